"""Tokenizers that are slow, fail or die in a worker: a worker imports them from here."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from shardmill.errors import EngineMismatchError
from shardmill.records import Ragged
from shardmill.tokenizers import ByteTokenizer
from shardmill.tokenizers.base import as_list


class Slow(ByteTokenizer):
    """Gives a killer time: as many seconds for a batch as the environment says."""

    def encode_batch(self, texts) -> Ragged:
        time.sleep(float(os.environ.get("TESTS_PAUSE", "0.03")))
        return super().encode_batch(texts)


class Wide(ByteTokenizer):
    """One text in it has an id that fits no shard; it says it has few ids."""

    def encode_batch(self, texts) -> Ragged:
        ids = super().encode_batch(texts)
        bad = [number for number, text in enumerate(as_list(texts)) if "poison" in text]
        values = ids.values.astype("int64")
        for number in bad:
            values[ids.offsets[number]] = 70_000
        return Ragged(values, ids.offsets)


class Differing(ByteTokenizer):
    """A fast engine that fails its check once, where a file says so; the file is then removed."""

    def encode_batch(self, texts) -> Ragged:
        mark = os.environ.get("TESTS_DIFFERS")
        if mark and in_a_worker() and Path(mark).exists():
            Path(mark).unlink()
            raise EngineMismatchError("it differs on 'x'")
        return super().encode_batch(texts)


def in_a_worker() -> bool:
    """Whether this is a worker: it was started to run code from its arguments."""
    return sys.argv[0] == "-c"


class Deadly(ByteTokenizer):
    """Kills its process at a text that holds what the environment calls poison."""

    def encode_batch(self, texts) -> Ragged:
        poison = os.environ.get("TESTS_POISON")
        if poison and any(poison in text for text in as_list(texts)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(texts)


class Watched(ByteTokenizer):
    """Where the environment names a folder it leaves a mark `parent-process` there, and is slow: it
    sleeps 0.03 s, or what a file `pause` there says. With a file `gate` it waits instead until so
    many processes have left a mark, for at most two minutes. At a text with the words of a file
    `poison` it kills its process, and at those of `poison in order` it asks it once to end. With a
    file `blind` the input is not there."""

    def encode_batch(self, texts) -> Ragged:
        folder = os.environ.get("TESTS_WATCHED")
        if folder:
            self._watch(Path(folder), texts)
        return super().encode_batch(texts)

    def _watch(self, folder: Path, texts) -> None:
        (folder / f"{os.getppid()}-{os.getpid()}").touch()
        if (folder / "blind").exists():
            raise FileNotFoundError(2, "No such file or directory", "remote.jsonl")
        for poison in folder.glob("poison*"):
            words = _content(poison)
            if words and any(words in text for text in as_list(texts)):
                if poison.name != "poison" and not _removed(poison):
                    continue
                in_order = poison.name == "poison in order"
                os.kill(os.getpid(), signal.SIGTERM if in_order else signal.SIGKILL)
        gate = folder / "gate"
        if gate.exists():
            _wait_at(gate)
        else:
            time.sleep(float(_content(folder / "pause") or 0.03))


def _removed(path: Path) -> bool:
    """Whether this process was the first to remove it."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _content(path: Path) -> str:
    """Empty when it is not there: another process may just have removed it."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _wait_at(gate: Path) -> None:
    """Until as many processes as it says have left a mark, or it is gone. It is removed when they
    have not come after two minutes: then the test goes on and can say so."""
    try:
        wanted, limit = int(gate.read_text()), time.monotonic() + 120
        while gate.exists() and len(list(gate.parent.glob("*-*"))) < wanted:
            if time.monotonic() > limit:
                gate.unlink()
            time.sleep(0.01)
    except FileNotFoundError:  # another process has removed it
        pass


class Sparse(ByteTokenizer):
    """A token for every forty bytes."""

    def encode_batch(self, texts) -> Ragged:
        return Ragged.from_sequences([one[::40] for one in super().encode_batch(texts)])


class Dense(ByteTokenizer):
    """Three tokens for every byte."""

    def encode_batch(self, texts) -> Ragged:
        ids = super().encode_batch(texts)
        return Ragged(ids.values.repeat(3), ids.offsets * 3)
