"""What a worker needs beside its unit: the tokenizer, and the engine that was proved for it.

In: a tokenizer and the record of the engine that the first process chose.  Out: an encoder.
Promise: the very engine that was proved, opened once a process and watched there as in one process.
Not here: proving (engine.py), how this travels (engines).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardmill.protocols import Texts, Tokenizer
from shardmill.records import JSON
from shardmill.tokenizer import ChosenEncoder, EngineCheck, reopen_encoder, thread_limits

_ALLOCATION = {
    # Arrow's own allocators reserve a gigabyte at once, used or not, and a limit counts that.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    # A batch takes the memory of the one before it, instead of new pages: a tenth of all CPU time.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}


class WorkerTools:
    """An `EncoderDesk` that travels by pickle, unopened."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        produced_by: Mapping[str, JSON],
        check: EngineCheck,
        has_spare_cores: bool = False,
    ) -> None:
        """`has_spare_cores`: there are more cores than workers."""
        self.has_spare_cores = has_spare_cores
        self._tokenizer, self._check = tokenizer, check
        self._produced_by = dict(produced_by)
        self._encoder: ChosenEncoder | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_encoder": None}

    def encoder(self, first: Texts) -> ChosenEncoder:  # noqa: ARG002 - it was chosen before
        if self._encoder is None:
            self._encoder = reopen_encoder(self._tokenizer, self._produced_by, check=self._check)
        return self._encoder


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_environ(workers: int) -> dict[str, str]:
    """Keeps the engines of so many workers together to the cores there are."""
    return environ_of_threads(max(1, num_cores() // workers))


def environ_of_threads(num_threads: int) -> dict[str, str]:
    """For a worker of so many threads. Arrow too: it reads and decodes in a pool of its own."""
    return {**thread_limits(num_threads), "OMP_NUM_THREADS": str(num_threads), **_ALLOCATION}
