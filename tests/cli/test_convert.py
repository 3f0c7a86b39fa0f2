"""`shardmill convert` as a person calls it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardmill.cli import main
from shardmill.formats.packed import open_packed
from shardmill.records import Ragged
from shardmill.testing.stores import build_small_store, read_documents
from tests.formats.test_unpickle import BIN, Calls, save


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run the command in a folder; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardmill", "convert", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


def test_a_store_goes_to_megatron_and_back_with_receipts(call):
    build_small_store(Path("store"), {"val": Ragged.from_sequences([[1, 2], [3]])})
    said = ("--split", "val")
    code, out, _ = call("store", "out/val", "--from", "store", "--to", "megatron", *said)
    assert (code, out) == (
        0,
        "out/val: 2 documents, 3 tokens, compared with store token for token: equal\n",
    )
    code, out, _ = call("out/val", "back", "--from", "megatron", "--to", "store", *said, "--json")
    assert code == 0
    assert json.loads(out) == {
        "source": "out/val",
        "target": "back",
        "from": "megatron",
        "to": "store",
        "documents": 2,
        "tokens": 3,
        "parity": {"equal": True, "documents": 2, "tokens": 3},
    }
    assert [ids.tolist() for ids in read_documents(Path("back"), "val")] == [[1, 2], [3]]


@pytest.mark.parametrize("target", ["memmap", "parquet"])
def test_a_legacy_shard_without_a_pack_size_has_that_of_its_longest_bin(call, caplog, target):
    save(Path("a.npy"), [BIN])
    ways = ("--from", "legacy", "--to", target, "--loss-mask-alignment", "label")
    code, out, _ = call("a.npy", "m.parquet", *ways, "--json")
    assert code == 0
    assert json.loads(out)["pack_size_rule"] == "longest_bin"
    assert "taking 3, the length of its longest bin" in caplog.text
    caplog.clear()
    assert open_packed("m.parquet").pack_size == 3
    code, out, _ = call("a.npy", "given.parquet", *ways, "--pack-size", "4")
    assert (code, caplog.text) == (0, "")
    assert out == "given.parquet: 1 bins, 3 tokens, compared with a.npy token for token: equal\n"
    assert open_packed("given.parquet").pack_size == 4
    if target == "memmap":
        rules = [
            json.loads(Path(name, "manifest.json").read_text()).get("pack_size_rule")
            for name in ("m.parquet", "given.parquet")
        ]
        assert rules == ["longest_bin", None]


def test_nothing_is_overwritten(call):
    save(Path("a.npy"), [BIN])
    ways = ("--from", "legacy", "--to", "parquet", "--pack-size", "4")
    assert call("a.npy", "p.parquet", *ways)[0] == 0
    before = Path("p.parquet").read_bytes()
    code, _, err = call("a.npy", "p.parquet", *ways)
    assert code == 2
    assert "p.parquet: is here already" in err
    assert Path("p.parquet").read_bytes() == before


def test_a_hostile_file_is_refused_in_one_line_and_does_not_run(call):
    save(Path("a.npy"), [Calls(exec, "open('it_ran', 'w')")])
    code, _, err = call("a.npy", "m", "--from", "legacy", "--to", "memmap", "--pack-size", "4")
    assert code == 2
    assert "refused: the name builtins.exec" in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["a.npy"]


def test_mistakes_in_the_call_are_one_line(call):
    code, _, err = call("x", "y", "--from", "llmc", "--to", "store", "--eot-first")
    assert (code, "--eot-first: of which id?" in err) == (2, True)
    code, _, err = call("x", "y", "--from", "store", "--to", "memmap")
    assert (code, "'store' to 'memmap': not offered" in err) == (2, True)
    code, _, err = call("x", "y", "--from", "llmc", "--to", "store")
    assert (code, "x: no such file" in err) == (2, True)
