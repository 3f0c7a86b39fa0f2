"""A unit is sealed while the next one is encoded: what was made before an error still counts, and
nothing is left of what was not finished."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardmill.building.plan import BuildSpec, cut_source, cut_units
from shardmill.building.segments import Receipt, SegmentWriter
from shardmill.building.splits import open_state
from shardmill.building.worker import ChunkEncoder, TokenRules, UnitTask, WorkerTools
from shardmill.building.workplace import FolderOutput
from shardmill.errors import BuildError, SourceError
from shardmill.sources import BatchLimits, JsonlSource
from shardmill.storage.atomic import is_temporary
from shardmill.tokenizers import ByteTokenizer
from shardmill.tokenizers.engines import choose_encoder

FILL = (("train", None),)


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UnitTask:
    """Four units of one file."""
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 1_000)
    rows = [json.dumps({"text": f"{number} " * 20}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    output = FolderOutput(store=tmp_path / "store", receipts=tmp_path / "receipts")
    output.store.mkdir()
    output.receipts.mkdir()
    source = JsonlSource(tmp_path / "a.jsonl", limits=BatchLimits(num_documents=4))
    feed = cut_source(source, FILL)
    units = tuple(cut_units(feed, 0, plan="p", shard_bytes=10**6, dtype="uint16"))
    assert len(units) >= 3
    rules = TokenRules.of(BuildSpec(append_eot=False), ByteTokenizer())
    return UnitTask(
        feed=0,
        units=units,
        fill=FILL,
        before=open_state(FILL),
        encoder=ChunkEncoder(rules=rules, max_document=10**6, by_hash=(None,)),
        output=output,
        shard_tokens=10**6,
        produced_by=choose_encoder(ByteTokenizer(), engine="reference").produced_by,
    )


def run(task: UnitTask, found: list[Receipt]) -> None:
    """Run it, and see that there is nothing but what its receipts say."""
    try:
        task.run(WorkerTools(tokenizer=ByteTokenizer(), check="sample"), found.append)
    finally:
        assert isinstance(task.output, FolderOutput)
        numbers = [receipt.unit for receipt in found]
        shards = {path.name for path in (task.output.store / "train").iterdir()}
        assert shards == {f"shard_{number:05d}.bin" for number in numbers}
        receipts = {path.name for path in task.output.receipts.iterdir()}
        assert receipts == {f"000-{number:08d}.receipt" for number in numbers}


def test_a_unit_is_encoded_while_the_one_before_is_sealed(
    task: UnitTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal, add, goes_on = SegmentWriter.seal, SegmentWriter.add, threading.Event()

    def waiting(self: SegmentWriter) -> Receipt:
        if self._unit.number == 0:
            assert goes_on.wait(60)  # for the next unit
        return seal(self)

    def noticed(self: SegmentWriter, batch: object) -> None:
        if self._unit.number == 1:
            goes_on.set()
        add(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(SegmentWriter, "seal", waiting)
    monkeypatch.setattr(SegmentWriter, "add", noticed)
    run(task, found := [])
    assert [receipt.unit for receipt in found] == [unit.number for unit in task.units]


def test_what_was_made_before_an_error_counts(task: UnitTask) -> None:
    (file,) = task.units[0].chunks[0].files
    before = file.path.stat()
    lines = file.path.read_bytes().splitlines(keepends=True)
    lines[-1] = b"x" * (len(lines[-1]) - 1) + b"\n"  # in the last unit
    file.path.write_bytes(b"".join(lines))
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(SourceError, match="line 40"):
        run(task, found := [])
    assert [receipt.unit for receipt in found] == [unit.number for unit in task.units[:-1]]


def test_an_error_of_sealing_ends_the_task(task: UnitTask, monkeypatch: pytest.MonkeyPatch) -> None:
    seal = SegmentWriter.seal

    def failing(self: SegmentWriter) -> Receipt:
        if self._unit.number == 1:
            raise BuildError("no space")
        return seal(self)

    monkeypatch.setattr(SegmentWriter, "seal", failing)
    with pytest.raises(BuildError, match="no space"):
        run(task, found := [])
    assert [receipt.unit for receipt in found] == [0]


class Stop(BaseException):
    """As Ctrl-C."""


def disk_fails(patch: pytest.MonkeyPatch, at: int) -> None:
    """While a unit is sealed, at its call number `at` of the system."""
    left = [at]  # only the one thread that seals counts

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            if threading.current_thread().name.startswith("shardmill-seal"):
                left[0] -= 1
                if left[0] == -1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")
            return real(*words)

        return call

    patch.setattr(os, "fsync", failing(os.fsync))
    patch.setattr(Path, "replace", failing(Path.replace))


def encoder_fails(patch: pytest.MonkeyPatch, at: int, error: type[BaseException]) -> None:
    """At batch `at`, with an error while the unit before is sealed."""
    encode, left = ByteTokenizer.encode_batch, [at]

    def failing(self: ByteTokenizer, texts: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise error
        return encode(self, texts)

    patch.setattr(ByteTokenizer, "encode_batch", failing)


def listener_fails(patch: pytest.MonkeyPatch, at: int, error: type[BaseException]) -> None:
    """As receipt `at` is given away, so that the generator of receipts is closed early."""
    run, left = UnitTask.run, [at]

    def failing(self: UnitTask, tools: Any, emit: Callable[[Receipt], None]) -> None:
        def give(receipt: Receipt) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise error
            emit(receipt)

        run(self, tools, give)

    patch.setattr(UnitTask, "run", failing)


FAULTS = {
    "the disk is full": (disk_fails, OSError, BuildError),
    "the encoder fails": (partial(encoder_fails, error=ValueError), ValueError, ValueError),
    "the encoder is stopped": (partial(encoder_fails, error=Stop), Stop, Stop),
    "the listener fails": (partial(listener_fails, error=ValueError), ValueError, ValueError),
    "the listener is stopped": (partial(listener_fails, error=Stop), Stop, Stop),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_at_any_moment_nothing_is_open_and_the_rest_is_made(
    task: UnitTask, tmp_path: Path, fault: str
) -> None:
    assert isinstance(task.output, FolderOutput)
    run(task, [])
    wanted = {path.relative_to(tmp_path): path.read_bytes() for path in files(task.output)}
    inject, *errors = FAULTS[fault]
    at, struck = 0, True
    while struck:
        for folder in (task.output.store, task.output.receipts):
            shutil.rmtree(folder)
            folder.mkdir()
        found: list[Receipt] = []
        with pytest.MonkeyPatch.context() as patch, suppress(*errors):
            inject(patch, at)
            struck = True
            task.run(WorkerTools(tokenizer=ByteTokenizer(), check="sample"), found.append)
            struck = False
        assert [receipt.unit for receipt in found] == list(range(len(found)))
        assert not any(one.name.startswith("shardmill-seal") for one in threading.enumerate())
        opened = (os.path.realpath(one) for one in Path("/proc/self/fd").iterdir())
        assert [path for path in opened if path.startswith(str(tmp_path))] == []
        assert not any(is_temporary(path.name) for path in files(task.output))
        run(task, again := [])
        assert [receipt.unit for receipt in again] == [unit.number for unit in task.units]
        left = {path.relative_to(tmp_path): path.read_bytes() for path in files(task.output)}
        assert left == wanted
        at += 1
    assert at > len(task.units)


def files(output: FolderOutput) -> list[Path]:
    return [*(output.store / "train").glob("*"), *output.receipts.iterdir()]
