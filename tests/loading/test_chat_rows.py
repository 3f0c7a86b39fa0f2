"""Rows of a chat store: one build for every length, every row trains, nothing vanishes unsaid."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat.fit import Fit, fit_rows
from shardmill.errors import OptionError
from shardmill.loading import ChatRows
from shardmill.records import IGNORE_INDEX
from shardmill.testing.stores import build_small_chat_store, chat_examples, slice_examples
from tests.store.test_chat_store import TWO

# the first of TWO: bos 1 | user 3 10 | assistant 4 [11 5];  the second: 1 | 2 | 4 [5] | 3


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build_small_chat_store(tmp_path / "s", {"train": TWO}, shard_bytes=8, vocab_size=100)
    return tmp_path / "s"


def test_a_batch_is_inputs_and_the_labels_that_are_trained(store: Path):
    rows = ChatRows(store, seq_len=6, pad_id=0)
    batch = rows.batch([1, 0])
    no = IGNORE_INDEX
    assert batch.input_ids.tolist() == [[1, 2, 4, 5, 3, 0], [1, 3, 10, 4, 11, 5]]
    assert batch.labels.tolist() == [[no, no, 5, no, no, no], [no, no, no, 11, 5, no]]
    assert batch.trained().tolist() == (batch.labels != no).tolist()
    assert batch.item.tolist() == [1, 0]
    assert {array.dtype for array in batch.arrays().values()} == {np.dtype("int64")}


def test_another_length_needs_no_build(store: Path):
    before = {path.name: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert ChatRows(store, seq_len=3, pad_id=0).rows([0]).ids.shape == (1, 4)
    assert ChatRows(store, seq_len=50, pad_id=0).rows([0]).ids.shape == (1, 51)
    assert before == {path.name: path.stat().st_mtime_ns for path in store.rglob("*")}


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(), seq_len=st.integers(1, 30), fit=st.sampled_from(sorted(set(Fit) - {Fit.ERROR}))
)
def test_a_row_depends_on_its_example_alone(data, seq_len, fit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows") / "s"
    written = data.draw(chat_examples())
    build_small_chat_store(folder, {"train": written})
    rows = ChatRows(folder, seq_len=seq_len, fit=fit, pad_id=9)
    total = len(written.ids)
    assert len(rows) == total
    chosen = data.draw(st.lists(st.integers(0, total - 1), max_size=8)) if total else []
    batch = rows.batch(chosen)
    alone = [
        fit_rows(slice_examples(written, n, n + 1), seq_len, fit=fit, pad_id=9) for n in chosen
    ]
    wanted = [row for part in alone for row in part.ids.tolist()]
    assert rows.rows(chosen).ids.tolist() == wanted
    assert batch.trained().any(axis=1).all()
    missing = [n for n, part in zip(chosen, alone, strict=True) if not len(part.ids)]
    assert sorted([*batch.item.tolist(), *missing]) == sorted(chosen)
    counts = rows.fit_counts()
    assert counts.examples == total
    assert counts.tokens_kept + counts.tokens_cut + counts.tokens_dropped == len(written.mask)


def test_an_example_without_a_row_is_reported_and_not_replaced(store: Path, caplog):
    rows = ChatRows(store, seq_len=4, fit="drop", pad_id=0)
    found = rows.rows([0, 1, 0])
    assert found.plan.kept.tolist() == [1]
    assert found.plan.dropped["too_long"].tolist() == [0, 2]
    assert rows.batch([0, 1, 0]).item.tolist() == [1]
    assert caplog.text.count("some examples give no row (too_long: 2)") == 1
    assert rows.fit_counts().dropped == {"too_long": 1}
    with pytest.raises(OptionError, match="too long"):
        ChatRows(store, seq_len=4, fit="error", pad_id=0).rows([0])


def test_padding_is_the_end_of_a_turn_as_the_store_says(store: Path, tmp_path: Path):
    with pytest.raises(OptionError, match="names no end of turn, 'eot' or 'eos'"):
        ChatRows(store, seq_len=4)
    build_small_chat_store(tmp_path / "eot", {"train": TWO}, special_token_ids={"eot": 5})
    assert ChatRows(tmp_path / "eot", seq_len=4).pad_id == 5
    options = {"chat": {"template": {"end_ids": [7, 8]}}}
    build_small_chat_store(
        tmp_path / "ends", {"train": TWO}, special_token_ids={"eot": 5}, options=options
    )
    assert ChatRows(tmp_path / "ends", seq_len=4).pad_id == 8
    assert ChatRows(tmp_path / "ends", seq_len=4, pad_id=0).pad_id == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_len": 0},
        {"seq_len": 2.5},
        {"seq_len": True},
        {"fit": "cut"},
        {"pad_id": -1},
        {"pad_id": 100},
        {"split": "test"},
    ],
)
def test_arguments_that_make_no_sense_are_refused(store: Path, wrong):
    with pytest.raises(OptionError):
        ChatRows(store, **{"seq_len": 8, "pad_id": 0, **wrong})


def test_rows_travel_as_the_path_of_their_store(store: Path):
    rows = ChatRows(store, seq_len=6, pad_id=0)
    data = pickle.dumps(rows)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert again.rows([1]).ids.tolist() == rows.rows([1]).ids.tolist()
    assert repr(again) == repr(rows)
    assert repr(rows).endswith("'train', seq_len=6, fit='drop-oldest-turns', examples=2)")
