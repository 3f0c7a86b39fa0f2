"""The mask proof: right templates pass, wrong ones are refused with a small conversation shown."""

from __future__ import annotations

import dataclasses
import json
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.chat.jinja.template import open_jinja_template
from shardmill.chat.policy import ChatTemplate, Rendered, TrainPolicy
from shardmill.chat.proof.examples import battery, battery_sha256, match_turns, stored
from shardmill.chat.proof.prove import Certificate, prove_mask
from shardmill.chat.template_spec import known_template
from shardmill.chat.token_template import bind_template
from shardmill.cli.app import as_flag
from shardmill.errors import MaskProofError, ShardmillError, TokenizerError
from shardmill.records import JSON, ChatExamples, Conversation, Drop, Ragged
from shardmill.tokenizers import ByteTokenizer, TrainSpec, open_tokenizer, train_tokenizer
from tests.chat.conftest import BINDABLE
from tests.chat.jinja_kit import (
    CHATML,
    OPENING_MARKED,
    RIGHT,
    SHORTENS,
    WRONG,
    make_tokenizer,
    trained_text,
)

MARKERS = ["<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>", "<|im_start|>", "<|im_end|>"]
MARKERS += ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MARKERS += ["<bos>", "<start_of_turn>", "<end_of_turn>"]
NAMES = {"<|sys|>": "sys", "<|usr|>": "usr", "<|asst|>": "asst", "<|eot|>": "eot"}
SPECIALS = {NAMES.get(text, text): text for text in MARKERS}
SYSTEM, USER, ASSISTANT, TOOL = range(4)
ASKED = "train_on=assistant, train_on_eot=true"


@pytest.fixture(scope="module")
def byte() -> ByteTokenizer:
    return ByteTokenizer(byte_offset=len(SPECIALS), specials=SPECIALS)


@pytest.mark.parametrize("name", RIGHT)
def test_correct_jinja_templates_are_proved(name: str) -> None:
    tokenizer = make_tokenizer(RIGHT[name])
    proved = prove_mask(open_jinja_template(tokenizer, name=name), tokenizer)
    assert proved.trim == ("both" if name.startswith(("llama", "gemma", "inst")) else "none")
    assert proved.checks[ASKED]["conversations"] >= 20


def test_blocks_are_the_authors_word_and_the_certificate_shows_what_they_mark() -> None:
    opening = make_tokenizer(OPENING_MARKED)
    proved = prove_mask(open_jinja_template(opening), opening)
    assert (proved.lead, proved.end) == ("<|im_start|>assistant\n", "<|im_end|>")
    newline = make_tokenizer(RIGHT["gemma blocks"])
    assert prove_mask(open_jinja_template(newline), newline).end == "<end_of_turn>\n"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_jinja_templates_are_refused_token_by_token(name: str) -> None:
    tokenizer = make_tokenizer(WRONG[name])
    template = open_jinja_template(tokenizer, name=name)
    with pytest.raises(MaskProofError, match=f"chat template '{name}' is refused") as caught:
        prove_mask(template, tokenizer)
    lines = str(caught.value).splitlines()
    assert sum(line.startswith('  {"role"') for line in lines) in (2, 3)
    assert any('"<|im_start|>"' in line and line.endswith(("-", "?", "yes")) for line in lines)


def test_the_smallest_conversation_is_shown_with_what_was_wanted() -> None:
    tokenizer = make_tokenizer(WRONG["forgets the end"])
    with pytest.raises(MaskProofError) as caught:
        prove_mask(open_jinja_template(tokenizer, name="forgets"), tokenizer)
    numbers = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    rows = [line.split() for line in str(caught.value).splitlines()]
    assert str(caught.value).startswith(
        "chat template 'forgets' is refused (train_on='assistant', train_on_eot=True): turn 1 "
        "trains no special token after its words: nothing would stop\n"
        "the smallest conversation found that fails this check (end):\n"
        '  {"role": "user", "content": "zq"}\n  {"role": "assistant", "content": "zq"}\n'
    )
    assert rows[5] == ["0", str(numbers[0]), '"<|im_start|>"', "-"]
    assert rows[17] == ["12", str(numbers[1]), '"<|im_end|>"', "-", "<--", "wanted", "yes"]
    assert rows[16] == ["11", "80", '"q"', "yes"]
    assert len(rows) == 19


@pytest.mark.parametrize("name", BINDABLE)
def test_templates_made_of_tokens_are_proved(name: str, byte: ByteTokenizer) -> None:
    proved = prove_mask(bind_template(known_template(name), byte), byte)
    assert proved.trim == ("both" if name in ("llama-3", "gemma") else "none")
    assert "special_in_text" not in proved.declined[ASKED]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_tokenizers_that_mark_the_start_of_words_are_proved_too(
    model_type: Any, tmp_path: Path
) -> None:
    text = Path(sysconfig.get_paths()["stdlib"]) / "bisect.py"
    spec = TrainSpec(vocab_size=330, model_type=model_type, specials=SPECIALS)
    train_tokenizer(tmp_path / "model", files=[text], spec=spec)
    tokenizer = open_tokenizer(tmp_path / "model")
    for name in ("four-marker", "chatml"):
        assert prove_mask(bind_template(known_template(name), tokenizer), tokenizer).end in (
            "<|eot|>",
            "<|im_end|>",
        )


def test_a_certificate_says_what_was_proved(byte: ByteTokenizer) -> None:
    template = bind_template(known_template("four-marker"), byte)
    proved = prove_mask(template, byte)
    assert isinstance(proved, Certificate)
    written = json.loads(json.dumps(proved.to_json()))
    assert written["template"] == template.describe()
    assert written["tokenizer"] == byte.fingerprint
    assert written["policy"] == {"train_on": "assistant", "train_on_eot": True}
    assert written["end"] == "<|eot|>"
    assert written["battery"] == {
        "version": 1,
        "sha256": "852e305ebe75b47ac0fe709c53a567a74ded60b7c1a5ae3d7fce8ddc667e2410",
        "conversations": 41,
    }
    declined = [name for names in written["declined"][ASKED].values() for name in names]
    assert sorted(declined) == [
        "reasoning",
        "reasoning, turns",
        "tool call",
        "tool call with words",
        "tool result",
        "tools",
        "two tool results",
    ]
    assert sorted(written["checks"]) == [
        f"train_on={on}, train_on_eot={end}"
        for on in ("all", "assistant", "last-assistant")
        for end in ("false", "true")
    ]
    assert prove_mask(template, byte).to_json() == proved.to_json()


def test_the_battery_covers_what_people_write() -> None:
    items = battery(["<x>"])
    assert len(stored("needed")) == 9
    assert items.keys() > stored("needed").keys()
    texts = [message.get("content") for chat in items.values() for message in chat.messages]
    assert {"", "   ", None} <= set(texts)
    assert any("<x>" in text for text in texts if text)
    assert any(not text.isascii() for text in texts if text)
    assert battery_sha256(battery(["<x>"])) == battery_sha256(battery(["<x>"]))
    assert battery_sha256(battery(["<x>"])) != battery_sha256(battery(["<y>"]))


# A template of tokens, and what goes wrong in others: each takes a right rendering and spoils it.

Spoil = Callable[[ChatExamples, int], ChatExamples]


class Spoilt:
    """A right template whose every rendering is spoilt, one conversation at a time."""

    def __init__(self, right: ChatTemplate, spoil: Spoil) -> None:
        self._right, self._spoil = right, spoil

    name = "spoilt"

    @property
    def marker_ids(self) -> frozenset[int]:
        return self._right.marker_ids

    def describe(self) -> dict[str, JSON]:
        return {"kind": "spoilt", "name": self.name, "sha256": "0" * 64}

    def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered:
        parts, kept, drops = [], [], []
        for place, conversation in enumerate(conversations):
            one = self._right.render([conversation], policy)
            drops += one.drops
            if len(one.kept):
                kept.append(place)
                parts.append(self._spoil(one.examples, len(conversation.messages)))
        ids = Ragged.from_sequences([part.ids.values for part in parts])
        none = np.empty(0, np.int64)
        begins = ids.offsets[:-1].tolist()
        starts = [part.turn_starts + at for part, at in zip(parts, begins, strict=True)]
        examples = ChatExamples(
            ids=ids,
            mask=np.concatenate([none.astype(bool), *(part.mask for part in parts)]),
            turn_starts=np.concatenate([none, *starts]),
            turn_roles=np.concatenate([none, *(p.turn_roles for p in parts)]).astype(np.uint8),
        )
        return Rendered(examples=examples, kept=np.array(kept, np.int64), drops=tuple(drops))


def with_mask(examples: ChatExamples, mask: Any) -> ChatExamples:
    return dataclasses.replace(examples, mask=np.asarray(mask, bool))


def shifted(examples: ChatExamples, by: int) -> ChatExamples:
    mask = np.roll(examples.mask, by)
    mask[: max(by, 0)] = False
    return with_mask(examples, mask)


def turn_of(examples: ChatExamples) -> Any:
    places = np.arange(len(examples.mask))
    return np.searchsorted(examples.turn_starts, places, side="right") - 1


def in_turns(examples: ChatExamples, *roles: int) -> Any:
    turn = turn_of(examples)
    return (turn >= 0) & np.isin(examples.turn_roles[turn], roles)


def without(examples: ChatExamples, where: Any) -> ChatExamples:
    return with_mask(examples, examples.mask & ~where)


def trained_edges(examples: ChatExamples, which: int) -> Any:
    """The first (0) or last (-1) trained token of every trained stretch."""
    mask = examples.mask
    before = np.concatenate(([False], mask[:-1]))
    after = np.concatenate((mask[1:], [False]))
    return mask & ~before if which == 0 else mask & ~after


def only_last_turn(examples: ChatExamples, num: int) -> ChatExamples:
    turn = turn_of(examples)
    return without(examples, turn != turn.max())


def lost_token(examples: ChatExamples, num: int) -> ChatExamples:
    """Drops the token before the last one, when there are several turns."""
    if num < 4:
        return examples
    keep = np.arange(len(examples.mask)) != len(examples.mask) - 3
    ids = Ragged.from_sequences([examples.ids.values[keep]])
    return dataclasses.replace(examples, ids=ids, mask=examples.mask[keep])


def other_first_turn(examples: ChatExamples, num: int) -> ChatExamples:
    """Writes the first letter of the first turn otherwise when more turns follow."""
    ids = examples.ids.values.copy()
    ids[int(examples.turn_starts[0]) + 1] += num > 2
    return dataclasses.replace(examples, ids=Ragged.from_sequences([ids]))


def late_turns(examples: ChatExamples, num: int) -> ChatExamples:
    return dataclasses.replace(examples, turn_starts=examples.turn_starts + 1)


def early_turn(examples: ChatExamples, num: int) -> ChatExamples:
    """Takes a token from the turn before, in one exchange with emoji only."""
    starts = examples.turn_starts.copy()
    starts[-1] -= num == 2 and int(examples.ids.values.max()) >= len(SPECIALS) + 0xF0
    return dataclasses.replace(examples, turn_starts=starts)


def trained_begin(examples: ChatExamples, num: int) -> ChatExamples:
    mask = examples.mask.copy()
    mask[: int(examples.turn_starts[0])] = True
    return with_mask(examples, mask)


def wrong_roles(examples: ChatExamples, num: int) -> ChatExamples:
    return dataclasses.replace(examples, turn_roles=examples.turn_roles[::-1])


def marker_as_word(examples: ChatExamples, num: int) -> ChatExamples:
    """A word of an answer becomes the end token."""
    ids = examples.ids.values.copy()
    ids[np.flatnonzero(examples.mask)[0]] = ids[np.flatnonzero(examples.mask)[-1]]
    return dataclasses.replace(examples, ids=Ragged.from_sequences([ids]))


def has_emoji(examples: ChatExamples) -> bool:
    return int(examples.ids.values.max()) >= len(SPECIALS) + 0xF0


def with_token(examples: ChatExamples, place: int, *, trained: bool) -> ChatExamples:
    """One more letter at `place`, inside the turn it falls into."""
    return dataclasses.replace(
        examples,
        ids=Ragged.from_sequences([np.insert(examples.ids.values, place, len(SPECIALS) + 0x78)]),
        mask=np.insert(examples.mask, place, trained),
        turn_starts=examples.turn_starts + (examples.turn_starts >= place),
    )


def longer_tail(examples: ChatExamples, num: int) -> ChatExamples:
    if num != 2 or not has_emoji(examples):
        return examples
    return with_token(examples, len(examples.mask), trained=False)


def one_word_more(examples: ChatExamples, num: int) -> ChatExamples:
    if num != 2 or not has_emoji(examples):
        return examples
    return with_token(examples, int(np.flatnonzero(examples.mask)[-1]), trained=True)


def longer_question(examples: ChatExamples, num: int) -> ChatExamples:
    """Writes more into the first turn when others follow; its text is still there."""
    if num < 3 or examples.turn_roles[0] != USER:
        return examples
    return with_token(examples, int(examples.turn_starts[1]) - 2, trained=False)


def other_mask_alone(examples: ChatExamples, num: int) -> ChatExamples:
    """The first exchange of the battery's several turns is masked otherwise when it is alone."""
    if num != 2 or not holds(examples, "first stone"):
        return examples
    return with_mask(examples, np.ones_like(examples.mask))


def holds(examples: ChatExamples, text: str) -> bool:
    found = ByteTokenizer(byte_offset=len(SPECIALS), specials=SPECIALS).decode(examples.ids.values)
    return text in found


def literal_as_marker(examples: ChatExamples, num: int) -> ChatExamples:
    """The text of an end token inside an answer becomes the end token: it reads the same."""
    tokenizer = ByteTokenizer(byte_offset=len(SPECIALS), specials=SPECIALS)
    ids, literal = examples.ids.values.tolist(), tokenizer.encode("<|eot|>")
    for place in np.flatnonzero(examples.mask).tolist():
        stop = place + len(literal)
        if ids[place:stop] == literal:
            gone = np.arange(place + 1, stop)
            ids[place] = tokenizer.special_token_ids()["eot"]
            later = examples.turn_starts > place
            return dataclasses.replace(
                examples,
                ids=Ragged.from_sequences([np.delete(ids, gone)]),
                mask=np.delete(examples.mask, gone),
                turn_starts=examples.turn_starts - later * len(gone),
            )
    return examples


SPOILS: dict[str, Spoil] = {
    "trains users too": lambda e, _: with_mask(e, e.mask | in_turns(e, USER)),
    "trains users instead": lambda e, _: with_mask(e, in_turns(e, USER)),
    "trains everything": lambda e, _: with_mask(e, np.ones_like(e.mask)),
    "trains nothing": lambda e, _: with_mask(e, np.zeros_like(e.mask)),
    "trains the opening": lambda e, _: with_mask(e, in_turns(e, ASSISTANT)),
    "forgets the end": lambda e, _: without(e, trained_edges(e, -1)),
    "forgets the first word": lambda e, _: without(e, trained_edges(e, 0)),
    "one to the right": lambda e, _: shifted(e, 1),
    "one to the left": lambda e, _: shifted(e, -1),
    "a bit before every answer": lambda e, _: with_mask(
        e, e.mask | np.append(trained_edges(e, 0)[1:], False)
    ),
    "last answer only": only_last_turn,
    "first answer only": lambda e, _: without(e, turn_of(e) > 2),
    "forgets the second word": lambda e, _: without(e, np.roll(trained_edges(e, 0), 1)),
    "forgets the last end": lambda e, n: without(
        e, (n > 2) & (np.arange(len(e.mask)) == np.flatnonzero(e.mask)[-1])
    ),
    "loses a token": lost_token,
    "changes earlier turns": other_first_turn,
    "starts turns late": late_turns,
    "starts one turn early": early_turn,
    "takes roles for others": wrong_roles,
    "lets words be structure": marker_as_word,
    "writes more after an end": longer_tail,
    "trains a word that was not said": one_word_more,
    "writes more into earlier turns": longer_question,
    "masks otherwise when alone": other_mask_alone,
    "short mask": lambda e, _: with_mask(e, e.mask[:-1]),
}


CAUGHT_BY = {
    "untrained": ["trains users too", "trains users instead", "trains everything"],
    "words": [
        "trains nothing",
        "trains the opening",
        "forgets the first word",
        "one to the right",
        "one to the left",
        "a bit before every answer",
        "last answer only",
        "first answer only",
        "forgets the second word",
        "forgets the last end",
        "lets words be structure",
        "trains a word that was not said",
    ],
    "end": ["forgets the end", "starts turns late", "writes more after an end"],
    "opening": ["starts one turn early"],
    "texts": ["loses a token"],
    "prefix": ["masks otherwise when alone"],
    "turns": ["takes roles for others", "short mask"],
    "texts|prefix": ["changes earlier turns", "writes more into earlier turns"],
}


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("name", ["four-marker", "chatml"])
def test_spoilt_templates_are_refused_by_the_check_meant_for_them(
    name: str, spoil: str, byte: ByteTokenizer
) -> None:
    """Each by the check that is there for it, under the policy that was asked for."""
    right = bind_template(known_template(name), byte)
    check = next(check for check, spoils in CAUGHT_BY.items() if spoil in spoils)
    asked = "train_on='assistant', train_on_eot=True"
    stored = rf"'spoilt' is refused \({asked}\)[^\n]*\n[^\n]*fails this check \(({check})\)"
    with pytest.raises(MaskProofError, match=stored):
        prove_mask(Spoilt(right, SPOILS[spoil]), byte)


def test_a_template_that_drops_the_beginning_of_a_conversation_is_refused(
    byte: ByteTokenizer,
) -> None:
    right = bind_template(known_template("four-marker"), byte)

    class Picky(Spoilt):
        def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered:
            found = super().render(conversations, policy)
            first = conversations[0].messages
            if len(conversations) > 1 or len(first) != 2 or first[0]["content"] != "first stone":
                return found
            drops = (Drop(id="", reason="too short"),)
            return dataclasses.replace(right.render([], policy), drops=drops)

    with pytest.raises(MaskProofError, match=r"first 2 messages alone are dropped \(too short\)"):
        prove_mask(Picky(right, lambda examples, _: examples), byte)


def test_a_template_that_lets_text_become_an_end_is_refused(byte: ByteTokenizer) -> None:
    right = bind_template(known_template("four-marker"), byte)
    with pytest.raises(MaskProofError, match="its words became structure"):
        prove_mask(Spoilt(right, literal_as_marker), byte)


def test_a_template_that_trains_what_opens_a_conversation_is_refused(byte: ByteTokenizer) -> None:
    right = bind_template(known_template("llama-3"), byte)
    with pytest.raises(MaskProofError, match="something is trained before the first turn"):
        prove_mask(Spoilt(right, trained_begin), byte)


@pytest.mark.parametrize(("name", "num"), [("chatml", 3), ("chatml", 10), ("qwen3", 10)])
def test_a_template_that_trains_the_end_of_an_opening_before_reasoning_is_refused(
    name: str, num: int, byte: ByteTokenizer
) -> None:
    def opening_too(examples: ChatExamples, _: int) -> ChatExamples:
        mask = examples.mask.copy()
        for start in np.flatnonzero(mask[1:] & ~mask[:-1]) + 1:
            if byte.decode(examples.ids.values[start : start + 7]) == "<think>":
                mask[start - num : start] = True
        return with_mask(examples, mask)

    right = bind_template(known_template(name), byte)
    with pytest.raises(MaskProofError, match=r"is trained after|opens like the assistant's"):
        prove_mask(Spoilt(right, opening_too), byte)


@pytest.mark.parametrize("name", ["four-marker", "chatml"])
def test_a_template_that_is_wrapped_but_not_spoilt_is_proved(
    name: str, byte: ByteTokenizer
) -> None:
    right = bind_template(known_template(name), byte)
    assert prove_mask(Spoilt(right, lambda examples, _: examples), byte).end in (
        "<|eot|>",
        "<|im_end|>",
    )


def test_every_policy_is_proved(byte: ByteTokenizer) -> None:
    """A template that ignores the policy is refused, whichever policy is asked for."""
    right = bind_template(known_template("four-marker"), byte)

    class Deaf(Spoilt):
        def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered:
            return right.render(conversations, TrainPolicy())

    deaf = Deaf(right, lambda examples, _: examples)
    with pytest.raises(MaskProofError, match="train_on='last-assistant'"):
        prove_mask(deaf, byte)
    with pytest.raises(MaskProofError, match="train_on='all'"):
        prove_mask(deaf, byte, TrainPolicy(train_on="all"))
    with pytest.raises(MaskProofError, match="after its words, with train_on_eot=False") as error:
        prove_mask(deaf, byte, TrainPolicy(train_on_eot=False))
    words = error.value.worded(as_flag)
    assert "is refused (--train-on assistant, --no-train-on-eot): " in words
    assert "after its words, with --no-train-on-eot\n" in words


def test_only_untrained_ends_can_be_proved(byte: ByteTokenizer) -> None:
    """A template that never trains ends is right for one policy and wrong for the other."""
    right = bind_template(known_template("four-marker"), byte)

    class Endless(Spoilt):
        def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered:
            return right.render(conversations, dataclasses.replace(policy, train_on_eot=False))

    endless = Endless(right, lambda examples, _: examples)
    assert prove_mask(endless, byte, TrainPolicy(train_on_eot=False)).end == ""
    with pytest.raises(MaskProofError, match="trains no special token after its words"):
        prove_mask(endless, byte)


def test_a_block_is_trained_to_its_last_byte() -> None:
    """transformers marks a block up to the first token of its last character, not the last."""
    tokenizer = make_tokenizer(WRONG["forgets the end"])
    template = open_jinja_template(tokenizer)
    talk = Conversation(
        messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "\U0001f44b"}]
    )
    policy = TrainPolicy(train_on_eot=False)
    assert trained_text(tokenizer, template.render([talk], policy)) == "\U0001f44b"
    assert prove_mask(template, tokenizer, policy).end == ""


def test_a_template_that_drops_everything_is_refused(byte: ByteTokenizer) -> None:
    right = bind_template(known_template("four-marker"), byte)

    class Closed(Spoilt):
        def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered:
            nothing = right.render([], policy)
            drops = tuple(Drop(id=one.id, reason="closed") for one in conversations)
            return dataclasses.replace(nothing, drops=drops)

    with pytest.raises(MaskProofError, match=r"dropped \(closed: its own reason\)"):
        prove_mask(Closed(right, lambda examples, _: examples), byte)


def test_a_template_that_loses_conversations_silently_is_refused(byte: ByteTokenizer) -> None:
    right = bind_template(known_template("four-marker"), byte)

    class Silent(Spoilt):
        def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered:
            return dataclasses.replace(super().render(conversations, policy), drops=())

    with pytest.raises(MaskProofError, match=r"\[\] kept and 0 dropped of one"):
        prove_mask(Silent(right, lambda examples, _: examples), byte)


def test_a_template_that_mixes_up_a_batch_is_refused(byte: ByteTokenizer) -> None:
    right = bind_template(known_template("four-marker"), byte)

    class Mixing(Spoilt):
        def render(self, conversations: Sequence[Conversation], policy: TrainPolicy) -> Rendered:
            found = right.render(conversations, policy)
            if len(conversations) == 1:
                return found
            return dataclasses.replace(
                found, examples=with_mask(found.examples, found.examples.mask[::-1])
            )

    with pytest.raises(MaskProofError, match="at once differ from the same rendered one by one"):
        prove_mask(Mixing(right, lambda examples, _: examples), byte)


def test_another_tokenizer_than_the_templates_own_is_refused(byte: ByteTokenizer) -> None:
    tokenizer = make_tokenizer(CHATML)
    with pytest.raises(ShardmillError):
        prove_mask(open_jinja_template(tokenizer), byte)


def test_a_tokenizer_without_an_identity_is_refused() -> None:
    tokenizer = make_tokenizer(CHATML)
    with pytest.raises(TokenizerError, match="has no fingerprint"):
        prove_mask(open_jinja_template(tokenizer), object())


def test_a_template_that_shortens_what_was_said_before_never_opens() -> None:
    with pytest.raises(ShardmillError, match="do not begin alike"):
        open_jinja_template(make_tokenizer(SHORTENS))


@pytest.mark.parametrize(
    ("roles", "messages", "groups"),
    [
        ([USER, ASSISTANT], [USER, ASSISTANT], [[0], [1]]),
        ([USER, ASSISTANT], [SYSTEM, USER, ASSISTANT], [[0, 1], [2]]),
        ([SYSTEM, USER, ASSISTANT], [USER, ASSISTANT], [[], [0], [1]]),
        ([USER, ASSISTANT, TOOL], [USER, ASSISTANT, TOOL, TOOL], [[0], [1], [2, 3]]),
        ([USER, ASSISTANT, TOOL, TOOL], [USER, ASSISTANT, TOOL, TOOL], [[0], [1], [2], [3]]),
        ([USER], [USER, ASSISTANT], None),
        ([USER, USER], [USER, ASSISTANT], None),
        ([USER, ASSISTANT, USER], [USER, ASSISTANT], None),
        ([USER, ASSISTANT], [USER, SYSTEM, ASSISTANT], None),
    ],
)
def test_turns_are_matched_with_messages(
    roles: list[int], messages: list[int], groups: list[list[int]] | None
) -> None:
    assert match_turns(roles, messages) == groups


def test_a_refusal_holds_no_control_characters(byte: ByteTokenizer) -> None:
    """The battery's odd characters come out escaped."""

    def spoil(examples: ChatExamples, num: int) -> ChatExamples:
        high = examples.ids.values.max() >= len(SPECIALS) + 0xF0
        return without(examples, np.roll(trained_edges(examples, 0), 1) & high)

    right = bind_template(known_template("four-marker"), byte)
    with pytest.raises(MaskProofError) as caught:
        prove_mask(Spoilt(right, spoil), byte)
    assert str(caught.value).isascii()
