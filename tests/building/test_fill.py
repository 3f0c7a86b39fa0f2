"""The budget rule: one split for each document, every token in one place, in any units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.building.splits import Fill, Filler, FillState, open_state, state_after
from shardmill.building.worker import append_to_each
from shardmill.records import Ragged

LENGTHS = st.lists(st.integers(1, 12), max_size=40)
LIMITS = st.lists(st.one_of(st.just(0), st.integers(0, 40)), max_size=4)
LAST = st.one_of(st.none(), st.integers(0, 60))
FILL = st.tuples(LIMITS, LAST).map(
    lambda limits: tuple((f"s{n}", limit) for n, limit in enumerate([*limits[0], limits[1]]))
)
Placed = list[tuple[int | None, int]]


def placed(lengths: list[int], filler: Filler, cuts: list[int]) -> Placed:
    """(split, tokens kept) of each document when the lengths come in batches cut at `cuts`."""
    result: Placed = []
    for part in np.split(np.asarray(lengths, np.int64), sorted(cuts)):
        for placement in filler.place(part):
            own = [int(n) for n in part[placement.start : placement.stop]]
            own[-1] -= placement.cut
            result += [(placement.split, n if placement.split is not None else 0) for n in own]
    return result


def one_by_one(lengths: list[int], fill: Fill) -> tuple[Placed, list[FillState]]:
    """The rule as a person would apply it, document after document; and the state before each and
    after the last."""
    left = [limit for _, limit in fill]
    result: Placed = []
    states = [state_of(left, fill)]
    for length in lengths:
        split = next((n for n, limit in enumerate(left) if limit is None or limit > 0), None)
        kept = 0
        if split is not None:
            limit = left[split]
            kept = length if limit is None else min(length, limit)
            left[split] = None if limit is None else limit - kept
        result.append((split, kept))
        states.append(state_of(left, fill))
    return result, states


def state_of(left: list[int | None], fill: Fill) -> FillState:
    for number, ((_, limit), rest) in enumerate(zip(fill, left, strict=True)):
        if limit is None or rest is None:
            return number, 0
        if rest > 0:
            return number, limit - rest
    return len(fill), 0


@given(LENGTHS, FILL, st.lists(st.integers(0, 40), max_size=5))
def test_each_document_goes_where_the_rule_says_however_it_is_batched(lengths, fill, cuts):
    filler = Filler(fill, open_state(fill))
    wanted, states = one_by_one(lengths, fill)
    assert placed(lengths, filler, cuts) == wanted
    assert filler.after == states[-1]
    assert filler.is_full == (states[-1][0] == len(fill))


@given(LENGTHS, FILL, st.data())
def test_a_filler_continues_from_any_state(lengths, fill, data):
    at = data.draw(st.integers(0, len(lengths)))
    wanted, states = one_by_one(lengths, fill)
    assert placed(lengths[at:], Filler(fill, states[at]), []) == wanted[at:]


@given(FILL, st.data())
def test_a_state_is_open_exactly_where_the_rule_would_put_a_token(fill, data):
    split = data.draw(st.integers(0, len(fill) - 1))
    tokens = data.draw(st.integers(0, fill[split][1] or 0))
    given_before = sum(most or 0 for _, most in fill[:split]) + tokens
    left: list[int | None] = []
    for _, most in fill:  # as if the tokens had been given one by one
        taken = given_before if most is None else min(given_before, most)
        left.append(None if most is None else most - taken)
        given_before -= taken
    assert open_state(fill, split, tokens) == state_of(left, fill)


@dataclass(frozen=True)
class Made:
    """What a receipt says of a unit."""

    before: FillState
    after: FillState
    num_tokens: int


def make(lengths: list[int], fill: Fill, before: FillState) -> tuple[Made, Placed]:
    filler = Filler(fill, before)
    where = placed(lengths, filler, [])
    return Made(before, filler.after, sum(lengths)), where


def guesses(fill: Fill) -> st.SearchStrategy[FillState]:
    """Every state for which a unit may be made without knowing what comes before it."""
    return st.sampled_from([(n, 0 if limit is None else None) for n, (_, limit) in enumerate(fill)])


@given(LENGTHS, LENGTHS, FILL, st.data())
def test_a_unit_made_for_a_guess_counts_only_if_it_is_what_the_rule_makes(
    before, lengths, fill, data
):
    """It never counts when it is wrong, and always when it is right and fills no split."""
    wanted, states = one_by_one([*before, *lengths], fill)
    now, after = states[len(before)], states[-1]
    if now[0] == len(fill):
        return
    guess = data.draw(guesses(fill))
    made, where = make(lengths, fill, guess)
    found = state_after(fill, now, made)
    is_right = where == wanted[len(before) :]
    assert found is None or (is_right and found == after)
    if is_right and guess[0] == now[0] and after[0] == now[0]:
        assert found == after


@given(LENGTHS, LENGTHS, FILL)
def test_a_unit_made_for_the_state_before_it_always_counts(before, lengths, fill):
    _, states = one_by_one([*before, *lengths], fill)
    now = states[len(before)]
    if now[0] < len(fill):
        made, _ = make(lengths, fill, now)
        assert state_after(fill, now, made) == states[-1]


def test_a_guess_that_ends_at_the_limit_does_not_count():
    """Made for the state itself, the rest of its batches would not have been read."""
    fill = (("train", 9),)
    assert state_after(fill, (0, 4), Made((0, None), (0, None), 5)) is None
    assert state_after(fill, (0, 3), Made((0, None), (0, None), 5)) == (0, 8)


def test_the_document_at_the_border_goes_to_one_split_and_its_rest_nowhere():
    fill = (("val", 6), ("train", 3))
    assert placed([4, 4, 4], Filler(fill, (0, 0)), []) == [(0, 4), (0, 2), (1, 3)]


def test_a_split_filled_to_the_token_gives_the_next_document_to_the_next_split():
    fill = (("val", 4), ("train", None))
    assert placed([4, 4], Filler(fill, (0, 0)), []) == [(0, 4), (1, 4)]


def test_a_document_larger_than_several_limits_fills_one_split_only():
    fill = (("a", 2), ("b", 3), ("c", None))
    assert placed([9, 9, 9], Filler(fill, (0, 0)), []) == [(0, 2), (1, 3), (2, 9)]


@pytest.mark.parametrize("fill", [(("a", 0),), (("a", 0), ("b", 0))])
def test_limits_of_nothing_take_nothing(fill):
    filler = Filler(fill, open_state(fill))
    assert filler.is_full
    assert placed([4, 4], filler, []) == [(None, 0), (None, 0)]


def test_take_cuts_the_end_of_the_last_document_only():
    documents = Ragged.from_sequences([[1, 2], [3, 4, 5], [6]])
    filler = Filler((("val", 4), ("train", None)), (0, 0))
    (first, second) = filler.place(documents.lengths)
    assert first.take(documents) == Ragged.from_sequences([[1, 2], [3, 4]])
    assert second.take(documents) == Ragged.from_sequences([[6]])


@given(st.lists(st.lists(st.integers(0, 8), max_size=5), max_size=8), st.sampled_from([1, 400]))
def test_the_end_token_follows_each_document(documents, times):
    documents = [document * times for document in documents]  # short ones, or long ones
    wanted = Ragged.from_sequences([[*document, 9] for document in documents])
    assert append_to_each(Ragged.from_sequences(documents), 9, np.int64) == wanted
