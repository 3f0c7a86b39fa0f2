"""`shardmill.build` and `shardmill.pack` do what the commands of the same names do."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shardmill.building import BuildSpec, build, build_store, has_unfinished_build, pack
from shardmill.building.api import open_feed
from shardmill.cli import main
from shardmill.cli.commands.build import BuildChatsCommand, BuildCommand
from shardmill.cli.commands.pack import PackCommand
from shardmill.cli.options import parse_bytes
from shardmill.errors import BuildError, OptionError, SourceError, UnfinishedBuildError
from shardmill.remote import pull
from shardmill.store import open_store
from shardmill.tokenizers import open_tokenizer
from tests.building.workplaces import receipts
from tests.helpers import folder_digest


@pytest.fixture(autouse=True)
def inputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two files of pages and one of chats, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for part in range(2):
        rows = [{"text": f"page {part}-{n} " * (n % 7), "body": "x"} for n in range(40)]
        Path(f"p{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": f"a{n} " * (n % 5 + 1)},
            ]
        }
        for n in range(40)
    ]
    Path("c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    fsspec.filesystem("memory").store.clear()


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["shardmill", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code


def same(one: str, other: str) -> bool:
    return folder_digest(Path(one)) == folder_digest(Path(other))


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {}),
        (
            ["--val-tokens", "300", "--max-tokens", "900", "--seed", "3", "--no-append-eot"],
            {"val_tokens": 300, "max_tokens": 900, "seed": 3, "append_eot": False},
        ),
        (
            ["--field", "body", "--name", "x", "--dtype", "uint32", "--shard-bytes", "1MiB"],
            {"field": "body", "name": "x", "dtype": "uint32", "shard_bytes": 2**20},
        ),
    ],
)
def test_documents_give_the_bytes_of_the_command(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], options: dict[str, Any]
) -> None:
    words = ("build", "p*.jsonl", "--tokenizer", "byte:1", "--eot", "<|end|>")
    command(monkeypatch, *words, "--out", "by_command", *flags)
    done = build("p*.jsonl", "by_python", tokenizer="byte:1", eot="<|end|>", **options)
    assert done.folder == Path("by_python").resolve()
    assert same("by_command", "by_python")


def test_conversations_and_plans_give_the_bytes_of_the_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ("build", "chats", "c.jsonl", "--tokenizer", "byte:4", "--template", "chatml")
    flags = ("--val-fraction", "0.2", "--seed", "5", "--train-on", "all")
    specials = {"<|im_start|>": "<|im_start|>", "<|im_end|>": "<|im_end|>"}
    named = [w for key, text in specials.items() for w in ("--special", f"{key}={text}")]
    command(monkeypatch, *words, "--out", "by_command", *flags, *named)
    command(monkeypatch, "pack", "by_command", "--seq-len", "64", "--long", "split")
    build(
        ["c.jsonl"],
        "by_python",
        tokenizer="byte:4",
        template="chatml",
        special=specials,
        val_fraction=0.2,
        seed=5,
        train_on="all",
    )
    plan = pack("by_python", 64, long="split")
    assert plan.facts.options.seq_len == 64
    assert same("by_command", "by_python")


def test_opened_tokenizers_and_templates_are_taken_too() -> None:
    opened = open_tokenizer("byte:1", specials={"eot": "<|end|>"})
    build("p0.jsonl", "opened", tokenizer=opened)
    build("p0.jsonl", "named", tokenizer="byte:1", eot="<|end|>")
    assert same("opened", "named")
    with pytest.raises(OptionError, match="open already"):
        build("p0.jsonl", "other", tokenizer=opened, eot="<|end|>")


def test_a_url_gets_the_same_store_and_the_report_says_what_was_sent() -> None:
    build("p*.jsonl", "local", tokenizer="byte:1", eot="<|end|>")
    url = "memory://bucket/store"
    options = {"tokenizer": "byte:1", "eot": "<|end|>", "report": "r.json"}
    done = build("p*.jsonl", url, **options)  # type: ignore[arg-type]
    pull(url, "copy")
    assert same("local", "copy")
    assert (done.url, done.sent_files) == (url, 4)
    files = [path for path in Path("local").rglob("*") if path.is_file()]
    assert done.sent_bytes == sum(path.stat().st_size for path in files)
    assert json.loads(Path("r.json").read_text()) == done.to_json()
    again = build("p*.jsonl", url, resume=True, **options)  # type: ignore[arg-type]
    assert (again.resumed, again.sent_files, again.url) == (True, 0, url)
    with pytest.raises(OptionError, match="pull it, append to it"):
        build("p*.jsonl", url, append=True, **options)  # type: ignore[arg-type]


def test_an_unfinished_build_is_continued_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 2_000)

    def stop(progress: object) -> None:
        if receipts(Path("s")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build("p*.jsonl", "s", tokenizer="byte:1", eot="<|end|>", on_progress=stop)
    assert has_unfinished_build(Path("s"))
    with pytest.raises(UnfinishedBuildError, match=r"resume=True.*overwrite=True"):
        build("p*.jsonl", "s", tokenizer="byte:1", eot="<|end|>")
    done = build("p*.jsonl", "s", tokenizer="byte:1", eot="<|end|>", resume=True)
    assert done.resumed
    build("p*.jsonl", "whole", tokenizer="byte:1", eot="<|end|>")
    assert same("s", "whole")


def test_options_that_make_no_sense_are_refused_by_name() -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises((OptionError, SourceError), match=match):
            build("p*.jsonl", "s", **{"tokenizer": "byte:1", "eot": "<|end|>", **options})
        assert not Path("s").exists()

    refused("train_on='all': is for conversations", train_on="all")
    refused("val_tokens=2: is for documents", val_tokens=2, template="chatml")
    refused("val_tokens=9: counts tokens in the order of the input", val_tokens=9, val_fraction=0.1)
    refused("val_fraction=1.5: wanted a share", val_fraction=1.5)
    refused("val_tokens=-1: wanted 0 or more", val_tokens=-1)
    refused("none of 80 rows has text in the field 'txt'.*did you mean 'text'", field="txt")
    refused("scratch='x': only for a store at a URL", scratch="x")
    refused("report='p0.jsonl': this file is an input", report="p0.jsonl")
    refused("report='none/r.json': there is no folder none", report="none/r.json")
    with pytest.raises(OptionError, match="out='hub:a/b': a hub dataset, wanted a local folder"):
        build("p*.jsonl", "hub:a/b", tokenizer="byte:1")


@pytest.mark.parametrize("kind", ["documents", "conversations"])
@pytest.mark.parametrize("where", ["in", "in/**/*.json*"])
def test_a_store_in_the_folder_of_its_input_is_no_input(
    kind: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    Path("in").mkdir()
    options: dict[str, Any] = {"tokenizer": "byte:1", "eot": "<|end|>", "on_bad": "skip"}
    if kind == "conversations":
        marks = ("<|im_start|>", "<|im_end|>")
        options = {"tokenizer": "byte:4", "template": "chatml", "on_bad": "skip"}
        options["special"] = {mark: mark for mark in marks}
    rows = Path("p0.jsonl" if kind == "documents" else "c.jsonl").read_text()
    Path("in/a.jsonl").write_text(rows + "broken\n")  # so that there is a dropped.jsonl
    build(where, "in/o", **options)
    before = folder_digest(Path("in/o"))
    assert Path("in/o/dropped.jsonl").exists()
    assert not caplog.messages
    build(where, "in/o", overwrite=True, **options)
    assert folder_digest(Path("in/o")) == before
    assert sum("in/o: holds a store: left out" in message for message in caplog.messages) == 1
    if kind == "documents":
        Path("in/b.jsonl").write_text(Path("p1.jsonl").read_text())
        for _ in range(2):
            done = build(where, "in/o", append=True, **options)
            files = [file["file"] for file in done.manifest.sources[0]["files"]]
            assert files == ["a.jsonl", "b.jsonl"]


def test_input_that_the_build_would_replace_is_refused() -> None:
    options: dict[str, Any] = {"tokenizer": "byte:1", "eot": "<|end|>", "on_bad": "skip"}
    Path("a.jsonl").write_text(Path("p0.jsonl").read_text() + "broken\n")
    fsspec.filesystem("memory").pipe("bucket/a.jsonl", Path("a.jsonl").read_bytes())
    for source, target in (("a.jsonl", "o"), ("memory://bucket/**/*.jsonl", "memory://bucket/o")):
        build(source, target, **options)
        named = source if source.startswith("memory") else "o/dropped.jsonl"
        with pytest.raises(OptionError, match=r"o/dropped\.jsonl: an input, but .*build elsewhere"):
            build(named, target, overwrite=True, **options)
    uri = f"file://{Path.cwd()}/o"
    with pytest.raises(OptionError, match=r"o/dropped\.jsonl: an input, but "):
        build("o/dropped.jsonl", uri, overwrite=True, **options)


def test_a_folder_is_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    Path("in").mkdir()
    Path("in/a.jsonl").write_text(Path("p0.jsonl").read_text())
    Path("in/notes.bin").write_text("1,2")
    with caplog.at_level("INFO"):
        done = build("in", "o", tokenizer="byte:1", eot="<|end|>")
    assert sum("left out 1 files of other endings (1 .bin)" in m for m in caplog.messages) == 1
    assert done.manifest.dataset_name == "in"


def test_a_report_has_its_place_and_a_failure_says_that_the_store_is_complete() -> None:
    options: dict[str, Any] = {"tokenizer": "byte:1", "eot": "<|end|>"}
    for out in ("o", f"file://{Path.cwd()}/o"):
        for report in ("o", ".o.building"):
            with pytest.raises(OptionError, match=f"report='{report}': is for the store alone"):
                build("p0.jsonl", out, report=report, **options)
            assert not Path("o").exists()
    with pytest.raises(BuildError, match=r"report='/dev/full': .*No space left.*o.* is complete"):
        build("p0.jsonl", "o", report="/dev/full", **options)
    with pytest.raises(OptionError, match=r"is for the store alone, which goes to .*/o;"):
        build("p0.jsonl", "o", report="o/r.json", overwrite=True, **options)
    assert build("p0.jsonl", "o", report="r.json", resume=True, **options).resumed
    assert json.loads(Path("r.json").read_text())["store"] == str(Path("o").resolve())


NAMED_OTHERWISE = {
    # what only one of the two has, or where "not given" is written differently
    "build": {"on_progress", "as_json", "dry_run", "template", "shard_bytes"},
    "build chats": {"on_progress", "as_json", "template", "shard_bytes", "seed"},
    "pack": {"store", "folder", "list_all", "as_json", "seq_len"},
}


def flags_of(command: Any) -> dict[str, Any]:
    """The options of a command and their defaults; "required" where there is none."""
    return {f.name: "required" if f.default is MISSING else f.default for f in fields(command)}


def keywords_of(function: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {p.name: "required" if p.default is p.empty else p.default for p in found}


@pytest.mark.parametrize(
    ("name", "function", "command"),
    [
        ("build", build, BuildCommand),
        ("build chats", build, BuildChatsCommand),
        ("pack", pack, PackCommand),
    ],
)
def test_a_keyword_and_its_flag_have_one_name_and_one_default(name, function, command) -> None:
    keywords, flags = keywords_of(function), flags_of(command)
    both = (set(keywords) & set(flags)) - NAMED_OTHERWISE[name]
    assert {key: flags[key] for key in both} == {key: keywords[key] for key in both}
    assert set(flags) - set(keywords) <= NAMED_OTHERWISE[name]


def test_every_keyword_has_a_flag() -> None:
    flags = {**flags_of(BuildCommand), **flags_of(BuildChatsCommand)}
    assert set(keywords_of(build)) - set(flags) == {"on_progress"}
    assert parse_bytes(flags["shard_bytes"], "shard_bytes") == keywords_of(build)["shard_bytes"]
    assert set(keywords_of(pack)) - set(flags_of(PackCommand)) == {"store"}


def test_a_feed_is_what_a_build_of_its_own_needs() -> None:
    feed = open_feed("p*.jsonl", val_tokens=100, max_tokens=500)
    assert feed.fill == (("val", 100), ("train", 500))
    tokenizer = open_tokenizer("byte:1")
    build_store([feed], "s", tokenizer=tokenizer, spec=BuildSpec())
    assert open_store(Path("s")).manifest.splits["train"].tokens == 500
