"""`shardmill pack` as a person calls it: one receipt, refusals in one line, lists."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from shardmill.cli import main
from shardmill.records import Ragged
from shardmill.store import open_store, read_plan
from shardmill.testing.stores import build_small_chat_store, build_small_store
from tests.packs import FIVE


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run the command in a folder with the store `s`; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    build_small_chat_store(tmp_path / "s", {"train": FIVE, "val": FIVE})

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardmill", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


def test_a_receipt_has_every_count(call, tmp_path: Path) -> None:
    code, out, err = call("pack", "s", "--seq-len", "6", "--long", "split")
    assert (code, err) == (0, "")
    assert re.sub(r"[0-9.]+ s$", "N s", out, flags=re.MULTILINE) == (
        f"{tmp_path}/s/packs/train-6-split.plan: 3 rows of 7 tokens, 85.71% full, 4 pieces, "
        "1,376 bytes, N s\n"
        "  rows: 3, no plan has less than 3\n"
        "  tokens: 18 in rows, 3 of padding\n"
        "  trained labels: 8\n"
        "  split: 1 examples, 0 tokens are in two rows\n"
        "  left out, trains nothing: 2 pieces, 7 tokens with 0 trained labels (examples 2, 3)\n"
    )
    code, out, _ = call("pack", "s", "--seq-len", "11", "--long", "truncate")
    assert "  truncated: 1 examples, 1 tokens with 1 trained labels\n" in out
    code, out, _ = call("pack", "s", "--seq-len", "11", "--long", "drop")
    assert "  left out, too long: 1 pieces, 13 tokens with 3 trained labels (examples 2)\n" in out


def test_every_option_reaches_the_plan(call, tmp_path: Path) -> None:
    code, out, _ = call(
        *("pack", "s", "--seq-len", "8", "--split", "val", "--algorithm", "first-fit-shuffle"),
        *("--seed", "7", "--max-per-row", "2", "--align-to", "4", "--long", "drop", "--json"),
    )
    assert code == 0
    facts = json.loads(out)
    path = tmp_path / "s/packs/val-8-first-fit-shuffle-s7-max2-align4-drop.plan"
    plan = read_plan(path)
    assert facts["options"] == {
        "seq_len": 8,
        "algorithm": "first-fit-shuffle",
        "seed": 7,
        "max_per_row": 2,
        "align_to": 4,
        "long": "drop",
    }
    assert (facts["plan"], facts["split"], facts["bytes"]) == (
        str(path),
        "val",
        path.stat().st_size,
    )
    assert (facts["store"], facts["fingerprint"]) == (
        open_store("s").fingerprint,
        plan.fingerprint,
    )
    assert facts["metrics"]["left_out"]["too_long"] == {"pieces": 1, "tokens": 13, "labels": 3}
    assert facts["utilisation"] == plan.facts.utilisation
    assert facts["seconds"] >= 0


def test_a_mistake_is_one_line_and_nothing_is_written(call) -> None:
    build_small_store(Path("d"), {"train": Ragged.from_sequences([[1, 2]])})
    cases = {
        ("pack", "s"): "--seq-len is missing",
        ("pack", "s", "--seq-len", "8"): "example 2: 13 tokens, but a row holds 9",
        ("pack", "s", "--seq-len", "16", "--seed", "1"): "--algorithm best-fit takes no seed",
        ("pack", "s", "--seq-len", "16", "--split", "test"): "no split 'test'",
        ("pack", "d", "--seq-len", "16"): "a store of documents, which have no loss mask",
        ("pack", "none", "--seq-len", "16"): "none",
    }
    for arguments, problem in cases.items():
        code, out, err = call(*arguments)
        assert (code, out) == (2, ""), arguments
        assert problem in err
        assert err.startswith("shardmill: ")
        assert err.count("\n") == 1
    assert not Path("s/packs").exists()


def test_plans_are_listed_and_never_replaced_unasked(call) -> None:
    assert call("pack", "s", "--list")[1] == (
        "s: no plan yet; make one with shardmill pack s --seq-len 8192\n"
    )
    assert call("pack", "s", "--seq-len", "12", "--name", "mine")[0] == 0
    assert call("pack", "s", "--seq-len", "12", "--split", "val")[0] == 0
    code, _, err = call("pack", "s", "--seq-len", "20", "--name", "mine")
    assert code == 2
    assert "train-mine.plan: another plan is here" in err
    assert call("pack", "s", "--seq-len", "20", "--name", "mine", "--overwrite")[0] == 0
    code, out, _ = call("pack", "s", "--list")
    assert (code, out) == (
        0,
        "train-mine: 2 rows of 21 tokens, 57.14% full, 4 pieces\n"
        "val-12: 2 rows of 13 tokens, 92.31% full, 4 pieces\n",
    )
    listed = json.loads(call("pack", "s", "--list", "--json")[1])["plans"]
    assert [(one["name"], one["options"]["seq_len"]) for one in listed] == [
        ("train-mine", 20),
        ("val-12", 12),
    ]


def test_verify_and_info_know_the_plans(call) -> None:
    call("pack", "s", "--seq-len", "12")
    code, out, _ = call("verify", "s")
    assert (code, out) == (0, "s: ok, 10 documents, 50 tokens, 12 files\n")
    assert "plan train-12" in call("info", "s")[1]
    assert [one["name"] for one in json.loads(call("info", "s", "--json")[1])["plans"]] == [
        "train-12"
    ]
    path = Path("s/packs/train-12.plan")
    path.write_bytes(path.read_bytes()[:-1])
    code, out, err = call("verify", "s")
    assert (code, out) == (1, "s: DAMAGED, 1 problem\n")
    assert "  packs/train-12.plan: its sha256 is not the one at its end" in err
    assert "CANNOT BE USED" in call("info", "s")[1]
    assert "problem" in json.loads(call("pack", "s", "--list", "--json")[1])["plans"][0]


def test_a_plan_of_the_store_before_it_was_built_again_is_refused(call) -> None:
    call("pack", "s", "--seq-len", "12")
    shutil.move("s/packs", "kept")
    shutil.rmtree("s")
    less = FIVE.keep(np.array([True, True, True, False, False]))
    build_small_chat_store(Path("s"), {"train": less, "val": FIVE})
    shutil.move("kept", "s/packs")
    assert "train-12: CANNOT BE USED: " in call("pack", "s", "--list")[1]
    code, _, err = call("verify", "s")
    assert code == 1
    assert "packs/train-12.plan: a plan of another store, or of this one before" in err


def test_a_plan_is_converted_to_a_packed_shard(call) -> None:
    call("pack", "s", "--seq-len", "12")
    code, out, _ = call(
        *("convert", "s/packs/train-12.plan", "out", "--from", "plan", "--to", "memmap")
    )
    assert (code, out) == (
        0,
        "out: 2 bins, 24 tokens, compared with s/packs/train-12.plan token for token: equal\n",
    )
    assert call("convert", "x", "y", "--from", "memmap", "--to", "plan")[0] == 2
