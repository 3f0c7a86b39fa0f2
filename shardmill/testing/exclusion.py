"""Law of exclusions: they change only the excluded places.

In: a stream before and after, what was excluded in between.  Out: nothing, or an AssertionError.
Promise: which samples have an excluded token is found by plain Python from where they lie.
Not here: a runner; call this from your own tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from shardmill.loading import RowSource, SampleStream

__all__ = ["Spans", "assert_only_excluded_places_change", "has_token"]

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Start and stop, in the token space of a split."""


def has_token(source: RowSource, item: int, spans: Spans) -> bool:
    """Whether a sample has a token of these spans."""
    place = source.span(item)
    parts = [(place.start, place.stop)]
    if place.documents is not None:
        parts = [(start, stop) for _, start, stop in place.documents]
    return any(
        start < behind and first < stop and start < stop and first < behind
        for start, stop in parts
        for first, behind in spans
    )


def assert_only_excluded_places_change(
    before: SampleStream, after: SampleStream, spans: Mapping[str, Spans], num_samples: int
) -> int:
    """Of the first `num_samples` samples those without a token of `spans` (by name of the source)
    are the same, at the same places; in the place of each other one is a sample of the same source
    and epoch without such a token. Returns how many those are."""
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
            assert new[:2] == old[:2], f"sample {sample}: a stand-in of another source or epoch"
        else:
            assert new == old, f"sample {sample}: was not excluded, and moved"
    return replaced
