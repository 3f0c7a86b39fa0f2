"""A plan of a chat store is a partition that trains exactly what its examples train."""

from __future__ import annotations

import shutil
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import build_plan, plan_name
from shardmill.building import packs as pieces
from shardmill.building.packs import count_labels, trained_before
from shardmill.errors import DamagedStoreError, LossError, OptionError, StoreExistsError
from shardmill.records import Ragged
from shardmill.store import PlanOptions, list_plans, open_store, read_plan
from shardmill.store.plans import LeftOut, check_plan
from shardmill.testing.stores import (
    build_small_chat_store,
    build_small_store,
    chat_examples,
    make_examples,
)
from tests.packs import (
    FIVE,
    assert_packs_every_piece,
    assert_plan_adds_up,
    plan_options,
    rows_of_plan,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    examples=chat_examples(max_examples=12),
    options=plan_options(),
    block=st.sampled_from([1, 2, 2**17]),
)
def test_every_piece_is_in_one_row_or_left_out_and_no_label_is_lost(
    examples, options, block
) -> None:
    with tempfile.TemporaryDirectory() as top, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_BLOCK", block)
        build_small_chat_store(Path(top, "s"), {"train": examples})
        plan = build_plan(Path(top, "s"), options=options, allow_empty=True)
        assert plan.facts.options == options
        assert_packs_every_piece(plan, examples)
        assert_plan_adds_up(plan, examples)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    examples=chat_examples().filter(lambda found: len(found.ids)),
    max_per_row=st.none() | st.integers(1, 3),
)
def test_examples_that_all_fit_need_no_rule(examples, max_per_row) -> None:
    with tempfile.TemporaryDirectory() as top:
        build_small_chat_store(Path(top, "s"), {"train": examples})
        longest = int(examples.ids.lengths.max())
        options = PlanOptions(seq_len=max(1, longest - 1), max_per_row=max_per_row)
        plan = build_plan(Path(top, "s"), options=options, allow_empty=True)
        assert_packs_every_piece(plan, examples)
        assert_plan_adds_up(plan, examples)
        assert not len(plan.arrays.cut_pieces)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build_small_chat_store(tmp_path / "s", {"train": FIVE, "val": FIVE})
    return tmp_path / "s"


def test_a_plan_by_hand(store: Path) -> None:
    plan = build_plan(store, options=PlanOptions(seq_len=6, long="split"))
    assert plan.path == store / "packs" / "train-6-split.plan"
    rows = rows_of_plan(plan, FIVE.ids.lengths.tolist())
    # the third example is 0..7, which trains nothing, and 6..13
    assert [[tuple(piece) for piece in row] for row in rows] == [
        [(2, 6, 13)],
        [(0, 0, 5), (1, 0, 2)],
        [(4, 0, 4)],
    ]
    metrics = plan.facts.metrics
    assert (metrics.num_rows, metrics.lower_bound, metrics.num_pieces) == (3, 3, 4)
    assert (metrics.num_tokens, metrics.repeated_tokens, metrics.trained_labels) == (18, 0, 8)
    assert (metrics.num_split, metrics.num_truncated, metrics.num_empty) == (1, 0, 0)
    assert metrics.left_out == {
        "too_long": LeftOut(pieces=0, tokens=0, labels=0),
        "trains_nothing": LeftOut(pieces=2, tokens=7, labels=0),  # 0..6 of one, all of another
    }
    assert plan.arrays.trains_nothing.tolist() == [2, 3]
    assert plan.facts.utilisation == 18 / 21


def test_a_split_repeats_a_token_so_that_no_label_is_lost(store: Path) -> None:
    plan = build_plan(store, options=PlanOptions(seq_len=2, long="split"))
    assert plan.facts.metrics.trained_labels == 8
    # 8..11 and 10..13 of the third example: token 10 is the label of the first and only an input
    # of the second
    rows = [tuple(piece) for row in rows_of_plan(plan, FIVE.ids.lengths.tolist()) for piece in row]
    assert (2, 8, 11) in rows
    assert (2, 10, 13) in rows
    assert plan.facts.metrics.repeated_tokens == 2  # and token 2 of the first example


def test_what_is_cut_off_is_counted_with_its_labels(store: Path) -> None:
    cut = build_plan(store, options=PlanOptions(seq_len=11, long="truncate")).facts.metrics
    assert (cut.num_truncated, cut.truncated_tokens, cut.truncated_labels) == (1, 1, 1)
    out = build_plan(store, options=PlanOptions(seq_len=11, long="drop"))
    assert out.facts.metrics.left_out["too_long"] == LeftOut(pieces=1, tokens=13, labels=3)
    assert out.arrays.too_long.tolist() == [2]


def test_with_alignment_a_row_holds_seq_len_tokens_of_pieces(store: Path) -> None:
    plan = build_plan(store, options=PlanOptions(seq_len=12, align_to=4, long="split"))
    assert (plan.facts.options.capacity, plan.facts.row_len) == (12, 13)
    assert plan.facts.metrics.num_split == 1  # 13 tokens would fit a row, but not on their multiple
    with pytest.raises(OptionError, match=r"seq_len=10 is no multiple of align_to=4; take 8"):
        build_plan(store, options=PlanOptions(seq_len=10, align_to=4))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (PlanOptions(seq_len=8192), "8192"),
        (
            PlanOptions(seq_len=8192, algorithm="first-fit-shuffle", seed=7),
            "8192-first-fit-shuffle-s7",
        ),
        (PlanOptions(seq_len=64, max_per_row=3, align_to=8, long="split"), "64-max3-align8-split"),
        (PlanOptions(seq_len=64, algorithm="concatenate", long="drop"), "64-concatenate-drop"),
    ],
)
def test_a_name_tells_the_options(options, name) -> None:
    assert plan_name(options) == name


def test_same_store_and_options_same_bytes(store: Path, tmp_path: Path) -> None:
    options = PlanOptions(seq_len=6, algorithm="first-fit-shuffle", seed=3, long="split")
    first = build_plan(store, options=options)
    again = build_plan(store, options=options)  # the same plan may stand there
    assert again.fingerprint == first.fingerprint
    build_small_chat_store(tmp_path / "other", {"train": FIVE, "val": FIVE})
    other = build_plan(tmp_path / "other", options=options, name="x")
    assert other.path.read_bytes() == first.path.read_bytes()


def test_plans_live_side_by_side(store: Path) -> None:
    for split, seq_len in (("train", 12), ("train", 24), ("val", 12)):
        build_plan(store, split, options=PlanOptions(seq_len=seq_len))
    assert list_plans(store) == ["train-12", "train-24", "val-12"]


def test_another_plan_of_the_name_is_replaced_only_when_asked(store: Path) -> None:
    first = build_plan(store, options=PlanOptions(seq_len=12), name="mine")
    other = PlanOptions(seq_len=24)
    with pytest.raises(StoreExistsError, match=r"train-mine\.plan: another plan is here"):
        build_plan(store, options=other, name="mine")
    assert read_plan(first.path).fingerprint == first.fingerprint
    assert build_plan(store, options=other, name="mine", overwrite=True).facts.options == other


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (PlanOptions(seq_len=0), "seq_len=0: wanted at least 1"),
        (PlanOptions(seq_len=2.5), "seq_len=2.5 .float.: wanted a whole number"),  # type: ignore[arg-type]
        (PlanOptions(seq_len=2**31), "seq_len=2,147,483,648: wanted 1 to 2,147,483,646"),
        (
            PlanOptions(seq_len=4, algorithm="worst-fit"),
            "algorithm='worst-fit': wanted one of best-fit",
        ),  # type: ignore[arg-type]
        (PlanOptions(seq_len=4, long="cut"), "long='cut': wanted one of error, truncate"),  # type: ignore[arg-type]
        (PlanOptions(seq_len=4, seed=1), "algorithm='best-fit' takes no seed"),
        (PlanOptions(seq_len=4, algorithm="first-fit-shuffle"), "'first-fit-shuffle' needs a seed"),
        (PlanOptions(seq_len=4, max_per_row=0), "max_per_row=0: wanted at least 1"),
        (
            PlanOptions(seq_len=4, align_to=8),
            "seq_len=4 is no multiple of align_to=8; take 8",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(store: Path, options, problem) -> None:
    with pytest.raises(OptionError, match=problem):
        build_plan(store, options=options)
    assert not (store / "packs").exists()


def test_a_too_long_example_is_an_error_unless_a_rule_says_otherwise(store: Path) -> None:
    with pytest.raises(OptionError, match=r"example 2: 13 tokens, but a row holds 9 \(1 of 5"):
        build_plan(store, options=PlanOptions(seq_len=8))
    with pytest.raises(OptionError, match="no split 'test'"):
        build_plan(store, "test", options=PlanOptions(seq_len=8))
    with pytest.raises(OptionError, match=r"plan name '\.\./x'"):
        build_plan(store, options=PlanOptions(seq_len=16), name="../x")


def test_documents_need_no_plan(tmp_path: Path) -> None:
    build_small_store(tmp_path / "d", {"train": Ragged.from_sequences([[1, 2]])})
    with pytest.raises(OptionError, match="a store of documents, which have no loss mask"):
        build_plan(tmp_path / "d", options=PlanOptions(seq_len=8))


def test_a_split_without_examples_gives_a_plan_without_rows_only_when_asked_for(
    tmp_path: Path,
) -> None:
    build_small_chat_store(tmp_path / "s", {"train": make_examples([])})
    with pytest.raises(LossError, match=r"no row is packed.*\n  the split has 0 examples"):
        build_plan(tmp_path / "s", options=PlanOptions(seq_len=8))
    assert not (tmp_path / "s/packs").exists()
    plan = build_plan(tmp_path / "s", options=PlanOptions(seq_len=8), allow_empty=True)
    assert (plan.facts.metrics.num_rows, plan.facts.utilisation) == (0, 1.0)


def test_a_plan_of_the_store_before_it_was_built_again_is_refused(store: Path) -> None:
    build_plan(store, options=PlanOptions(seq_len=12))
    shutil.move(store / "packs", store.parent / "kept")
    shutil.rmtree(store)
    less = FIVE.keep(np.array([True, True, True, False, False]))
    build_small_chat_store(store, {"train": less, "val": FIVE})
    shutil.move(store.parent / "kept", store / "packs")
    with pytest.raises(DamagedStoreError, match=r"train-12\.plan: a plan of another store, or of"):
        check_plan(read_plan(store / "packs" / "train-12.plan"), open_store(store))
    with pytest.raises(StoreExistsError, match="another plan is here"):
        build_plan(store, options=PlanOptions(seq_len=12))
    fresh = build_plan(store, options=PlanOptions(seq_len=12), overwrite=True)
    assert_packs_every_piece(fresh, less)


def test_a_mask_that_is_not_the_one_of_the_manifest_is_refused(store: Path) -> None:
    mask = store / "train_mask.bin"
    mask.write_bytes(bytes([mask.read_bytes()[0] ^ 1, *mask.read_bytes()[1:]]))
    with pytest.raises(DamagedStoreError, match=r"split 'train': its mask trains \d+ tokens"):
        build_plan(store, options=PlanOptions(seq_len=12))


@settings(deadline=None, max_examples=100)
@given(bits=st.lists(st.booleans(), max_size=200), data=st.data(), block=st.integers(1, 9))
def test_trained_tokens_are_counted_in_front_of_any_position(bits, data, block) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(bits)), max_size=20)))
    packed = np.packbits(np.array(bits, np.bool_), bitorder="little")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_BLOCK", block)
        found = trained_before(packed, np.array(places, np.int64))
    assert found.tolist() == [sum(bits[:place]) for place in places]


def test_labels_are_counted_without_an_array_of_tokens() -> None:
    packed = np.full(2**22, 0b10101010, np.uint8)  # 32 million tokens, every second one trained
    starts = np.arange(0, 8 * 2**22, 2**20)
    tracemalloc.start()
    found = count_labels(packed, starts, starts + 2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tolist() == [2**19] * len(starts)
    assert peak < 4 * 2**20, f"{peak:,} bytes for {8 * len(packed):,} tokens"
