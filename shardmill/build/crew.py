"""Units at work in an engine: what was reported of each, in order.

In: tasks in the order of the plan, an engine.  Out: the receipts of a unit, as they come.
Promise: receipts of a unit come in order and once, also when its worker died in between; units are
handed out in order, and no more of a feed than it can need. A mismatch of the tokenizer engine is
raised as soon as it is known.
Not here: reading segments, errors of a unit (stage.py does it again and meets them).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardmill.build.memory import no_memory
from shardmill.build.segments import Receipt, UnitKey
from shardmill.build.task import TextTask
from shardmill.build.units import Unit
from shardmill.closing import Closing
from shardmill.errors import BuildError, EngineMismatchError
from shardmill.protocols import Engine, Task, TaskReport


class UnitFailedError(Exception):
    """A task raised; never leaves this room."""


@dataclass(slots=True)
class _State:
    """What is known of one unit."""

    receipts: list[Receipt] = field(default_factory=list)
    ended: bool = False
    report: TaskReport | None = None  # of its failure


class Crew(Closing):
    """The tasks of some units. One without tasks has no unit."""

    def __init__(
        self,
        tasks: Sequence[TextTask] = (),
        *,
        engine: Engine | None = None,
        tools: Any = None,
        on_receipt: Callable[[Receipt], None] = lambda _: None,
    ) -> None:
        self._tasks, self._on_receipt = tasks, on_receipt
        self._numbers = {task.unit.key: number for number, task in enumerate(tasks)}
        self._states = [_State() for _ in tasks]
        self._tokens: dict[int, int] = {}  # sealed, by feed
        self._reports: Generator[TaskReport, None, None] | None = None
        if tasks:
            assert engine is not None, "tasks need an engine"
            self._reports = engine.run(tools, self._handed_out())

    def has(self, unit: Unit) -> bool:
        return unit.key in self._numbers

    def receipts(self, unit: Unit) -> Iterator[Receipt]:
        """The receipts of a unit in order, waiting for them; ends when the unit has ended."""
        state = self._state(unit.key)
        given = 0
        while True:
            while given < len(state.receipts):
                given += 1
                yield state.receipts[given - 1]
            if state.report is not None:
                raise self._failure(state.report)
            if state.ended:
                return
            self._wait()

    def settle(self, unit: Unit) -> None:
        """Wait until nobody works on a unit."""
        state = self._state(unit.key)
        while not state.ended:
            self._wait()

    def close(self) -> None:
        """Stop what is still at work."""
        if self._reports is not None:
            self._reports.close()

    def _state(self, key: UnitKey) -> _State:
        return self._states[self._numbers[key]]

    def _handed_out(self) -> Iterator[Task]:
        """Tasks as the engine asks for them. All before one are out when it is, so a feed whose
        sealed tokens reach its limits needs no more."""
        for task in self._tasks:
            if task.most is None or self._tokens.get(task.unit.key.feed, 0) < task.most:
                yield task

    def _wait(self) -> None:
        """Take the next report."""
        assert self._reports is not None
        report = next(self._reports, None)
        assert report is not None, "an engine tells the end of every task it took"
        if isinstance(report.error, EngineMismatchError):
            raise report.error
        state = self._states[report.task]
        if report.note is not None:
            self._note(state, report.note)
        elif report.error is not None:
            state.report, state.ended = report, True
        elif report.ended:
            state.ended = True

    def _note(self, state: _State, receipt: Receipt) -> None:
        if receipt.number < len(state.receipts):
            known = state.receipts[receipt.number]
            if known != receipt:
                raise BuildError(
                    f"segment {receipt.number} of unit {receipt.key.folder} was made twice, and "
                    "not alike: go on with resume=True"
                )
            return
        assert receipt.number == len(state.receipts), "receipts of a unit come in order"
        state.receipts.append(receipt)
        feed = receipt.feed
        self._tokens[feed] = self._tokens.get(feed, 0) + receipt.num_tokens
        self._on_receipt(receipt)

    def _failure(self, report: TaskReport) -> Exception:
        error = report.error
        if report.lost:
            assert isinstance(error, BuildError), "engines say why a task is lost"
            return error
        if isinstance(error, MemoryError):
            return no_memory(self._tasks[report.task].name)
        return UnitFailedError(f"{type(error).__name__}: {error}")
