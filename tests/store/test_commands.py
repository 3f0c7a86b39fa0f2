"""shardmill verify and shardmill info."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmill.records import Drop, Ragged
from shardmill.store import open_store
from shardmill.testing.stores import build_small_store
from tests.helpers import run_command as run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    build_small_store(
        folder,
        {"train": Ragged.from_sequences([[1, 2, 3], [4]]), "val": Ragged.from_sequences([])},
        shard_bytes=4,
        drops=[Drop(id="x", reason="bad_json")],
        dataset_name="name [/with] brackets",
        vocab_size=16004,
        special_token_ids={"eot": 6},
    )
    return folder


def test_verify_prints_one_receipt(store: Path) -> None:
    done = run("verify", str(store))
    assert (done.exit_code, done.stdout) == (0, f"{store}: ok, 2 documents, 4 tokens, 6 files\n")


def test_verify_exits_1_and_names_the_damage(store: Path) -> None:
    (store / "train" / "shard_00001.bin").write_bytes(b"\3\0\5\0")
    done = run("verify", str(store))
    assert (done.exit_code, done.stdout) == (1, f"{store}: DAMAGED, 1 problem\n")
    assert "train/shard_00001.bin: damaged: its sha256 is" in done.stderr


def test_verify_as_json(store: Path) -> None:
    assert json.loads(run("verify", str(store), "--json").stdout) == {
        "store": str(store),
        "ok": True,
        "files": 6,
        "tokens": 4,
        "documents": 2,
        "problems": [],
    }
    (store / "train" / "shard_00000.bin").unlink()
    done = run("verify", str(store), "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["problems"] == ["train/shard_00000.bin: missing"]


def test_no_store_is_an_error_of_ours(tmp_path: Path, store: Path) -> None:
    for command in ("verify", "info"):
        done = run(command, str(tmp_path / "none"))
        assert (done.exit_code, "no such folder" in done.stderr) == (2, True)
    (store / "train" / "shard_00000.bin").unlink()
    done = run("info", str(store))
    assert (done.exit_code, "shard_00000.bin" in done.stderr) == (2, True)


def test_info_shows_splits_tokenizer_and_ledger(store: Path) -> None:
    done = run("info", str(store))
    assert done.exit_code == 0
    words = [line.split() for line in done.stdout.splitlines()]
    rows = {" ".join(w for w in line if w not in "\u2502\u2503") for line in words}
    assert "split documents tokens mean shards bytes" in rows
    assert "train 2 4 2.0 2 8" in rows
    assert "val 0 0 - 0 0" in rows
    assert "data name [/with] brackets" in rows
    assert "dtype uint16" in rows
    assert "special ids eot=6" in rows
    assert "documents 3 read = 2 kept + 1 bad_json" in rows
    assert "tokens 4 encoded + 0 separators = 4 kept + 0 over budget" in rows
    assert any(row.startswith("tokenizer 16,004 ids, sha256 ") for row in rows)


def test_info_as_json_is_the_manifest_with_counted_shards(store: Path) -> None:
    facts = json.loads(run("info", str(store), "--json").stdout)
    assert facts["splits"]["train"]["shards"] == 2
    assert (facts["train_tokens"], facts["train_documents"], facts["val_tokens"]) == (4, 2, 0)
    assert facts["fingerprint"] == open_store(store).fingerprint
    assert facts["vocab_size"] == 16004
