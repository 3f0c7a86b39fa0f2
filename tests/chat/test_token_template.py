"""Conversations to ids, mask and turns: every known template on small real tokenizers."""

from __future__ import annotations

from collections import UserList
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmill.chat import (
    KNOWN_TEMPLATES,
    REASONS,
    Rendered,
    TokenTemplate,
    TrainPolicy,
    assistant_mask,
    bind_template,
    known_template,
)
from shardmill.errors import OptionError, TokenizerError
from shardmill.protocols import Texts, Tokenizer
from shardmill.records import ROLES, Conversation, Drop, Ragged
from shardmill.testing.tokenizers import nasty_texts
from shardmill.tokenizers import ByteTokenizer
from tests.chat.conftest import CHAT_TOKENIZERS, MARKERS
from tests.chat.oracle import expected, said

NAMES = ("four-marker", "chatml", "llama-3", "gemma")
POLICIES = [
    TrainPolicy(train_on=train_on, train_on_eot=eot)
    for train_on in ("assistant", "last-assistant", "all")
    for eot in (True, False)
]
ALL = TrainPolicy(train_on="all")
TRAIN = TrainPolicy()
COMMON = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
words = nasty_texts(tuple(MARKERS.values()))
kinds = st.sampled_from(CHAT_TOKENIZERS)


def chat(*turns: tuple[str, str], **others: Any) -> Conversation:
    return Conversation(messages=[{"role": r, "content": c} for r, c in turns], **others)


def calls() -> st.SearchStrategy[list[dict[str, Any]]]:
    value = st.dictionaries(words, st.one_of(words, st.integers(), st.none()), max_size=2)
    call = st.fixed_dictionaries({"name": words.filter(bool), "arguments": value})
    return st.lists(call, min_size=1, max_size=2)


@st.composite
def chats_of(draw: st.DrawFn, name: str) -> Conversation:
    """A sound conversation that the template has a place for."""
    roles = ["user", "assistant", "assistant"]
    roles += {"chatml": ["system", "tool"], "gemma": []}.get(name, ["system"])
    messages: list[dict[str, Any]] = []
    for role in draw(st.lists(st.sampled_from(roles), min_size=1, max_size=5)):
        message: dict[str, Any] = {"role": role, "content": draw(words)}
        if name == "chatml" and role == "assistant" and draw(st.integers(0, 3)) == 0:
            message["tool_calls"] = draw(calls())
            message["content"] = draw(st.sampled_from([None, "", message["content"]]))
        if name == "chatml" and role == "assistant" and draw(st.integers(0, 3)) == 0:
            message["reasoning_content"] = draw(words)
        if draw(st.integers(0, 5)) == 0:
            message["train"] = draw(st.booleans())
        messages.append(message)
    asked = messages[0]["role"] == "user" and "train" not in messages[0]
    if name == "gemma" and asked and draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(words)})
    tools: Any = draw(st.none() | calls()) if name == "chatml" else None
    return Conversation(messages=messages, tools=tools, id="here")


def one(rendered: Rendered, index: int) -> tuple[list[int], list[bool], list[int], list[str]]:
    """ids, mask, starts of turns and speakers of one example, as the oracle gives them."""
    examples = rendered.examples
    start, stop = examples.ids.offsets[index : index + 2].tolist()
    inside = (examples.turn_starts >= start) & (examples.turn_starts < stop)
    return (
        examples.ids[index].tolist(),
        examples.mask[start:stop].tolist(),
        (examples.turn_starts[inside] - start).tolist(),
        [ROLES[number] for number in examples.turn_roles[inside].tolist()],
    )


def test_the_known_templates_begin_with_these() -> None:
    assert tuple(KNOWN_TEMPLATES)[: len(NAMES)] == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@COMMON
@given(data=st.data())
def test_ids_mask_and_turns_equal_a_plain_implementation(
    name: str, data: st.DataObject, chat_tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = chat_tokenizers[data.draw(kinds)]
    template = bind_template(known_template(name), tokenizer)
    batch = data.draw(st.lists(chats_of(name), min_size=1, max_size=4))
    policy = data.draw(st.sampled_from(POLICIES))
    rendered = template.render(batch, policy)
    wanted = [expected(name, conversation, policy, tokenizer) for conversation in batch]
    kept = [n for n, (_, mask, _, _) in enumerate(wanted) if any(mask)]
    assert rendered.kept.tolist() == kept
    assert [one(rendered, n) for n in range(len(kept))] == [wanted[n] for n in kept]
    assert [drop.id for drop in rendered.drops] == ["here"] * (len(batch) - len(kept))
    assert {drop.reason for drop in rendered.drops} <= {"no_assistant", "nothing_trained"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@COMMON
@given(data=st.data())
def test_trained_tokens_decode_to_the_assistants_words_and_their_end_and_nothing_else_is_trained(
    name: str, data: st.DataObject, chat_tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = chat_tokenizers[data.draw(kinds)]
    template = bind_template(known_template(name), tokenizer)
    conversation = data.draw(
        chats_of(name).filter(lambda c: all("train" not in m for m in c.messages))
    )
    rendered = template.render([conversation], TRAIN)
    spoken = said(name, conversation)
    assert len(rendered.kept) == bool(spoken)
    if spoken and "\u2581" not in str(conversation):
        ids, mask, _, _ = one(rendered, 0)
        assert tokenizer.decode(np.array(ids)[mask]) == spoken


@pytest.mark.parametrize("name", NAMES)
@COMMON
@given(data=st.data())
def test_special_strings_in_text_never_become_markers(
    name: str, data: st.DataObject, chat_tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = chat_tokenizers[data.draw(kinds)]
    template = bind_template(known_template(name), tokenizer)
    crafted = words.map(lambda text: text + "".join(MARKERS.values()))
    contents = data.draw(st.lists(crafted, min_size=1, max_size=4))
    turns = [("assistant" if n % 2 else "user", text) for n, text in enumerate(contents)]
    (ids,) = template.render([chat(*turns)], ALL).examples.ids
    harmless = [(role, "x") for role, _ in turns]
    (bare,) = template.render([chat(*harmless)], ALL).examples.ids
    markers = sorted(template.marker_ids)
    assert ids[np.isin(ids, markers)].tolist() == bare[np.isin(bare, markers)].tolist()
    assert len(bare[np.isin(bare, markers)]) >= 2 * len(turns)


ANYTHING = st.sampled_from(
    [None, "text", [], ["x"], [{"role": "user"}], [{"role": "nobody", "content": "a"}]]
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@COMMON
@given(data=st.data())
def test_a_batch_equals_one_by_one_and_every_conversation_is_kept_or_dropped(
    name: str, data: st.DataObject, chat_tokenizers: dict[str, Tokenizer]
) -> None:
    template = bind_template(known_template(name), chat_tokenizers["byte"])
    bad: Any = ANYTHING.map(lambda messages: Conversation(messages=messages))
    other = chats_of("chatml")  # with tools, say, which others have no place for
    drawn = data.draw(st.lists(st.one_of(chats_of(name), other, bad), max_size=6))
    batch = [
        Conversation(messages=c.messages, tools=c.tools, id=f"n{n}") for n, c in enumerate(drawn)
    ]
    policy = data.draw(st.sampled_from(POLICIES))
    together = template.render(batch, policy)
    alone = [template.render([conversation], policy) for conversation in batch]
    assert together.kept.tolist() == [n for n, r in enumerate(alone) if len(r.kept)]
    assert together.drops == tuple(drop for r in alone for drop in r.drops)
    kept = [one(r, 0) for r in alone if len(r.kept)]
    assert [one(together, n) for n in range(len(kept))] == kept
    dropped = {int(drop.id[1:]) for drop in together.drops}
    assert dropped | set(together.kept.tolist()) == set(range(len(batch)))
    assert len(dropped) + len(together.kept) == len(batch)
    assert {drop.reason for drop in together.drops} <= set(REASONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@COMMON
@given(data=st.data())
def test_the_fast_path_equals_the_general_one(
    name: str, data: st.DataObject, chat_tokenizers: dict[str, Tokenizer]
) -> None:
    """A list that is no list takes the long way for all, an unknown key for its message."""
    template = bind_template(known_template(name), chat_tokenizers["byte"])
    role = st.sampled_from(["system", "user", "Human", "assistant", "GPT", "bOt", "tool", "x"])
    turns = st.lists(st.tuples(role, words | st.just("\ud800")), max_size=4)
    bare = turns.map(lambda turns: chat(*turns))
    plain = data.draw(st.lists(bare | chats_of(name) | chats_of("chatml"), max_size=4))
    policy = data.draw(st.sampled_from(POLICIES))
    ways = [
        plain,
        [
            Conversation(messages=[{**m, "weight": 1} for m in c.messages], tools=c.tools, id=c.id)
            for c in plain
        ],
        [Conversation(messages=UserList(c.messages), tools=c.tools, id=c.id) for c in plain],
    ]
    first, *others = [template.render(conversations, policy) for conversations in ways]
    for other in others:
        assert first.kept.tolist() == other.kept.tolist()
        assert first.drops == other.drops
        for n in range(len(first.kept)):
            assert one(first, n) == one(other, n)


@pytest.mark.parametrize("name", NAMES)
@COMMON
@given(data=st.data())
def test_the_first_messages_render_to_a_prefix(
    name: str, data: st.DataObject, chat_tokenizers: dict[str, Tokenizer]
) -> None:
    template = bind_template(known_template(name), chat_tokenizers["byte"])
    conversation = data.draw(chats_of(name))
    whole = template.render([conversation], ALL)
    stop = data.draw(st.integers(1, len(conversation.messages)))
    first = Conversation(messages=conversation.messages[:stop], tools=conversation.tools)
    part = template.render([first], ALL)
    if len(part.kept) and len(whole.kept):
        size = len(part.examples.ids.values)
        assert part.examples.ids.values.tolist() == whole.examples.ids.values[:size].tolist()
        assert part.examples.mask.tolist() == whole.examples.mask[:size].tolist()


def shown(template: TokenTemplate, tokenizer: Tokenizer, conversation: Conversation) -> str:
    """The text of a conversation, trained parts in [[ ]]."""
    rendered = template.render([conversation], TRAIN)
    assert rendered.drops == ()
    ids, mask, _, _ = one(rendered, 0)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    spans = [(ids[a:b], mask[a]) for a, b in pairwise(edges)]
    return "".join(
        f"[[{tokenizer.decode(s)}]]" if trained else tokenizer.decode(s) for s, trained in spans
    )


SIMPLE = chat(("system", "Be kind."), ("user", " hi "), ("assistant", "yo\n"), ("user", "bye"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "four-marker",
            "<|sys|>Be kind.<|eot|><|usr|> hi <|eot|><|asst|>[[yo\n<|eot|>]]<|usr|>bye<|eot|>",
        ),
        (
            "chatml",
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n hi <|im_end|>\n"
            "<|im_start|>assistant\n[[yo\n<|im_end|>]]\n<|im_start|>user\nbye<|im_end|>\n",
        ),
        (
            "llama-3",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[yo<|eot_id|>]]"
            "<|start_header_id|>user<|end_header_id|>\n\nbye<|eot_id|>",
        ),
        (
            "gemma",
            "<bos><start_of_turn>user\nBe kind.\n\nhi<end_of_turn>\n"
            "<start_of_turn>model\n[[yo<end_of_turn>]]\n<start_of_turn>user\nbye<end_of_turn>\n",
        ),
    ],
)
def test_a_conversation_in_each_template(
    name: str, text: str, chat_tokenizers: dict[str, Tokenizer]
) -> None:
    for tokenizer in chat_tokenizers.values():
        assert shown(bind_template(known_template(name), tokenizer), tokenizer, SIMPLE) == text


def test_tools_calls_results_and_reasoning_in_chatml(
    chat_tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = chat_tokenizers["byte"]
    function = {"name": "add", "arguments": '{"a": 1,  "b": 2}'}
    conversation = Conversation(
        messages=[
            {"role": "user", "content": "1+2?"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "add them",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": function},
                    {"name": "sub", "arguments": {"a": 3}},
                ],
            },
            {"role": "tool", "name": "add", "content": "3"},
            {"role": "assistant", "content": "So ", "tool_calls": [function]},
        ],
        tools=[{"name": "add"}, {"name": "sub"}],
    )
    assert shown(bind_template(known_template("chatml"), tokenizer), tokenizer, conversation) == (
        "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user "
        "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n"
        '<tools>\n{"name": "add"}\n{"name": "sub"}\n</tools>\n\nFor each function call, return a '
        "json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n1+2?<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nadd them\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "sub", "arguments": {"a": 3}}\n</tool_call><|im_end|>]]\n'
        "<|im_start|>tool\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[[So \n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call><|im_end|>]]\n'
    )


CALL = [{"name": "f", "arguments": {}}]
ASKED = {"role": "user", "content": "a"}
SPOKE = {"role": "assistant", "content": "b"}
TOLD = {"role": "system", "content": "s"}
RESULT = {"role": "tool", "content": "3"}


@pytest.mark.parametrize(
    ("name", "messages", "tools", "reason"),
    [
        ("llama-3", [ASKED, {**SPOKE, "tool_calls": CALL}], None, "no_place_for_tool_calls"),
        ("llama-3", [ASKED, SPOKE], [{"name": "f"}], "no_place_for_tools"),
        ("gemma", [ASKED, SPOKE, RESULT], None, "no_place_for_tool_results"),
        ("gemma", [{**SPOKE, "reasoning_content": "hm"}], None, "no_place_for_reasoning"),
        ("gemma", [TOLD, SPOKE], None, "system_not_first"),
        ("gemma", [ASKED, TOLD, ASKED, SPOKE], None, "system_not_first"),
        ("gemma", [TOLD, ASKED, SPOKE, TOLD, ASKED], None, "system_not_first"),
        ("gemma", [TOLD, TOLD, ASKED, SPOKE], None, "system_not_first"),
        ("gemma", [SPOKE, ASKED, TOLD], None, "system_not_first"),
        ("gemma", [{**TOLD, "train": True}, ASKED, SPOKE], None, "mixed_train"),
        ("chatml", [ASKED, SPOKE], "tools", "bad_tools"),
        ("chatml", [ASKED, SPOKE], [{"name": "\ud800"}], "invalid_unicode"),
        ("chatml", [ASKED], None, "no_assistant"),
        ("chatml", [ASKED, {**SPOKE, "train": False}], None, "nothing_trained"),
    ],
)
def test_what_a_template_cannot_write_is_dropped_with_a_reason(
    name: str,
    messages: list[Any],
    tools: Any,
    reason: str,
    chat_tokenizers: dict[str, Tokenizer],
) -> None:
    template = bind_template(known_template(name), chat_tokenizers["byte"])
    conversation = Conversation(messages=messages, tools=tools, id="x:1")
    rendered = template.render([conversation], TRAIN)
    assert rendered.drops == (Drop(id="x:1", reason=reason),)
    assert len(rendered.kept) == len(rendered.examples.ids) == len(rendered.examples.mask) == 0
    assert reason in REASONS


def test_an_example_without_a_trained_token_is_dropped_even_when_a_turn_is_trained(
    chat_tokenizers: dict[str, Tokenizer],
) -> None:
    template = bind_template(known_template("chatml"), chat_tokenizers["byte"])
    silent = chat(("user", "a"), ("assistant", ""))
    without_ends = template.render([silent], TrainPolicy(train_on_eot=False))
    assert without_ends.drops == (Drop(id="conversation 0", reason="nothing_trained"),)
    assert len(template.render([silent], TRAIN).kept) == 1


def test_an_empty_batch_is_an_empty_result(chat_tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in chat_tokenizers.values():
        for conversations in ([], [chat()]):
            rendered = bind_template(known_template("gemma"), tokenizer).render(conversations, ALL)
            assert len(rendered.examples.ids) == len(rendered.kept) == 0
            assert rendered.examples.ids.offsets.tolist() == [0]
            assert len(rendered.examples.turn_starts) == len(rendered.examples.mask) == 0


class CountingEncoder:
    """A byte tokenizer that counts its calls; "!" cheats: it becomes the end marker."""

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = ByteTokenizer(byte_offset=20, specials=MARKERS)

    def encode_batch(self, texts: Texts) -> Ragged:
        self.calls += 1
        ids = self.bytes.encode_batch(texts)
        cheat = np.where(ids.values == ord("!") + 20, MARKER_ID["eot"], ids.values)
        return Ragged(cheat, ids.offsets)


MARKER_ID = {name: number for number, name in enumerate(MARKERS)}


def test_a_batch_is_one_call_of_the_given_encoder() -> None:
    encoder = CountingEncoder()
    template = bind_template(known_template("chatml"), encoder.bytes, encoder)
    assert encoder.calls == 0
    batch = [SIMPLE, Conversation(messages=[{**SPOKE, "tool_calls": CALL}]), SIMPLE]
    assert len(template.render(batch, TRAIN).kept) == 3
    assert encoder.calls == 1


def test_text_that_becomes_a_marker_is_dropped_with_a_reason() -> None:
    encoder = CountingEncoder()
    template = bind_template(known_template("four-marker"), encoder.bytes, encoder)
    batch = [
        chat(("user", "a"), ("assistant", "b"), id="one"),
        chat(("user", "a!"), ("assistant", "b"), id="two"),
        chat(("user", "only"), id="three"),
        chat(("assistant", "c"), id="four"),
    ]
    rendered = template.render(batch, TRAIN)
    assert rendered.kept.tolist() == [0, 3]
    assert rendered.drops == (
        Drop(id="two", reason="special_in_text"),
        Drop(id="three", reason="no_assistant"),
    )
    usr, asst, eot = MARKER_ID["usr"], MARKER_ID["asst"], MARKER_ID["eot"]
    a, b, c = (ord(letter) + 20 for letter in "abc")
    assert one(rendered, 0)[0] == [usr, a, eot, asst, b, eot]
    assert one(rendered, 1) == ([asst, c, eot], [False, True, True], [0], ["assistant"])
    assert rendered.examples.turn_starts.tolist() == [0, 3, 6]


@COMMON
@given(batch=st.lists(chats_of("four-marker"), max_size=4))
def test_the_mask_of_bare_ids_is_the_mask_of_the_spans(batch: list[Conversation]) -> None:
    tokenizer = ByteTokenizer(byte_offset=20, specials=MARKERS)
    plain = [
        Conversation(messages=[{"role": m["role"], "content": m["content"]} for m in c.messages])
        for c in batch
    ]
    examples = bind_template(known_template("four-marker"), tokenizer).render(plain, TRAIN).examples
    found = [
        assistant_mask(ids, open_id=MARKER_ID["asst"], end_id=MARKER_ID["eot"])
        for ids in examples.ids
    ]
    assert np.concatenate([np.empty(0, np.bool_), *found]).tolist() == examples.mask.tolist()


def test_ids_keep_their_dtype_unless_a_marker_is_wider() -> None:
    class Narrow:
        def encode_batch(self, texts: Texts) -> Ragged:
            return Ragged.from_sequences([[50]] * len(texts), np.uint8)

    tokenizer = ByteTokenizer(byte_offset=20, specials=MARKERS)
    template = bind_template(known_template("four-marker"), tokenizer, Narrow())
    assert template.render([SIMPLE], TRAIN).examples.ids.values.dtype == np.uint8

    class Wide(ByteTokenizer):
        def special_token_ids(self) -> dict[str, int]:
            return {**super().special_token_ids(), "eot": 70_000}

    wide = Wide(byte_offset=20, specials=MARKERS)
    template = bind_template(known_template("four-marker"), wide, Narrow())
    (ids,) = template.render([chat(("assistant", "x"))], TRAIN).examples.ids
    assert ids.tolist() == [2, 50, 70_000]


def test_an_unknown_policy_is_refused(chat_tokenizers: dict[str, Tokenizer]) -> None:
    template = bind_template(known_template("chatml"), chat_tokenizers["byte"])
    wrong: Any = "assistants"
    with pytest.raises(OptionError, match="'assistants': wanted one of assistant, last-assistant"):
        template.render([SIMPLE], TrainPolicy(train_on=wrong))
    wrong = 1
    with pytest.raises(OptionError, match="train_on_eot=1"):
        template.render([SIMPLE], TrainPolicy(train_on_eot=wrong))


def test_an_encoder_that_loses_texts_is_refused() -> None:
    class Losing:
        def encode_batch(self, texts: Texts) -> Ragged:
            return Ragged.from_sequences([[50]] * (len(texts) - 1))

    tokenizer = ByteTokenizer(byte_offset=20, specials=MARKERS)
    template = bind_template(known_template("chatml"), tokenizer, Losing())
    with pytest.raises(TokenizerError, match="3 sequences for 4 texts"):
        template.render([SIMPLE], TRAIN)
