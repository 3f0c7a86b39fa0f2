"""Laws of a loader: order, resume, ranks.

In: a function that makes loaders.  Out: nothing, or an AssertionError.
Promise: works with any loader that iterates and has `state_dict` and `load_state_dict`; states go
through JSON before they are loaded; what is expected is what one rank with batches of one gives.
Not here: a runner; call these from your own tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

__all__ = [
    "MakeLoader",
    "RankShape",
    "Resumable",
    "Row",
    "Rows",
    "STATE_BYTES",
    "assert_order_is_one",
    "assert_resume_is_elastic",
    "assert_resumes_exactly",
    "make_ranks",
    "read_steps",
    "rows_of",
    "saved",
]

STATE_BYTES = 1024
"""A state is smaller than this, as JSON."""

Row: TypeAlias = Any
"""What tells one sample from another, with `==`."""
Rows: TypeAlias = Callable[[Any], Sequence[Row]]
"""The rows of a batch, in order."""


class Resumable(Protocol):
    """What is asked of a loader."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class MakeLoader(Protocol):
    """Makes the loader of one rank, always over the same stream, at its beginning."""

    def __call__(self, *, batch_size: int, rank: int, world: int) -> Resumable: ...


class RankShape(NamedTuple):
    """How many ranks read, and how much each at a step."""

    batch_size: int
    world: int

    @property
    def step_samples(self) -> int:
        return self.batch_size * self.world


def rows_of(batch: Any) -> list[Row]:
    """Number, inputs and labels of each row of a `Batch`."""
    rows = zip(batch.samples, batch.input_ids, batch.labels, strict=True)
    return [(number, ids.tobytes(), labels.tobytes()) for number, ids, labels in rows]


def saved(loader: Resumable) -> dict[str, Any]:
    """The state as it comes back from a file, after a look at its size."""
    text = json.dumps(loader.state_dict())
    assert len(text) < STATE_BYTES, f"a state of {len(text)} bytes"
    state: dict[str, Any] = json.loads(text)
    return state


def read_steps(loaders: Iterable[Resumable], num_steps: int, rows: Rows = rows_of) -> list[Row]:
    """The rows of `num_steps` steps of all ranks, step by step and rank by rank."""
    batches = [list(islice(loader, num_steps)) for loader in loaders]
    assert [len(own) for own in batches] == [num_steps] * len(batches), "a rank ended early"
    return [row for step in zip(*batches, strict=True) for own in step for row in rows(own)]


def make_ranks(
    make: MakeLoader, shape: RankShape, state: dict[str, Any] | None = None
) -> list[Resumable]:
    """The loaders of all ranks, from the beginning or from a state."""
    ranks = range(shape.world)
    found = [make(batch_size=shape.batch_size, rank=rank, world=shape.world) for rank in ranks]
    for loader in found if state is not None else ():
        assert state is not None
        loader.load_state_dict(state)
    return found


def assert_order_is_one(
    make: MakeLoader, shapes: Sequence[RankShape], num_samples: int, rows: Rows = rows_of
) -> None:
    """Laws 5 and 7: whatever the number of ranks and the batch size, the steps of all ranks
    together are the same samples in the same order, each read once."""
    expected = read_steps(make_ranks(make, RankShape(1, 1)), num_samples, rows)
    for shape in shapes:
        num_steps = num_samples // shape.step_samples
        found = read_steps(make_ranks(make, shape), num_steps, rows)
        assert found == expected[: num_steps * shape.step_samples], f"another order with {shape}"


def assert_resumes_exactly(
    make: Callable[[], Resumable], num_steps: int, rows: Rows = rows_of
) -> None:
    """Law 6: from the state before every step, a fresh loader gives the same remaining batches;
    and saving right after loading gives the same state."""
    first = make()
    states = [saved(first)]
    expected = []
    for batch in islice(first, num_steps):
        expected.append(list(rows(batch)))
        states.append(saved(first))
    assert len(expected) == num_steps, f"only {len(expected)} steps"
    for step, state in enumerate(states):
        again = make()
        again.load_state_dict(state)
        assert saved(again) == state, f"step {step}: saving after loading changes the state"
        found = [list(rows(batch)) for batch in islice(again, num_steps - step)]
        assert found == expected[step:], f"step {step}: other batches after a resume"
        assert saved(again) == states[-1]


def assert_resume_is_elastic(
    make: MakeLoader, runs: Sequence[tuple[RankShape, int]], rows: Rows = rows_of
) -> None:
    """Law 6 on other ranks: runs of so many steps, each on ranks of its own and resumed from the
    state of any rank of the run before, read together what one rank reads in one go."""
    total = sum(shape.step_samples * num_steps for shape, num_steps in runs)
    expected = read_steps(make_ranks(make, RankShape(1, 1)), total, rows)
    found: list[Row] = []
    state: dict[str, Any] | None = None
    for shape, num_steps in runs:
        ranks = make_ranks(make, shape, state)
        found += read_steps(ranks, num_steps, rows)
        states = [saved(loader) for loader in ranks]
        assert all(other == states[0] for other in states), "ranks save different states"
        state = states[0]
    assert found == expected, "a resumed run reads other samples"
