"""The packed format's own plan: its test cases, signatures, defaults and keys, by its own names."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import tempfile
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pydantic
import pytest

import shardmill.compat.nemotron
from shardmill.compat.nemotron import (
    ChatSftOutputConfig,
    process_chat_sft_pack_from_spool_core,
    write_memmap_to_cloud,
)
from shardmill.errors import OptionError
from shardmill.formats.packed import (
    LegacyPickleWriter,
    MemmapShardWriter,
    SequenceSpoolReader,
    SequenceSpoolWriter,
    convert_legacy_to_memmap,
    materialize_bin_arrays,
    open_memmap_shard,
    open_packed,
    pack_from_spool,
)
from shardmill.packing import BinAssignment, best_fit_decreasing, concatenate, first_fit_shuffle
from tests.formats.packed import aligned_slowly, plain, write_spool


def test_writers_have_the_attributes_of_the_specification(tmp_path: Path) -> None:
    with MemmapShardWriter(str(tmp_path / "bins"), 0, 10, 0) as memmap:
        assert memmap.output_dir == tmp_path / "bins"
    with LegacyPickleWriter(str(tmp_path / "bins.npy")) as legacy:
        assert legacy.output_path == tmp_path / "bins.npy"


def test_memmap_writer_roundtrip() -> None:
    with tempfile.TemporaryDirectory() as tmpdir:
        writer = MemmapShardWriter(output_dir=tmpdir, num_bins=3, pack_size=10, total_seq_starts=6)
        test_data = [
            (np.array([1, 2, 3]), np.array([0, 1, 1]), np.array([0])),
            (np.array([4, 5, 6, 7]), np.array([0, 0, 1, 1]), np.array([0, 2])),
            (np.array([8, 9]), np.array([0, 1]), np.array([0, 1, 2])),
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
        # the plan's third start of 2 in a bin of 2 tokens breaks the plan's own invariant: it is
        # an empty sequence, which has no start
        assert open_memmap_shard(tmpdir).read_bin(2).seq_boundaries == [0, 1, 2]


@pytest.mark.slow
def test_memmap_writer_memory_efficiency() -> None:
    """3,000 bins x 2,048: 30 MB of files, in less memory than one in six of it."""
    with tempfile.TemporaryDirectory() as tmpdir:
        tracemalloc.start()
        try:
            writer = MemmapShardWriter(
                output_dir=tmpdir, num_bins=3000, pack_size=2048, total_seq_starts=15000
            )
            rng = np.random.default_rng(0)
            for i in range(3000):
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
        assert shard.read_bin(2999).seq_boundaries == [0, 500, 1000, 1500, 2000]
        assert len(np.load(f"{tmpdir}/seq_starts.npy", mmap_mode="r")) == 12000


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")  # on small machines
def test_dataloader_multiworker() -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    from shardmill.compat.nemotron import GPTSFTPackedMemmapDataset

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


SEVEN = [
    ([1, 2, 3], [0, 1, 1]),
    ([4, 5], [0, 1]),
    ([6], [1]),
    ([], []),
    ([7, 8, 9, 10], [0, 0, 1, 0]),
    ([11, 12, 13, 14, 15, 16, 17], [0, 1, 0, 1, 1, 1, 1]),
    ([18, 19], [1, 1]),
]
"""With pack_size=5 one sequence is too long, by two tokens; one has no tokens."""


def core(top: Path, sequences: Any = SEVEN, **options: Any) -> dict[str, Any]:
    """Pack a new spool of these sequences into `top`/out."""
    if not (top / "spool").exists():
        write_spool(top / "spool", sequences)
    given = {"shard_id": "shard_000000", "pack_size": 5, "packer": "first-fit"}
    return process_chat_sft_pack_from_spool_core(
        **{
            "spool_dir": str(top / "spool"),
            "output_dir": str(top / "out"),
            "output_fs": fsspec.filesystem("file"),
            **given,
            **options,
        }
    )


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [
        (one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()
    ]


def test_the_pack_function_has_exactly_the_plans_signature() -> None:
    only = inspect.Parameter.KEYWORD_ONLY
    required = ["spool_dir", "output_dir", "shard_id", "pack_size", "packer", "output_fs"]
    assert parameters(process_chat_sft_pack_from_spool_core) == [
        *((name, only, inspect.Parameter.empty) for name in required),
        ("dtype", only, np.int32),
        ("packed_storage", only, "legacy_npy_pickle"),
    ]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (MemmapShardWriter, "output_dir num_bins pack_size total_seq_starts dtype"),
        (MemmapShardWriter.write_bin, "self bin_id input_ids loss_mask seq_start_id"),
        (LegacyPickleWriter, "output_path"),
        (LegacyPickleWriter.write_bin, "self bin_id input_ids loss_mask seq_start_id"),
        (
            materialize_bin_arrays,
            "spool_reader assignment bin_id pack_size scratch_input_ids scratch_loss_mask",
        ),
        (
            write_memmap_to_cloud,
            "output_fs output_dir num_bins pack_size total_seq_starts write_fn",
        ),
        (convert_legacy_to_memmap, "legacy_npy_path output_dir"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_positional_arguments_are_the_plans_and_the_rest_is_optional(function, names) -> None:
    found = parameters(function)
    ours = found[len(names.split()) :]
    assert [name for name, _, _ in found[: len(names.split())]] == names.split()
    for name, kind, default in ours:
        assert kind is inspect.Parameter.KEYWORD_ONLY, name
        assert default is not inspect.Parameter.empty, name


def test_the_plans_datasets_take_a_path_and_a_tokenizer() -> None:
    pytest.importorskip("torch")
    from shardmill.compat import nemotron

    for name, first in (
        ("GPTSFTPackedDataset", "file_path"),
        ("GPTSFTPackedMemmapDataset", "file_path"),
        ("GPTSFTPackedMultiShardDataset", "shard_dirs"),
        ("create_sft_dataset", "path"),
    ):
        found = parameters(getattr(nemotron, name))
        assert [one for one, _, _ in found] == [first, "tokenizer", "kwargs"], name
        assert found[2][1] is inspect.Parameter.VAR_KEYWORD


def test_the_storage_of_the_output_config_is_the_plans() -> None:
    assert ChatSftOutputConfig().packed_storage == "legacy_npy_pickle"
    assert ChatSftOutputConfig(packed_storage="memmap_v1").packed_storage == "memmap_v1"
    assert issubclass(ChatSftOutputConfig, pydantic.BaseModel)
    for wrong in ({"packed_storage": "zip"}, {"packed_storage": None}, {"packed_store": "x"}):
        with pytest.raises(pydantic.ValidationError):
            ChatSftOutputConfig(**wrong)


@pytest.mark.parametrize("storage", [None, "legacy_npy_pickle", "memmap_v1", "parquet"])
def test_the_pack_function_writes_where_and_what_the_plan_says(tmp_path, storage) -> None:
    options = {} if storage is None else {"packed_storage": storage}
    receipt = core(tmp_path, **options)
    ending = {"memmap_v1": "", "parquet": ".parquet"}.get(storage, ".npy")
    wanted = {
        "shard_id": "shard_000000",
        "output_path": f"{tmp_path}/out/shard_000000{ending}",
        "format": storage or "legacy_npy_pickle",
        "num_bins": 4,
        "num_sequences": 7,
        "truncated": 1,
        "truncated_tokens": 2,
        "dropped": 0,
    }
    assert {name: receipt[name] for name in wanted} == wanted
    shard = open_packed(receipt["output_path"])
    assert (shard.pack_size, shard.loss_mask_alignment) == (5, "label")
    cut = ([11, 12, 13, 14, 15], [0, 1, 0, 1, 1])
    bins = [[cut], [SEVEN[2], SEVEN[4]], [SEVEN[0], SEVEN[1]], [SEVEN[6]]]
    assert sorted(plain(shard.read_bin(number)) for number in range(4)) == sorted(
        aligned_slowly(one, "label") for one in bins
    )
    if ending == ".npy":
        loaded = np.load(receipt["output_path"], allow_pickle=True)
        assert {tuple(one) for one in loaded} == {("input_ids", "loss_mask", "seq_start_id")}


def test_what_is_cut_is_announced_and_our_own_function_refuses_it(tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        core(tmp_path)
    assert "1 of 7 sequences do not fit into bins of pack_size=5" in caplog.text
    assert "2 tokens were cut off" in caplog.text
    with pytest.raises(OptionError, match="example 5: 7 tokens, but a row holds 5"):
        pack_from_spool(tmp_path / "spool", tmp_path / "own", shard_id="a", pack_size=5)
    assert not (tmp_path / "own").exists()


class ListsAndMetrics:
    """A packer as Nemotron's: it knows the capacity, takes lengths, gives lists and metrics."""

    def pack(self, sequence_lengths: list[int]) -> tuple[list[list[int]], dict[str, int]]:
        assert isinstance(sequence_lengths, list)
        return BINS, {"num_bins": len(BINS)}


class Bins:
    """An assignment of somebody else's class."""

    num_bins = 4

    def bin_indices(self, bin_id: int) -> list[int]:
        return BINS[bin_id]


BINS = [[5], [4, 2], [1, 0], [6, 3]]
PACKERS = {
    "an object with pack": ListsAndMetrics(),
    "a function that gives lists": lambda lengths, pack_size: BINS,
    "a function that gives an assignment": lambda lengths, pack_size: BinAssignment.from_bins(BINS),
    "a foreign assignment": lambda lengths, pack_size: Bins(),
}


@pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)
def test_a_packer_of_your_own_decides_the_bins_and_their_order(tmp_path, packer) -> None:
    receipt = core(tmp_path, packer=packer, packed_storage="memmap_v1")
    assert (receipt["num_bins"], receipt["truncated"], receipt["truncated_tokens"]) == (4, 1, 2)
    shard = open_packed(receipt["output_path"])
    cut = ([11, 12, 13, 14, 15], [0, 1, 0, 1, 1])
    wanted = [[cut], [SEVEN[4], SEVEN[2]], [SEVEN[1], SEVEN[0]], [SEVEN[6]]]
    assert [plain(shard.read_bin(number)) for number in range(4)] == [
        aligned_slowly(one, "label") for one in wanted
    ]


@pytest.mark.parametrize(
    "packer",
    [
        *("best-fit", "first-fit", "concatenate", "first_fit_decreasing", "concatenative"),
        *(best_fit_decreasing, concatenate, partial(first_fit_shuffle, seed=3)),
        partial(best_fit_decreasing, max_per_row=1),
    ],
    ids=lambda packer: packer if isinstance(packer, str) else None,
)
def test_our_packers_are_taken_by_name_and_as_functions(tmp_path, packer) -> None:
    receipt = core(tmp_path, packer=packer, packed_storage="memmap_v1")
    shard = open_packed(receipt["output_path"])
    ids = [number for n in range(len(shard)) for number in plain(shard.read_bin(n))[0]]
    assert sorted(ids) == [*range(1, 16), 18, 19]
    assert (receipt["truncated"], receipt["truncated_tokens"]) == (1, 2)


def test_aligned_starts_of_our_packers_are_kept(tmp_path) -> None:
    packer = partial(concatenate, align_to=4)
    receipt = core(tmp_path, packer=packer, pack_size=8, packed_storage="memmap_v1")
    assert (receipt["align_to"], receipt["truncated"]) == (4, 0)
    shard = open_packed(receipt["output_path"])
    starts = [start for n in range(len(shard)) for start in plain(shard.read_bin(n))[2]]
    assert {start % 4 for start in starts} == {0}


def test_a_bin_that_is_too_full_is_cut_at_its_end_as_the_plan_does(tmp_path) -> None:
    """The plan cuts the sequence that goes over the end, and leaves out those after it."""
    bins = [[0, 1, 4, 2], [6, 5], [3]]
    options = {"packed_storage": "memmap_v1", "packer": lambda lengths, pack_size: bins}
    receipt = core(tmp_path, pack_size=6, **options)
    shard = open_packed(receipt["output_path"])
    first = aligned_slowly([SEVEN[0], SEVEN[1], ([7], [0])], "label")
    second = aligned_slowly([SEVEN[6], ([11, 12, 13, 14], [0, 1, 0, 1])], "label")
    assert [plain(shard.read_bin(number)) for number in range(len(shard))] == [first, second]
    counts = {"num_bins": 2, "num_sequences": 7, "tokens": 12, "empty": 1}
    counts |= {"truncated": 2, "truncated_tokens": 6, "dropped": 1, "dropped_tokens": 1}
    assert {name: receipt[name] for name in counts} == counts
    assert counts["tokens"] + 6 + 1 == sum(len(ids) for ids, _ in SEVEN)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"packer": "magic"}, "packer='magic': wanted one of best-fit"),
        ({"packer": "first-fit-shuffle"}, "needs a seed"),
        ({"packer": 5}, "packer=5"),
        ({"packer": lambda lengths, size: [[0, 1], [1]]}, "item 1 is in 2 bins"),
        ({"packer": lambda lengths, size: [[0, 1]]}, "item 2 is in 0 bins"),
        ({"packer": lambda lengths, size: [[0, 99]]}, "out of range: 99"),
        ({"packer": lambda lengths, size: 7}, "gave int, wanted"),
        ({"packer": lambda lengths, size: best_fit_decreasing(lengths, 99)}, "rows of 99 tokens"),
        ({"packer": lambda lengths, size: best_fit_decreasing([1], size)}, "a plan of 1 sequences"),
        ({"packed_storage": "zip"}, "packed_storage='zip'"),
        ({"shard_id": "../x"}, "shard_id"),
        ({"pack_size": 0}, "pack_size=0"),
        ({"dtype": "float32"}, "dtype=float32"),
        ({"output_fs": "file"}, "output_fs='file': wanted an fsspec file system"),
        ({"output_dir": "s3://bucket/x"}, r"output_dir: found a URL \(s3://\.\.\.\)"),
        ({"spool_dir": "s3://bucket/x"}, r"spool_dir: found a URL \(s3://\.\.\.\)"),
    ],
)
def test_arguments_that_make_no_sense_leave_nothing(tmp_path, monkeypatch, options, words) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=words):
        core(tmp_path, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["spool"]


def slowly_cut(sequences: Any, indices: list[int], pack_size: int) -> Any:
    """The plan's loop over the sequences of a bin; but an empty one does not end the bin."""
    room, kept = pack_size, []
    for index in indices:
        ids, mask = sequences[index]
        kept.append((ids[:room], mask[:room]))
        room -= len(kept[-1][0])
    return kept


@pytest.mark.parametrize("pack_size", [1, 2, 4, 5, 9, 30])
@pytest.mark.parametrize("alignment", ["label", "roll_right"])
def test_a_bin_made_by_hand_is_cut_at_pack_size_and_announced(pack_size, alignment, caplog) -> None:
    indices = [1, 3, 5, 0, 4]
    reader = SimpleNamespace(
        read_sequence=lambda index: (np.array(SEVEN[index][0], int), np.array(SEVEN[index][1], int))
    )
    assignment = BinAssignment.from_bins([indices, [2, 6]])
    ids, mask = np.full(pack_size, 99, np.int32), np.full(pack_size, 1, np.uint8)
    length, starts = materialize_bin_arrays(
        reader, assignment, 0, pack_size, ids, mask, loss_mask_alignment=alignment
    )
    wanted = aligned_slowly(slowly_cut(SEVEN, indices, pack_size), alignment)
    assert (ids[:length].tolist(), mask[:length].tolist(), starts.tolist()) == wanted
    total = sum(len(SEVEN[index][0]) for index in indices)
    assert (f"{total - pack_size:,} tokens were cut off" in caplog.text) == (total > pack_size)


def test_a_legacy_file_is_converted_with_two_arguments(tmp_path, caplog) -> None:
    """The plan's converter: the longest bin decides the pack size, which is said and recorded."""
    bins = [
        {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 0], "seq_start_id": [0]},
        {"input_ids": [4, 5], "loss_mask": [0, 0], "seq_start_id": [0, 1]},
    ]
    np.save(tmp_path / "theirs.npy", bins, allow_pickle=True)
    writer = LegacyPickleWriter(str(tmp_path / "ours.npy"))
    for number, one in enumerate(bins):
        writer.write_bin(number, *(np.array(one[key]) for key in bins[0]))
    assert writer.finalize()["format"] == "legacy_pickle"
    for name in ("theirs", "ours"):
        caplog.clear()
        manifest = convert_legacy_to_memmap(f"{tmp_path}/{name}.npy", f"{tmp_path}/{name}")
        assert (manifest["num_bins"], manifest["pack_size"]) == (2, 3)
        assert manifest["pack_size_rule"] == "longest_bin"
        assert "taking 3, the length of its longest bin" in caplog.text
        shard = open_memmap_shard(tmp_path / name)
        assert shard.manifest.pack_size_rule == "longest_bin"
        for number, one in enumerate(bins):
            assert plain(shard.read_bin(number)) == tuple(one.values())
    given = convert_legacy_to_memmap(tmp_path / "ours.npy", tmp_path / "given", pack_size=8)
    assert given["pack_size"] == 8
    assert "pack_size_rule" not in given


def test_every_name_of_the_facade_is_there() -> None:
    for name in shardmill.compat.nemotron.__all__:
        assert getattr(shardmill.compat.nemotron, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        shardmill.compat.nemotron.nothing  # noqa: B018


def test_the_facade_needs_no_torch_and_nothing_remote() -> None:
    code = """
import sys
for name in ("torch", "s3fs", "megatron"): sys.modules[name] = None
import shardmill.compat.nemotron, shardmill.formats
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr
