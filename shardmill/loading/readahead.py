"""Ask the kernel for windows before their turn, when that is worth it.

In: steps.  Out: nothing; `madvise` or `posix_fadvise` for the windows of the next steps.
Promise: what is read is never changed by it. Without an option it asks from the moment a batch had
to wait for the disk: the kernel counts that for each thread (major page faults of maps, blocks read
by pread), so data in memory cost two looks at a counter every fourth batch, and not a system call a
window.
Not here: reading. Not for two threads at a time.

Asking hides the faults that would show that it is needed, so after some steps it stops and lets one
batch go unasked: if that one waits, asking goes on for twice as many steps.
"""

from __future__ import annotations

from shardmill.loading.order import HORIZON, Steps
from shardmill.sampling.order import by_value

try:
    import resource
except ImportError:  # not on Windows: nobody counts there, so nothing is asked unless told to
    resource = None  # type: ignore[assignment]

_WHOSE = 0 if resource is None else getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

LOOK_EVERY = 4
"""Steps from one look at the counter to the next."""

FIRST_SPELL, LONGEST_SPELL = 32, 4096
"""Steps to go on asking after a batch that waited."""


def disk_waits() -> int:
    """How often this thread (elsewhere than on Linux: this process) waited for the disk."""
    return 0 if resource is None else resource.getrusage(_WHOSE).ru_majflt


def disk_reads() -> int:
    """How many blocks this thread had read from disk: what pread waits for is no page fault."""
    return 0 if resource is None else resource.getrusage(_WHOSE).ru_inblock


class Asker:
    """`ask` True: for every step. False: never. None: when batches wait for the disk."""

    def __init__(self, steps: Steps, *, ask: bool | None) -> None:
        self._steps = steps
        self._watch = ask is None
        preads = any(getattr(one, "reader", "mapped") == "pread" for one in steps.stream.sources)
        self._counted = disk_reads if preads else disk_waits
        self._until = 0 if ask is not True else None  # the step at which to stop; None: never
        self._asked = 0  # steps before this one were asked for, or have been read
        self._spell = FIRST_SPELL
        self._waits = 0

    def before(self, step: int) -> None:
        """`step` is about to be read."""
        if self._until is None or step < self._until:
            self._ask(step)
        elif self._watch and not step % LOOK_EVERY:
            self._waits = self._counted()

    def after(self, step: int) -> None:
        """`step` was read."""
        if not self._watch or step % LOOK_EVERY or self._until is None or step < self._until:
            return
        if self._counted() == self._waits:
            self._spell = FIRST_SPELL
            return
        self._until = step + 1 + self._spell
        self._spell = min(2 * self._spell, LONGEST_SPELL)
        self._ask(step)

    def _ask(self, step: int) -> None:
        """For the `HORIZON` steps behind `step`, each once."""
        stop = step + 1 + HORIZON
        if self._steps.num_steps is not None:
            stop = min(stop, self._steps.num_steps)
        sources = self._steps.stream.sources
        for ahead in range(max(self._asked, step + 1), stop):
            wanted = self._steps.at(ahead)
            for number, chosen in by_value(wanted.source):
                sources[number].prefetch(wanted.item[chosen])
        self._asked = max(self._asked, stop)
