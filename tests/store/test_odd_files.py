"""A link, a pipe or a folder in place of a file of a store is a problem, and nothing hangs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardmill.building import build_plan
from shardmill.errors import ManifestError
from shardmill.records import Drop
from shardmill.store import (
    Origins,
    PlanOptions,
    StoreWriter,
    exclude_documents,
    open_store,
    read_origins,
    verify,
)
from shardmill.store.plans import write_origins
from shardmill.testing.stores import chat_facts, make_examples

FILES = (
    *("meta.json", "dropped.jsonl", "exclude.json", "origins.table", "packs/train-8.plan"),
    *("train/shard_00000.bin", "train_idx.npy", "train_mask.bin", "train_turns.npy"),
    "train_roles.bin",
)
KINDS = ("pipe", "folder", "link out", "link to nothing", "link to itself", "socket")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A store with every kind of file that there is."""
    folder = tmp_path_factory.mktemp("odd") / "store"
    examples = make_examples([([1], [(1, [(n, False)]), (2, [(9, True)])]) for n in range(5)])
    drops = [Drop(id="x:1", reason="bad")]
    with StoreWriter(folder, splits=["train"], dtype="uint16", shard_bytes=16, chat=True) as writer:
        writer.append_examples("train", examples)
        writer.record_drops(drops)
        manifest = writer.finish(chat_facts({"train": examples}, drops))
    table = np.array([[0, 0, 0, 5, 0]], np.int64)
    origins = Origins(fill=(("train",),), splits=("train",), table=table)
    write_origins(folder, origins, manifest)
    build_plan(folder, options=PlanOptions(seq_len=8))
    exclude_documents(folder, [1], reason="a test")
    assert verify(folder).problems == []
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert there >= set(FILES)
    assert all(f"/{file}".split("/")[-1] for file in there)
    return folder


def put(path: Path, kind: str, aside: Path) -> None:
    """Something else in place of a file, whose contents go to `aside`."""
    path.rename(aside)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        code = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, path.name], cwd=path.parent, check=True)
    else:
        target = {"link out": aside, "link to nothing": "nowhere", "link to itself": path.name}
        path.symlink_to(target[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_what_is_not_the_plain_file_is_a_problem_and_nothing_hangs(sound, tmp_path, file, kind):
    folder = tmp_path / "store"
    shutil.copytree(sound, folder)
    put(folder / file, kind, tmp_path / "aside")
    problems = verify(folder).problems
    assert len(problems) == 1
    assert problems[0].startswith((f"{file}: ", f"{folder / file}: ")), problems


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["train", "packs"])
def test_what_is_not_the_folder_is_a_problem(sound, tmp_path, name, kind):
    if kind == "folder":
        pytest.skip("it is one")
    folder = tmp_path / "store"
    shutil.copytree(sound, folder)
    put(folder / name, kind, tmp_path / "aside")
    problems = verify(folder).problems
    assert problems
    assert all(problem.startswith((f"{name}/", f"{name}: ")) for problem in problems), problems


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_origins_that_is_no_plain_file_is_refused_where_it_is_read(
    sound, tmp_path, kind
):
    folder = tmp_path / "store"
    shutil.copytree(sound, folder)
    put(folder / "origins.table", kind, tmp_path / "aside")
    with pytest.raises(ManifestError, match=r"origins.table: not a plain file"):
        read_origins(folder, open_store(folder).manifest)
    (folder / "origins.table").rmdir() if kind == "folder" else (folder / "origins.table").unlink()
    assert read_origins(folder, open_store(folder).manifest) is None
