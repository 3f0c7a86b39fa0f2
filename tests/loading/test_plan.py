"""The plan of a step is what a loader gives there."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError
from shardmill.loading import Loader, PlannedSample, SampleStream, TokenSource, plan_step
from shardmill.records import Ragged
from shardmill.testing.stores import build_small_store
from tests.loading.stores import SIZES, open_stream

EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@EXAMPLES
@given(
    names=st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=3, unique=True),
    seq_len=st.integers(1, 40),
    shuffle=st.sampled_from(["global", "block", "none"]),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 5)),
    consumed=st.integers(0, 50),
)
def test_the_tokens_of_a_plan_are_the_rows_of_the_loader(
    stores, names, seq_len, shuffle, sizes, consumed
):
    batch_size, world, steps = sizes
    stream = open_stream(stores, names, seq_len=seq_len, shuffle=shuffle, seed=11)
    rank = world // 2
    loader = Loader(stream, batch_size=batch_size, world=world, rank=rank)
    loader.load_state_dict({**loader.state_dict(), "samples": consumed})
    batch = list(islice(loader, steps + 1))[-1]
    before = consumed + steps * batch_size * world
    plan = plan_step(stream, samples=before, batch_size=batch_size, world=world, rank=rank)
    assert [row.sample for row in plan] == list(batch.samples)
    for number, row in enumerate(plan):
        small = stores[row.source]
        window = small.tokens[row.start : row.stop]
        assert window[:-1].tolist() == batch.input_ids[number].tolist()
        assert window[1:].tolist() == batch.labels[number].tolist()
        assert (row.epoch, row.window) == (batch.epoch[number], batch.item[number])
        assert row.source == stream.sources[batch.source[number]].name
        assert (row.path, row.split) == (small.folder, "train")


@EXAMPLES
@given(name=st.sampled_from(sorted(SIZES)), seq_len=st.integers(1, 40), samples=st.integers(0, 90))
def test_documents_of_a_plan_cover_its_window_and_are_where_they_start(
    stores, name, seq_len, samples
):
    starts = stores[name].starts.tolist()
    ends = [*starts[1:], len(stores[name].tokens)]
    (row,) = plan_step(open_stream(stores, [name], seq_len=seq_len), samples=samples, batch_size=1)
    expected = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        first, last = max(start, row.start), min(end, row.stop)
        if first < last:
            expected.append((number, first, last))
    assert row.documents == tuple(expected)


def test_a_plan_in_plain_numbers(tmp_path):
    """Documents of 3, 0, 5 and 8 tokens, windows of 4 + 1, in order."""
    build_small_store(
        tmp_path / "wiki", {"train": Ragged.from_lengths(np.arange(16), [3, 0, 5, 8])}
    )
    stream = SampleStream([TokenSource(tmp_path / "wiki", seq_len=4)], shuffle="none")
    plan = plan_step(stream, samples=3, batch_size=1, world=2, rank=1)
    expected = PlannedSample(
        sample=4,
        source="wiki",
        path=tmp_path / "wiki",
        split="train",
        epoch=1,
        window=1,
        start=4,
        stop=9,
        documents=((2, 4, 8), (3, 8, 9)),
    )
    assert plan == [expected]
    (first,) = plan_step(stream, samples=0, batch_size=1)
    assert first.documents == ((0, 0, 3), (2, 3, 5))


def test_a_folder_has_no_documents_to_tell(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(50, dtype=np.uint16))
    stream = SampleStream([TokenSource(tmp_path, seq_len=8)])
    (row,) = plan_step(stream, samples=0, batch_size=1)
    assert (row.documents, row.split) == (None, None)


@pytest.mark.parametrize(
    "wrong", [{"samples": -1}, {"samples": 1.0}, {"batch_size": 0}, {"rank": 2, "world": 2}]
)
def test_a_step_without_sense_is_refused(stores, wrong):
    stream = open_stream(stores, ["wiki"], seq_len=8)
    with pytest.raises(OptionError, match=next(iter(wrong))):
        plan_step(stream, **{"samples": 0, "batch_size": 1, **wrong})
