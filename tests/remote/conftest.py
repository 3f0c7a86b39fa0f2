"""Stores to move, and places to move them to: memory, a disk, and S3 on loopback."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.cli import main
from shardmill.records import Ragged
from shardmill.remote.folder import RemoteFolder, open_folder
from shardmill.storage import retry
from shardmill.testing.stores import build_small_store
from tests.services import LoopbackS3

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)


@dataclass(frozen=True, slots=True)
class Spot:
    """A URL that nothing was pushed to yet."""

    url: str
    options: dict[str, Any]

    def open(self) -> RemoteFolder:
        return open_folder(self.url, self.options)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[LoopbackS3]:
    for package in ("s3fs", "moto", "flask_cors"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: S3 is not tested")
    with LoopbackS3() as server:
        server.make_bucket("data")
        yield server


@pytest.fixture
def s3(s3_server: LoopbackS3) -> Iterator[LoopbackS3]:
    """The server, with no faults and an empty log."""
    s3_server.faults.clear()
    s3_server.requests.clear()
    yield s3_server
    s3_server.faults.clear()


@pytest.fixture
def s3_spot(s3: LoopbackS3) -> Spot:
    return Spot(f"s3://data/store-{next(_numbers)}", s3.options())


# S3 is in `make quick` through the tests of `s3_spot`
@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def spot(request: pytest.FixtureRequest, tmp_path: Path) -> Spot:
    if request.param == "memory":
        return Spot(f"memory://remote/store-{next(_numbers)}", {})
    if request.param == "file":
        return Spot(f"file://{tmp_path}/elsewhere/store", {})
    found: Spot = request.getfixturevalue("s3_spot")
    return found


@pytest.fixture
def shardmill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command of the command line, in this process."""

    def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["shardmill", *words])
            capsys.readouterr()
            with pytest.raises(SystemExit) as end:
                main()
        found = capsys.readouterr()
        return subprocess.CompletedProcess(words, int(end.value.code or 0), found.out, found.err)

    return run


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., Path]:
    """A store of random documents: 10 train shards of 1,000 bytes, one val shard, two indexes."""

    def make(name: str = "store", seed: int = 0, shard_bytes: int = 1000) -> Path:
        ids = np.random.default_rng(seed).integers(0, 60_000, 5 * shard_bytes)
        splits = {
            "train": Ragged.from_lengths(ids, [shard_bytes // 2] * 10),
            "val": Ragged.from_sequences([[1, 2, seed]]),
        }
        build_small_store(tmp_path / name, splits, shard_bytes=shard_bytes)
        return tmp_path / name

    return make


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file, by relative name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def remote_files(spot: Spot) -> dict[str, bytes]:
    """The same at the other end, read with fsspec alone."""
    place = spot.open()
    found = {}
    for name in place.listing():
        # the flag of a push at work is rewritten all the time; nothing else may vanish
        gone = FileNotFoundError if name.startswith(".shardmill-") else ()
        with suppress(gone):
            found[name] = place.fs.cat_file(place.path(name))
    return found
