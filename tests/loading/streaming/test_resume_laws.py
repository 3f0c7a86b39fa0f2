"""The guarantees of a stream: resuming is continuing, and every token is given once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.loading.streaming.documents import StreamOrder
from shardmill.loading.streaming.stream import BatchShape, TextStream
from shardmill.trainers.grain import StreamIterator
from tests.loading.streaming.pipelines import (
    EOS,
    Case,
    assert_equal,
    cases,
    rows_of,
    some,
    through_json,
    tokens_of,
    with_states,
)

LAW = settings(deadline=None, max_examples=30)


@pytest.mark.slow
@LAW
@given(case=cases(), data=st.data())
def test_after_set_state_come_the_batches_of_an_undisturbed_run_twice_in_a_row(
    case: Case, data: st.DataObject
) -> None:
    with case.open() as undisturbed:
        batches, states = with_states(undisturbed)
    first = data.draw(st.integers(0, len(batches)))
    second = data.draw(st.integers(first, len(batches)))
    with case.open() as resumed, case.open() as again:
        resumed.set_state(through_json(states[first]))
        assert resumed.get_state() == states[first]
        assert_equal(some(resumed, second - first), batches[first:second])
        assert resumed.get_state() == states[second]
        again.set_state(through_json(resumed.get_state()))
        assert_equal(some(again, len(batches) - second), batches[second:])
        assert again.get_state() == states[-1]
        if len(batches) < 14:
            assert next(again, None) is None


@LAW
@given(case=cases(), prefetch=st.integers(0, 3), data=st.data())
def test_whatever_grain_prefetches_a_state_is_that_after_the_batch_given(
    case: Case, prefetch: int, data: st.DataObject
) -> None:
    with case.open() as undisturbed:
        batches, states = with_states(undisturbed)
    stop = data.draw(st.integers(0, len(batches)))
    iterator: Any = StreamIterator(case.open, prefetch)
    for number in range(stop):
        assert_equal([next(iterator)], batches[number : number + 1])
        assert iterator.get_state() == states[number + 1]
    resumed: Any = StreamIterator(case.open, prefetch)
    resumed.set_state(through_json(iterator.get_state()))
    iterator.close()
    assert_equal(some(resumed, len(batches) - stop), batches[stop:])
    assert resumed.get_state() == states[-1]
    resumed.set_state(states[0])  # in mid-run, with batches read ahead
    assert_equal(some(resumed, len(batches)), batches)
    resumed.close()


@LAW
@given(case=cases(repeat=False))
def test_every_token_is_given_exactly_once_in_an_epoch_or_counted_as_truncated(case: Case) -> None:
    with case.open() as iterator:
        batches = list(iterator)
        total = iterator.stats().total
    assert tokens_of(batches) == case.expected()
    assert total.tokens == case.expected().total()
    assert total.tokens + total.padding == total.rows * (case.shape.seq_len + 1)
    assert total.rows == len(batches) * case.shape.rows
    assert total.documents == len(case.lengths) == total.input_documents == total.input_read
    most = case.max_doc_tokens or 10**9
    assert total.truncated_documents == sum(length > most for length in case.lengths)
    assert total.truncated_tokens == sum(max(length - most, 0) for length in case.lengths)


@pytest.mark.slow
@LAW
@given(case=cases(repeat=True))
def test_with_repeat_the_second_epoch_gives_every_token_again(case: Case) -> None:
    """Rows cross epochs, so what was given is cut at the number of tokens. A buffer of bins, which
    may hold several epochs, gives its shortest pieces last."""
    expected = case.expected()
    held = 0 if case.bins is None else case.bins.buffer_tokens + expected.total()
    with case.open() as iterator:
        given: Counter[int] = Counter()
        while given.total() < 2 * expected.total() + held:
            given += tokens_of([next(iterator)])
    assert all(given[token] >= 1 for token in expected)
    if case.bins is None:  # in stream order: at most one row beyond the second epoch
        assert all(given[token] >= 2 for token in expected)


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(
    case=cases(repeat=False, streams=12),
    counts=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (2, 3), (4, 3)]),
)
def test_the_processes_of_a_run_share_every_token(case: Case, counts: tuple[int, int]) -> None:
    num_processes, per_process = counts
    pipeline = case.pipeline(num_streams=num_processes * per_process)
    given: Counter[int] = Counter()
    for index in range(num_processes):
        with TextStream(pipeline, rank=index, world=num_processes) as one:
            tokens = tokens_of(one)
        assert not (given.keys() - {EOS}) & tokens.keys()
        given += tokens
    assert given == case.expected()


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(case=cases(streams=6), data=st.data())
def test_a_process_with_several_streams_resumes_exactly(case: Case, data: st.DataObject) -> None:
    pipeline = case.pipeline(num_streams=6)
    with TextStream(pipeline, rank=1, world=2) as undisturbed:
        batches, states = with_states(undisturbed)
    stop = data.draw(st.integers(0, len(batches)))
    with TextStream(pipeline, rank=1, world=2) as resumed:
        resumed.set_state(through_json(states[stop]))
        assert_equal(some(resumed, len(batches) - stop), batches[stop:])
        assert resumed.get_state() == states[-1]


@pytest.mark.slow
@LAW
@given(
    case=cases(repeat=False),
    batch_size=st.integers(1, 4),
    grad_accum=st.integers(1, 3),
    data=st.data(),
)
def test_a_run_may_resume_with_another_batch_size(
    case: Case, batch_size: int, grad_accum: int, data: st.DataObject
) -> None:
    """The rows stay the same; they are only divided otherwise."""
    with case.open() as undisturbed:
        batches, states = with_states(undisturbed, 1000)
    stop = data.draw(st.integers(0, len(batches)))
    shape = replace(case.shape, batch_size=batch_size, grad_accum=grad_accum)
    with TextStream(case.pipeline(shape=shape)) as resumed:
        resumed.set_state(states[stop])
        assert list(rows_of(resumed)) == list(rows_of(batches[stop:]))


def test_two_epochs_come_in_different_orders() -> None:
    case = Case(
        units=((4,) * 30,),
        order=StreamOrder(shuffle=True, buffer_documents=30, repeat=True),
        shape=BatchShape(batch_size=30, seq_len=4),  # an epoch is one batch, a row one document
    )
    with case.open() as iterator:
        one, two = some(iterator, 2)
    assert sorted(rows_of([one])) == sorted(rows_of([two]))
    assert list(rows_of([one])) != list(rows_of([two]))
    assert list(rows_of([one])) != sorted(rows_of([one]))
