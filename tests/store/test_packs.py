"""Rows read through a plan are the examples, piece by piece, and nothing else."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import build_plan
from shardmill.errors import DamagedStoreError, OptionError
from shardmill.records import Ragged
from shardmill.store import PlanOptions, StoredPlan, open_store, read_plan
from shardmill.store.readers import PackSpace, open_pack, packed_rows
from shardmill.store.readers.files import take
from shardmill.store.readers.packed_rows import fill_rows
from shardmill.testing.stores import build_small_chat_store, chat_examples, make_examples
from tests.packs import FIVE, plain_row, plan_options, rows_of_plan


def open_rows(store: Path, options: PlanOptions, **more) -> PackSpace:
    return PackSpace(
        open_store(store), build_plan(store, options=options, allow_empty=True), **more
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(
    examples=chat_examples(max_examples=10, max_tokens=12),
    options=plan_options(),
    pad_id=st.integers(0, 65535),
    shard_bytes=st.sampled_from([None, 2, 14, 100]),
    chunk=st.sampled_from([2, 5, 64]),
    reader=st.sampled_from(["mapped", "pread"]),
    data=st.data(),
)
def test_rows_are_their_pieces_token_for_token(
    examples, options, pad_id, shard_bytes, chunk, reader, data
) -> None:
    with tempfile.TemporaryDirectory() as top, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_rows, "_CHUNK", chunk)
        build_small_chat_store(Path(top, "s"), {"train": examples}, shard_bytes=shard_bytes)
        space = open_rows(Path(top, "s"), options, pad_id=pad_id, reader=reader)
        assert space.reader == reader
        number = st.integers(0, len(space) - 1) if len(space) else st.nothing()
        chosen = data.draw(st.lists(number, max_size=6) if len(space) else st.just([]))
        found = space.rows(chosen)
        pieces = rows_of_plan(space.plan, examples.ids.lengths.tolist())
        assert found.ids.dtype == np.uint16
        assert found.ids.shape == found.trained.shape == (len(chosen), options.seq_len + 1)
        for at, row in enumerate(chosen):
            wanted = plain_row(space.plan, pieces[row], examples, pad_id)
            got = found.ids[at].tolist(), found.trained[at].tolist(), found.starts[at].tolist()
            assert got == wanted
            last = pieces[row][-1]
            end = wanted[2][-1] + last.stop - last.start
            assert found.used[at] == -(-end // options.align_to) * options.align_to
        told = space.pieces(chosen)
        assert told.examples.tolist() == [piece.example for row in chosen for piece in pieces[row]]
        space.prefetch(chosen)
        space.close()


@settings(deadline=None, max_examples=100)
@given(lengths=st.lists(st.integers(1, 300), max_size=8), gap=st.integers(0, 3))
def test_every_piece_is_copied_to_its_columns_and_nothing_else_is_touched(lengths, gap) -> None:
    sizes = np.array(lengths, np.int64)
    starts = np.cumsum(sizes) - sizes
    values = np.arange(1, sizes.sum() + 1, dtype=np.uint16)
    columns = starts + gap * np.arange(1, len(sizes) + 1)
    row = np.zeros((1, int(sizes.sum()) + gap * (len(sizes) + 1)), np.uint16)
    pieces = Ragged(columns, np.array([0, len(sizes)]))
    fill_rows(pieces, sizes, (partial(take, values), starts, row))
    wanted = np.zeros_like(row[0])
    for start, size, column in zip(starts, sizes, columns, strict=True):
        wanted[column : column + size] = values[start : start + size]
    assert row[0].tolist() == wanted.tolist()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build_small_chat_store(tmp_path / "s", {"train": FIVE}, dtype="uint32")
    return tmp_path / "s"


SPLIT = PlanOptions(seq_len=6, long="split")


def test_a_row_by_hand(store: Path) -> None:
    found = open_rows(store, SPLIT, pad_id=99).rows([1, 2])
    assert found.ids.tolist() == [[1, 10, 11, 12, 13, 1, 10], [1, 10, 11, 12, 99, 99, 99]]
    assert found.trained.astype(int).tolist() == [[0, 0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 0, 0, 0]]
    assert [starts.tolist() for starts in found.starts] == [[0, 5], [0]]
    assert found.used.tolist() == [7, 4]


def test_the_first_token_of_a_piece_is_never_trained(store: Path) -> None:
    space = open_rows(store, PlanOptions(seq_len=2, long="split"))
    found = space.rows(np.arange(len(space)))
    for row, starts in zip(found.trained, found.starts, strict=True):
        assert not row[starts].any()
    assert found.trained.sum() == space.plan.facts.metrics.trained_labels == 8
    assert found.trained.any(axis=1).all()


def test_a_row_that_is_not_there_is_an_index_error(store: Path) -> None:
    space = open_rows(store, SPLIT)
    for wrong in (-1, len(space)):
        with pytest.raises(IndexError, match=f"row {wrong:,} of 3"):
            space.rows([0, wrong])
    with pytest.raises(OptionError, match="positions have dtype float64"):
        space.rows([0.5])


def test_a_plan_opens_from_its_path_alone(store: Path) -> None:
    plan = build_plan(store, options=SPLIT)
    assert open_pack(plan.path).rows([0]).ids.tolist() == [[15, 16, 17, 18, 19, 20, 21]]
    assert repr(open_pack(str(plan.path))).endswith(
        "train-6-split.plan', rows=3, row_len=7, mapped)"
    )


def test_a_plan_of_another_store_is_refused(store: Path, tmp_path: Path) -> None:
    plan = build_plan(store, options=SPLIT)
    other = make_examples([([1], [(2, [(9, True)])])])
    build_small_chat_store(tmp_path / "other", {"train": other})
    with pytest.raises(DamagedStoreError, match="a plan of another store"):
        PackSpace(open_store(tmp_path / "other"), plan)


def test_copies_pickle_by_path_and_refuse_what_was_made_again(store: Path) -> None:
    space = open_rows(store, SPLIT, pad_id=3)
    data = pickle.dumps(space)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert again.rows([0, 1, 2]).ids.tolist() == space.rows([0, 1, 2]).ids.tolist()
    build_plan(store, options=PlanOptions(seq_len=12), name="6-split", overwrite=True)
    with pytest.raises(DamagedStoreError, match="another plan than when this one was pickled"):
        pickle.loads(data)
    shutil.rmtree(store)
    build_small_chat_store(store, {"train": FIVE.keep(np.array([True, True, True, False, False]))})
    with pytest.raises(DamagedStoreError, match="rebuilt meanwhile"):
        pickle.loads(data)


def _read(space: PackSpace) -> list[list[int]]:
    rows: list[list[int]] = space.rows([2, 0]).ids.tolist()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_space_reads_in_other_processes(store: Path, method) -> None:
    space = open_rows(store, SPLIT)
    wanted = _read(space)
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_read, (space,)) == wanted


def changed(plan: StoredPlan, **arrays: object) -> StoredPlan:
    return replace(plan, arrays=replace(plan.arrays, **arrays))


def test_a_false_plan_never_reads_outside(store: Path) -> None:
    plan = build_plan(store, options=SPLIT)
    files = open_store(store)
    huge = np.array([2**64 - 3], np.uint64)
    cases = [
        ({"cut_starts": np.array([13]), "cut_stops": np.array([14])}, "impossible positions"),
        ({"cut_stops": np.array([2**40])}, "impossible positions"),
        ({"cut_starts": huge, "cut_stops": huge + np.uint64(1)}, "impossible positions"),
        ({"cut_starts": np.array([0])}, "row 0 has 13 tokens, but holds 7"),
        ({"counts": np.array([3, 1])}, "row 0 has 14 tokens, but holds 7"),
    ]
    for arrays, problem in cases:
        with pytest.raises(DamagedStoreError, match=problem):
            PackSpace(files, changed(plan, **arrays)).rows([0])


def test_a_damaged_index_never_reads_outside(store: Path) -> None:
    plan = build_plan(store, options=SPLIT)
    index = store / "train_idx.npy"
    data = np.frombuffer(index.read_bytes()[128:], "<i8").copy()
    data[1] = 2**40
    index.write_bytes(index.read_bytes()[:128] + data.tobytes())
    space = PackSpace(open_store(store), read_plan(plan.path))
    with pytest.raises(DamagedStoreError, match=r"a piece of example . has impossible positions"):
        space.rows([0, 1, 2])
