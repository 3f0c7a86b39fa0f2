"""`shardmill pack`: which conversations share a row, as a plan beside the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from shardmill.building import pack as pack_store
from shardmill.cli.commands.info import first_few, plan_facts, plan_line
from shardmill.cli.options import AsJson, SplitOfStore
from shardmill.cli.printing import Answer
from shardmill.errors import OptionError
from shardmill.loading import PackSource
from shardmill.packing import Algorithm, Long
from shardmill.store import StoredPlan, open_store, plans_of


@dataclass(frozen=True, kw_only=True)
class PackCommand:
    """Prints the plan's file, its rows, how full they are, and what no row holds. A plan is an
    index, not a copy: no token is moved, a store may have several plans, and packing again takes
    seconds.

    Example: shardmill pack chats --seq-len 8192 --long split

    Example: shardmill pack chats --list

    Exit 0: packed, or listed. Exit 1: no row was packed, so nothing was written. Exit 2: a mistake
    in the call, or no such store.
    """

    folder: Annotated[Path, "FOLDER", "A store of conversations."]
    seq_len: Annotated[int | None, "Inputs of a row; it has one token more."] = None
    split: SplitOfStore = "train"
    algorithm: Annotated[Algorithm, "How rows are filled; docs/packing.md compares them."] = (
        "best-fit"
    )
    seed: Annotated[int | None, "Of first-fit-shuffle."] = None
    max_per_row: Annotated[int | None, "The most pieces in a row."] = None
    align_to: Annotated[int, "Every piece starts at a multiple of it, for context parallelism."] = 1
    long: Annotated[Long, "What to do with conversations that no row holds."] = "error"
    name: Annotated[str | None, "Of the plan; without it the options give one."] = None
    overwrite: Annotated[bool, "Another plan of this name may be replaced."] = False
    allow_empty: Annotated[bool, "A plan without rows may be written."] = False
    list_all: Annotated[bool, "--list", "List the plans of the store, and make none."] = False
    as_json: AsJson = False

    def run(self) -> Answer:
        folder = self.folder
        if self.list_all:
            return _plans(folder)
        if self.seq_len is None:
            raise OptionError("--seq-len is missing: how many inputs a row has, for instance 8192")
        ours = ("folder", "list_all", "as_json")
        keywords = {name: value for name, value in vars(self).items() if name not in ours}
        began = time.perf_counter()
        plan = pack_store(folder, **keywords)
        seconds = time.perf_counter() - began
        facts = plan_facts(plan) | {"seconds": round(seconds, 3)}
        return Answer(facts, _lines(folder, plan, seconds), indent=2)


def _lines(folder: Path, plan: StoredPlan, seconds: float) -> Iterator[str]:
    facts, metrics = plan.facts, plan.facts.metrics
    padding = metrics.num_rows * facts.row_len - metrics.num_tokens
    size = plan.path.stat().st_size
    yield f"{plan.path}: {plan_line(plan)}, {size:,} bytes, {seconds:.2f} s"
    yield f"  rows: {metrics.num_rows:,}, no plan has less than {metrics.lower_bound:,}"
    yield f"  tokens: {metrics.num_tokens:,} in rows, {padding:,} of padding"
    yield f"  trained labels: {metrics.trained_labels:,}"
    if metrics.num_split:
        yield (
            f"  split: {metrics.num_split:,} examples, {metrics.repeated_tokens:,} tokens are in "
            "two rows"
        )
    if metrics.num_truncated:
        yield (
            f"  truncated: {metrics.num_truncated:,} examples, {metrics.truncated_tokens:,} tokens "
            f"with {metrics.truncated_labels:,} trained labels"
        )
    for reason, out in metrics.left_out.items():
        if out.pieces:
            numbers = np.unique(getattr(plan.arrays, reason)).tolist()
            yield (
                f"  left out, {reason.replace('_', ' ')}: {out.pieces:,} pieces, {out.tokens:,} "
                f"tokens with {out.labels:,} trained labels (examples {first_few(numbers)})"
            )
    # A plan is made over all conversations, since exclusions may change while it stays.
    with closing(PackSource(folder, plan.path, pad_id=0)) as source:
        if source.excluded is not None:
            yield (
                f"  excluded: {source.excluded.num_excluded:,} of {len(source):,} rows have "
                "excluded tokens; other rows replace them when they are read"
            )


def _plans(folder: Path) -> Answer:
    plans = list(plans_of(open_store(folder)))
    listed = [{"name": name, **plan_facts(plan)} for name, plan in plans]
    lines = [f"{name}: {plan_line(plan)}" for name, plan in plans]
    none = f"{folder}: no plan yet; make one with shardmill pack {folder} --seq-len 8192"
    return Answer({"store": str(folder), "plans": listed}, lines or [none], indent=2)
