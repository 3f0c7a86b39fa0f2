"""Which tokens the assistant said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat import assistant_mask
from shardmill.errors import OptionError

OPEN, END = 7, 9
tokens = st.sampled_from([4, 5, 6, OPEN, END])


def spoken(ids: list[int]) -> list[bool]:
    """The rule, word by word."""
    said, mask = False, []
    for token in ids:
        mask.append(said and token != OPEN)
        said = token == OPEN or (said and token != END)
    return mask


def test_only_the_words_and_the_end_of_the_assistant_are_true() -> None:
    ids = np.array([1, 4, 9, 2, 5, 9, 7, 4, 5, 9, 4])
    assert assistant_mask(ids, open_id=7, end_id=9).tolist() == [False] * 7 + [True] * 3 + [False]


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(tokens, max_size=40))
def test_the_mask_is_the_rule_word_by_word(ids: list[int]) -> None:
    array = np.array(ids, np.uint16)
    assert assistant_mask(array, open_id=OPEN, end_id=END).tolist() == spoken(ids)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), rows=st.integers(0, 5), width=st.integers(0, 12))
def test_the_rows_of_a_batch_do_not_touch(data: st.DataObject, rows: int, width: int) -> None:
    row = st.lists(tokens, min_size=width, max_size=width)
    batch = data.draw(st.lists(row, min_size=rows, max_size=rows))
    mask = assistant_mask(np.array(batch).reshape(rows, width), open_id=OPEN, end_id=END)
    assert mask.shape == (rows, width)
    assert mask.tolist() == [spoken(row) for row in batch]


@settings(deadline=None, max_examples=100)
@given(chats=st.lists(st.lists(tokens, max_size=8), max_size=6))
def test_an_open_span_ends_where_the_next_conversation_starts(chats: list[list[int]]) -> None:
    flat = np.array([token for chat in chats for token in chat], np.int64)
    starts = np.cumsum([0, *map(len, chats)])[:-1]
    mask = assistant_mask(flat, open_id=OPEN, end_id=END, starts=starts)
    assert mask.tolist() == [said for chat in chats for said in spoken(chat)]


def test_senseless_arguments_are_refused() -> None:
    ids = np.arange(4)
    with pytest.raises(OptionError, match="both 3"):
        assistant_mask(ids, open_id=3, end_id=3)
    with pytest.raises(OptionError, match=r"\(2, 2, 1\)"):
        assistant_mask(ids.reshape(2, 2, 1), open_id=1, end_id=2)
    with pytest.raises(OptionError, match="flat ids"):
        assistant_mask(ids.reshape(2, 2), open_id=1, end_id=2, starts=[0])
    with pytest.raises(OptionError, match="of 4 ids"):
        assistant_mask(ids, open_id=1, end_id=2, starts=[5])
