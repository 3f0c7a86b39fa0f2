"""Small data in every format that the fuzz test damages, and the calls that read it.

A `Format` makes one of two data sets (0 and 1), reads all of it, and checks it. What checks what:

    store, chat store   opening: the manifest, sizes of files; reading: borders; verify:
                        sha256 of every file
    store manifest      the same, with meta.json damaged and nothing else
    plan                opening (read_plan): sha256 of the whole file; check_plan: of which store
    memmap              opening: manifest with its seal, headers, sizes; read_bin: the invariant;
                        verify_memmap_shard: sha256 of every file
    spool               opening: manifest with its seal, sizes; reading: borders; verify(): sha256
    parquet             opening: seal of its metadata; read_bin: sha256 of the row group
    legacy              reading: structure; check_record (every conversion): sha256 in its record

Without checksums, so other tokens can come out; opening and reading check the structure:

    old memmap          a shard of the format's first writers: no hashes, no seal
    others' parquet     no seal, and no page checksums
    np.save             a legacy file without a record
    megatron, llmc, datatrove, dolma
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.building.packs import build_plan
from shardmill.errors import ShardmillError
from shardmill.formats.megatron import open_megatron, write_megatron
from shardmill.formats.packed.legacy import LegacyPickleWriter, check_record, iter_legacy_bins
from shardmill.formats.packed.memmap import (
    MemmapShardWriter,
    open_memmap_shard,
    verify_memmap_shard,
)
from shardmill.formats.packed.parquet import ParquetShard, ParquetShardWriter
from shardmill.formats.packed.records import PackedShard
from shardmill.formats.packed.spool import ChatStoreSpool, SequenceSpoolReader
from shardmill.formats.stores import StoreSplit
from shardmill.formats.token_files import (
    ForeignFile,
    Separator,
    open_datatrove,
    open_dolma,
    open_llmc,
)
from shardmill.records import Ragged
from shardmill.store import PlanOptions, open_store, read_plan, verify
from shardmill.store.plans import NAMES, check_plan
from shardmill.store.readers import open_tokens
from shardmill.testing.stores import build_small_chat_store, build_small_store, make_examples
from tests.formats.packed import Bin, plain, write_spool
from tests.formats.test_foreign_in import datatrove, dolma, llmc

Value = Any  # lists and numbers, compared as a whole
FIELDS = ("input_ids", "loss_mask", "seq_start_id")
OLD_KEYS = ("version", "format", "num_bins", "pack_size", "dtype")
OLD_KEYS += ("loss_mask_dtype", "index_dtype", "bins_written")


def nothing(folder: Path) -> list[str]:
    """Reading has checked everything that there is to check."""
    return []


@dataclass(frozen=True, kw_only=True)
class Format:
    make: Callable[[Path, int], object]
    read: Callable[[Path], Value]
    verify: Callable[[Path], list[str]] = nothing  # problems; may raise an error of ours
    is_checked: bool  # other data that `verify` does not see is a failure
    targets: str = "*"  # what is damaged


def random_documents(number: int, most: int = 2**16) -> list[list[int]]:
    rng = np.random.default_rng([7, number])
    return [rng.integers(0, most, rng.integers(0, 60)).tolist() for _ in range(40)]


def random_bins(number: int) -> list[Bin]:
    rng = np.random.default_rng([8, number])
    bins = []
    for size in rng.integers(1, 120, 30).tolist():
        starts = sorted({0, *rng.integers(0, size, 3).tolist()})
        ids, mask = rng.integers(0, 50_000, size), rng.integers(0, 2, size)
        bins.append((ids.tolist(), mask.tolist(), starts))
    return bins


def make_store(folder: Path, number: int) -> None:
    lists = random_documents(number)
    splits = {"train": Ragged.from_sequences(lists[:30]), "val": Ragged.from_sequences(lists[30:])}
    build_small_store(folder / "store", splits, shard_bytes=500)


def read_store(folder: Path) -> Value:
    store, found = open_store(folder / "store"), {}
    for split in store.splits:
        with open_tokens(store, split) as space:
            starts = store.document_starts(split).tolist()
            found[split] = space.read(0, store.num_tokens(split)).tolist(), starts
    return found


def make_chats(folder: Path, number: int) -> None:
    rng = np.random.default_rng([9, number])
    chats = []
    for size in rng.integers(1, 12, 25).tolist():
        pairs = [(i, bool(t)) for i, t in rng.integers(0, (500, 2), (size, 2)).tolist()]
        chats.append(([1, 2], [(1, pairs), (2, [*pairs, (3, True)])]))
    build_small_chat_store(folder / "store", {"train": make_examples(chats)}, shard_bytes=200)


def read_chats(folder: Path) -> Value:
    with ChatStoreSpool(folder / "store", "train") as spool:
        lengths = spool.lengths().tolist()
        found = [spool.read_sequence(index) for index in range(len(spool))]
        return lengths, [(ids.tolist(), mask.tolist()) for ids, mask in found]


def verify_folder(folder: Path) -> list[str]:
    return verify(folder / "store").problems


def make_plan(folder: Path, number: int) -> None:
    make_chats(folder, number)
    build_plan(folder / "store", options=PlanOptions(seq_len=20, long="split"), name="a")


def read_stored_plan(folder: Path) -> Value:
    plan = read_plan(folder / "store/packs/train-a.plan")
    check_plan(plan, open_store(folder / "store"))
    return plan.facts, [getattr(plan.arrays, name).tolist() for name in NAMES]


def make_memmap(folder: Path, number: int) -> None:
    bins = random_bins(number)
    with MemmapShardWriter(folder / "s", len(bins), 128, sum(len(b[2]) for b in bins)) as writer:
        write_bins(writer, bins)


def make_parquet(folder: Path, number: int) -> None:
    with ParquetShardWriter(folder / "a.parquet", 128, row_group_size=8) as writer:
        write_bins(writer, random_bins(number))


def make_old_memmap(folder: Path, number: int) -> None:
    make_memmap(folder, number)
    manifest = folder / "s/manifest.json"
    fields = json.loads(manifest.read_bytes())
    manifest.write_text(json.dumps({name: fields[name] for name in OLD_KEYS}, indent=2))


def read_old_memmap(folder: Path) -> Value:
    return read_shard(open_memmap_shard(folder / "s", loss_mask_alignment="label"))


def make_others_parquet(folder: Path, number: int) -> None:
    rows = [dict(zip(FIELDS, one, strict=True)) for one in random_bins(number)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=8)


def make_legacy(folder: Path, number: int) -> None:
    with LegacyPickleWriter(folder / "a.npy", pack_size=128) as writer:
        write_bins(writer, random_bins(number))


def write_bins(writer: Any, bins: list[Bin]) -> None:
    for place, one in enumerate(bins):
        writer.write_bin(place, *one)
    writer.finalize()


def make_np_save(folder: Path, number: int) -> None:
    bins = [dict(zip(FIELDS, one, strict=True)) for one in random_bins(number)]
    if number:  # the other common kind
        bins = [{name: np.array(part) for name, part in one.items()} for one in bins]
    np.save(folder / "a.npy", np.array(bins, object), allow_pickle=True)


def read_shard(shard: PackedShard) -> Value:
    found = [plain(shard.read_bin(place)) for place in range(len(shard))]
    return found, shard.pack_size, shard.loss_mask_alignment


def read_legacy(folder: Path) -> Value:
    return [plain(found) for found in iter_legacy_bins(folder / "a.npy")]


def verify_legacy(folder: Path) -> list[str]:
    check_record(folder / "a.npy")
    return []


def make_spool(folder: Path, number: int) -> None:
    write_spool(folder / "s", [(ids, mask) for ids, mask, _ in random_bins(number)])


def read_spool(folder: Path) -> Value:
    with SequenceSpoolReader(folder / "s") as spool:
        lengths, every = spool.lengths(), np.arange(len(spool))
        found = [spool.read_sequence(index) for index in range(len(spool))]
        flat = [part.tolist() for part in spool.read_pieces(every, 0 * every, lengths)]
        return lengths.tolist(), flat, [(ids.tolist(), mask.tolist()) for ids, mask in found]


def make_megatron(folder: Path, number: int) -> None:
    store = folder.with_name(folder.name + ".store")
    build_small_store(store, {"train": Ragged.from_sequences(random_documents(number))})
    write_megatron(StoreSplit(store, "train"), folder / "train")


def read_dolma(folder: Path) -> Value:
    with suppress(ShardmillError):  # the dtype judged by its bytes
        read_foreign(open_dolma(folder / "a.npy"))
    return read_foreign(open_dolma(folder / "a.npy", dtype="uint16"))


def read_foreign(*files: ForeignFile) -> Value:
    return [ids.tolist() for file in files for batch in file.batches() for ids in batch]


def read_llmc(folder: Path) -> Value:
    separated = open_llmc(folder / "a.bin", separator=Separator(token=9, first=True))
    return read_foreign(open_llmc(folder / "a.bin")), read_foreign(separated)


def flat(number: int) -> list[int]:
    return [token % 50 for ids in random_documents(number) for token in ids]


FORMATS = {
    "store": Format(make=make_store, read=read_store, verify=verify_folder, is_checked=True),
    "store manifest": Format(
        make=make_store,
        read=read_store,
        verify=verify_folder,
        is_checked=True,
        targets="store/meta.json",
    ),
    "chat store": Format(make=make_chats, read=read_chats, verify=verify_folder, is_checked=True),
    "plan": Format(
        make=make_plan, read=read_stored_plan, is_checked=True, targets="store/packs/*.plan"
    ),
    "memmap": Format(
        make=make_memmap,
        read=lambda folder: read_shard(open_memmap_shard(folder / "s")),
        verify=lambda folder: verify_memmap_shard(folder / "s"),
        is_checked=True,
    ),
    "spool": Format(
        make=make_spool,
        read=read_spool,
        verify=lambda folder: SequenceSpoolReader(folder / "s").verify(),
        is_checked=True,
    ),
    "parquet": Format(
        make=make_parquet,
        read=lambda folder: read_shard(ParquetShard(folder / "a.parquet")),
        is_checked=True,
    ),
    "legacy": Format(make=make_legacy, read=read_legacy, verify=verify_legacy, is_checked=True),
    "old memmap": Format(
        make=make_old_memmap,
        read=read_old_memmap,
        verify=lambda folder: verify_memmap_shard(folder / "s"),
        is_checked=False,
    ),
    "others' parquet": Format(
        make=make_others_parquet,
        read=lambda folder: read_shard(ParquetShard(folder / "a.parquet", pack_size=128)),
        is_checked=False,
    ),
    "np.save": Format(make=make_np_save, read=read_legacy, is_checked=False),
    "megatron": Format(
        make=make_megatron,
        read=lambda folder: read_foreign(open_megatron(folder / "train")),
        is_checked=False,
    ),
    "llmc": Format(
        make=lambda folder, number: llmc(folder / "a.bin", flat(number)),
        read=read_llmc,
        is_checked=False,
    ),
    "datatrove": Format(
        make=lambda folder, number: datatrove(folder / "a.ds", random_documents(number)),
        read=lambda folder: read_foreign(open_datatrove(folder / "a.ds", dtype="uint16")),
        is_checked=False,
    ),
    "dolma": Format(
        make=lambda folder, number: dolma(folder / "a.npy", random_documents(number)),
        read=read_dolma,
        is_checked=False,
    ),
}
