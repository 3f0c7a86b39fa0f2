"""Which turns are trained, and which tokens the assistant said."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat.policy import (
    TRAIN_ON,
    TrainOn,
    TrainPolicy,
    assistant_mask,
    trained_turns,
)
from shardmill.errors import OptionError

S, U, A, T = range(4)
turn = st.tuples(st.sampled_from([S, U, A, T]), st.sampled_from([None, None, None, True, False]))


def rule(chat: list[tuple[int, bool | None]], train_on: TrainOn) -> list[bool]:
    """The rule, turn by turn."""
    assistants = [number for number, (role, _) in enumerate(chat) if role == A]
    trained = []
    for number, (_, flag) in enumerate(chat):
        by_policy = {
            "all": True,
            "assistant": number in assistants,
            "last-assistant": bool(assistants) and number == assistants[-1],
        }[train_on]
        trained.append(by_policy if flag is None else flag)
    return trained


def test_every_policy_has_a_name_for_type_checkers() -> None:
    assert tuple(TRAIN_ON) == get_args(TrainOn)


def test_policies_on_two_conversations() -> None:
    roles = np.array([S, U, A, U, A, U, A, U], np.uint8)
    bounds = np.array([0, 5, 8])
    found = {
        train_on: np.flatnonzero(
            trained_turns(roles, bounds, [], TrainPolicy(train_on=train_on))
        ).tolist()
        for train_on in ("assistant", "last-assistant", "all")
    }
    assert found == {
        "assistant": [2, 4, 6],
        "last-assistant": [4, 6],
        "all": [0, 1, 2, 3, 4, 5, 6, 7],
    }


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    chats=st.lists(st.lists(turn, min_size=1, max_size=6), max_size=5),
    train_on=st.sampled_from(["assistant", "last-assistant", "all"]),
)
def test_policies_equal_a_loop_over_turns(
    chats: list[list[tuple[int, bool | None]]], train_on: TrainOn
) -> None:
    flat = [one for chat in chats for one in chat]
    found = trained_turns(
        np.array([role for role, _ in flat], np.uint8),
        np.cumsum([0, *map(len, chats)]),
        [(number, flag) for number, (_, flag) in enumerate(flat) if flag is not None],
        TrainPolicy(train_on=train_on),
    )
    assert found.tolist() == [trained for chat in chats for trained in rule(chat, train_on)]


OPEN, END = 7, 9
tokens = st.sampled_from([4, 5, 6, OPEN, END])


def spoken(ids: list[int]) -> list[bool]:
    """The rule, token by token."""
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
def test_the_mask_equals_a_loop_over_tokens(ids: list[int]) -> None:
    array = np.array(ids, np.uint16)
    assert assistant_mask(array, open_id=OPEN, end_id=END).tolist() == spoken(ids)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), rows=st.integers(0, 5), width=st.integers(0, 12))
def test_rows_of_a_batch_are_independent(data: st.DataObject, rows: int, width: int) -> None:
    row = st.lists(tokens, min_size=width, max_size=width)
    batch = data.draw(st.lists(row, min_size=rows, max_size=rows))
    mask = assistant_mask(np.array(batch).reshape(rows, width), open_id=OPEN, end_id=END)
    assert mask.shape == (rows, width)
    assert mask.tolist() == [spoken(row) for row in batch]


def test_wrong_arguments_are_refused() -> None:
    ids = np.arange(4)
    with pytest.raises(OptionError, match="both 3"):
        assistant_mask(ids, open_id=3, end_id=3)
    with pytest.raises(OptionError, match=r"\(2, 2, 1\)"):
        assistant_mask(ids.reshape(2, 2, 1), open_id=1, end_id=2)
