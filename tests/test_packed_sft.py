"""The cases of the packed format's own plan, by its own names.

Where the plan breaks its own invariant it is put right: a third start of 2 in a bin of 2 tokens.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tracemalloc

import numpy as np
import pytest

import shardmill.packed_sft
from shardmill.packed_sft import (
    BinAssignment,
    MemmapShardWriter,
    SequenceSpoolReader,
    SequenceSpoolWriter,
    materialize_bin_arrays,
    open_memmap_shard,
)


def test_memmap_writer_roundtrip() -> None:
    with tempfile.TemporaryDirectory() as tmpdir:
        writer = MemmapShardWriter(output_dir=tmpdir, num_bins=3, pack_size=10, total_seq_starts=6)
        test_data = [
            (np.array([1, 2, 3]), np.array([0, 1, 1]), np.array([0])),
            (np.array([4, 5, 6, 7]), np.array([0, 0, 1, 1]), np.array([0, 2])),
            (np.array([8, 9]), np.array([0, 1]), np.array([0, 1])),
        ]
        for i, (ids, mask, starts) in enumerate(test_data):
            writer.write_bin(i, ids, mask, starts)
        writer.finalize()

        input_ids = np.load(f"{tmpdir}/input_ids.npy", mmap_mode="r")
        loss_mask = np.load(f"{tmpdir}/loss_mask.npy", mmap_mode="r")
        packed_len = np.load(f"{tmpdir}/packed_len.npy", mmap_mode="r")
        for i, (expected_ids, expected_mask, _) in enumerate(test_data):
            length = packed_len[i]
            np.testing.assert_array_equal(input_ids[i, :length], expected_ids)
            np.testing.assert_array_equal(loss_mask[i, :length], expected_mask)


@pytest.mark.slow
def test_memmap_writer_memory_efficiency() -> None:
    """10,000 bins x 2,048: 100 MB of files, in less memory than one in twenty of it."""
    with tempfile.TemporaryDirectory() as tmpdir:
        tracemalloc.start()
        try:
            writer = MemmapShardWriter(
                output_dir=tmpdir, num_bins=10000, pack_size=2048, total_seq_starts=50000
            )
            rng = np.random.default_rng(0)
            for i in range(10000):
                writer.write_bin(
                    i,
                    rng.integers(0, 50000, size=2000, dtype=np.int32),
                    rng.integers(0, 2, size=2000, dtype=np.uint8),
                    np.array([0, 500, 1000, 1500], dtype=np.uint32),
                )
            writer.finalize()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 5 * 1024 * 1024, f"Peak memory {peak / 1e6:.1f} MB too high"
        shard = open_memmap_shard(tmpdir)
        assert shard.read_bin(9999).seq_boundaries == [0, 500, 1000, 1500, 2000]
        assert len(np.load(f"{tmpdir}/seq_starts.npy", mmap_mode="r")) == 40000


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")  # on small machines
def test_dataloader_multiworker() -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    from shardmill.pytorch import GPTSFTPackedMemmapDataset

    with tempfile.TemporaryDirectory() as tmpdir:
        writer = MemmapShardWriter(tmpdir, num_bins=100, pack_size=64, total_seq_starts=200)
        for i in range(100):
            writer.write_bin(
                i,
                np.arange(50, dtype=np.int32),
                np.ones(50, dtype=np.uint8),
                np.array([0, 25], dtype=np.uint32),
            )
        writer.finalize()
        dataset = GPTSFTPackedMemmapDataset(tmpdir, tokenizer=None)
        loader = torch_data.DataLoader(
            dataset, batch_size=8, num_workers=4, persistent_workers=True
        )
        total_samples = 0
        for batch in loader:
            total_samples += len(batch["input_ids"])
            assert batch["input_ids"][0].tolist() == list(range(50))
            assert [int(edge[0]) for edge in batch["seq_boundaries"]] == [0, 25, 50]
        assert total_samples == 100, f"Expected 100 samples, got {total_samples}"


def test_the_plans_own_loop_packs_a_spool() -> None:
    with tempfile.TemporaryDirectory() as top:
        with SequenceSpoolWriter(f"{top}/spool") as spool:
            spool.append([1, 2, 3], [0, 1, 1])
            spool.append([4, 5], [0, 1])
            spool.append([6, 7], [0, 1])
        reader = SequenceSpoolReader(f"{top}/spool")
        assignment = BinAssignment.from_bins([[0, 2], [1]])
        writer = MemmapShardWriter(f"{top}/shard_000000", assignment.num_bins, 6, 3)
        ids, mask = np.zeros(6, np.int32), np.zeros(6, np.uint8)
        for bin_id in range(assignment.num_bins):
            packed_len, seq_start_id = materialize_bin_arrays(
                spool_reader=reader,
                assignment=assignment,
                bin_id=bin_id,
                pack_size=6,
                scratch_input_ids=ids,
                scratch_loss_mask=mask,
            )
            writer.write_bin(
                bin_id=bin_id,
                input_ids=ids[:packed_len].copy(),
                loss_mask=mask[:packed_len].copy(),
                seq_start_id=seq_start_id,
            )
        assert writer.finalize()["loss_mask_alignment"] == "label"
        found = open_memmap_shard(f"{top}/shard_000000").read_bin(0)
        assert found.input_ids.tolist() == [1, 2, 3, 6, 7]
        assert found.loss_mask.tolist() == [1, 1, 0, 1, 0]
        assert found.seq_boundaries == [0, 3, 5]


def test_every_name_of_the_facade_is_there() -> None:
    for name in shardmill.packed_sft.__all__:
        assert getattr(shardmill.packed_sft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        shardmill.packed_sft.nothing  # noqa: B018


def test_the_facade_needs_no_torch_and_nothing_remote() -> None:
    code = """
import sys
for name in ("torch", "s3fs", "megatron"): sys.modules[name] = None
import shardmill.packed_sft, shardmill.interop
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr
