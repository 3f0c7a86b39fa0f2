"""Opening: cheap, lazy, and never something that does not match its manifest."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardmill.errors import DamagedStoreError, OptionError, ShardmillError, StoreNotFoundError
from shardmill.records import Ragged, TokenFile
from shardmill.store import Manifest, open_store
from shardmill.store.layout import index_header
from shardmill.store.manifest import ListedFile, ShardEntry, SplitEntry, write_manifest
from shardmill.testing.stores import build_small_store, plain_facts


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build_small_store(
        tmp_path / "store",
        {
            "train": Ragged.from_sequences([[1, 2, 3], [4], [5, 6]]),
            "val": Ragged.from_sequences([]),
        },
        shard_bytes=8,
    )
    return tmp_path / "store"


def test_a_store_says_what_it_is(store: Path) -> None:
    found = open_store(store)
    assert (found.folder, found.splits, found.dtype) == (store, ("train", "val"), "uint16")
    assert found.token_files("train") == [
        TokenFile(path=store / "train/shard_00000.bin", num_tokens=4, dtype="uint16"),
        TokenFile(path=store / "train/shard_00001.bin", num_tokens=2, dtype="uint16"),
    ]
    assert found.token_files("val") == []
    assert (found.num_tokens("train"), found.num_documents("train")) == (6, 3)
    assert repr(found) == f"Store('{store}', uint16, tokens: train=6, val=0)"
    with pytest.raises(OptionError, match=r"no split 'test'; its splits are: train, val"):
        found.token_files("test")


def test_document_starts_are_mapped_and_cannot_be_written(store: Path) -> None:
    starts = open_store(store).document_starts("train")
    assert starts.tolist() == [0, 3, 4]
    assert starts.dtype == np.int64
    assert isinstance(starts.base, np.memmap)
    for array in (starts, open_store(store).document_starts("val")):
        assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        starts[0] = 1


def test_a_relative_path_opens_the_same_store(store: Path, monkeypatch) -> None:
    monkeypatch.chdir(store.parent)
    found = open_store("store")
    monkeypatch.chdir("/")
    assert found.document_starts("train").tolist() == [0, 3, 4]


def test_a_store_travels_to_a_spawned_process_as_its_path(store: Path) -> None:
    data = pickle.dumps(open_store(store))
    assert len(data) < 500
    code = (
        "import pickle, sys\n"
        "s = pickle.loads(sys.stdin.buffer.read())\n"
        "print(s.fingerprint, s.document_starts('train').tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert done.stdout.decode() == f"{open_store(store).fingerprint} [0, 3, 4]\n"


def test_a_pickled_store_refuses_other_tokens_at_its_path(store: Path) -> None:
    data = pickle.dumps(open_store(store))
    store.rename(store.with_name("old"))
    build_small_store(store, {"train": Ragged.from_sequences([[9]])}, shard_bytes=8)
    with pytest.raises(DamagedStoreError, match="rebuilt meanwhile"):
        pickle.loads(data)


def test_the_fingerprint_follows_the_tokens_and_nothing_else(tmp_path: Path) -> None:
    ragged = Ragged.from_sequences([[1, 2], [3]])
    other = {
        "tokens": Ragged.from_sequences([[1, 2], [4]]),
        "borders": Ragged.from_sequences([[1], [2, 3]]),
    }
    build_small_store(tmp_path / "a", {"t": ragged})
    build_small_store(tmp_path / "b", {"t": ragged}, dataset_name="b", produced_by={"engine": "x"})
    same = open_store(tmp_path / "a").fingerprint
    assert open_store(tmp_path / "b").fingerprint == same
    for name, documents in other.items():
        build_small_store(tmp_path / name, {"t": documents})
        assert open_store(tmp_path / name).fingerprint != same
    build_small_store(tmp_path / "wide", {"t": ragged}, dtype="uint32")
    assert open_store(tmp_path / "wide").fingerprint != same


def test_no_store_is_said_in_the_words_that_fit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "train").mkdir(parents=True)
    (tmp_path / "half" / "train" / "shard_00000.bin").write_bytes(b"ab")
    for name, wanted in {
        "missing": "no such folder",
        "file": "no such folder",
        "empty": "not a store",
        "half": "no meta.json, so no store or an unfinished one",
    }.items():
        with pytest.raises(StoreNotFoundError, match=wanted) as error:
            open_store(tmp_path / name)
        assert isinstance(error.value, FileNotFoundError)
        assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize(
    ("file", "size", "wanted"),
    [
        ("train/shard_00000.bin", 7, "truncated: found 7 bytes, wanted 8"),
        ("train/shard_00001.bin", 6, "too long: found 6 bytes, wanted 4"),
        ("train_idx.npy", 151, "truncated: found 151 bytes, wanted 152"),
        ("val_idx.npy", 136, "too long: found 136 bytes, wanted 128"),
    ],
)
def test_a_file_of_another_size_is_refused(store: Path, file: str, size: int, wanted: str) -> None:
    os.truncate(store / file, size)
    with pytest.raises(DamagedStoreError, match=f"{file}: {wanted}; .*build it again"):
        open_store(store)


def test_a_missing_file_is_refused_and_further_damage_counted(store: Path) -> None:
    (store / "train" / "shard_00001.bin").unlink()
    with pytest.raises(DamagedStoreError, match=r"train/shard_00001\.bin: missing; "):
        open_store(store)
    (store / "train_idx.npy").unlink()
    with pytest.raises(DamagedStoreError, match=r"missing \(and 1 more damaged files\)"):
        open_store(store)


def test_a_folder_in_the_place_of_a_shard_is_refused(store: Path) -> None:
    (store / "train" / "shard_00001.bin").unlink()
    (store / "train" / "shard_00001.bin").mkdir()
    with pytest.raises(DamagedStoreError, match="not a plain file"):
        open_store(store)


def test_links_that_leave_the_store_are_refused_and_links_inside_are_not(store: Path) -> None:
    shard = store / "train" / "shard_00001.bin"
    outside = store.parent / "outside.bin"
    shard.rename(outside)
    shard.symlink_to(outside)
    with pytest.raises(DamagedStoreError, match="leads out of the store"):
        open_store(store)
    shard.unlink()
    outside.rename(store / "kept.data")
    shard.symlink_to("../kept.data")
    assert open_store(store).num_tokens("train") == 6
    shard.unlink()
    shard.symlink_to("shard_00001.bin")
    with pytest.raises(DamagedStoreError, match=r"shard_00001\.bin"):
        open_store(store)


def test_a_split_folder_that_is_a_link_out_is_refused(store: Path) -> None:
    (store / "train").rename(store.parent / "moved")
    (store / "train").symlink_to(store.parent / "moved")
    with pytest.raises(DamagedStoreError, match=r"train/shard_00000\.bin: missing"):
        open_store(store)
    (store / "train").unlink()
    (store / "train").symlink_to("train")
    with pytest.raises(DamagedStoreError, match=r"train/shard_00000\.bin: missing"):
        open_store(store)


def test_a_store_opens_through_a_link(store: Path) -> None:
    link = store.with_name("link")
    link.symlink_to(store)
    assert open_store(link).num_tokens("train") == 6


@pytest.mark.parametrize(
    ("starts", "wanted"),
    [([1, 3, 4], "the first at 0"), ([0, 3, 7], "within 0..6"), ([0, 3, -1], "within 0..6")],
)
def test_an_index_that_points_outside_is_not_handed_out(store: Path, starts, wanted) -> None:
    data = index_header(3) + np.array(starts, "<i8").tobytes()
    (store / "train_idx.npy").write_bytes(data)
    with pytest.raises(DamagedStoreError, match=wanted):
        open_store(store).document_starts("train")


def test_an_index_with_another_header_is_not_handed_out(store: Path) -> None:
    data = (store / "train_idx.npy").read_bytes()
    (store / "train_idx.npy").write_bytes(data.replace(b"'<i8'", b"'<f8'"))
    with pytest.raises(DamagedStoreError, match="header"):
        open_store(store).document_starts("train")


def test_an_index_that_shrinks_or_goes_after_opening_is_an_error_of_ours(store: Path) -> None:
    found = open_store(store)
    os.truncate(store / "train_idx.npy", 140)
    with pytest.raises(DamagedStoreError, match="140 bytes, wanted 152"):
        found.document_starts("train")
    (store / "train_idx.npy").unlink()
    with pytest.raises(ShardmillError, match="cannot be mapped"):
        found.document_starts("train")


def sparse_store(folder: Path, shards: int, tokens: int) -> None:
    """`shards` files of `tokens` zeros that take no disk, and one document."""
    (folder / "train").mkdir(parents=True)
    sha256 = hashlib.sha256(bytes(2 * tokens)).hexdigest()
    entries = []
    for number in range(shards):
        name = f"train/shard_{number:05d}.bin"
        descriptor = os.open(folder / name, os.O_CREAT | os.O_WRONLY)
        os.ftruncate(descriptor, 2 * tokens)
        os.close(descriptor)
        entries.append(
            ShardEntry(
                file=name,
                tokens=tokens,
                documents=int(number == 0),
                first_document=0,
                last_document=0,
                sha256=sha256,
            )
        )
    (folder / "train_idx.npy").write_bytes(index_header(1) + bytes(8))
    index = ListedFile(file="train_idx.npy", entries=1, sha256=sha256)
    total = shards * tokens
    split = SplitEntry(tokens=total, documents=1, index=index, shards=entries, chat=None)
    facts = plain_facts({})
    fields = {name: getattr(facts, name) for name in facts.__struct_fields__}
    one = {"read": 1, "kept": 1, "empty": 0, "over_budget": 0, "dropped": {}}
    many = {"encoded": total, "separators": 0, "kept": total, "over_budget": 0}
    ledger = type(facts.ledger)
    fields["ledger"] = ledger(
        documents=type(facts.ledger.documents)(**one),
        tokens=type(facts.ledger.tokens)(**many),
        repaired={},
        chat=None,
    )
    write_manifest(
        folder,
        Manifest(
            format="shardmill-store",
            version=1,
            built=True,
            token_dtype="uint16-le",
            shard_bytes=2 * tokens,
            splits={"train": split},
            dropped=None,
            **fields,
        ),
    )


def test_opening_opens_no_shard(tmp_path: Path) -> None:
    sparse_store(tmp_path / "s", 50, 1000)
    opened: list[str] = []
    code = (
        "import sys\n"
        "from shardmill.store import open_store\n"
        "def hook(event, args):\n"
        "    if event == 'open' and str(args[0]).startswith(sys.argv[1]): print(args[0])\n"
        "sys.addaudithook(hook)\n"
        "open_store(sys.argv[1]).token_files('train')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")],
        capture_output=True,
        check=True,
        text=True,
    )
    opened = done.stdout.split()
    assert opened == [str(tmp_path / "s" / "meta.json")]


@pytest.mark.slow
def test_a_terabyte_in_20_000_shards_opens_and_a_damaged_one_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    sparse_store(folder, 20_000, 25 * 2**20)
    store = open_store(folder)
    assert store.num_tokens("train") * 2 == 1_048_576_000_000
    assert len(store.token_files("train")) == 20_000
    os.truncate(folder / "train" / "shard_17777.bin", 1)
    with pytest.raises(DamagedStoreError, match=r"shard_17777\.bin: truncated: found 1 bytes"):
        open_store(folder)
