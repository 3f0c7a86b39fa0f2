"""What a build would do: its plan and what it takes. Nothing is written.

In: the arguments of `build_store`.  Out: a `BuildPlan`.
Promise: reads a grain of each source and encodes some kilobytes of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmill.build.estimate import FeedEstimate, estimate_feed
from shardmill.build.hands import open_manner
from shardmill.build.spec import BuildSpec, Feed, check_feeds
from shardmill.build.store import limited_feeds, most_tokens
from shardmill.build.tokenise import token_rules
from shardmill.build.units import cut_feed, unit_ranges
from shardmill.build.workplace import target_of
from shardmill.protocols import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """A build that has not been started."""

    feeds: tuple[FeedEstimate, ...]
    workers: int  # processes at most; 1: no other process
    memory_bytes: int  # of all processes together, when no document is large
    most_document: int  # bytes of text: a larger document is refused
    free_bytes: int  # on the disk of the store, now

    @property
    def disk_bytes(self) -> int | None:
        """Needed at the peak; None when a source does not tell its size."""
        known = [feed.disk_bytes for feed in self.feeds if feed.disk_bytes is not None]
        return sum(known) if len(known) == len(self.feeds) else None


def plan_store(
    feeds: Sequence[Feed],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    workers: int | None = None,
    unit_bytes: int | None = None,
    memory: int | None = None,
    ray_address: str | None = None,
) -> BuildPlan:
    """What `build_store` would do with these arguments; an address: on that Ray."""
    check_feeds(feeds)
    rules = token_rules(spec, tokenizer)
    with open_manner(
        workers=workers,
        unit_bytes=unit_bytes,
        memory=memory,
        run_on="local" if ray_address is None else "ray",
        ray_address=ray_address,
    ) as manner:
        fits, unit_bytes = manner.memory_plan(), manner.size_of_units()
    estimates = []
    most_document = fits.most_document(tokenizer)
    for feed in limited_feeds(feeds, most_document):
        grains = cut_feed(feed.source)
        ranges = list(unit_ranges(grains.sizes, unit_bytes, {}))
        most = most_tokens(feed)
        estimates.append(estimate_feed(grains, tokenizer, rules, num_units=len(ranges), most=most))
    return BuildPlan(
        feeds=tuple(estimates),
        workers=fits.workers,
        memory_bytes=fits.total_bytes,
        most_document=most_document,
        free_bytes=shutil.disk_usage(_standing(target_of(folder))).free,
    )


def _standing(folder: Path) -> Path:
    """The nearest folder above that exists."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())
