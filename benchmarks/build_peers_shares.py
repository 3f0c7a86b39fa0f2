"""What the cores do during one of our builds: read, encode, write, start, or nothing.

In: a corpus, an engine.  Out: shares of the time of all cores.
Promise: measured as CPU time in the worker processes of a real build. Reading: making a batch of
texts. Encoding: the calls of the engine, its threads, the comparison with the reference. Starting:
imports, opening the tokenizer. Writing: what is left of a worker, which takes the ids and writes
shards and receipts, and all of the first process, which plans and ends the build. Idle: what no
process took. The proof is left out.
Not here: speed.

Workers get the clocks with their tools, which are of a class of this module.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import build_peers_ours as ours
from build_peers_corpus import Corpus

from shardmill.building import scheduler as scheduler_module
from shardmill.building import worker as worker_module
from shardmill.building.worker import ReadBatch, UnitTask, WorkerTools
from shardmill.protocols import Texts
from shardmill.records import Ragged
from shardmill.tokenizers import ChosenEncoder

_TICK = os.sysconf("SC_CLK_TCK")
_STARTED = time.process_time()
_FOLDER = "SHARDMILL_BENCH_SHARES"


class Clocks:
    """CPU seconds of this process, by what they were for."""

    def __init__(self) -> None:
        self.reading = self.encoding = self.opening = 0.0
        self.engine_threads: set[int] = set()

    def told(self) -> dict[str, float]:
        """So far."""
        # A thread that is gone was none of the engine's: one began to read meanwhile, and ended.
        engine = sum(_cpu_of(thread) for thread in self.engine_threads & _threads())
        spent = {
            "reading": self.reading,
            "encoding": self.encoding + engine,
            "starting": _STARTED + self.opening,
        }
        return {**spent, "writing": time.process_time() - sum(spent.values())}

    def install(self) -> None:
        """Put the clocks into this process."""
        encode, watch, run = ChosenEncoder.encode_unwatched, ChosenEncoder.watch, UnitTask.run
        read = worker_module.read_batches

        def timed_read(*arguments: Any) -> Generator[ReadBatch, None, None]:
            with closing(read(*arguments)) as batches:
                while True:
                    begin = time.thread_time()
                    found = next(batches, None)
                    self.reading += time.thread_time() - begin
                    if found is None:
                        return
                    yield found

        def timed_encode(encoder: ChosenEncoder, texts: Texts) -> Ragged:
            before, begin = _threads(), time.thread_time()
            ids = encode(encoder, texts)
            self.encoding += time.thread_time() - begin
            if not self.engine_threads:
                self.engine_threads = _threads() - before
            return ids

        def timed_watch(*arguments: Any) -> None:
            begin = time.thread_time()
            watch(*arguments)
            self.encoding += time.thread_time() - begin

        def timed_run(task: UnitTask, tools: Any, emit: Callable[[Any], None]) -> None:
            run(task, tools, emit)
            path = Path(os.environ[_FOLDER], f"{os.getpid()}.json")
            path.write_text(json.dumps(self.told()), encoding="utf-8")

        worker_module.read_batches = timed_read
        ChosenEncoder.encode_unwatched = timed_encode  # type: ignore[method-assign]
        ChosenEncoder.watch = timed_watch  # type: ignore[method-assign]
        UnitTask.run = timed_run  # type: ignore[method-assign]


CLOCKS = Clocks()


class TimedTools(WorkerTools):
    """The tools of a worker, which bring the clocks with them."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        CLOCKS.install()

    def prepare(self) -> None:
        begin = time.thread_time()
        super().prepare()
        CLOCKS.opening += time.thread_time() - begin

    def encoder(self, first: Texts) -> ChosenEncoder:
        begin = time.thread_time()
        chosen = super().encoder(first)
        CLOCKS.opening += time.thread_time() - begin
        return chosen


def measure_shares(corpus: Corpus, engine: str) -> dict[str, float]:
    """Shares of the cores' time, which sum to 1."""
    scheduler_module.WorkerTools = TimedTools  # type: ignore[misc]
    with tempfile.TemporaryDirectory(dir=corpus.folder) as place:
        os.environ[_FOLDER] = place
        began = time.process_time()
        report, proof = ours.build(corpus, engine, Path(place, "store"))
        first = time.process_time() - began - proof.cpu
        workers = [json.loads(path.read_text()) for path in Path(place).glob("*.json")]
    assert report.cost is not None
    if not workers:
        raise RuntimeError(f"{engine}: one process built it alone: raise --megabytes")
    spent = {kind: sum(worker[kind] for worker in workers) for kind in workers[0]}
    spent["writing"] += first
    whole = (report.seconds - proof.seconds) * report.cost.num_cores
    shares = {kind: seconds / whole for kind, seconds in spent.items()}
    return {**shares, "idle": 1 - sum(shares.values())}


def _threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def _cpu_of(thread: int) -> float:
    """CPU seconds of one thread of this process."""
    text = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="ascii")
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK
