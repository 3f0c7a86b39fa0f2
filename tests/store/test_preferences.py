"""Version 3 of the format: what FORMAT.md says is enough to read it, and what lies is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.errors import DamagedStoreError, ManifestError, OptionError
from shardmill.records import ChatExamples
from shardmill.remote import open_remote, pull, push, verify_remote
from shardmill.store import StoreWriter, open_store, verify
from tests.helpers import folder_digest
from tests.helpers import run_command as run
from tests.preferences import TOKENIZER, PlainRecord, build_preferences, pair, records_of
from tests.store.test_format import reader
from tests.store.test_manifest import sealed

ROWS = [
    pair("why", "good", "bad"),
    pair("why", "better", "worse"),
    {"prompt": "how", "completions": ["a", "b", "c"], "scores": [3, 3, 1]},
]
LINKS = [[1, 0, 0, 0], [2, 0, 0, 1], [3, 0, 1, 0], [4, 0, 1, 1]]
LINKS += [[6, 5, 2, 0], [7, 5, 2, 0], [8, 5, 2, 1]]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build_preferences(tmp_path, ROWS)
    return tmp_path / "store"


def rewrite(store: Path, links: Any = None, **changes: Any) -> None:
    """Other branches or claims, as a hostile writer would make them: every checksum is right."""
    meta = json.loads((store / "meta.json").read_bytes())
    entry = meta["splits"]["train"]["chat"]["preference"]
    if links is not None:
        data = np.array(links, "<i8").tobytes()
        (store / "train_branches.bin").write_bytes(data)
        entry["branches"]["sha256"] = hashlib.sha256(data).hexdigest()
        entry["branches"]["entries"] = len(data) // 32
    entry |= changes.pop("entry", {})
    (store / "meta.json").write_bytes(sealed(meta | changes))


def test_the_reader_in_the_text_reads_every_record(store: Path) -> None:
    found = reader()["read_records"](store, "train")
    texts = []
    for record in found:
        prompts = {TOKENIZER.decode(ids[:first]) for _, ids, first in record}
        answers = [(TOKENIZER.decode(ids[first:]), value) for value, ids, first in record]
        texts.append(PlainRecord(*prompts, answers))
    assert texts == records_of(store)
    assert np.fromfile(store / "train_branches.bin", "<i8").reshape(-1, 4).tolist() == LINKS
    assert json.loads((store / "meta.json").read_bytes())["version"] == 3


def change(row: int, column: int, value: int) -> list[list[int]]:
    links = [list(one) for one in LINKS]
    links[row][column] = value
    return links


HOSTILE: dict[str, tuple[list[list[int]], str]] = {
    "an example too far": (change(6, 0, 9), "do not rise from 1 to the last one, 8"),
    "an example twice": (change(1, 0, 1), "do not rise"),
    "an example below 0": (change(0, 0, -(2**63)), "do not rise"),
    "a first branch without a prefix": (change(0, 0, 0), "do not rise"),
    "a prefix too far": (change(0, 1, 2**62), "names the prefix"),
    "the prefix of another": (change(4, 1, 0), "branch 4 names the prefix 0, wanted 5"),
    "records from 1": ([[*one[:2], one[2] + 1, one[3]] for one in LINKS], "not counted from 0"),
    "a record that is skipped": (change(6, 2, 4), "not counted from 0"),
    "a record with two prefixes": (
        [*LINKS[:4], [6, 5, 1, 1], [7, 5, 1, 1], [8, 5, 1, 1]],
        "record 1 has answers with two prefixes",
    ),
    "ranks that fall": (change(1, 3, -1), "ranks are not counted from 0"),
    "ranks from 1": (change(0, 3, 1), "ranks are not counted from 0"),
    "a rank that is skipped": (change(6, 3, 2), "ranks are not counted from 0"),
    "nothing is better": (change(6, 3, 0), "no answer that is worse"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_branches_that_cannot_be_are_refused_by_name(store: Path, name: str) -> None:
    links, words = HOSTILE[name]
    rewrite(store, links)
    with pytest.raises(DamagedStoreError, match=words):
        open_store(store).branches("train")
    problems = verify(store).problems
    assert any("train_branches.bin" in problem and words in problem for problem in problems)


CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "too few branches": (
        {"entry": {"records": 4}},
        r"7 branches of 4 records with ranks are impossible|records in all splits",
    ),
    "another version": ({"version": 2}, "stores of preferences have version 3, and no other"),
    "another kind": ({"entry": {"kind": "stars"}}, "Invalid enum value 'stars'"),
    "labels": ({"entry": {"kind": "labels"}}, "with labels are impossible"),
    "an unknown key": ({"entry": {"more": 1}}, "unknown field `more`"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_manifest_that_cannot_be_is_refused(store: Path, name: str) -> None:
    changes, words = CLAIMS[name]
    rewrite(store, **changes)
    with pytest.raises(ManifestError, match=words):
        open_store(store)


def test_verify_counts_records_and_saved_tokens(store: Path) -> None:
    rewrite(store, entry={"saved_tokens": 7})
    assert verify(store).problems == ["train_branches.bin: saves 30 tokens, the manifest says 7"]


def test_verify_finds_prompts_that_train(store: Path) -> None:
    mask = bytearray((store / "train_mask.bin").read_bytes())
    mask[0] ^= 1  # the first token of the first prompt
    (store / "train_mask.bin").write_bytes(mask)
    problems = verify(store).problems
    assert "train_mask.bin: example 0 is a prompt and trains" in problems


def test_verify_finds_answers_that_do_not_train(store: Path) -> None:
    starts = np.append(
        open_store(store).document_starts("train"), open_store(store).num_tokens("train")
    )
    bits = np.unpackbits(np.fromfile(store / "train_mask.bin", np.uint8), bitorder="little")
    bits[starts[8] : starts[9]] = 0
    np.packbits(bits, bitorder="little").tofile(store / "train_mask.bin")
    assert "train_mask.bin: example 8 trains no token" in verify(store).problems


def test_conversations_alone_are_not_appended_to_preferences(tmp_path: Path) -> None:
    options: dict[str, Any] = {"splits": ["train"], "dtype": "uint16", "shard_bytes": 64}
    with (
        StoreWriter(tmp_path / "new", preference="ranks", **options) as writer,
        pytest.raises(OptionError, match="takes adopt only"),
    ):
        writer.append_examples("train", ChatExamples.concatenate([]))


def test_info_show_and_verify_say_what_is_there(store: Path) -> None:
    done = run("info", str(store))
    assert done.exit_code == 0
    line = next(line for line in done.stdout.splitlines() if "preferences train" in line)
    words = " ".join(done.stdout.split())
    assert "3 records with ranks: 7 answers to 2 prompts; 30 tokens saved by shared" in words, line
    done = run("show", str(store), "--example", "0")
    assert "a prompt, of examples 1 to 4" in done.stdout
    done = run("show", str(store), "--example", "8")
    assert "an answer to the prompt of example 5, record 2, rank 1" in " ".join(done.stdout.split())
    assert run("verify", str(store)).exit_code == 0
    done = run("show", str(store), "--example", "1", "--seq-len", "8")
    assert done.exit_code == 2
    assert "a store of preferences" in done.stderr


def test_preferences_are_pushed_and_pulled_and_not_read_from_afar(
    store: Path, tmp_path: Path
) -> None:
    far = (tmp_path / "far").as_uri()
    push(store, far)
    assert verify_remote(far).problems == []
    with pytest.raises(OptionError, match="a store of preferences, which is not read through"):
        open_remote(far, cache=tmp_path / "cache", max_bytes=10**6)
    pull(far, tmp_path / "near")
    assert folder_digest(tmp_path / "near") == folder_digest(store)
    assert records_of(tmp_path / "near") == records_of(store)
