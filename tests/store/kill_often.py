"""Builds and publishes stores in children that are killed; checks what each one leaves.

Run as `python kill_often.py FOLDER at-events|at-times KILLS SEED`. Prints one JSON object.
at-events: the n-th child dies just before the n-th file operation of the build that Python's
audit events know (open, rename, mkdir, remove, ...), until one lives through all of them.
at-times: children are killed at random instants, KILLS of them before their build was over.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.records import Ragged
from shardmill.store import StoreWriter, open_store, publish_folder, verify
from shardmill.testing.stores import plain_facts, read_documents

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree")


def version(number: int) -> Ragged:
    """Documents of which every token says which build they belong to."""
    return Ragged.from_lengths(np.full(3000, number), np.full(300, 10))


def build(staged: Path, target: Path, number: int) -> None:
    documents = version(number)
    with StoreWriter(staged, splits=["a", "b"], dtype="uint16", shard_bytes=2000) as out:
        for start in range(0, 300, 50):
            out.append("a", documents.slice(start, start + 50))
        out.finish(plain_facts({"a": documents}))
    publish_folder(staged, target, overwrite=True)


def found_in(folder: Path) -> int | None:
    """Which version is here, whole; None when nothing opens. Anything else is a failure."""
    try:
        open_store(folder)
    except ShardmillError:
        return None
    assert verify(folder).problems == [], folder
    documents = read_documents(folder, "a")
    number = int(documents.values[0])
    assert documents == version(number), folder
    return number


def child(place: Path, number: int, die_at: int | None) -> int:
    """Start a build of version `number`; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    left = die_at

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        file = event in EVENTS and str(place) in str(args[0])
        exchange = event == "ctypes.dlsym" and args[1] == "renameat2"
        if left is not None and (file or exchange):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    build(place / f"staged-{number}", place / "store", number)
    os._exit(0)


def check(place: Path, number: int, status: int, counts: dict[str, int]) -> None:
    """After each child: the old version or the new one, whole, and never a half."""
    old = counts["version"]
    now = found_in(place / "store") or 0
    assert now in (old, number), f"version {now} at the target, wanted {old} or {number}"
    assert old == 0 or now, "the old store vanished"
    assert status != 0 or now == number, "a build that ended well is not there"
    for path in place.iterdir():
        if path.name != "store":
            half = found_in(path)
            counts["openable leftovers"] += half is not None
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    counts["version"] = now
    counts["killed"] += status == signal.SIGKILL
    counts["replaced"] += now != old


def at_events(place: Path, counts: dict[str, int]) -> None:
    """Kill before the first operation, before the second, ... until a build lives."""
    status = int(signal.SIGKILL)
    while status == signal.SIGKILL:
        status = one_build(place, counts, die_at=counts["builds"] - 1)


def at_times(place: Path, counts: dict[str, int], kills: int, draw: random.Random) -> None:
    """Kill at random instants of a build until `kills` of them hit a living one."""
    whole = 1.0
    while counts["killed"] < kills and counts["builds"] < 20 * kills:
        start = time.monotonic()
        if one_build(place, counts, die_after=draw.uniform(0, 1.1 * whole)) == 0:
            whole = min(whole, time.monotonic() - start)


def one_build(
    place: Path, counts: dict[str, int], *, die_at: int | None = None, die_after: float = 60.0
) -> int:
    """One child from start to end; returns its status after checking what it left."""
    counts["builds"] += 1
    number = counts["builds"]
    pid = child(place, number, die_at)
    limit = time.monotonic() + die_after
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended:
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0)
        else:
            time.sleep(0.0002)
            ended, status = os.waitpid(pid, os.WNOHANG)
    assert status in (0, signal.SIGKILL), f"the child failed: {status}"
    check(place, number, status, counts)
    return status


def main() -> None:
    place, mode, kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    counts = {"version": 0, "killed": 0, "replaced": 0, "openable leftovers": 0, "builds": 0}
    one_build(place, counts)
    if mode == "at-events":
        at_events(place, counts)
    else:
        at_times(place, counts, kills, random.Random(seed))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
