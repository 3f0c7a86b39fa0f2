"""Ask the kernel to read the rows of the next steps, when that is worth a system call per row.

Unless told otherwise, asking starts when a batch had to wait for the disk. The kernel counts such
waits per thread (major page faults of maps, blocks read by pread), so data that are in memory cost
two looks at a counter every fourth batch. Asking hides the waits that would show that it is needed.
So after some steps it stops and watches one batch: if that one waits, asking continues for twice as
many steps. What is read never depends on any of this.
"""

from __future__ import annotations

from shardmill.loading.order import HORIZON, Steps
from shardmill.sampling.order import by_value

try:
    import resource
except ImportError:  # not on Windows: nothing is counted there
    resource = None  # type: ignore[assignment]

_WHOSE = 0 if resource is None else getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

LOOK_EVERY = 4
"""Steps between two looks at the counter."""

FIRST_SPELL, LONGEST_SPELL = 32, 4096
"""Steps of asking after a batch that waited."""


def disk_waits() -> int:
    """Page faults of this thread (outside Linux: of this process) that waited for the disk."""
    return 0 if resource is None else resource.getrusage(_WHOSE).ru_majflt


def disk_reads() -> int:
    """Blocks that this thread read from disk: pread causes no page faults."""
    return 0 if resource is None else resource.getrusage(_WHOSE).ru_inblock


class Readahead:
    """`ask` True: for every step. False: never. None: when batches wait for the disk.

    Not for two threads at a time.
    """

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
        """Call before `step` is read."""
        if self._until is None or step < self._until:
            self._ask(step)
        elif self._watch and not step % LOOK_EVERY:
            self._waits = self._counted()

    def after(self, step: int) -> None:
        """Call after `step` was read."""
        if not self._watch or step % LOOK_EVERY or self._until is None or step < self._until:
            return
        if self._counted() == self._waits:
            self._spell = FIRST_SPELL
            return
        self._until = step + 1 + self._spell
        self._spell = min(2 * self._spell, LONGEST_SPELL)
        self._ask(step)

    def _ask(self, step: int) -> None:
        """For each of the `HORIZON` steps after `step`, once."""
        stop = step + 1 + HORIZON
        if self._steps.num_steps is not None:
            stop = min(stop, self._steps.num_steps)
        sources = self._steps.stream.sources
        for ahead in range(max(self._asked, step + 1), stop):
            wanted = self._steps.at(ahead)
            for number, chosen in by_value(wanted.source):
                sources[number].prefetch(wanted.item[chosen])
        self._asked = max(self._asked, stop)
