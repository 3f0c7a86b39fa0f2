"""Units settle in order, exactly once, as in one process, whatever workers do and in what order."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building.plan import FeedChunks, Unit
from shardmill.building.scheduler import FeedWork
from shardmill.building.segments import Receipt
from shardmill.building.splits import Fill, Filler, FillState, open_state
from shardmill.sources import MemorySource
from tests.building.test_fill import FILL

UNITS = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.integers(1, 12), max_size=6)), max_size=12
)  # bytes of input, and the lengths of its documents


MOST_HELD = 4


class Chunk:
    """Holds the text of a unit, of a source that cannot be cut."""

    name = "chunk"


def unit_of(number: int, num_bytes: int) -> Unit:
    return Unit(
        feed=0,
        number=number,
        plan="",
        inputs="",
        source="source",
        first_chunk=number,
        chunks=(Chunk(),),
        num_bytes=num_bytes,
    )


def receipt_of(number: int, lengths: list[int], fill: Fill, before: FillState) -> Receipt:
    """Of a unit that is made for this state."""
    filler = Filler(fill, before)
    for _ in filler.place(np.array(lengths, np.int64)):
        pass
    return Receipt(
        feed=0,
        unit=number,
        plan="",
        inputs="",
        mark="",
        before=before,
        after=filler.after,
        num_given=len(lengths),
        num_tokens=sum(lengths),
        num_bytes=4 * sum(lengths),
        cursor=None,
    )


@dataclass
class Running:
    """A task as far as it has come."""

    units: list[Unit]
    before: FillState


@dataclass
class Model:
    """A feed, the tasks at work on it, and what one process would do."""

    documents: list[list[int]]  # lengths, of each unit
    fill: Fill
    work: FeedWork
    states: list[FillState] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    last: dict[int, Receipt] = field(default_factory=dict)  # of each unit, as it was made last

    def __post_init__(self) -> None:
        self.states.append(open_state(self.fill))
        for number, lengths in enumerate(self.documents):
            if self.states[-1][0] == len(self.fill):
                return
            made = receipt_of(number, lengths, self.fill, self.states[-1])
            self.states.append(made.after)

    def take(self, most_bytes: int) -> bool:
        found = self.work.take(most_bytes, MOST_HELD)
        if found is None:
            return False
        units, before = found
        busy = {unit.number for task in self.running for unit in task.units}
        assert not busy & {unit.number for unit in units}, "one worker at a time makes a unit"
        self.running.append(Running(list(units), before))
        return True

    def step(self, task: Running) -> None:
        """It makes its next unit, and ends after the last one or when all splits are full."""
        unit = task.units.pop(0)
        made = receipt_of(unit.number, self.documents[unit.number], self.fill, task.before)
        self.last[unit.number], task.before = made, made.after
        settled = self.work.num_settled
        self.work.receive(made)
        self.check(settled)
        if not task.units or made.after[0] == len(self.fill):
            self.end(task)

    def end(self, task: Running) -> None:
        """As it ends, or fails."""
        self.running.remove(task)
        left = self.work.give_back(task.units)
        assert (left is None) == (not task.units)
        assert not task.units or left is task.units[0]

    def check(self, settled: int) -> None:
        assert self.work.states == self.states[: self.work.num_settled + 1]
        for number in range(settled, self.work.num_settled):
            right = receipt_of(number, self.documents[number], self.fill, self.states[number])
            made = self.last[number]
            where = [(made.before[0], made.after[0]), made.num_tokens]
            assert where == [(right.before[0], right.after[0]), right.num_tokens]


def feed_of(sizes: list[int], fill: Fill, *, is_cut: bool) -> FeedChunks:
    return FeedChunks(source=MemorySource([]), chunks=(), sizes=sizes, is_cut=is_cut, fill=fill)


def run_to_the_end(model: Model, data: Any) -> None:
    """Any order of taking, making and failing; then everything that is left, one by one."""
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["take", "make", "make", "make", "fail"]))
        if action == "take" or not model.running:
            model.take(data.draw(st.sampled_from([1, 20, 10**9])))
        else:
            task = data.draw(st.sampled_from(range(len(model.running))))
            if action == "fail":
                model.end(model.running[task])
            else:
                model.step(model.running[task])
    while not model.work.is_done:
        if not model.running:
            assert model.take(1), "the first unit that is not settled can be made"
        model.step(model.running[0])
    assert model.work.states == model.states


@settings(max_examples=100)
@given(UNITS, FILL, st.data())
def test_units_settle_as_in_one_process(units, fill, data):
    work = FeedWork(feed_of([size for size, _ in units], fill, is_cut=True))
    work.begin(iter([unit_of(number, size) for number, (size, _) in enumerate(units)]))
    run_to_the_end(Model([lengths for _, lengths in units], fill, work), data)


@settings(max_examples=60)
@given(UNITS, FILL, st.data())
def test_a_feed_that_is_resumed_continues_after_what_is_settled(units, fill, data):
    documents = [lengths for _, lengths in units]
    work = FeedWork(feed_of([size for size, _ in units], fill, is_cut=True))
    model = Model(documents, fill, work)
    settled = data.draw(st.integers(0, len(model.states) - 1))
    for number in range(settled):
        work.receive(receipt_of(number, documents[number], fill, model.states[number]))
    found = [unit_of(number, size) for number, (size, _) in enumerate(units)]
    work.begin(iter(found[work.num_settled :]))
    assert work.num_settled == settled
    run_to_the_end(model, data)


@settings(max_examples=60)
@given(UNITS, FILL, st.data())
def test_a_source_that_cannot_be_cut_settles_as_in_one_process_and_little_of_it_is_held(
    units, fill, data
):
    """Its units hold text, and are read as they are asked for."""
    alive: weakref.WeakSet[Chunk] = weakref.WeakSet()

    def read() -> Iterator[Unit]:
        for number, (size, _) in enumerate(units):
            unit = unit_of(number, size)
            alive.update(unit.chunks)
            assert len(alive) <= MOST_HELD + 1, "one is read to see whether there are more"
            yield unit
            del unit

    work = FeedWork(feed_of([], fill, is_cut=False))
    work.begin(read())
    run_to_the_end(Model([lengths for _, lengths in units], fill, work), data)


def test_a_guess_is_by_the_tokens_per_byte_of_input():
    """Of Parquet, text is a multiple of the file; of rows with much beside it, a part."""
    fill = (("val", 100), ("train", None))
    work = FeedWork(feed_of([10] * 9, fill, is_cut=True))
    work.begin(unit_of(number, 10) for number in range(9))
    assert work.take(10, MOST_HELD) is not None
    work.receive(receipt_of(0, [30], fill, (0, 0)))  # three tokens per byte
    befores = []
    while (found := work.take(10, MOST_HELD)) is not None:
        befores.append(found[1])
    # 30 tokens each, after 30: 30, 60, 90, then 120 are more than 100
    assert befores == [(0, 30), (0, None), (0, None), (1, 0), (1, 0), (1, 0), (1, 0), (1, 0)]


def test_what_is_left_is_what_no_task_has():
    sizes = [10] * 6
    source = MemorySource(["text"], name="source")
    work = FeedWork(
        FeedChunks(source=source, chunks=sizes, sizes=sizes, is_cut=True, fill=(("train", None),))
    )
    work.begin(unit_of(number, size) for number, size in enumerate(sizes))
    left = [work.bytes_left]
    taken = []
    for most in (30, 20, 10):
        found = work.take(most, MOST_HELD)
        assert found is not None
        taken.append([unit.number for unit in found[0]])
        left.append(work.bytes_left)
    assert (taken, left) == ([[0, 1, 2], [3, 4], [5]], [60, 30, 10, 0])
    work.give_back([unit_of(number, 10) for number in taken[1]])
    assert work.bytes_left == 30  # its units are taken again, and about so is what follows
