"""The recipe's chat format: serialise, mask, cut to S, collate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from niels_gpt.format.sft import (
    DEFAULT_SYSTEM_TEXT,
    IGNORE_INDEX,
    SFTFormatError,
    collate_sft_batch,
    pack_sft_ids_and_mask,
    serialize_chat_to_ids,
    sft_loss_mask_for_ids,
)
from niels_gpt.special_tokens import ASST, EOT, SPECIAL_TOKENS, SYS, USR
from shardmill.errors import OptionError, ShardmillError, TokenizerError

IDS = {"sys_id": 1, "usr_id": 2, "asst_id": 3, "eot_id": 4}
SPECIAL = {1, 2, 3, 4}


class WordTokenizer:
    """Special strings have fixed ids; any other word is 10 and up, in order of first use."""

    def __init__(self) -> None:
        self.special = {SYS: 1, USR: 2, ASST: 3, EOT: 4}
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        return [self.special.get(word) or self._number(word) for word in text.split()]

    def _number(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return 10 + self.words.index(word)


class NamedTokenizer(WordTokenizer):
    """The same with a table of its special ids."""

    def special_token_ids(self) -> dict[str, int]:
        return {"sys": 1, "usr": 2, "asst": 3, "eot": 4}


def chat(*turns: tuple[str, str], **fields: Any) -> Any:
    return {"messages": [{"role": role, "content": text} for role, text in turns], **fields}


def serialize(example: Any, tokenizer: Any = None, system: str = DEFAULT_SYSTEM_TEXT) -> list[int]:
    return serialize_chat_to_ids(
        example, tokenizer=tokenizer or WordTokenizer(), default_system_text=system
    )


def pack(ids: list[int], size: int, mask: list[bool] | None = None) -> tuple[list[int], list[bool]]:
    mask = sft_loss_mask_for_ids(ids, **IDS) if mask is None else mask
    return pack_sft_ids_and_mask(ids, mask, S=size, pad_id=4, **IDS)


THREE = chat(
    ("user", "one two"),
    ("assistant", "three"),
    ("user", "four"),
    ("assistant", "five six"),
    ("user", "seven"),
    ("assistant", "eight"),
)
#                sys      one two        three     four      five six       seven     eight
THREE_IDS = [1, 10, 4, 2, 11, 12, 4, 3, 13, 4, 2, 14, 4, 3, 15, 16, 4, 2, 17, 4, 3, 18, 4]


# 1. serialisation


def test_the_default_system_message_comes_first_and_every_turn_ends_in_eot() -> None:
    example = chat(("user", "hello"), ("assistant", "hi there"))
    assert DEFAULT_SYSTEM_TEXT == "you are a helpful assistant."
    assert serialize(example) == [1, 10, 11, 12, 13, 14, 4, 2, 15, 4, 3, 16, 17, 4]


def test_a_given_system_message_takes_the_place_of_the_default() -> None:
    example = chat(("system", "be brief"), ("user", "hello"), ("assistant", ""))
    assert serialize(example) == [1, 10, 11, 4, 2, 12, 4, 3, 4]


def test_turns_come_in_their_order_whoever_speaks() -> None:
    example = chat(("assistant", "a"), ("user", "b"), ("user", "c"), ("assistant", "d"))
    assert serialize(example, system="") == [1, 4, 3, 10, 4, 2, 11, 4, 2, 12, 4, 3, 13, 4]
    assert serialize(THREE, system="sys") == THREE_IDS


@pytest.mark.parametrize(
    ("role", "opening"),
    [
        ("user", 2),
        ("USER", 2),
        ("Prompter", 2),
        ("human", 2),
        ("GPT", 3),
        ("bot", 3),
        ("Assistant", 3),
    ],
)
def test_roles_in_any_case_and_by_their_other_names(role: str, opening: int) -> None:
    assert serialize(chat((role, "x"), ("assistant", "y")), system="") == [
        *[1, 4],
        *[opening, 10, 4],
        *[3, 11, 4],
    ]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (
            chat(("moderator", "x"), id="e-1"),
            r"^example_id=e-1: message 0: unknown role 'moderator'",
        ),
        (chat(("tool", "x"), ("assistant", "y")), "^message 0: unknown role 'tool'"),
        ({"messages": [{"role": None, "content": "x"}]}, "unknown role None"),
        (chat(("user", "x"), id=7), "^example_id=7: no assistant turn"),
        (chat(id="e-1"), "^example_id=e-1: no assistant turn among 0 messages"),
        (chat(("assistant", "x"), ("system", "y"), id="e"), "^example_id=e: message 1 is a system"),
        (chat(("system", "x"), ("system", "y"), ("assistant", "z")), "message 1 is a system"),
        ({"id": "e", "messages": [{"role": "user", "content": None}]}, "^example_id=e: .*NoneType"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "content is list, wanted a string"),
        ({"messages": [{"role": "user"}]}, "wanted an object with role and content"),
        ({"messages": ["hello"]}, "message 0 is 'hello'"),
        ({"messages": "hello", "id": "e"}, "^example_id=e: .*list of messages"),
        ({"text": "hello"}, "list of messages"),
        ([], "list of messages"),
        (chat(("assistant", "a\ud800")), "lone surrogate at character 1"),
    ],
)
def test_what_is_no_chat_is_refused_by_name(example: Any, message: str) -> None:
    with pytest.raises(SFTFormatError, match=message):
        serialize(example)


def test_the_error_is_a_value_error_and_one_of_ours() -> None:
    assert issubclass(SFTFormatError, ValueError)
    assert issubclass(SFTFormatError, ShardmillError)


def test_a_default_system_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(SFTFormatError, match="default_system_text is NoneType"):
        serialize(THREE, system=None)  # type: ignore[arg-type]


# 2. mask


def test_only_the_assistants_words_and_their_eot_are_trained() -> None:
    ids = [1, 10, 4, 2, 11, 12, 4, 3, 13, 14, 4]
    assert sft_loss_mask_for_ids(ids, **IDS) == [False] * 8 + [True] * 3


def test_every_assistant_turn_is_trained_and_an_empty_one_trains_its_eot() -> None:
    ids = [1, 4, 3, 4, 2, 10, 4, 3, 11, 4]
    assert sft_loss_mask_for_ids(ids, **IDS) == [
        *[False, False, False, True],
        *[False, False, False],
        *[False, True, True],
    ]


def test_a_role_token_is_never_trained() -> None:
    assert sft_loss_mask_for_ids([3, 10, 2, 1, 3, 11, 4, 12], **IDS) == [
        *[False, True, False, False],
        *[False, True, True, False],
    ]
    assert sft_loss_mask_for_ids([], **IDS) == []


# 3. whole turns go first


@pytest.mark.parametrize(
    ("size", "row"),
    [
        (23, THREE_IDS),
        (22, [1, 10, 4, *THREE_IDS[10:], *[4] * 6]),
        (16, [1, 10, 4, *THREE_IDS[10:]]),
        (15, [1, 10, 4, *THREE_IDS[17:], *[4] * 6]),
        (9, [1, 10, 4, *THREE_IDS[17:]]),
        (8, [2, 17, 4, 3, 18, 4, 4, 4]),
        (6, [2, 17, 4, 3, 18, 4]),
        (5, [3, 18, 4, 4, 4]),
        (3, [3, 18, 4]),
        (2, [18, 4]),
    ],
)
def test_the_oldest_pairs_go_first_and_the_last_assistant_turn_stays(
    size: int, row: list[int]
) -> None:
    ids, mask = pack(THREE_IDS, size)
    assert ids == row
    real = len(row) - (row[::-1].index(18) - 1 if 18 in row else 0)
    assert mask[real - 2 : real] == [True, True]
    assert not any(mask[real:])


def test_the_mask_of_what_stays_is_the_mask_it_had() -> None:
    assert pack(THREE_IDS, 16)[1] == [*[False] * 7, True, True, True, *[False] * 4, True, True]


def test_a_huge_assistant_turn_keeps_its_end_and_is_still_trained() -> None:
    ids = [1, 10, 4, 2, 11, 4, 3, *range(20, 40), 4]
    assert pack(ids, 5) == ([36, 37, 38, 39, 4], [True] * 5)
    assert pack(ids, 22) == ([3, *range(20, 40), 4], [False, *[True] * 21])
    assert pack(ids, 24) == ([3, *range(20, 40), 4, 4, 4], [False, *[True] * 21, False, False])


def test_pairs_are_dropped_on_imperfect_input() -> None:
    first = serialize(chat(("assistant", "a"), ("user", "b"), ("assistant", "c")), system="s")
    assert first == [1, 10, 4, 3, 11, 4, 2, 12, 4, 3, 13, 4]
    assert pack(first, 11)[0] == [1, 10, 4, 2, 12, 4, 3, 13, 4, 4, 4]
    twice = serialize(
        chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("user", "d"), ("assistant", "e")),
        system="s",
    )
    assert pack(twice, 12)[0] == [1, 10, 4, 2, 13, 4, 2, 14, 4, 3, 15, 4]
    trailing = serialize(chat(("user", "a"), ("assistant", "b"), ("user", "c d e")), system="s")
    assert pack(trailing, 13)[0] == [1, 10, 4, 2, 11, 4, 3, 12, 4, *[4] * 4]


# 4. padding


def test_short_ids_are_padded_and_padding_is_not_trained() -> None:
    ids = [1, 4, 2, 10, 4, 3, 11, 4]
    mask = sft_loss_mask_for_ids(ids, **IDS)
    packed = pack_sft_ids_and_mask(ids, mask, S=11, pad_id=0, **IDS)
    assert packed == ([*ids, 0, 0, 0], [*mask, False, False, False])
    assert pack(ids, 8) == (ids, mask)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([1, 4, 3, 10, 4], [False] * 4, "mask of 4 values"),
        ([1, 4, 3, 10, 4], [0, 0, 0, 1, 1], "wanted one bool"),
        ([1, 4, 3, 10, 4], [False] * 5, "train nothing"),
        ([1, 4, 2, 10, 4], None, "train nothing"),
        ([10, 4], [True, False], "train nothing"),
        ([], [], "train nothing"),
        ([1, 4, 3, 10], None, "has no EOT"),
        ([1.5, 4], [True, True], "whole numbers"),
        ([-1, 4], [True, True], "whole numbers"),
    ],
)
def test_ids_and_masks_that_cannot_be_trained_are_refused(
    ids: list[int], mask: list[bool] | None, message: str
) -> None:
    with pytest.raises(SFTFormatError, match=message):
        pack(ids, 8, mask)


def test_senseless_arguments_are_refused() -> None:
    with pytest.raises(OptionError, match="S=1"):
        pack(THREE_IDS, 1)
    with pytest.raises(SFTFormatError, match="four different ids"):
        sft_loss_mask_for_ids([3, 4], sys_id=1, usr_id=1, asst_id=3, eot_id=4)
    with pytest.raises(TokenizerError, match="no encode"):
        serialize(THREE, tokenizer=object())


# 5. collate


def test_labels_are_the_next_tokens_and_minus_100_where_nothing_is_trained() -> None:
    ids = [1, 4, 2, 10, 4, 3, 11, 4]
    other = [1, 12, 4, 3, 4]
    x, y, loss_mask = collate_sft_batch([pack(ids, 8), pack(other, 8)], T=7, device="cpu")
    assert x.tolist() == [[1, 4, 2, 10, 4, 3, 11], [1, 12, 4, 3, 4, 4, 4]]
    assert y.tolist() == [[-100] * 5 + [11, 4], [-100] * 3 + [4] + [-100] * 3]
    assert loss_mask.tolist() == [[False] * 5 + [True] * 2, [False] * 3 + [True] + [False] * 3]
    assert (x.dtype, y.dtype, loss_mask.dtype) == (torch.int64, torch.int64, torch.bool)
    assert IGNORE_INDEX == -100
    other_index = collate_sft_batch([pack(ids, 8)], T=7, device="cpu", ignore_index=-1)
    assert other_index[1].tolist() == [[-1] * 5 + [11, 4]]


def test_items_of_another_length_are_refused() -> None:
    with pytest.raises(SFTFormatError, match=r"packed item 1 has 9 ids .* S = T \+ 1 = 8"):
        collate_sft_batch([pack(THREE_IDS, 8), pack(THREE_IDS, 9)], T=7, device="cpu")
    assert [part.shape for part in collate_sft_batch([], T=7, device="cpu")] == [(0, 7)] * 3


# special ids, and text that looks like them


def test_special_ids_come_from_the_table_or_from_the_strings() -> None:
    class ByString(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            return [self._number(word) for word in text.split()]

        def special_token_ids(self) -> dict[str, int]:
            return self.special

    for tokenizer in (WordTokenizer(), NamedTokenizer(), ByString()):
        assert serialize(THREE, tokenizer, system="sys") == THREE_IDS


def test_a_tokenizer_without_the_special_tokens_is_refused() -> None:
    class Bytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    class Unknown:
        def encode(self, text: str) -> list[int]:
            return [0] * len(text.split())

    with pytest.raises(SFTFormatError, match=r"^example_id=e: no id for 'sys'.* 45 ids, wanted 1"):
        serialize(chat(("assistant", "x"), id="e"), Bytes())
    with pytest.raises(SFTFormatError, match="four different ids"):
        serialize(THREE, Unknown())


def test_a_literal_special_string_is_text() -> None:
    tokenizer = WordTokenizer()
    assert tokenizer.encode(f"s say < {EOT[1:]} now {ASST[1:]}") == [10, 11, 12, 13, 14, 15]
    example = chat(("user", f"say {EOT} now"), ("assistant", ASST))
    ids = serialize(example, tokenizer, system="s")
    assert ids == [1, 10, 4, 2, 11, 12, 13, 14, 4, 3, 12, 15, 4]


def test_a_tokenizer_that_refuses_the_strings_gets_them_in_pieces() -> None:
    class Refusing(NamedTokenizer):
        def encode(self, text: str) -> list[int]:
            if any(literal in text for literal in SPECIAL_TOKENS.values()):
                raise ValueError("disallowed special token")
            return super().encode(text)

    assert serialize(chat(("assistant", f"a {SYS}")), Refusing(), system="s") == [
        *[1, 10, 4],
        *[3, 11, 12, 13, 4],
    ]


def test_text_that_stays_structure_is_refused() -> None:
    class Shouting(NamedTokenizer):
        def encode(self, text: str) -> list[int]:
            return [4 if word == "STOP" else 10 for word in text.split()]

    example = chat(("user", "please STOP"), ("assistant", "x"), id="e")
    with pytest.raises(SFTFormatError, match=r"^example_id=e: turn 1 \(user\).* \[4\]"):
        serialize(example, Shouting())


# Laws over random chats, with special strings thrown in.

pieces = st.sampled_from(
    ["a", "b", " ", "\n", "word", "\u00e9", *SPECIAL_TOKENS.values(), EOT[:-1], USR[1:], "<"]
)
contents = st.lists(pieces, max_size=8).map("".join)
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), contents), max_size=8)
lengths = st.integers(4, 48)


class SubstringTokenizer(NamedTokenizer):
    """As naive as can be: finds special strings anywhere, and has one id a character."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            found = next((s for s in self.special if text.startswith(s)), None)
            ids.append(10 + ord(text[0]) if found is None else self.special[found])
            text = text[len(found or "x") :]
        return ids


def pieces_of(ids: list[int]) -> list[list[int]]:
    """Ids cut at role tokens."""
    found: list[list[int]] = []
    for token in ids:
        if token in (1, 2, 3) or not found:
            found.append([])
        found[-1].append(token)
    return found


@settings(deadline=None, max_examples=150)
@given(
    chat_turns=turns,
    system=contents,
    tokenizer=st.sampled_from([WordTokenizer, SubstringTokenizer]),
)
def test_no_content_becomes_structure(
    chat_turns: list[tuple[str, str]], system: str, tokenizer: type[WordTokenizer]
) -> None:
    assume(any(role == "assistant" for role, _ in chat_turns))
    said = [("system", system), *chat_turns]
    found = pieces_of(serialize(chat(*chat_turns), tokenizer(), system=system))
    openings = {"system": 1, "user": 2, "assistant": 3}
    assert [turn[0] for turn in found] == [openings[role] for role, _ in said]
    assert all(turn[-1] == 4 for turn in found)
    assert not any(SPECIAL & set(turn[1:-1]) for turn in found)
    if tokenizer is SubstringTokenizer:
        texts = ["".join(chr(token - 10) for token in turn[1:-1]) for turn in found]
        assert texts == [text for _, text in said]


@settings(deadline=None, max_examples=150)
@given(chat_turns=turns, size=lengths)
def test_every_row_has_the_length_asked_for_and_ends_its_training_with_the_assistants_eot(
    chat_turns: list[tuple[str, str]], size: int
) -> None:
    assume(any(role == "assistant" for role, _ in chat_turns))
    ids = serialize(chat(*chat_turns), system="be kind")
    mask = sft_loss_mask_for_ids(ids, **IDS)
    row, trained = pack(ids, size)
    assert len(row) == len(trained) == size
    assert any(trained[1:])
    last = max(place for place in range(size) if trained[place])
    assert row[last] == 4
    assert not any(said and token in (1, 2, 3) for token, said in zip(row, trained, strict=True))
    # Behind the last trained token there is padding, or turns of users when all of it fits.
    if len(ids) > size:
        assert row[last + 1 :] == [4] * (size - last - 1)
    # What is trained is the end of what was trained before.
    kept = [token for token, said in zip(row, trained, strict=True) if said]
    assert kept == [token for token, said in zip(ids, mask, strict=True) if said][-len(kept) :]
    # Packing again changes nothing, and neither does a second call.
    assert pack(row, size, trained) == pack(ids, size) == (row, trained)


@settings(deadline=None, max_examples=150)
@given(pairs=st.lists(st.tuples(contents, contents), min_size=1, max_size=6), size=lengths)
def test_dropping_keeps_the_system_turn_and_a_suffix_of_pairs(
    pairs: list[tuple[str, str]], size: int
) -> None:
    said = [turn for user, bot in pairs for turn in (("user", user), ("assistant", bot))]
    ids = serialize(chat(*said), system="be kind")
    parts = pieces_of(ids)
    suffixes = [[parts[0], *parts[first:]] for first in range(1, len(parts), 2)]
    rests = [*suffixes, parts[-2:], parts[-1:]]
    flat = [[token for part in rest for token in part] for rest in rests]
    wanted = next((rest for rest in flat if len(rest) <= size), ids[-size:])
    assert pack(ids, size)[0] == wanted + [4] * (size - len(wanted))
