"""Which turns are trained."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat import TrainPolicy, trained_turns
from shardmill.chat.policy import TrainOn

S, U, A, T = range(4)
turn = st.tuples(st.sampled_from([S, U, A, T]), st.sampled_from([None, None, None, True, False]))


def rule(chat: list[tuple[int, bool | None]], train_on: TrainOn) -> list[bool]:
    """The rule, word by word."""
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


@settings(deadline=None, max_examples=200)
@given(
    chats=st.lists(st.lists(turn, min_size=1, max_size=6), max_size=5),
    train_on=st.sampled_from(["assistant", "last-assistant", "all"]),
)
def test_the_policy_is_the_rule_word_by_word(
    chats: list[list[tuple[int, bool | None]]], train_on: TrainOn
) -> None:
    flat = [one for chat in chats for one in chat]
    found = trained_turns(
        np.array([role for role, _ in flat], np.uint8),
        np.cumsum([0, *map(len, chats)]),
        [(number, flag) for number, (_, flag) in enumerate(flat) if flag is not None],
        TrainPolicy(train_on=train_on),
    )
    assert found.tolist() == [told for chat in chats for told in rule(chat, train_on)]
