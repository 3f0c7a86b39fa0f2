"""Guarantees of loaders and streams as tests: one order on any ranks, exact resume, exclusions.

A loader is anything that iterates and has `state_dict` and `load_state_dict`; what is expected is
what one rank with batches of one gives. States go through JSON before they are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

from shardmill.loading import RowSource, SampleStream

STATE_BYTES = 1024
"""A state is smaller than this, as JSON."""

Row: TypeAlias = Any
"""What identifies a sample, compared with `==`."""
Rows: TypeAlias = Callable[[Any], Sequence[Row]]
"""The rows of a batch, in order."""


class Resumable(Protocol):
    """What a loader must have."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class MakeLoader(Protocol):
    """Makes the loader of one rank, always over the same stream, at its start."""

    def __call__(self, *, batch_size: int, rank: int, world: int) -> Resumable: ...


class RankShape(NamedTuple):
    """How many ranks read, and how much each reads at a step."""

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
    """The state as it comes back from a file; its size is checked."""
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
    """The loaders of all ranks, from the start or from a state."""
    ranks = range(shape.world)
    found = [make(batch_size=shape.batch_size, rank=rank, world=shape.world) for rank in ranks]
    if state is not None:
        for loader in found:
            loader.load_state_dict(state)
    return found


def assert_order_is_one(
    make: MakeLoader, shapes: Sequence[RankShape], num_samples: int, rows: Rows = rows_of
) -> None:
    """Guarantees 5 and 7: whatever the number of ranks and the batch size, the steps of all ranks
    together are the same samples in the same order, each read once."""
    expected = read_steps(make_ranks(make, RankShape(1, 1)), num_samples, rows)
    for shape in shapes:
        num_steps = num_samples // shape.step_samples
        found = read_steps(make_ranks(make, shape), num_steps, rows)
        assert found == expected[: num_steps * shape.step_samples], f"another order with {shape}"


def assert_resumes_exactly(
    make: Callable[[], Resumable], num_steps: int, rows: Rows = rows_of
) -> None:
    """Guarantee 6: from the state before every step, a fresh loader gives the same remaining
    batches; and saving right after loading gives the same state."""
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
    """Guarantee 6 on other ranks: runs of some steps, each on its own ranks and resumed from the
    state that all ranks of the previous run saved, together read what one rank reads at once."""
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


Spans: TypeAlias = Sequence[tuple[int, int]]
"""Start and stop, in the token space of a split."""


def has_token(source: RowSource, item: int, spans: Spans) -> bool:
    """Whether a sample contains a token of these spans."""
    place = source.span(item)
    parts = [(place.start, place.stop)]
    if place.documents is not None:
        parts = [(start, stop) for _, start, stop in place.documents]
    return any(
        max(start, first) < min(stop, last) for start, stop in parts for first, last in spans
    )


def assert_only_excluded_places_change(
    before: SampleStream, after: SampleStream, spans: Mapping[str, Spans], num_samples: int
) -> int:
    """Of the first `num_samples` samples, those without a token of `spans` (by name of the source)
    are the same, at the same numbers; each other one is replaced by a sample of the same source and
    epoch without such a token. Returns how many are replaced."""
    assert before.names == after.names
    rows = [
        list(zip(found.source.tolist(), found.epoch.tolist(), found.item.tolist(), strict=True))
        for found in (before.take(range(num_samples)), after.take(range(num_samples)))
    ]
    replaced = 0
    for sample, (old, new) in enumerate(zip(*rows, strict=True)):
        source = after.sources[old[0]]
        excluded = spans.get(source.name, ())
        assert not has_token(source, new[2], excluded), f"sample {sample}: an excluded token"
        if has_token(source, old[2], excluded):
            replaced += 1
            assert new[:2] == old[:2], f"sample {sample}: replaced from another source or epoch"
        else:
            assert new == old, f"sample {sample}: was not excluded, but changed"
    return replaced
