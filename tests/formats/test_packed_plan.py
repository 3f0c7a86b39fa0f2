"""The plan file of a chat store is a packed shard like any other."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import build_plan
from shardmill.errors import DamagedStoreError, OptionError, StoreError
from shardmill.formats.convert import convert
from shardmill.formats.packed import (
    ChatStoreSpool,
    PackedOptions,
    PlanShard,
    open_packed,
    pack_from_spool,
)
from shardmill.formats.packed import formats as planned_module
from shardmill.formats.packed.formats import packed_format
from shardmill.store import PlanOptions
from shardmill.testing.stores import build_small_chat_store, chat_examples
from tests.formats.packed import assert_holds_bins, assert_trains_the_same_labels, plain
from tests.packs import FIVE, plain_row, plan_options, rows_of_plan

SPLIT = PlanOptions(seq_len=6, long="split")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    build_small_chat_store(tmp_path / "s", {"train": FIVE})
    return build_plan(tmp_path / "s", options=SPLIT).path


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(examples=chat_examples(max_examples=10), options=plan_options(), block=st.integers(1, 60))
def test_bins_are_rows_without_padding_and_with_masks_of_labels(examples, options, block) -> None:
    with tempfile.TemporaryDirectory() as top, pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_module, "_BLOCK", block)
        build_small_chat_store(Path(top, "s"), {"train": examples})
        plan = build_plan(Path(top, "s"), options=options, allow_empty=True)
        bins = []
        for row in rows_of_plan(plan, examples.ids.lengths.tolist()):
            ids, trained, starts = plain_row(plan, row, examples, 0)
            end = starts[-1] + row[-1].stop - row[-1].start
            used = -(-end // options.align_to) * options.align_to
            bins.append((ids[:used], [int(bit) for bit in trained[1:used]] + [0], starts))
        shard = open_packed(plan.path)
        assert isinstance(shard, PlanShard)
        assert shard.pack_size == options.capacity
        assert_holds_bins(shard, bins)
        assert [plain(found) for found in shard.bins()] == bins


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    examples=chat_examples().filter(lambda found: len(found.ids)),
    algorithm=st.sampled_from(["best-fit", "first-fit", "concatenate"]),
    align_to=st.sampled_from([1, 4]),
)
def test_a_plan_holds_what_packing_the_store_writes(examples, algorithm, align_to) -> None:
    with tempfile.TemporaryDirectory() as top:
        store = Path(top, "s")
        build_small_chat_store(store, {"train": examples})
        seq_len = -(-int(examples.ids.lengths.max()) // align_to) * align_to
        options = PlanOptions(seq_len=seq_len, algorithm=algorithm, align_to=align_to)
        shard = open_packed(build_plan(store, options=options).path)
        packed = pack_from_spool(
            ChatStoreSpool(store, "train"),
            Path(top, "out"),
            shard_id="a",
            pack_size=shard.pack_size,
            options=PackedOptions(algorithm=algorithm, align_to=align_to),
        )
        written = open_packed(packed["output_path"])
        assert_holds_bins(shard, [plain(written.read_bin(n)) for n in range(len(written))])
        if align_to == 1:
            masks = np.split(examples.mask.astype(int), examples.ids.offsets[1:-1])
            pairs = zip(examples.ids, masks, strict=True)
            assert_trains_the_same_labels(shard, [(i.tolist(), m.tolist()) for i, m in pairs])


@pytest.mark.parametrize("name", ["memmap", "parquet", "legacy"])
@pytest.mark.parametrize(
    "options", [SPLIT, PlanOptions(seq_len=8, align_to=4, long="truncate")], ids=["split", "align"]
)
def test_a_plan_becomes_any_packed_format(tmp_path: Path, name, options) -> None:
    build_small_chat_store(tmp_path / "s", {"train": FIVE}, dtype="uint32")
    plan = build_plan(tmp_path / "s", options=options).path
    target = tmp_path / {"memmap": "out", "parquet": "out.parquet", "legacy": "out.npy"}[name]
    receipt = convert(plan, target, from_format="plan", to_format=name)
    shard = open_packed(plan)
    tokens = sum(len(found) for found in shard.bins())
    assert receipt["parity"] == {"equal": True, "bins": len(shard), "tokens": tokens}
    written = open_packed(target)
    assert written.loss_mask_alignment == "label"
    assert written.pack_size == shard.pack_size == options.capacity
    assert_holds_bins(written, [plain(found) for found in shard.bins()])


def test_no_format_becomes_a_plan(plan: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'memmap' to 'plan': not offered"):
        convert(plan, tmp_path / "x", from_format="memmap", to_format="plan")


def test_bins_that_are_not_there_are_index_errors(plan: Path) -> None:
    shard = open_packed(plan)
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match=f"bin {wrong} of 3"):
            shard.read_bin(wrong)
    with pytest.raises(OptionError, match="its masks are aligned 'label', not 'roll_right'"):
        open_packed(plan, loss_mask_alignment="roll_right")
    assert open_packed(plan, loss_mask_alignment="label").loss_mask_alignment == "label"


def test_a_store_is_no_shard_but_its_plans_are(plan: Path) -> None:
    assert packed_format(plan) == "plan"
    with pytest.raises(
        StoreError, match=r"no packed shard.*; this store has .*train-6-split\.plan"
    ):
        open_packed(plan.parent.parent)


def test_a_shard_is_opened_again_by_path_unless_it_was_packed_again(plan: Path) -> None:
    with open_packed(plan) as shard:  # type: ignore[attr-defined]
        before = plain(shard.read_bin(1))
    assert plain(shard.read_bin(1)) == before
    copy = pickle.dumps(shard)
    assert plain(pickle.loads(copy).read_bin(1)) == before
    shard.close()
    other = PlanOptions(seq_len=12)
    build_plan(plan.parent.parent, options=other, name="6-split", overwrite=True)
    for again in (lambda: shard.read_bin(1), lambda: pickle.loads(copy)):
        with pytest.raises(DamagedStoreError, match="was written again since it was opened"):
            again()
