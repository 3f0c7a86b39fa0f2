"""Careless or hostile changes between a stop and a resume are refused, and nothing is lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.building import BuildSpec, Feed, build_store, has_unfinished_build
from shardmill.errors import (
    BuildError,
    BuildLockedError,
    OptionError,
    ShardmillError,
    UnfinishedBuildError,
)
from shardmill.sources import BatchLimits, JsonlSource
from shardmill.storage import files as source_files
from shardmill.store import open_store
from shardmill.tokenizers import open_tokenizer
from tests.helpers import folder_digest


class Stopped(Exception):
    """Stands for a process that ends in mid-build."""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten documents a batch and a batch a unit; only the ends of the file are hashed."""
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 200)
    monkeypatch.setattr(source_files, "FULL_HASH_BYTES", 10)
    monkeypatch.setattr(source_files, "END_BYTES", 30)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one two"}\n' * 200)
    return tmp_path / "a.jsonl"


def build(corpus: Path, *, stop_at: int | None = None, out: str = "s", **options: object) -> Path:
    def tell(progress) -> None:
        if stop_at is not None and progress.documents > stop_at:
            raise Stopped

    source = JsonlSource(corpus, limits=BatchLimits(num_documents=10))
    build_store(
        [Feed(source=source, fill=(("train", None),))],
        corpus.parent / out,
        tokenizer=open_tokenizer("byte"),
        spec=BuildSpec(shard_bytes=500),
        on_progress=tell,
        **options,
    )
    return corpus.parent / out


def stop(corpus: Path) -> Path:
    with pytest.raises(Stopped):
        build(corpus, stop_at=100)
    return corpus.parent / ".s.building"


def test_an_edit_that_the_ends_do_not_show_still_stops_a_resume(corpus):
    stop(corpus)
    before = corpus.stat()
    data = corpus.read_bytes()
    corpus.write_bytes(data[:500] + data[500:-500].replace(b"one", b"ONE") + data[-500:])
    os.utime(corpus, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(UnfinishedBuildError, match=r"a\.jsonl: last written"):
        build(corpus, resume=True)


@pytest.mark.parametrize("note", ["plan", "produced_by", "run"])
@pytest.mark.parametrize("content", ["{bad", "[]", '{"name": "../../elsewhere"}'])
def test_a_damaged_note_is_refused_and_overwrite_starts_again(corpus, note, content):
    work = stop(corpus)
    (work / f"{note}.json").write_text(content)
    with pytest.raises(BuildError, match="overwrite=True"):
        build(corpus, resume=True)
    open_store(build(corpus, overwrite=True))


def test_nothing_that_no_build_made_is_deleted(corpus):
    victim = corpus.parent / "victim"
    victim.mkdir()
    (victim / "precious.txt").write_text("mine")
    (corpus.parent / ".s.building").symlink_to(victim)
    with pytest.raises(BuildError, match="move it away"):
        build(corpus)
    (corpus.parent / ".s.building").unlink()
    victim.rename(corpus.parent / ".s.building")
    with pytest.raises(BuildError, match=r"precious\.txt"):
        build(corpus, overwrite=True)
    assert (corpus.parent / ".s.building/precious.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["lock", "run", "run-0123456789abcdef", "plan.json", ".plan.json.0.tmp"]
)
@pytest.mark.parametrize("kind", ["link", "other kind"])
@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}])
def test_what_takes_a_name_of_the_build_is_refused_and_left(corpus, name, kind, how):
    work = stop(corpus)
    if name == "run":
        (path,) = work.glob("run-*")
    else:
        path = work / name
    victim = corpus.parent / "victim"
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "link":
        victim.mkdir() if name.startswith("run") else victim.write_text("mine")
        path.symlink_to(victim)
    elif name.startswith("run"):
        path.write_text("mine")
    else:
        path.mkdir()
    with pytest.raises(BuildError, match=re.escape(f"{path}: not made by a build")) as refused:
        build(corpus, **how)
    assert "move it away" in str(refused.value)
    assert path.is_symlink() == (kind == "link")
    assert path.exists()


def test_a_call_that_was_refused_leaves_no_unfinished_build(corpus):
    with pytest.raises(OptionError, match="shard_bytes"):
        build_store(
            [Feed(source=JsonlSource(corpus), fill=(("train", None),))],
            corpus.parent / "s",
            tokenizer=open_tokenizer("byte"),
            spec=BuildSpec(shard_bytes=3),
        )
    corpus.write_text("broken\n")
    with pytest.raises(ShardmillError, match="broken JSON"):
        build(corpus)
    assert [path.name for path in corpus.parent.iterdir()] == ["a.jsonl"]


@pytest.mark.slow
def test_a_living_build_is_not_called_unfinished(corpus):
    seen = []

    def look(progress) -> None:
        if len(seen) < 2:  # each look waits a moment for a dying holder of the lock
            seen.append(has_unfinished_build(corpus.parent / "s"))

    build_store(
        [Feed(source=JsonlSource(corpus), fill=(("train", None),))],
        corpus.parent / "s",
        tokenizer=open_tokenizer("byte"),
        spec=BuildSpec(),
        on_progress=look,
    )
    assert set(seen) == {False}


def test_who_holds_the_lock_is_named(corpus):
    work = stop(corpus)
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(work / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout.readline()
        wanted = re.escape(f"(process {holder.pid} holds {work / 'lock'})")
        with pytest.raises(BuildLockedError, match=wanted):
            build(corpus, resume=True)
        holder.communicate(b"\n")
    assert build(corpus, resume=True) == corpus.parent / "s"


def test_a_killed_overwrite_is_resumed_by_the_words_of_the_message(corpus):
    other = corpus.with_name("b.jsonl")
    other.write_text('{"text": "other"}\n')
    build(other)
    with pytest.raises(Stopped):
        build(corpus, stop_at=100, overwrite=True)
    with pytest.raises(ShardmillError, match="resume=True and overwrite=True"):
        build(corpus, resume=True)
    build(other, resume=True)  # the finished store; the unfinished work beside it stays
    assert has_unfinished_build(corpus.parent / "s")
    build(corpus, out="whole")
    done = build(corpus, resume=True, overwrite=True)
    assert folder_digest(done) == folder_digest(corpus.parent / "whole")
