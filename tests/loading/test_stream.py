"""Sources and their common order."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError, StoreNotFoundError
from shardmill.loading import SampleStream, TokenSource
from shardmill.loading.config import open_stream as open_config
from shardmill.loading.config import read_config
from shardmill.records import Ragged
from shardmill.sampling import Mixture, Permutation
from shardmill.store.readers import open_token_folder
from shardmill.testing.stores import build_small_chat_store, build_small_store, make_examples
from tests.loading.stores import SIZES, open_stream

EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@EXAMPLES
@given(name=st.sampled_from(sorted(SIZES)), seq_len=st.integers(1, 60), data=st.data())
def test_a_source_fills_rows_with_windows_and_their_next_tokens(stores, name, seq_len, data):
    source = TokenSource(stores[name].folder, seq_len=seq_len)
    tokens = stores[name].tokens
    assert len(source) == (len(tokens) - 1) // seq_len
    items = data.draw(st.lists(st.integers(0, len(source) - 1), max_size=9))
    chosen = data.draw(st.permutations(range(len(items) + 2)))[: len(items)]
    rows = data.draw(st.sampled_from([None, np.array(chosen, np.int64)]))
    shape = (len(items) + (0 if rows is None else 2), seq_len)
    input_ids, labels = np.full(shape, -7), np.full(shape, -7)
    source.fill(np.array(items, np.int64), input_ids, labels, rows)
    expected = dict(zip(chosen, items, strict=True))
    if rows is None:
        expected = dict(enumerate(items))
    for row in range(len(input_ids)):
        if row not in expected:
            assert set(input_ids[row]) == set(labels[row]) == {-7}
            continue
        start = expected[row] * seq_len
        assert input_ids[row].tolist() == tokens[start : start + seq_len].tolist()
        assert labels[row].tolist() == tokens[start + 1 : start + 1 + seq_len].tolist()


def test_a_large_request_is_filled_in_parts(tmp_path):
    """Windows of 128 KiB: two of them are a block."""
    tokens = np.random.default_rng(0).integers(0, 2**16, 7 * 2**16 + 1, dtype=np.uint16)
    np.save(tmp_path / "a.npy", tokens)
    source = TokenSource(tmp_path, seq_len=2**16)
    input_ids, labels = np.zeros((5, 2**16), np.int64), np.zeros((5, 2**16), np.int64)
    source.fill([6, 0, 3, 3, 1], input_ids, labels)
    for row, item in enumerate([6, 0, 3, 3, 1]):
        assert np.array_equal(input_ids[row], tokens[item * 2**16 : (item + 1) * 2**16])
        assert np.array_equal(labels[row], tokens[item * 2**16 + 1 : (item + 1) * 2**16 + 1])


def test_a_source_tells_what_it_is(stores):
    source = TokenSource(stores["web"].folder, seq_len=12)
    assert (source.name, source.split, source.path) == ("web", "train", stores["web"].folder)
    assert (source.num_tokens, len(source), source.window_bytes) == (1203, 100, 4 * 13)
    assert source.document_starts().tolist() == stores["web"].starts.tolist()
    assert "name='web', seq_len=12, windows=100" in repr(source)


def test_a_path_may_name_the_split_itself(tmp_path):
    splits = {name: Ragged.from_lengths(np.arange(20), [20]) for name in ("train", "val")}
    build_small_store(tmp_path / "store", splits, shard_bytes=16)
    assert TokenSource(tmp_path / "store", seq_len=4, split="val").split == "val"
    assert TokenSource(tmp_path / "store" / "val", seq_len=4, split=None).split == "val"
    assert TokenSource(tmp_path / "store", seq_len=4).split == "train"
    with pytest.raises(OptionError, match="is the split 'val', but split='train'"):
        TokenSource(tmp_path / "store" / "val", seq_len=4)


def test_a_folder_of_tokens_is_one_run_over_its_files(tmp_path):
    np.save(tmp_path / "b.npy", np.arange(7, 20, dtype=np.uint16))
    np.save(tmp_path / "a.npy", np.arange(7, dtype=np.uint16))
    source = TokenSource(tmp_path, seq_len=4, name="digits")
    assert (source.name, source.split, len(source)) == ("digits", None, 4)
    assert source.document_starts() is None
    input_ids, labels = np.zeros((1, 4), np.int64), np.zeros((1, 4), np.int64)
    source.fill([1], input_ids, labels)
    assert (input_ids.tolist(), labels.tolist()) == ([[4, 5, 6, 7]], [[5, 6, 7, 8]])


def test_the_fingerprint_of_a_folder_sees_names_sizes_and_tokens(tmp_path):
    def folder(name: str, tokens: np.ndarray, file: str = "a.npy") -> str:
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / file, tokens.astype(np.uint16))
        return TokenSource(tmp_path / name, seq_len=4).fingerprint

    tokens = np.random.default_rng(0).integers(0, 2**16, 100_000)
    same = folder("one", tokens)
    assert folder("two", tokens) == same
    assert folder("other name", tokens, "b.npy") != same
    assert folder("shorter", tokens[:-1]) != same
    assert folder("other end", np.append(tokens[:-1], tokens[-1] ^ 1)) != same
    assert folder("shifted", np.roll(tokens, 1)) != same
    assert folder("other dtype ids", tokens % 1000) != same


def test_what_is_not_a_source_is_refused(stores, tmp_path):
    with pytest.raises(StoreNotFoundError, match="No files"):
        TokenSource(tmp_path, seq_len=8)
    with pytest.raises(OptionError, match="seq_len=0"):
        TokenSource(stores["wiki"].folder, seq_len=0)
    for option, problem in (("*.bin", "is read whole"), ("uint32", "are uint16; leave it out")):
        key = "dtype" if option == "uint32" else "file_pattern"
        dataset = {"name": "wiki", "path": str(stores["wiki"].folder), key: option}
        config = read_config({"data": {"datasets": [dataset]}})
        with pytest.raises(OptionError, match=problem):
            open_config(config, seq_len=8, global_batch_size=1)
    with pytest.raises(OptionError, match="name='': wanted a name"):
        TokenSource(stores["wiki"].folder, seq_len=8, name="")
    source = TokenSource(stores["wiki"].folder, seq_len=8)
    rows = np.zeros((1, 8), np.int64)
    with pytest.raises(IndexError, match="window 76 of 76"):
        source.fill([76], rows, rows)
    with pytest.raises(OptionError, match=r"rows of int16 \(1, 8\); wanted int64 \(n, 8\)"):
        source.fill([0], rows, rows.astype(np.int16))
    with pytest.raises(OptionError, match=r"rows of int64 \(1, 7\)"):
        source.fill([0], rows[:, 1:], rows)
    with pytest.raises(ValueError, match="could not broadcast"):
        source.fill([0, 1], rows, rows)


def test_rows_after_the_last_item_are_left_alone(stores):
    source = TokenSource(stores["wiki"].folder, seq_len=8)
    input_ids, labels = np.full((3, 8), -7), np.full((3, 8), -7)
    source.fill([5], input_ids, labels)
    assert input_ids[0].tolist() == stores["wiki"].tokens[40:48].tolist()
    assert (input_ids[1:] == -7).all()
    assert (labels[1:] == -7).all()


def test_a_stream_is_the_mixture_of_its_sources(stores):
    stream = open_stream(
        stores, ["wiki", "web"], seq_len=10, seed=9, weights=[0.3, 0.7], phases=[(50, [1, 0])]
    )
    plain = Mixture(
        [61, 120],
        [0.3, 0.7],
        seed=9,
        names=["wiki", "web"],
        phases=[(50, [1, 0])],
        order=Permutation,
    )
    found, wanted = stream.take(range(200)), plain.take(range(200))
    assert found.source.tolist() == wanted.source.tolist()
    assert found.epoch.tolist() == wanted.epoch.tolist()
    assert found.item.tolist() == wanted.item.tolist()
    assert stream.counts(50).tolist() == [15, 35]
    assert stream.counts(60).tolist() == [25, 35]
    assert stream.epoch_samples is None


def test_one_source_goes_through_its_windows_in_permuted_epochs(stores):
    stream = open_stream(stores, ["code"], seq_len=12, seed=4)
    found = stream.take(range(24))
    assert stream.epoch_samples == 8
    assert found.epoch.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    for epoch in range(3):
        order = Permutation(8, 4, "source", "code", "epoch", epoch)
        assert found.item[found.epoch == epoch].tolist() == order.take(range(8)).tolist()


def test_without_weights_sources_come_by_their_windows(stores):
    stream = open_stream(stores, ["wiki", "web"], seq_len=10)
    assert stream.counts(181).tolist() == [61, 120]


def test_no_shuffle_keeps_the_order(stores):
    stream = open_stream(stores, ["wiki"], seq_len=10, shuffle="none")
    assert stream.take(range(122)).item.tolist() == [*range(61), *range(61)]


def test_the_block_shuffle_stays_inside_its_blocks(tmp_path):
    """127 windows of a little over 32 KiB are a block of 4 MiB; 16 blocks are mixed at a time."""
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(2 * (16_384 * 128 * 40 + 1))
    folder = open_token_folder(tmp_path, "*.bin", dtype="uint16")
    source = TokenSource(folder, seq_len=16_384, name="blank")
    assert len(source) == 128 * 40
    item = SampleStream([source], shuffle="block").take(range(128 * 40)).item
    assert sorted(item.tolist()) == list(range(128 * 40))
    per_block = 4 * 2**20 // (2 * 16_385)
    assert per_block == 127
    assert len(set(item[: 15 * 127] // per_block)) == 16
    assert len(set(SampleStream([source]).take(range(15 * 127)).item // per_block)) == 41


def test_the_fingerprint_of_a_stream_sees_all_that_decides_it(stores):
    def of(names=("wiki", "web"), **changes) -> str:
        options = {"seq_len": 10, "seed": 1, "weights": [1, 2], **changes}
        return open_stream(stores, list(names), **options).fingerprint

    same = of()
    assert of() == same
    others = [
        of(seed=2),
        of(seq_len=11),
        of(weights=[2, 1]),
        of(shuffle="none"),
        of(shuffle="block"),
        of(temperature=3.0),
        of(phases=[(5, [2, 1])]),
        of(names=("web", "wiki")),
        of(names=("wiki", "code")),
    ]
    assert len({same, *others}) == 10


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shuffle": "blocks"}, "shuffle='blocks': wanted one of 'global', 'block', 'none'"),
        ({"shuffle": None}, "shuffle=None"),
        ({"weights": [1]}, "1 weights for 2 sources"),
        ({"weights": [0, 0]}, "weights sum to 0"),
        ({"weights": [-1, 2]}, "negative"),
        ({"weights": [float("nan"), 2]}, "nan"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"phases": [(0, [1, 1])]}, "phase_start=0"),
        ({"phases": None}, "wanted a list of"),
        ({"phases": [5]}, "wanted a list of"),
        ({"phases": [(5,)]}, "wanted a list of"),
        ({"phases": [(5, None)]}, "wanted weights"),
        ({"weights": (w for w in (1, 1))}, "wanted a list, one number per source"),
        ({"phases": [(5, [1])]}, "1 weights for 2 sources"),
        ({"temperature": 0}, "temperature=0"),
    ],
)
def test_a_stream_without_sense_is_refused(stores, change, words):
    with pytest.raises(OptionError, match=words):
        open_stream(stores, ["wiki", "web"], seq_len=8, **change)


def test_sources_that_do_not_go_together_are_refused(stores):
    wiki = TokenSource(stores["wiki"].folder, seq_len=8)
    with pytest.raises(OptionError, match="wanted a list, also of one"):
        SampleStream(wiki)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="sources is empty"):
        SampleStream([])
    with pytest.raises(OptionError, match="hold a str"):
        SampleStream(["wiki"])  # type: ignore[list-item]
    with pytest.raises(OptionError, match="share the name 'wiki'"):
        SampleStream([wiki, wiki])
    with pytest.raises(OptionError, match="'web' has seq_len=9, but 'wiki' has 8"):
        SampleStream([wiki, TokenSource(stores["web"].folder, seq_len=9)])
    with pytest.raises(OptionError, match="'code' has 97 tokens of 101 wanted"):
        SampleStream([TokenSource(stores["code"].folder, seq_len=100)])


def test_a_source_without_a_window_is_reported_or_refused(stores, caplog):
    sources = [TokenSource(stores[name].folder, seq_len=200) for name in ("wiki", "code")]
    with caplog.at_level(logging.WARNING):
        stream = SampleStream(sources)
    assert "'code' has 97 tokens of 201 wanted" in caplog.text
    assert stream.counts(10).tolist() == [10, 0]
    with pytest.raises(OptionError, match="'code' is empty, but has a weight above 0"):
        SampleStream(sources, weights=[1, 1])


def test_a_store_of_conversations_is_refused_with_the_way_to_read_it(tmp_path):
    examples = make_examples([([1], [(1, [(2, False)]), (2, [(3, True)])])])
    build_small_chat_store(tmp_path / "chats", {"train": examples})
    with pytest.raises(OptionError, match=r"shardmill\.ChatRows"):
        TokenSource(tmp_path / "chats", seq_len=8)


def test_streams_pickle_by_path_and_by_no_means_by_value(tmp_path):
    build_small_store(
        tmp_path / "big", {"train": Ragged.from_lengths(np.arange(60_000), [6] * 10_000)}
    )
    source = TokenSource(tmp_path / "big", seq_len=100)
    stream = SampleStream([source], seed=3, shuffle="block")
    expected = stream.take(range(50)).item.tolist()
    assert source.document_starts() is not None
    data = pickle.dumps(stream)
    assert len(data) < 2000
    again = pickle.loads(data)
    assert again.take(range(50)).item.tolist() == expected
    assert again.fingerprint == stream.fingerprint
    assert again.sources[0].document_starts().tolist() == list(range(0, 60_000, 6))


def test_threads_share_a_stream(stores):
    options = {"seq_len": 3, "weights": [0.1234567, 0.31], "shuffle": "block"}
    expected = open_stream(stores, ["wiki", "web"], **options).take(range(3000)).item
    stream = open_stream(stores, ["wiki", "web"], **options)

    def ask(start: int) -> bool:
        found = stream.take(range(start, start + 100)).item
        return np.array_equal(found, expected[start : start + 100])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, [100 * (7 * number % 29) for number in range(200)]))


def read_in_child(stream: SampleStream, connection) -> None:
    rows = np.zeros((2, 8), np.int64)
    stream.sources[0].fill([0, 5], rows, np.zeros_like(rows))
    connection.send((stream.take(range(20)).item.tolist(), rows.tolist()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_streams_work_in_child_processes_also_when_forked_under_a_lock(stores, method):
    if method == "fork" and not hasattr(os, "fork"):
        pytest.skip("no fork here")
    stream = open_stream(stores, ["wiki"], seq_len=8, seed=2)
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=read_in_child, args=(stream, sender))
    with stream._one_thread.waiting():  # as if another thread were asking at this moment
        child.start()
        answer = receiver.recv() if receiver.poll(60) else "the child hangs"
    child.kill()
    child.join()
    tokens = stores["wiki"].tokens
    rows = [tokens[:8].tolist(), tokens[40:48].tolist()]
    assert answer == (stream.take(range(20)).item.tolist(), rows)


def test_closing_a_stream_closes_its_sources_and_may_be_repeated(stores):
    stream = open_stream(stores, ["wiki"], seq_len=8)
    stream.close()
    stream.close()
    rows = np.zeros((1, 8), np.int64)
    with pytest.raises(ValueError, match="is closed"):
        stream.sources[0].fill([0], rows, rows)
