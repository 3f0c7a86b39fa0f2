"""The tokens that all ranks saw at some steps, store by store.

In: data, seed, batch size, world, and steps.  Out: an entry for every store that gave samples.
Promise: the samples are those that loaders opened now give there, as `show --step` shows them:
where something is excluded already, its stand-ins. No loop over samples.
Not here: writing entries (exclude).
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardmill.cli.show_step import StepCall, find_moment, find_place, places_of
from shardmill.errors import OptionError
from shardmill.inspector.batch import Moment
from shardmill.loading import TokenSource
from shardmill.records import OffsetArray
from shardmill.sampling.order import by_value
from shardmill.shards import ExcludedSteps, ExcludeEntry, Store, open_store
from shardmill.shards.exclude import spans_entry
from shardmill.shards.exclude_entries import NO_SPANS, merge_spans

_CHUNK = 2**16  # samples looked at together
_MOST_SAMPLES = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one store is to exclude."""

    store: Store
    entry: ExcludeEntry  # not written yet
    windows: tuple[int, int] | None = None  # with an excluded token of it, of how many
    stand_ins: int = 0  # samples of the steps that stand in for others already


def find_parts(
    folder: Path | None,
    call: StepCall,
    steps: str,
    *,
    row: tuple[str | None, int | None],
    reason: str,
) -> list[Part]:
    """The entries of these steps; `row`: split and sequence length."""
    first, stop = parse_steps(steps)
    _, moment = find_moment(folder, replace(call, step=first), row)
    with closing(moment.stream) as stream:
        only = None if call.config is None else find_place(folder, stream)
        spans, stand_ins = _collect(moment, stop - first)
        parts = []
        for number, source in enumerate(stream.sources):
            if not len(spans[number]) or (only is not None and only not in places_of(source)):
                continue
            if source.split is None or not isinstance(source, TokenSource):
                raise OptionError(
                    f"source {source.name!r}: {source.path} is no store, so nothing can be "
                    "recorded there; only stores have exclusions"
                )
            told = ExcludedSteps(
                source=source.name,
                start=first,
                stop=stop,
                world=moment.world,
                batch_size=moment.batch_size,
                seq_len=stream.seq_len,
                seed=stream.seed,
                shuffle=stream.shuffle,
            )
            store = open_store(source.path)
            entry = spans_entry(store, spans[number], reason=reason, split=source.split, steps=told)
            windows = source.windows_of(spans[number])
            parts.append(
                Part(store=store, entry=entry, windows=windows, stand_ins=stand_ins[number])
            )
    return parts


def parse_steps(text: str) -> tuple[int, int]:
    """`A` or `A:B`, the latter without B."""
    first, colon, stop = text.partition(":")
    words = [first, stop] if colon else [first]
    if not all(word.isascii() and word.isdigit() and len(word) < 16 for word in words):
        raise OptionError(f"--step {text}: wanted a step, as 31207, or steps, as 31200:31210")
    start = int(first)
    behind = int(stop) if colon else start + 1
    if behind <= start:
        raise OptionError(f"--step {text}: no step lies in it; {start}:{start + 1} is one step")
    return start, behind


def _collect(moment: Moment, num_steps: int) -> tuple[list[OffsetArray], list[int]]:
    """Of each source: the tokens of its samples, and how many of them are stand-ins."""
    stream, size = moment.stream, moment.stop - moment.samples
    stop = moment.samples + num_steps * size
    if stop - moment.samples > _MOST_SAMPLES:
        raise OptionError(
            f"{num_steps:,} steps of {size:,} samples: wanted at most {_MOST_SAMPLES:,} samples; "
            "exclude fewer steps at a time"
        )
    spans = [NO_SPANS for _ in stream.sources]
    stand_ins = [0 for _ in stream.sources]
    for start in range(moment.samples, stop, _CHUNK):
        samples = np.arange(start, min(start + _CHUNK, stop))
        found, meant = stream.take(samples), stream.take_all(samples)
        for number, chosen in by_value(found.source):
            source, items = stream.sources[number], found.item[chosen]
            if not isinstance(source, TokenSource):
                raise OptionError(
                    f"source {source.name!r}: these steps saw rows of a pack plan of "
                    f"{source.path}, and --step excludes windows only; exclude the conversations "
                    "with --document (`shardmill show --plan` prints which a row has)"
                )
            spans[number] = merge_spans(np.concatenate((spans[number], source.spans(items))))
            stand_ins[number] += int((items != meant.item[chosen]).sum())
    return spans, stand_ins
