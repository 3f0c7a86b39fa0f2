"""`shardmill exclude`: by document or by step, listed, taken back, shown by the other commands."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from shardmill.building import build_plan
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.loading.config import open_stream, read_config
from shardmill.records import Ragged
from shardmill.store import PlanOptions, read_exclusions
from shardmill.testing.stores import build_small_chat_store, build_small_store
from tests.cli.test_build_chats import call  # noqa: F401
from tests.packs import FIVE

CONFIG = """
[data]
seed = 7
datasets = [
  { name = "pages", path = "pages", weight = 3 },
  { name = "other", path = "pages/val", weight = 1 },
  { name = "more", path = "more" },
]
"""
TRAINING = ("--batch-size", "2", "--world", "3", "--seq-len", "10")


@pytest.fixture
def run(call, tmp_path):  # noqa: F811
    """Stores `pages` (train 50 documents of 12 tokens, val 10) and `more`, chats `c`; a command."""
    splits = {
        "train": Ragged.from_lengths(np.arange(600), [12] * 50),
        "val": Ragged.from_lengths(np.arange(120), [12] * 10),
    }
    build_small_store(tmp_path / "pages", splits, shard_bytes=200)
    more = {"train": Ragged.from_lengths(np.arange(300), [10] * 30)}
    build_small_store(tmp_path / "more", more)
    build_small_chat_store(tmp_path / "c", {"train": FIVE}, special_token_ids={"eot": 5})
    (tmp_path / "data.toml").write_text(CONFIG)
    (tmp_path / "bin").mkdir()
    np.arange(500, dtype="<u2").tofile(tmp_path / "bin" / "a.bin")
    (tmp_path / "bin" / "meta.json").write_text('{"dtype": "uint16"}')
    return call


def spans(folder: str, split: str = "train") -> list[list[int]]:
    return read_exclusions(folder).spans(split).tolist()


def test_documents_are_excluded_with_a_receipt(run, tmp_path):
    arguments = ("exclude", "pages", "--document", "3", "--document", "4", "--reason", "takedown")
    code, out, err = run(*arguments, "--seq-len", "10")
    assert (code, err) == (0, "")
    assert out == (
        f"{tmp_path}/pages: entry 1, train: 2 documents (3, 4), 24 tokens: takedown "
        "(24 of these tokens were not excluded before; 3 of 59 windows have one of them)\n"
    )
    assert spans("pages") == [[36, 60]]
    _, out, _ = run("exclude", "pages/val", "--document", "0", "--reason", "b", "--json")
    (facts,) = json.loads(out)["excluded"]
    assert facts == {
        "store": f"{tmp_path}/pages",
        "written": True,
        "new_tokens": 12,
        "windows": None,
        "of_windows": None,
        "stand_ins": 0,
        "entry": {
            "number": 2,
            "split": "val",
            "reason": "b",
            "documents": [0],
            "steps": None,
            "spans": [[0, 12]],
            "tokens": 12,
        },
    }


def test_numbers_may_come_from_a_file(run, tmp_path):
    (tmp_path / "list").write_text("7\n\n 2 \n3\n")
    code, out, _ = run(
        "exclude", "pages", "--documents", "list", "--document", "9", "--reason", "x"
    )
    assert (code, spans("pages")) == (0, [[24, 48], [84, 96], [108, 120]])
    assert "4 documents (2, 3, 7, 9), 48 tokens" in out
    for text, words in (("7\nx\n", "line 2: x: wanted a number from 0"), ("\n", "no number in it")):
        (tmp_path / "list").write_text(text)
        code, _, err = run("exclude", "pages", "--documents", "list", "--reason", "x")
        assert (code, words in err) == (2, True)


def test_a_dry_run_prints_and_writes_nothing(run, tmp_path):
    arguments = ("exclude", "pages", "--document", "3", "--reason", "x", "--dry-run")
    code, out, _ = run(*arguments)
    assert (code, out) == (
        0,
        f"{tmp_path}/pages: would be excluded, train: 1 documents (3), 12 tokens: x "
        "(12 of these tokens were not excluded before)\n",
    )
    facts = json.loads(run(*arguments, "--json")[1])["excluded"][0]
    assert (facts["written"], facts["entry"]["number"]) == (False, None)
    assert not (tmp_path / "pages" / "exclude.json").exists()


def test_steps_are_the_tokens_of_all_samples_of_all_ranks(run):
    code, out, err = run("exclude", "pages", "--step", "4:6", *TRAINING, "--reason", "spike")
    assert (code, err) == (0, "")
    shutil.copytree("pages", "copy", ignore=shutil.ignore_patterns("exclude.json"))
    plain = SampleStream([TokenSource("copy", seq_len=10, name="pages")])
    items = plain.take(range(24, 36)).item
    tokens = {t for item in items.tolist() for t in range(10 * item, 10 * item + 11)}
    assert {t for start, stop in spans("pages") for t in range(start, stop)} == tokens
    (entry,) = read_exclusions("pages").entries
    assert entry.steps is not None
    assert (entry.steps.source, entry.steps.start, entry.steps.stop) == ("pages", 4, 6)
    assert (entry.steps.world, entry.steps.batch_size, entry.steps.seq_len) == (3, 2, 10)
    assert f"steps 4..6 of source 'pages' (3 x 2 samples, seq_len 10, seed 0), {len(tokens)}" in out


def test_a_run_continues_unchanged_after_excluded_steps(run):
    def rows(step: int) -> list[tuple[int, bytes]]:
        found = []
        for rank in range(3):
            stream = SampleStream([TokenSource("pages", seq_len=10)])
            batch = next(islice(iter(Loader(stream, batch_size=2, rank=rank, world=3)), step, None))
            found += list(zip(batch.samples, map(np.ndarray.tobytes, batch.input_ids), strict=True))
        return found

    before = [rows(step) for step in range(8)]
    run("exclude", "pages", "--step", "5", *TRAINING, "--reason", "spike")
    after = [rows(step) for step in range(8)]
    assert all(old != new for old, new in zip(before[5], after[5], strict=True))
    given = {ids for step in after for _, ids in step}
    assert not given & {ids for _, ids in before[5]}
    _, out, _ = run("show", "pages", "--step", "5", "--rank", "1", *TRAINING, "--json")
    shown = json.loads(out)["rows"]
    assert [np.array(row["input_ids"]).tobytes() for row in shown] == [r[1] for r in after[5][2:4]]
    assert all(row["instead_of"] is not None for row in shown)
    _, out, _ = run("show", "pages", "--step", "5", *TRAINING)
    assert out.count(" is excluded here\n") == 2
    arguments = ("--step", "5", *TRAINING, "--reason", "again", "--dry-run")
    _, out, _ = run("exclude", "pages", *arguments)
    assert "6 samples of these steps replace excluded ones" in out


def test_a_config_gives_every_store_its_part(run):
    plain = open_stream(read_config("data.toml"), seq_len=10, global_batch_size=6)
    found = plain.take(range(60, 120))
    wanted: dict[str, set[int]] = {}
    for source, item in zip(found.source.tolist(), found.item.tolist(), strict=True):
        name = plain.names[source]
        wanted.setdefault(name, set()).update(range(10 * item, 10 * item + 11))
    arguments = ("--config", "data.toml", "--step", "10:20", *TRAINING, "--reason", "spike")
    code, out, err = run("exclude", *arguments)
    assert (code, err, len(out.splitlines())) == (0, "", 3)
    for name, folder, split in (
        ("pages", "pages", "train"),
        ("other", "pages", "val"),
        ("more", "more", "train"),
    ):
        tokens = {t for start, stop in spans(folder, split) for t in range(start, stop)}
        assert tokens == wanted[name], name
    assert [entry.steps.seed for entry in read_exclusions("pages").entries] == [7, 7]
    for folder in ("pages", "more"):
        Path(folder, "exclude.json").unlink()
    code, out, _ = run("exclude", "more", *arguments)
    assert (code, len(out.splitlines()), Path("pages/exclude.json").exists()) == (0, 1, False)


def test_entries_are_listed_and_taken_back(run, tmp_path):
    assert run("exclude", "pages", "--list")[1] == f"{tmp_path}/pages: nothing is excluded\n"
    run("exclude", "pages", "--document", "3", "--reason", "one\x1b[31m")
    run("exclude", "pages", "--step", "2", *TRAINING, "--reason", "two")
    code, out, _ = run("exclude", "pages", "--list")
    first, second, total = out.splitlines()
    assert first == "entry 1, train: 1 documents (3), 12 tokens: one\\x1b[31m"
    assert second.startswith("entry 2, train: steps 2..3 of source 'pages'")
    assert total.endswith(" of 600 tokens are excluded")
    facts = json.loads(run("exclude", "pages", "--list", "--json")[1])
    assert [entry["number"] for entry in facts["entries"]] == [1, 2]
    assert facts["sha256"] == read_exclusions("pages").sha256
    code, out, _ = run("exclude", "pages", "--remove", "2")
    assert (code, out.startswith(f"{tmp_path}/pages: taken back: entry 2, train: steps")) == (
        0,
        True,
    )
    assert spans("pages") == [[36, 48]]
    code, _, err = run("exclude", "pages", "--remove", "2")
    assert (code, "no entry 2; its entries are: 1" in err) == (2, True)


def test_info_verify_and_diff_name_exclusions(run, tmp_path):
    shutil.copytree("pages", "copy")
    assert json.loads(run("info", "pages", "--json")[1])["exclusions"] == []
    run("exclude", "pages", "--document", "3", "--reason", "x")
    out = run("info", "pages")[1]
    assert "excluded train" in out
    assert "12 of 600 tokens, by 1 entries" in out
    assert json.loads(run("info", "pages", "--json")[1])["exclusions"][0]["spans"] == [[36, 48]]
    assert run("verify", "pages")[0] == 0
    code, out, _ = run("diff", "copy", "pages")
    assert code == 1
    assert "  exclusions:\n    train: 0 tokens by 0 entries -> 12 tokens by 1 entries\n" in out
    shutil.copy("pages/exclude.json", "copy")
    assert run("diff", "copy", "pages")[0] == 0
    path = tmp_path / "pages" / "exclude.json"
    path.write_bytes(path.read_bytes().replace(b'"x"', b'"y"'))
    code, _, err = run("verify", "pages")
    assert (code, "exclude.json: its sha256 is not the one it says" in err) == (1, True)


def test_conversations_are_excluded_and_a_new_plan_says_so(run):
    code, out, _ = run("exclude", "c", "--document", "0", "--reason", "takedown")
    assert (code, "1 documents (0), 5 tokens: takedown" in out) == (0, True)
    code, out, _ = run("pack", "c", "--seq-len", "6", "--long", "split")
    assert code == 0
    assert "  excluded: 1 of 3 rows have excluded tokens; other rows replace them" in out
    build_plan("c", options=PlanOptions(seq_len=12))
    code, _, err = run("exclude", "c", "--document", "1", "--reason", "x", "--seq-len", "8")
    assert (code, "holds conversations, which are not cut into windows" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pages",), "found 0 things to do; wanted one of --document"),
        (("pages", "--list", "--remove", "1"), "found 2 things to do"),
        (("pages", "--document", "1"), "--reason is missing"),
        (("pages", "--document", "50", "--reason", "x"), "document 50 of 50 in split 'train'"),
        (("pages", "--document", "1", "--reason", "x", "--world", "2"), "--world is for --step"),
        (("--document", "1", "--reason", "x"), "name the store"),
        (("bin", "--document", "1", "--reason", "x"), "not a store, so nothing can be recorded"),
        (("bin", "--step", "1", "--reason", "x", *TRAINING), "is not a store, so nothing can be"),
        (("pages", "--step", "1", "--reason", "x", "--seq-len", "9"), "--batch-size is missing"),
        (("pages", "--step", "5:5", "--reason", "x", *TRAINING), "holds no step"),
        (("pages", "--step", "5-7", "--reason", "x", *TRAINING), "wanted a step, as 31207"),
        (("pages", "--step", "0:99999999", "--reason", "x", *TRAINING), "exclude fewer steps"),
        (("pages", "--remove", "1", "--dry-run"), "nothing to try out"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_written(run, tmp_path, arguments, words):
    code, _, err = run("exclude", *arguments)
    assert (code, words in err) == (2, True), err
    assert not (tmp_path / "pages" / "exclude.json").exists()
