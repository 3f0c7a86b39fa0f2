"""Laws 5 to 7 of the loader, against the stream and against plain slicing."""

from __future__ import annotations

import gc
import logging
import pickle
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading import Batch, Loader, SampleStream, SourceCounters, TokenSource
from shardmill.store.readers import open_token_folder
from shardmill.testing.loading import (
    RankShape,
    assert_order_is_one,
    assert_resume_is_elastic,
    assert_resumes_exactly,
    rows_of,
)
from tests.helpers import wait_for
from tests.loading.stores import SIZES, expected_rows, open_stream

EXAMPLES = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SHAPES = st.builds(RankShape, st.integers(1, 7), st.integers(1, 5))


@st.composite
def stream_options(draw) -> dict[str, object]:
    """Sources, weights with a change, seed, shuffle and seq_len."""
    names = draw(st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=3, unique=True))
    weights = st.lists(st.integers(1, 9), min_size=len(names), max_size=len(names))
    starts = draw(st.lists(st.integers(1, 60), max_size=2, unique=True).map(sorted))
    return {
        "names": names,
        "seq_len": draw(st.integers(1, 24)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "shuffle": draw(st.sampled_from(["global", "block", "none"])),
        "weights": draw(st.none() | weights),
        "phases": [(start, draw(weights)) for start in starts],
    }


@EXAMPLES
@given(data=st.data(), options=stream_options(), ahead=st.integers(0, 3), documents=st.booleans())
def test_the_order_is_one_whatever_the_ranks(stores, data, options, ahead, documents):
    stream = open_stream(stores, **options)

    def make(**shape):
        return Loader(stream, ahead=ahead, documents=documents, **shape)

    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=3))
    assert_order_is_one(make, shapes, 70)


@EXAMPLES
@given(options=stream_options(), shape=SHAPES, ahead=st.integers(0, 3), documents=st.booleans())
def test_batches_hold_the_tokens_of_their_samples(stores, options, shape, ahead, documents):
    stream = open_stream(stores, **options)
    rank = shape.world - 1
    loader = Loader(
        stream,
        batch_size=shape.batch_size,
        rank=rank,
        world=shape.world,
        documents=documents,
        ahead=ahead,
    )
    size = shape.step_samples
    for step, batch in enumerate(islice(loader, 6)):
        start = step * size + rank * shape.batch_size
        samples = range(start, start + shape.batch_size)
        assert batch.samples == samples
        found = list(zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True))
        assert found == expected_rows(stores, stream, samples, documents=documents)
        wanted = stream.take(list(samples))
        assert batch.source.tolist() == wanted.source.tolist()
        assert batch.epoch.tolist() == wanted.epoch.tolist()
        assert batch.item.tolist() == wanted.item.tolist()
        assert batch.input_ids.flags.c_contiguous
        assert batch.labels.flags.c_contiguous
        assert batch.input_ids.dtype == batch.labels.dtype == np.int64


@pytest.mark.slow
@EXAMPLES
@given(options=stream_options(), shape=SHAPES, ahead=st.integers(0, 3), data=st.data())
def test_from_the_state_before_any_step_the_rest_is_the_same(stores, options, shape, ahead, data):
    stream = open_stream(stores, **options)
    rank = data.draw(st.integers(0, shape.world - 1))

    def make():
        return Loader(
            stream, batch_size=shape.batch_size, rank=rank, world=shape.world, ahead=ahead
        )

    assert_resumes_exactly(make, 7)


@EXAMPLES
@given(
    options=stream_options(),
    runs=st.lists(st.tuples(SHAPES, st.integers(0, 4)), min_size=2, max_size=4),
    ahead=st.integers(0, 3),
)
def test_resumed_again_and_again_on_other_ranks_it_reads_one_order(stores, options, runs, ahead):
    stream = open_stream(stores, **options)
    assert_resume_is_elastic(lambda **shape: Loader(stream, ahead=ahead, **shape), runs)


def test_eight_ranks_of_four_resume_as_three_of_five(stores):
    """Literally, so that no helper can hide a mistake: samples 0..96, then 96..126."""
    stream = open_stream(stores, ["wiki", "web"], seq_len=8, seed=3, phases=[(100, [1, 9])])
    seen: list[int] = []
    for rank in range(8):
        loader = Loader(stream, batch_size=4, rank=rank, world=8)
        seen += [number for batch in islice(loader, 3) for number in batch.samples]
        state = loader.state_dict()
    assert sorted(seen) == list(range(96))
    assert state["samples"] == 96
    after = []
    for rank in range(3):
        loader = Loader(stream, batch_size=5, rank=rank, world=3)
        loader.load_state_dict(state)
        after.append([batch.samples for batch in islice(loader, 2)])
    assert after == [
        [range(96, 101), range(111, 116)],
        [range(101, 106), range(116, 121)],
        [range(106, 111), range(121, 126)],
    ]


@given(
    num_samples=st.integers(0, 60),
    shape=SHAPES,
    consumed=st.integers(0, 60),
    ahead=st.integers(0, 2),
)
@EXAMPLES
def test_all_ranks_have_the_same_number_of_steps(stores, num_samples, shape, consumed, ahead):
    stream = open_stream(stores, ["wiki"], seq_len=8)
    consumed = min(consumed, num_samples)
    state = {**Loader(stream, batch_size=1).state_dict(), "samples": consumed}
    lengths = []
    for rank in range(shape.world):
        loader = Loader(
            stream,
            batch_size=shape.batch_size,
            rank=rank,
            world=shape.world,
            num_samples=num_samples,
            ahead=ahead,
        )
        loader.load_state_dict(state)
        batches = list(loader)
        assert all(len(batch) == shape.batch_size for batch in batches)
        lengths.append(len(batches))
        assert list(loader) == []  # at the end it stays there
    assert lengths == [(num_samples - consumed) // (shape.batch_size * shape.world)] * shape.world


def test_samples_that_fill_no_step_are_reported_once(stores, caplog):
    stream = open_stream(stores, ["wiki"], seq_len=8)
    loader = Loader(stream, batch_size=4, world=2, num_samples=21)
    with caplog.at_level(logging.WARNING):
        assert len(list(loader)) == 2
        assert list(loader) == []
    assert [record.message for record in caplog.records] == [
        "the last 5 of 21 samples fill no step of 8 (2 ranks x 4) and are left out"
    ]


def test_an_epoch_of_one_source_has_every_window_once(stores):
    stream = open_stream(stores, ["wiki"], seq_len=10, seed=5)
    assert stream.epoch_samples == 61
    loader = Loader(stream, batch_size=1, num_samples=stream.epoch_samples)
    assert sorted(int(batch.item[0]) for batch in loader) == list(range(61))


def test_documents_stay_apart_in_a_mixed_batch(tmp_path):
    """wiki has documents of 3 and 5 tokens in turn, web of 4: windows of 4 + 1 tokens."""
    from shardmill.records import Ragged
    from shardmill.testing.stores import build_small_store

    build_small_store(
        tmp_path / "wiki", {"train": Ragged.from_lengths(np.arange(16), [3, 5, 3, 5])}
    )
    build_small_store(
        tmp_path / "web", {"train": Ragged.from_lengths(np.arange(100, 116), [4] * 4)}
    )
    sources = [TokenSource(tmp_path / name, seq_len=4) for name in ("wiki", "web")]
    stream = SampleStream(sources, weights=[1, 1], shuffle="none")
    batch = next(iter(Loader(stream, batch_size=4, documents=True)))
    assert batch.source.tolist() == [0, 1, 0, 1]
    assert batch.input_ids.tolist() == [
        [0, 1, 2, 3],
        [100, 101, 102, 103],
        [4, 5, 6, 7],
        [104, 105, 106, 107],
    ]
    assert batch.labels.tolist() == [
        [1, 2, -100, 4],
        [101, 102, 103, -100],
        [5, 6, 7, -100],
        [105, 106, 107, -100],
    ]
    assert batch.doc_ids is not None
    assert batch.doc_ids.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8, 12, 16]
    assert batch.cu_seqlens.dtype == np.int32
    assert batch.max_seqlen == 4


def test_without_documents_there_are_none_and_labels_are_whole(stores):
    batch = next(iter(Loader(open_stream(stores, ["wiki"], seq_len=8), batch_size=2)))
    assert (batch.doc_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen) == (None,) * 4
    assert (batch.labels >= 0).all()


def test_counters_count_all_ranks_from_the_first_sample_on(stores):
    stream = open_stream(stores, ["wiki", "web"], seq_len=10, weights=[3, 1])  # 61 and 120 windows
    loader = Loader(stream, batch_size=2, world=10, rank=3)
    assert loader.counters()["wiki"] == SourceCounters(samples=0, tokens=0, epochs=0.0)
    list(islice(loader, 10))
    expected = {
        "wiki": SourceCounters(samples=150, tokens=1500, epochs=150 / 61),
        "web": SourceCounters(samples=50, tokens=500, epochs=50 / 120),
    }
    assert loader.counters() == expected
    again = Loader(stream, batch_size=7)
    again.load_state_dict(loader.state_dict())
    assert again.counters() == expected


def test_the_state_counts_what_was_given_not_what_was_made(stores):
    stream = open_stream(stores, ["wiki"], seq_len=8)
    loader = Loader(stream, batch_size=2, ahead=3)
    batches = iter(loader)
    for step in range(5):
        next(batches)
        wait_until_ahead(batches, 3)
        assert loader.samples == 2 * (step + 1)
        assert loader.state_dict()["samples"] == 2 * (step + 1)


def wait_until_ahead(batches, depth: int) -> None:
    """Let the thread do all it may: `depth` batches lie ready."""
    wait_for(lambda: len(batches._batches._work._ready) == depth)


def test_a_new_iterator_continues_and_ends_the_one_before(stores):
    loader = Loader(open_stream(stores, ["wiki"], seq_len=8), batch_size=2)
    first = iter(loader)
    assert next(first).samples == range(2)
    second = iter(loader)
    assert next(second).samples == range(2, 4)
    with pytest.raises(OptionError, match="ended by a newer one"):
        next(first)
    assert next(second).samples == range(4, 6)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(OptionError, match=r"make a new one with iter\(loader\)"):
        next(second)
    assert [batch.samples for batch in islice(loader, 1)] == [range(6, 8)]


def test_a_pickled_loader_continues_from_its_position_without_a_thread(stores):
    loader = Loader(open_stream(stores, ["wiki", "web"], seq_len=8), batch_size=3, ahead=2)
    batches = iter(loader)
    next(batches)
    again = pickle.loads(pickle.dumps(loader))
    assert again.samples == 3
    assert [rows_of(b) for b in islice(again, 4)] == [rows_of(b) for b in islice(batches, 4)]


def test_keeping_batches_costs_their_own_arrays_only(stores):
    """A batch holds copies of its few numbers, not the thousands of samples asked for at once."""
    loader = Loader(open_stream(stores, ["wiki"], seq_len=8), batch_size=2)
    batch = next(iter(loader))
    for array in (batch.source, batch.epoch, batch.item):
        owner = array if array.base is None else array.base
        assert owner.nbytes == 3 * 2 * 8


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch_size": 0}, "batch_size=0: wanted at least 1"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"rank": 2, "world": 2}, "rank=2: wanted 0 to 1"),
        ({"rank": -1}, "rank=-1"),
        ({"world": 0}, "world=0"),
        ({"num_samples": -1}, "num_samples=-1"),
        ({"ahead": -1}, "ahead=-1"),
    ],
)
def test_arguments_without_sense_are_refused(stores, wrong, words):
    stream = open_stream(stores, ["wiki"], seq_len=8)
    with pytest.raises(OptionError, match=words):
        Loader(stream, **{"batch_size": 2, **wrong})


def test_a_source_is_no_stream(stores):
    with pytest.raises(OptionError, match="stream is a TokenSource; wanted a SampleStream"):
        Loader(TokenSource(stores["wiki"].folder, seq_len=8), batch_size=1)  # type: ignore[arg-type]


def test_documents_of_a_folder_without_an_index_are_refused_with_the_other_way(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    source = TokenSource(open_token_folder(tmp_path, "*.bin", dtype="uint16"), seq_len=8)
    stream = SampleStream([source])
    with pytest.raises(OptionError, match=r"TokenSource\(\.\.\., eos_token_id="):
        Loader(stream, batch_size=2, documents=True)
    batch = next(iter(Loader(SampleStream([source], shuffle="none"), batch_size=2)))
    assert batch.input_ids.tolist() == [list(range(8)), list(range(8, 16))]
    assert batch.labels.tolist() == [list(range(1, 9)), list(range(9, 17))]


def test_an_error_of_the_data_comes_out_at_its_step_and_the_position_stays(tmp_path):
    """The second file is cut after opening: windows in it cannot be read."""
    for name in ("a", "b"):
        np.zeros(4096, np.uint16).tofile(tmp_path / f"{name}.bin")
    source = TokenSource(open_token_folder(tmp_path, "*.bin", dtype="uint16"), seq_len=64)
    source.close()
    source = TokenSource(open_token_folder(tmp_path, "*.bin", dtype="uint16"), seq_len=64)
    again = pickle.loads(pickle.dumps(source))  # has mapped nothing yet
    for ahead in (0, 2):
        reopened = pickle.loads(pickle.dumps(again))
        loader = Loader(SampleStream([reopened], shuffle="none"), batch_size=21, ahead=ahead)
        (tmp_path / "b.bin").write_bytes(bytes(2 * 4096 + 2))
        batches = iter(loader)
        assert [next(batches).samples.start for _ in range(3)] == [0, 21, 42]
        for _ in range(2):  # asking again gives the same error
            with pytest.raises(ValueError, match=r"b\.bin: found 8,194 bytes"):
                next(batches)
            assert loader.samples == 63
        np.zeros(4096, np.uint16).tofile(tmp_path / "b.bin")


def test_closing_is_allowed_at_any_time_and_twice(stores):
    loader = Loader(open_stream(stores, ["wiki"], seq_len=8), batch_size=2)
    loader.close()
    with loader:
        batches = iter(loader)
        next(batches)
    loader.close()
    with pytest.raises(OptionError, match="by close"):
        next(batches)
    assert next(iter(loader)).samples == range(2, 4)


def test_a_batch_that_is_kept_never_changes(stores):
    """Every third batch is kept whole, of others a view, a slice, a row, or a memoryview."""
    stream = open_stream(stores, ["wiki", "web"], seq_len=16)
    for ahead in (0, 1, 3):
        loader = Loader(stream, batch_size=4, ahead=ahead)
        kept: list[tuple[object, list]] = []
        for step, batch in enumerate(islice(loader, 300)):
            part = {
                0: batch,
                1: batch.labels[1:3, ::2],
                2: batch.input_ids[-1],
                3: memoryview(batch.labels),
                4: batch.input_ids.T.reshape(4, 16)[:1] if step % 2 else batch.input_ids.T,
            }.get(step % 7)
            if part is not None:
                kept.append((part, values(part)))
        assert len(kept) > 200
        for part, before in kept:
            assert values(part) == before


def values(part: object) -> list:
    if isinstance(part, Batch):
        return [part.input_ids.tolist(), part.labels.tolist()]
    return part.tolist()  # type: ignore[attr-defined]


def test_batches_that_are_let_go_give_their_arrays_back(stores):
    loader = Loader(open_stream(stores, ["wiki"], seq_len=16), batch_size=4, ahead=2)
    addresses = set()
    for batch in islice(loader, 200):
        addresses.add(batch.input_ids.ctypes.data)
    del batch
    gc.collect()
    assert len(addresses) <= 5


def test_a_state_after_the_end_is_refused(stores):
    stream = open_stream(stores, ["wiki"], seq_len=8)
    loader = Loader(stream, batch_size=2)
    list(islice(loader, 6))
    state = loader.state_dict()
    Loader(stream, batch_size=2, num_samples=12).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="has consumed 12, this loader ends at num_sam"):
        Loader(stream, batch_size=2, num_samples=11).load_state_dict(state)


def test_a_step_of_more_samples_than_anybody_has_is_refused(stores) -> None:
    with pytest.raises(OptionError, match="a step has at most 1,099,511,627,776"):
        Loader(open_stream(stores, ["web"], seq_len=8), batch_size=2, world=10**18)
