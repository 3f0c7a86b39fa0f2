"""build-all as people run it: in its own process, on the examples of this repository."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from niels_gpt.cache import read_meta, sha256_file
from niels_gpt.cache.cli import choose, main
from niels_gpt.tokenizer import load_tokenizer
from shardmill.errors import OptionError, StoreNotFoundError
from shardmill.records import IntArray
from shardmill.store import Store, open_store, verify
from tests.helpers import folder_digest
from tests.niels_gpt.conftest import EXAMPLES, ROOT

SPLITS = ("train", "val")
STORES = (
    "pretrain/fineweb_edu",
    "pretrain/roam",
    "pretrain/wikitext",
    "sft/dolly15k",
    "sft/oasst1",
)


@pytest.fixture
def flags(tmp_path: Path, model: Path, pages: Path, wiki: Path) -> list[str]:
    """A build of everything but gutenberg from local files."""
    return [
        "build-all",
        *("--cache-dir", str(tmp_path / "cache"), "--seed", "42", "--tokenizer", str(model)),
        *("--fineweb-path", str(pages), "--fineweb-train-tokens", "4000"),
        *("--fineweb-val-tokens", "500", "--shuffle-buffer", "20", "--shard-bytes", "1KiB"),
        *("--wikitext-path", str(wiki), "--roam-dir", str(EXAMPLES / "notes")),
        *("--dolly-path", str(EXAMPLES / "chats" / "questions.jsonl")),
        *("--oasst1-path", str(EXAMPLES / "chats" / "trees.jsonl")),
    ]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "niels_gpt.cache.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={"COLUMNS": "200"}
    )


def tokens(store: Store, split: str) -> IntArray:
    """All tokens of a split, with numpy alone."""
    files = store.token_files(split)
    return np.concatenate([np.fromfile(file.path, "<u2") for file in files])


def spans(store: Store, split: str) -> list[tuple[int, int]]:
    edges = [*store.document_starts(split).tolist(), store.num_tokens(split)]
    return list(pairwise(edges))


@pytest.mark.slow
def test_build_all_makes_the_prescribed_tree(flags: list[str], tmp_path: Path, model: Path) -> None:
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    cache = tmp_path / "cache"
    files = {path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()}
    assert {
        "tokenizer/spm.model",
        "tokenizer/meta.json",
        "pretrain/fineweb_edu/train/shard_00000.bin",
        "pretrain/fineweb_edu/val/shard_00000.bin",
        "pretrain/fineweb_edu/meta.json",
        "pretrain/roam/train/shard_00000.bin",
        "pretrain/roam/val/shard_00000.bin",
        "pretrain/wikitext/train/shard_00000.bin",
        "pretrain/wikitext/val/shard_00000.bin",
        "pretrain/gutenberg/meta.json",
        *(f"sft/{name}/{split}_tokens.bin" for name in ("dolly15k", "oasst1") for split in SPLITS),
        *(f"sft/{name}/{split}_idx.npy" for name in ("dolly15k", "oasst1") for split in SPLITS),
        "sft/dolly15k/meta.json",
        "sft/oasst1/meta.json",
    } <= files
    for store in STORES:
        assert verify(cache / store).problems == []
        assert store.split("/")[1] in done.stdout
    assert sha256_file(str(cache / "tokenizer" / "spm.model")) == sha256_file(str(model))


def test_what_was_built_is_recorded(flags: list[str], tmp_path: Path, model: Path) -> None:
    assert main(flags) == 0
    cache = tmp_path / "cache"
    sha256 = sha256_file(str(model))
    for store in (*STORES, "pretrain/gutenberg"):
        meta = read_meta(str(cache / store / "meta.json"))
        assert meta["tokenizer_sha256"] == sha256
        assert meta["special_token_ids"] == {"sys": 1, "usr": 2, "asst": 3, "eot": 4}
        assert (meta["seed"], meta["token_dtype"]) == (42, "uint16-le")
        assert (meta["vocab_size"], meta["streaming"]) == (800, False)
        kind = "tokens" if store.startswith("pretrain") else "examples"
        assert meta.keys() >= {f"train_{kind}", f"val_{kind}", "split_rule", "dataset_config"}
    fineweb = read_meta(str(cache / "pretrain" / "fineweb_edu" / "meta.json"))
    assert (fineweb["train_tokens"], fineweb["val_tokens"]) == (4000, 500)
    assert (fineweb["shuffle_buffer"], fineweb["append_eot"]) == (20, True)
    assert fineweb["shard_bytes"] == 1024
    stub = cache / "pretrain" / "gutenberg"
    assert read_meta(str(stub / "meta.json"))["built"] is False
    assert sorted(path.name for path in stub.iterdir()) == ["meta.json", "train", "val"]
    with pytest.raises(StoreNotFoundError, match="not built"):
        open_store(stub)
    oasst = read_meta(str(cache / "sft" / "oasst1" / "meta.json"))
    assert oasst["options"]["messages"]["left_out"] == {"deleted": 1, "other_language": 4}
    tokenizer = read_meta(str(cache / "tokenizer" / "meta.json"))
    assert tokenizer["tokenizer_sha256"] == sha256
    assert tokenizer["vocab_size"] == 800


def test_notes_in_the_store_are_the_files_of_their_side(
    flags: list[str], tmp_path: Path, model: Path
) -> None:
    assert main([*flags, "--only", "roam", "--no-append-eot"]) == 0
    tokenizer = load_tokenizer(model)
    store = open_store(tmp_path / "cache" / "pretrain" / "roam")
    found = []
    for split in ("train", "val"):
        assert store.num_documents(split) == {"train": 19, "val": 2}[split]
        for start, stop in spans(store, split):
            found.append(tokenizer.decode(tokens(store, split)[start:stop]))
    assert sorted(found) == sorted(path.read_text() for path in (EXAMPLES / "notes").iterdir())


def test_one_failure_does_not_lose_the_others_and_resume_ends_equal(
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    notes = tmp_path / "notes"
    flags[flags.index("--roam-dir") + 1] = str(notes)
    assert main(flags) == 1
    failed = capsys.readouterr()
    assert "roam failed" in failed.err
    assert "name your notes with --roam-dir" in failed.err
    assert failed.err.rstrip().endswith("--resume")
    assert "failed: SourceError" in failed.out
    cache = tmp_path / "cache"
    built = [store for store in STORES if store != "pretrain/roam"]
    assert not (cache / "pretrain" / "roam").exists()
    before = {store: (cache / store / "meta.json").stat().st_mtime_ns for store in built}
    notes.symlink_to(EXAMPLES / "notes")
    assert main([*flags, "--resume"]) == 0
    assert capsys.readouterr().out.count("finished before") == 4
    after = {store: (cache / store / "meta.json").stat().st_mtime_ns for store in built}
    assert after == before
    flags[flags.index("--cache-dir") + 1] = str(tmp_path / "again")
    assert main(flags) == 0
    assert folder_digest(tmp_path / "again") == folder_digest(cache)


def test_finished_stores_are_kept_unless_asked(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags += ["--only", "dolly15k,roam"]
    assert main(flags) == 0
    digest = folder_digest(tmp_path / "cache")
    assert main(flags) == 1
    assert "StoreExistsError" in capsys.readouterr().out
    assert main([*flags, "--seed", "43", "--resume"]) == 1
    messages = capsys.readouterr().err
    assert "dolly15k failed" in messages
    assert "seed 42" in messages
    assert "seed 43" in messages
    assert folder_digest(tmp_path / "cache") == digest
    assert main([*flags, "--seed", "43", "--overwrite"]) == 0
    assert folder_digest(tmp_path / "cache") != digest
    assert main([*flags, "--overwrite"]) == 0
    assert folder_digest(tmp_path / "cache") == digest


def test_a_cache_keeps_to_one_tokenizer(
    flags: list[str], tmp_path: Path, other_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags += ["--only", "roam"]
    assert main(flags) == 0
    place = flags.index("--tokenizer")
    other = [*flags[:place], "--tokenizer", str(other_model), *flags[place + 2 :], "--resume"]
    assert main(other) == 2
    assert "another model" in capsys.readouterr().err
    without = [*flags[:place], *flags[place + 2 :], "--resume"]
    assert main(without) == 0


def test_a_missing_tokenizer_is_an_error_that_says_how_to_train_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build-all", "--cache-dir", str(tmp_path / "c")]) == 2
    messages = capsys.readouterr().err
    assert "shardmill tokenizer train" in messages
    assert "'eot=<|ngpt_eot_84a5023f67d74cf29cc4001becde983c|>'" in messages
    assert not (tmp_path / "c").exists()


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs the command inside `tmp_path`, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run_here(*words: str) -> subprocess.CompletedProcess[str]:
        code = main(list(words))
        written = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, written.out, written.err)

    return run_here


def test_the_exact_command_finds_the_tokenizer_that_the_recipe_trained(
    tmp_path: Path, model: Path, command: Command
) -> None:
    trained = tmp_path / "artifacts" / "tokenizer" / "spm.model"
    trained.parent.mkdir(parents=True)
    trained.write_bytes(model.read_bytes())
    exact = ("build-all", "--cache-dir", "cache", "--seed", "42")
    done = command(*exact, "--only", "roam,gutenberg")
    assert done.returncode == 0, done.stderr
    installed = tmp_path / "cache" / "tokenizer" / "spm.model"
    assert sha256_file(str(installed)) == sha256_file(str(model))
    assert "artifacts/tokenizer/spm.model" in done.stderr


def test_the_tokenizer_of_the_cache_comes_before_the_trained_one(
    tmp_path: Path, model: Path, other_model: Path, command: Command
) -> None:
    for folder, file in (("artifacts/tokenizer", other_model), ("cache/tokenizer", model)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "spm.model").write_bytes(file.read_bytes())
    assert command("build-all", "--only", "gutenberg").returncode == 0
    installed = tmp_path / "cache" / "tokenizer" / "spm.model"
    assert sha256_file(str(installed)) == sha256_file(str(model))


def test_without_any_tokenizer_the_command_that_trains_one_is_named(
    tmp_path: Path, command: Command
) -> None:
    done = command("build-all", "--cache-dir", "cache", "--seed", "42")
    assert done.returncode == 2
    assert "artifacts/tokenizer/spm.model" in done.stderr
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text((EXAMPLES / "notes" / "Bread.md").read_text())
    training = next(line for line in done.stderr.splitlines() if "tokenizer train" in line)
    words = [*shlex.split(training), "--vocab-size", "320"]
    words[words.index("texts/*.txt")] = str(tmp_path / "texts" / "a.txt")
    trained = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=False
    )
    assert trained.returncode == 0
    assert command("build-all", "--only", "gutenberg").returncode == 0


def test_unnamed_notes_that_do_not_exist_give_a_stub(
    tmp_path: Path, model: Path, command: Command
) -> None:
    words = ("build-all", "--only", "roam,gutenberg", "--tokenizer", str(model))
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert "--roam-dir" in done.stdout
    stub = tmp_path / "cache" / "pretrain" / "roam"
    meta = read_meta(str(stub / "meta.json"))
    assert (meta["built"], meta["dataset_name"], meta["split_rule"]) == (False, "roam", "not built")
    assert sorted(path.name for path in stub.iterdir()) == ["meta.json", "train", "val"]
    named = command(*words, "--roam-dir", "data/roam")
    assert named.returncode == 1
    assert "data/roam: no such folder" in named.stderr


def test_notes_in_the_default_folder_are_built_over_the_stub(
    tmp_path: Path, model: Path, command: Command
) -> None:
    words = ("build-all", "--only", "roam", "--tokenizer", str(model))
    assert command(*words).returncode == 0
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "roam").symlink_to(EXAMPLES / "notes")
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert open_store(tmp_path / "cache" / "pretrain" / "roam").num_documents("train") == 19
    (tmp_path / "data" / "roam").unlink()
    kept = command(*words)
    assert (kept.returncode, "kept" in kept.stdout) == (0, True)


def test_a_kept_store_of_another_tokenizer_is_an_error(
    tmp_path: Path, model: Path, other_model: Path, command: Command
) -> None:
    words = ("build-all", "--only", "roam", "--overwrite", "--tokenizer")
    notes = ("--roam-dir", str(EXAMPLES / "notes"))
    assert command(*words, str(model), *notes).returncode == 0
    done = command(*words, str(other_model))
    assert done.returncode == 1
    assert "another tokenizer" in done.stderr


def oasst1(command: Command, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Ten trees of four threads each."""
    rows = []
    for tree in range(10):
        root = {"message_id": f"t{tree}", "parent_id": None, "role": "prompter"}
        answers = [
            {"message_id": f"t{tree}-{n}", "parent_id": f"t{tree}", "role": "assistant"}
            for n in range(4)
        ]
        for row in (root, *answers):
            row |= {"text": row["message_id"], "lang": "en", "message_tree_id": f"t{tree}"}
            rows.append(json.dumps(row) + "\n")
    (folder / "trees.jsonl").write_text("".join(rows))
    return command("build-all", "--only", "oasst1", "--oasst1-path", "trees.jsonl", *words)


def examples_of(folder: Path, split: str) -> list[str]:
    tokenizer = load_tokenizer(folder / "tokenizer")
    store = open_store(folder / "sft" / "oasst1")
    ids = tokens(store, split)
    return [tokenizer.decode(ids[start:stop]) for start, stop in spans(store, split)]


def test_the_chat_split_is_by_example_as_written(
    tmp_path: Path, model: Path, command: Command
) -> None:
    done = oasst1(command, tmp_path, "--tokenizer", str(model))
    assert done.returncode == 0, done.stderr
    cache = tmp_path / "cache"
    order = torch.randperm(40, generator=torch.Generator().manual_seed(42)).tolist()
    threads = [f"t{n // 4}-{n % 4}" for n in range(40)]
    for split, wanted in (("val", sorted(order[:4])), ("train", sorted(order[4:]))):
        found = examples_of(cache, split)
        assert [next(name for name in threads if name in text) for text in found] == [
            threads[n] for n in wanted
        ]
    meta = read_meta(str(cache / "sft" / "oasst1" / "meta.json"))
    assert meta["split_rule"].startswith("by example: torch.randperm(n, seed 42)")
    messages = [line for line in done.stderr.splitlines() if "--sft-split tree" in line]
    assert len(messages) == 1
    assert "of 10 trees" in messages[0]


def test_sft_split_tree_keeps_trees_together_and_records_it(
    tmp_path: Path, model: Path, command: Command
) -> None:
    done = oasst1(command, tmp_path, "--tokenizer", str(model), "--sft-split", "tree")
    assert done.returncode == 0, done.stderr
    cache = tmp_path / "cache"
    train, val = (examples_of(cache, split) for split in SPLITS)
    assert (len(train), len(val)) == (36, 4)
    (tree,) = (f"t{n}-" for n in range(10) if any(f"t{n}-" in text for text in val))
    assert all(tree in text for text in val)
    assert not any(tree in text for text in train)
    meta = read_meta(str(cache / "sft" / "oasst1" / "meta.json"))
    assert meta["split_rule"].endswith("chats of one tree count as one")
    assert "--sft-split" not in done.stderr
    changed = oasst1(command, tmp_path, "--resume")
    assert changed.returncode == 1
    assert "by example" in changed.stderr
    assert oasst1(command, tmp_path, "--resume", "--sft-split", "tree").returncode == 0


def test_a_cache_of_single_chats_resumes_under_either_split(
    tmp_path: Path, model: Path, command: Command
) -> None:
    chats = ("--only", "dolly15k", "--dolly-path", str(EXAMPLES / "chats" / "questions.jsonl"))
    words = ("build-all", *chats, "--tokenizer", str(model))
    assert command(*words, "--sft-split", "tree").returncode == 0
    done = command(*words, "--resume")
    assert (done.returncode, "finished before" in done.stdout) == (0, True), done.stderr


def test_only_and_skip_choose_sources() -> None:
    assert [recipe.name for recipe in choose(["oasst1,roam"], [])] == ["roam", "oasst1"]
    assert [recipe.name for recipe in choose([], ["fineweb-edu", "gutenberg"])] == [
        "roam",
        "wikitext",
        "dolly15k",
        "oasst1",
    ]
    with pytest.raises(OptionError, match=r"no source 'books'; there are fineweb_edu"):
        choose(["books"], [])
    with pytest.raises(OptionError, match="leave nothing"):
        choose(["roam"], ["roam"])


def test_a_source_that_keeps_nothing_or_too_little_fails_alone(
    command: Command, tmp_path: Path, model: Path
) -> None:
    good = {"instruction": "2 + 2?", "context": "", "response": "4", "category": "x"}
    rows = [good] * 8 + [{**good, "response": None}] * 2
    Path("dolly.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("pages.jsonl").write_text(json.dumps({"text": ""}) + "\n")
    words = ("build-all", "--only", "dolly15k,fineweb-edu", "--tokenizer", str(model))
    words += ("--dolly-path", "dolly.jsonl", "--fineweb-path", "pages.jsonl")
    done = command(*words)
    assert done.returncode == 1
    assert "nothing is kept of 1 rows; nothing was published" in done.stderr
    assert "2 of 10 rows are lost: 20.0%, above the limit of 5.0%" in done.stderr
    assert "2 content_not_text" in done.stderr
    assert "as dolly:8" in done.stderr
    assert "accept the loss with --max-loss 0.2" in done.stderr
    assert not list(tmp_path.glob("cache/*/*/meta.json"))
    done = command(*words, "--max-loss", "0.2", "--allow-empty")
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("cache/*/*/meta.json"))) == 2
