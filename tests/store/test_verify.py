"""verify finds every damage; nothing that reads a store fails with a foreign exception."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import ShardmillError, StoreNotFoundError
from shardmill.records import Drop, Ragged
from shardmill.store import open_store, verify, write_placeholder
from shardmill.store.layout import index_header
from shardmill.testing.stores import build_small_store, plain_facts
from tests.store.test_manifest import sealed

DOCUMENTS = Ragged.from_sequences([[1, 2, 3], [4], [], [5, 6, 7, 8, 9], [10]])


def small(folder: Path, shard_bytes: int | None = 8) -> Path:
    build_small_store(
        folder,
        {"train": DOCUMENTS, "val": Ragged.from_sequences([[3, 4]])},
        shard_bytes=shard_bytes,
        drops=[Drop(id="x:1", reason="bad"), Drop(id="x:2", reason="worse")],
        vocab_size=11,
    )
    return folder


def test_a_sound_store_has_no_problem(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(small(tmp_path), on_progress=lambda *both: seen.append(both))
    assert (report.problems, report.ok) == ([], True)
    # train: 3 shards and an index; val: 1 and 1; dropped.jsonl; meta.json
    assert (report.files, report.tokens, report.documents) == (8, 12, 6)
    total = 24 + (128 + 40) + (128 + 8) + (tmp_path / "dropped.jsonl").stat().st_size
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_index_that_is_cut_after_its_hash_is_a_problem_and_not_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path)
    module = importlib.import_module("shardmill.store.verify")
    disorder = module._disorder

    def cut(*given, **options):
        os.truncate(tmp_path / "train_idx.npy", 130)
        return disorder(*given, **options)

    monkeypatch.setattr(module, "_disorder", cut)
    wanted = "train_idx.npy: cannot be read (cut while it was checked)"
    assert verify(tmp_path).problems == [wanted]


def test_all_damage_is_reported_not_only_the_first(tmp_path: Path) -> None:
    small(tmp_path)
    (tmp_path / "train/shard_00000.bin").write_bytes(b"\1\0\2\0\3\0\5\0")
    os.truncate(tmp_path / "train/shard_00001.bin", 3)
    (tmp_path / "val/shard_00000.bin").unlink()
    (tmp_path / "dropped.jsonl").write_text('{"id":"x:1","reason":"bad"}\n')
    (tmp_path / "train/shard_00003.bin").write_bytes(b"ab")
    (tmp_path / "other_tokens.bin").write_bytes(b"ab")
    (tmp_path / ".meta.json.0123456789abcdef.tmp").write_bytes(b"{")
    (tmp_path / "README.txt").write_text("notes of a user are no problem")
    problems = verify(tmp_path).problems
    assert [problem.partition(":")[0] for problem in problems] == [
        "train/shard_00001.bin",
        "val/shard_00000.bin",
        ".meta.json.0123456789abcdef.tmp",
        "other_tokens.bin",
        "train/shard_00003.bin",
        "train/shard_00000.bin",
        "dropped.jsonl",
        "dropped.jsonl",
    ]
    text = "\n".join(problems)
    for wanted in (
        "truncated: found 3 bytes, wanted 8",
        "missing",
        "foreign: not in meta.json",
        "killed writer",
        "damaged: its sha256 is",
        "lists dropped rows {'bad': 1}, but the ledger says {'bad': 1, 'worse': 1}",
    ):
        assert wanted in text


def edit_with_right_hashes(folder: Path, file: str, data: bytes) -> None:
    """Change a file and hide it: only the structure shows it."""
    meta = json.loads((folder / "meta.json").read_bytes())
    entries = [e for s in meta["splits"].values() for e in (s["index"], *s["shards"])]
    (entry,) = [e for e in [*entries, meta["dropped"]] if e["file"] == file]
    entry["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / file).write_bytes(data)
    (folder / "meta.json").write_bytes(sealed(meta))


@pytest.mark.parametrize(
    ("starts", "wanted"),
    [
        ([1, 3, 4, 4, 9], "document 0 starts at token 1, wanted 0"),
        ([0, 3, 2, 4, 9], "document 2 starts before the one before it"),
        ([0, 3, 4, 4, 11], "a document starts at token 11 of 10"),
        ([0, 3, -(2**63), 4, 9], "document 2 starts before"),
        ([0, 3, 2**62, -(2**63), 9], "document 3 starts before"),
        ([0, 4, 4, 4, 9], "puts (started, first, last) (1, 0, 0) in train/shard_00000.bin"),
        ([0, 3, 4, 4, 7], "puts (started, first, last) (3, 3, 4) in train/shard_00001.bin"),
        ([0, 2, 4, 4, 9], None),
    ],
)
def test_an_index_is_judged_by_its_contents(tmp_path: Path, starts, wanted) -> None:
    small(tmp_path)
    data = index_header(5) + np.array(starts, "<i8").tobytes()
    edit_with_right_hashes(tmp_path, "train_idx.npy", data)
    problems = verify(tmp_path).problems
    if wanted is None:
        assert problems == []
    else:
        assert problems[0].startswith(f"train_idx.npy: {wanted}")


def test_an_id_outside_the_vocabulary_is_reported(tmp_path: Path) -> None:
    small(tmp_path)
    edit_with_right_hashes(tmp_path, "train/shard_00002.bin", b"\x09\0\x0b\0")
    assert verify(tmp_path).problems == [
        "train/shard_00002.bin: holds the id 11, but the vocabulary has 11 ids"
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"not json\n",
        b'{"id":"x"}\n',
        b'{"id":"x","reason":"bad","more":1}\n',
        b"\xff\n",
        b"[" * 9999,
    ],
)
def test_a_list_of_drops_that_is_none_is_reported(tmp_path: Path, data: bytes) -> None:
    small(tmp_path)
    edit_with_right_hashes(tmp_path, "dropped.jsonl", data)
    (problem,) = verify(tmp_path).problems
    assert problem.startswith("dropped.jsonl: line 1 is no dropped row")


def test_a_damaged_manifest_is_a_problem_and_a_missing_one_an_error(tmp_path: Path) -> None:
    small(tmp_path)
    meta = tmp_path / "meta.json"
    meta.write_bytes(meta.read_bytes().replace(b'"small"', b'"smaII"'))
    report = verify(tmp_path)
    assert len(report.problems) == 1
    assert "changed or damaged after the build" in report.problems[0]
    meta.unlink()
    with pytest.raises(StoreNotFoundError, match="unfinished"):
        verify(tmp_path)
    write_placeholder(tmp_path / "p", plain_facts({}), ["a"])
    with pytest.raises(StoreNotFoundError, match="not built"):
        verify(tmp_path / "p")


def test_verifying_takes_a_few_mebibytes_whatever_the_size(tmp_path: Path) -> None:
    values = np.zeros(20_000_000, np.uint16)
    ragged = Ragged(values, np.append(np.arange(0, 20_000_000, 10), 20_000_000))
    build_small_store(tmp_path, {"a": ragged})
    tracemalloc.start()
    report = verify(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (report.tokens, report.documents) == (20_000_000, 2_000_000)
    assert peak < 16e6  # 40 MB of tokens, 16 MB of index


ACTIONS = ("flip", "truncate", "append", "delete", "rename", "swap", "empty", "folder")


def damage(folder: Path, file: Path, action: str, number: int) -> None:
    data = file.read_bytes()
    place = number % max(1, len(data))
    if action == "flip" and data:
        file.write_bytes(
            data[:place] + bytes([data[place] ^ (1 << number % 8)]) + data[place + 1 :]
        )
    elif action == "truncate":
        file.write_bytes(data[:place])
    elif action == "append":
        file.write_bytes(data + bytes([number % 256]) * (1 + number % 9))
    elif action == "delete":
        file.unlink()
    elif action == "rename":
        file.rename(file.with_name("renamed_" + file.name))
    elif action == "swap":
        others = sorted(path for path in folder.rglob("*") if path.is_file())
        other = others[number % len(others)]
        mine, theirs = file.read_bytes(), other.read_bytes()
        file.write_bytes(theirs)
        other.write_bytes(mine)
    elif action == "empty":
        file.write_bytes(b"")
    elif action == "folder":
        file.unlink()
        file.mkdir()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module", params=[8, None], ids=["shards", "one-file"])
def sound(request, tmp_path_factory) -> Path:
    return small(tmp_path_factory.mktemp("sound") / "store", request.param)


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(
    choices=st.lists(
        st.tuples(st.integers(0, 99), st.sampled_from(ACTIONS), st.integers(0, 2**16)),
        min_size=1,
        max_size=2,
    )
)
def test_any_damage_is_found_and_nothing_fails_with_a_foreign_exception(
    sound: Path, choices, tmp_path_factory
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "store"
    shutil.copytree(sound, folder)
    for which, action, number in choices:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        damage(folder, files[which % len(files)], action, number)
    try:
        problems = verify(folder).problems
    except ShardmillError as error:
        problems = [str(error)]
    assert problems or contents(folder) == contents(sound)
    try:
        store = open_store(folder)
        for split in store.splits:
            starts = store.document_starts(split)
            tokens = sum(len(np.fromfile(f.path, f.dtype)) for f in store.token_files(split))
            assert tokens == store.num_tokens(split)
            assert len(starts) == store.num_documents(split)
    except ShardmillError:
        pass
    shutil.rmtree(folder)
