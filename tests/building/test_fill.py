"""The budget rule: one split for each document, every token in one place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardmill.building.assembly import Filler
from shardmill.building.worker import append_to_each
from shardmill.records import Ragged

LENGTHS = st.lists(st.integers(1, 12), max_size=40)
FILL = st.tuples(st.integers(0, 60), st.one_of(st.none(), st.integers(0, 120))).map(
    lambda limits: (("val", limits[0]), ("train", limits[1]))
)


def placed(lengths: list[int], fill: tuple, cuts: list[int]) -> list[tuple[str | None, int]]:
    """(split, tokens kept) of each document when the lengths come in batches cut at `cuts`."""
    filler, result = Filler(fill, {}), []
    for part in np.split(np.asarray(lengths, np.int64), sorted(cuts)):
        for placement in filler.place(part):
            own = [int(n) for n in part[placement.start : placement.stop]]
            own[-1] -= placement.cut
            result += [(placement.split, n if placement.split else 0) for n in own]
    return result


def one_by_one(lengths: list[int], fill: tuple) -> list[tuple[str | None, int]]:
    """The rule as a person would apply it, document after document."""
    left, result = dict(fill), []
    for length in lengths:
        split = next((s for s, limit in left.items() if limit is None or limit > 0), None)
        kept = 0
        if split is not None:
            limit = left[split]
            kept = length if limit is None else min(length, limit)
            left[split] = None if limit is None else limit - kept
        result.append((split, kept))
    return result


@given(LENGTHS, FILL, st.lists(st.integers(0, 40), max_size=5))
def test_each_document_goes_where_the_rule_says_however_it_is_batched(lengths, fill, cuts):
    assert placed(lengths, fill, cuts) == one_by_one(lengths, fill)


def test_the_document_at_the_border_goes_to_one_split_and_its_rest_nowhere():
    assert placed([4, 4, 4], (("val", 6), ("train", 3)), []) == [
        ("val", 4),
        ("val", 2),
        ("train", 3),
    ]


def test_a_split_filled_to_the_token_gives_the_next_document_to_the_next_split():
    assert placed([4, 4], (("val", 4), ("train", None)), []) == [("val", 4), ("train", 4)]


def test_take_cuts_the_end_of_the_last_document_only():
    documents = Ragged.from_sequences([[1, 2], [3, 4, 5], [6]])
    (first, second) = Filler((("val", 4), ("train", None)), {}).place(documents.lengths)
    assert first.take(documents) == Ragged.from_sequences([[1, 2], [3, 4]])
    assert second.take(documents) == Ragged.from_sequences([[6]])


@given(st.lists(st.lists(st.integers(0, 8), max_size=5), max_size=8), st.sampled_from([1, 400]))
def test_the_end_token_follows_each_document(documents, times):
    documents = [document * times for document in documents]  # short ones, or long ones
    wanted = Ragged.from_sequences([[*document, 9] for document in documents])
    assert append_to_each(Ragged.from_sequences(documents), 9, np.int64) == wanted
