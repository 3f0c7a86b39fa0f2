"""Build a store of examples: a stream of tokenised examples, split once their number is known.

In: batches of examples and a rule that assigns example numbers to splits.  Out: a finished store
with one token file for each split.
Promise: every example is in one split or among the drops; within a split the order is the
input's; memory holds a few bytes for each example, never its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardmill.build.commit import Books
from shardmill.build.portion import Account, Portion
from shardmill.build.segments import Receipt, SegmentWriter, UnitKey, load_segment
from shardmill.build.spec import BuildReport, BuildSpec, ExampleBatch, store_facts
from shardmill.build.tokenise import TokenRules, token_rules
from shardmill.build.workplace import open_workplace, target_of
from shardmill.errors import OptionError
from shardmill.protocols import Tokenizer
from shardmill.records import JSON, IntArray, OffsetArray
from shardmill.shards import StoreWriter, check_target, publish_folder

Assign = Callable[[int], Mapping[str, IntArray]]


def build_examples(
    batches: Iterable[ExampleBatch],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    assign: Assign,
    produced_by: dict[str, JSON] | None = None,
    overwrite: bool = False,
) -> BuildReport:
    """Write examples to a store at `folder`.

    `assign(num_read)` tells the numbers of the examples of each split, over all that were read.
    """
    started = time.monotonic()
    target = target_of(folder)
    rules = token_rules(spec, tokenizer)
    check_target(target, overwrite=overwrite)
    with open_workplace(target, {}, stamps=[], resume=False) as work:
        receipts, numbers = _spool(batches, work.segments, rules, spec.dataset_name or target.name)
        splits, owner = _owners(assign, sum(receipt.num_read for receipt in receipts))
        staged = work.staging()
        with StoreWriter(staged, splits=splits, dtype=rules.dtype, shard_bytes=None) as out:
            books = Books()
            for receipt, number in zip(receipts, numbers, strict=True):
                first = 0
                for portion, account in load_segment(work.segments, receipt, rules.dtype):
                    examples, stop = portion.documents, first + len(portion.documents)
                    for index, split in enumerate(splits):
                        out.append(split, examples.keep(owner[number[first:stop]] == index))
                    out.record_drops(portion.drops)
                    kept = {"documents": len(examples), "tokens": len(examples.values)}
                    books.add(portion, account, portion.drops, kept)
                    first = stop
            facts = store_facts(
                spec,
                tokenizer,
                sources=[],
                ledger=books.ledger(),
                produced_by=produced_by or {},
                options={},
                unit="example",
            )
            manifest = out.finish(facts)
        publish_folder(staged, target, overwrite=overwrite)
    seconds = time.monotonic() - started
    return BuildReport(folder=target, manifest=manifest, seconds=seconds, resumed=False)


def _spool(
    batches: Iterable[ExampleBatch], folder: Path, rules: TokenRules, source: str
) -> tuple[list[Receipt], list[OffsetArray]]:
    """Segments on disk, and for each the numbers of its examples among all that were read."""
    receipts: list[Receipt] = []
    numbers: list[OffsetArray] = []
    read = 0
    key = UnitKey(feed=0, start=0, stop=1, plan="", inputs="")
    segment, mine = SegmentWriter(folder, key, after=None), [np.empty(0, np.int64)]
    try:
        for batch in batches:
            examples = rules.fit(batch.ids, source=source, first=read)
            portion = Portion(documents=examples, drops=batch.drops)
            segment.add(portion, Account(num_read=batch.num_read))
            mine.append(batch.kept + read)
            read += batch.num_read
            if segment.due:
                receipts.append(segment.seal({}, last=False))
                numbers.append(np.concatenate(mine))
                segment = SegmentWriter(folder, key, after=receipts[-1])
                mine = [np.empty(0, np.int64)]
        receipts.append(segment.seal({}, last=True))
        numbers.append(np.concatenate(mine))
    finally:
        segment.abandon()
    return receipts, numbers


def _owners(assign: Assign, num_read: int) -> tuple[tuple[str, ...], npt.NDArray[np.int16]]:
    """For each example the number of its split; refuses what is not a partition."""
    assigned = assign(num_read)
    owner = np.full(num_read, -1, np.int16)
    for index, examples in enumerate(assigned.values()):
        owner[examples] = index
    if (owner < 0).any() or sum(map(len, assigned.values())) != num_read:
        raise OptionError(
            f"the split rule must put each of {num_read:,} examples into one split; it gave "
            + ", ".join(f"{split}: {len(numbers):,}" for split, numbers in assigned.items())
        )
    return tuple(assigned), owner
