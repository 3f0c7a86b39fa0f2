"""Laws over random conversations: what a Jinja template keeps is whole and rightly masked."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat.jinja.template import JinjaTemplate, open_jinja_template
from shardmill.chat.policy import TrainPolicy
from shardmill.records import Conversation
from tests.chat.jinja_kit import RIGHT, SPECIALS, make_tokenizer

NAMES = ["chatml", "chatml blocks", "llama-3", "llama-3 blocks", "gemma", "gemma blocks", "tools"]
ENDS = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "gemma": "<end_of_turn>"}
ANY = st.characters(exclude_categories=["Cs"])
TEXTS = st.lists(
    st.one_of(st.text(ANY, max_size=12), st.sampled_from(["\n", "  ", "<|im_", "end|>", "None"])),
    max_size=3,
).map("".join)
EVIL = st.tuples(TEXTS, st.sampled_from(SPECIALS), TEXTS).map("".join)


@functools.cache
def opened(name: str) -> JinjaTemplate:
    return open_jinja_template(make_tokenizer(RIGHT[name]), name=name)


def talks(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Conversation]:
    exchanges = st.lists(st.tuples(texts, texts), min_size=1, max_size=3)

    def build(pairs: list[tuple[str, str]], system: str | None) -> Conversation:
        messages = [] if system is None else [{"role": "system", "content": system}]
        for asked, answered in pairs:
            messages += [{"role": "user", "content": asked}]
            messages += [{"role": "assistant", "content": answered}]
        return Conversation(messages=messages)

    return st.builds(build, exchanges, st.none() | texts)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(NAMES), batch=st.lists(talks(TEXTS), min_size=1, max_size=3))
def test_kept_conversations_train_exactly_the_answers_and_their_ends(
    name: str, batch: list[Conversation]
) -> None:
    template = opened(name)
    decode = make_tokenizer().decode
    rendered = template.render(batch, TrainPolicy())
    ids, mask = rendered.examples.ids, rendered.examples.mask
    assert len(rendered.kept) + len(rendered.drops) == len(batch)
    end = next((end for key, end in ENDS.items() if key in name), "<|im_end|>")
    for number, place in enumerate(rendered.kept.tolist()):
        start, stop = ids.offsets[number : number + 2]
        answers = [m["content"] for m in batch[place].messages if m["role"] == "assistant"]
        if "llama" in name or "gemma" in name:
            answers = [answer.strip() for answer in answers]
        ending = f"{end}\n" if name == "gemma blocks" else end
        wanted = "".join(answer + ending for answer in answers)
        found = decode(ids[number][mask[start:stop]], clean_up_tokenization_spaces=False)
        assert found == wanted


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(NAMES), batch=st.lists(talks(TEXTS), min_size=1, max_size=3))
def test_a_batch_is_its_conversations_one_by_one(name: str, batch: list[Conversation]) -> None:
    template, policy = opened(name), TrainPolicy()
    whole = template.render(batch, policy)
    alone = [template.render([one], policy) for one in batch]
    assert whole.kept.tolist() == [place for place, one in enumerate(alone) if len(one.kept)]
    assert [d.reason for d in whole.drops] == [d.reason for one in alone for d in one.drops]
    kept = [one.examples for one in alone if len(one.kept)]
    for number, one in enumerate(kept):
        start, stop = whole.examples.ids.offsets[number : number + 2]
        assert whole.examples.ids[number].tolist() == one.ids[0].tolist()
        assert whole.examples.mask[start:stop].tolist() == one.mask.tolist()
    starts = [one.turn_starts for one in kept]
    begins = whole.examples.ids.offsets[:-1]
    wanted = [start + begin for part, begin in zip(starts, begins, strict=True) for start in part]
    assert whole.examples.turn_starts.tolist() == wanted


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(NAMES), talk=talks(st.one_of(TEXTS, EVIL)))
def test_the_only_markers_of_a_kept_conversation_are_the_templates_own(
    name: str, talk: Conversation
) -> None:
    template = opened(name)
    rendered = template.render([talk], TrainPolicy())
    evil = any(s in message["content"] for s in SPECIALS for message in talk.messages)
    if not len(rendered.kept):
        return
    assert not evil
    harmless = [{**m, "content": "a" if m["content"].strip() else ""} for m in talk.messages]
    plain = template.render([Conversation(messages=harmless)], TrainPolicy())
    markers = sorted(template.marker_ids)
    ids, plain_ids = rendered.examples.ids.values, plain.examples.ids.values
    assert ids[np.isin(ids, markers)].tolist() == plain_ids[np.isin(plain_ids, markers)].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_plain_words_are_never_dropped(name: str) -> None:
    messages = [
        {"role": role, "content": f"{role} word{number} and more"}
        for number in range(4)
        for role in ("user", "assistant")
    ]
    rendered = opened(name).render([Conversation(messages=messages)], TrainPolicy())
    assert rendered.kept.tolist() == [0]
    assert rendered.examples.turn_roles.tolist() == [1, 2] * 4
