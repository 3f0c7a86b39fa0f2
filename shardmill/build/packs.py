"""Pack the conversations of a store: which of them share a row, as a plan beside it.

In: the folder of a chat store, a split, options.  Out: a plan in its folder `packs`, read back.
Promise: same store and options, same bytes; every piece of every example is in exactly one row, or
is left out with its number and a reason; every row trains at least one token; the tokens and the
trained labels of the split are accounted for to the last one. Only the index and the mask are read.
Not here: choosing rows (packing), the file (shards), rows of tokens (mapped).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np

from shardmill.arguments import whole_number
from shardmill.build.pieces import Pieces, count_labels, cut_examples, is_trained, trained_before
from shardmill.errors import DamagedStoreError, OptionError
from shardmill.packing import PACKERS, PackPlan
from shardmill.records import BoolArray, OffsetArray
from shardmill.shards import (
    LeftOut,
    PlanArrays,
    PlanFacts,
    PlanMetrics,
    PlanOptions,
    Store,
    StoredPlan,
    check_plan,
    open_store,
    plan_path,
    read_plan,
    write_plan,
)
from shardmill.shards.plan_entries import Algorithm, LongRule, option_problems


def build_plan(
    folder: str | Path,
    split: str = "train",
    *,
    options: PlanOptions,
    name: str | None = None,
    overwrite: bool = False,
) -> StoredPlan:
    """Write the plan of a split to `folder/packs/split-name.plan` and open it.

    A row has `seq_len + 1` tokens: inputs are all but its last, labels all but its first.
    `align_to`: every piece starts at a multiple of it, which `seq_len` must be too. A row then
    holds `seq_len` tokens of pieces, each rounded up, and its last token is padding: so the inputs
    of every piece, rounded up, end within the row. `long`: what becomes of examples over that
    capacity. "split" repeats one token between pieces, so that no trained label is lost.
    Without a `name` the options give one. The same plan may stand there already; another one is
    replaced only with `overwrite`.
    """
    asked = _checked(options)
    store = open_store(folder)
    if not store.is_chat:
        raise OptionError(
            f"{store.folder}: a store of documents, which have no loss mask; it needs no plan: "
            "shardmill.TokenSource cuts it into windows of any length"
        )
    path = plan_path(store.folder, split, plan_name(asked) if name is None else name)
    found = _measure(store, split, asked)
    plan = _pack(found, asked)
    metrics = _metrics(found, plan, asked)
    _check_account(store, split, metrics)
    facts = PlanFacts(store=store.fingerprint, split=split, options=asked, metrics=metrics)
    write_plan(path, facts, _arrays(found, plan, asked), overwrite=overwrite)
    written = read_plan(path)
    check_plan(written, open_store(folder))  # nobody built the store again meanwhile
    return written


def plan_name(options: PlanOptions) -> str:
    """`8192` for the default options; what differs from them is told: `8192-first-fit-split`."""
    parts = [str(options.seq_len)]
    parts += [options.algorithm] * (options.algorithm != "best-fit")
    parts += [f"s{options.seed}"] * (options.seed is not None)
    parts += [f"max{options.max_per_row}"] * (options.max_per_row is not None)
    parts += [f"align{options.align_to}"] * (options.align_to != 1)
    parts += [options.long] * (options.long != "error")
    return "-".join(parts)


def _checked(options: PlanOptions) -> PlanOptions:
    """The same options as plain numbers, or what is wrong with them."""
    for field, known in (("algorithm", get_args(Algorithm)), ("long", get_args(LongRule))):
        if getattr(options, field) not in known:
            found = getattr(options, field)
            raise OptionError(f"{field}={found!r}: wanted one of {', '.join(known)}")
    most = options.max_per_row
    asked = PlanOptions(
        seq_len=whole_number(options.seq_len, "seq_len"),
        algorithm=options.algorithm,
        seed=None if options.seed is None else whole_number(options.seed, "seed", least=0),
        max_per_row=None if most is None else whole_number(most, "max_per_row"),
        align_to=whole_number(options.align_to, "align_to"),
        long=options.long,
    )
    if asked.seed is not None and asked.seed >= 2**62:
        raise OptionError(f"seed={asked.seed}: wanted less than 2**62")
    for problem in option_problems(asked):
        raise OptionError(problem)
    return asked


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Measured:
    """A split as packing sees it: numbers, and no token."""

    lengths: OffsetArray  # of every example
    pieces: Pieces
    labels: OffsetArray  # trained ones of every piece
    long_labels: OffsetArray  # trained ones of every whole example of `pieces.long`

    @property
    def trains(self) -> BoolArray:
        return self.labels > 0


def _measure(store: Store, split: str, options: PlanOptions) -> _Measured:
    starts, bits = store.document_starts(split), store.chat_arrays(split).mask_bits
    lengths = np.diff(starts, append=store.num_tokens(split))
    if len(lengths) and lengths.min() < 0:
        example = int(np.flatnonzero(lengths < 0)[0])
        raise _damaged(store, split, f"example {example:,} ends before it starts")
    pieces = cut_examples(lengths, options.capacity, options.long)
    begins, long = starts[pieces.example], pieces.long
    return _Measured(
        lengths=lengths,
        pieces=pieces,
        labels=count_labels(bits, begins + pieces.start, begins + pieces.stop),
        long_labels=count_labels(bits, starts[long], starts[long] + lengths[long]),
    )


def _pack(found: _Measured, options: PlanOptions) -> PackPlan:
    """Rows of the pieces that train something, numbered among themselves."""
    pack = PACKERS[options.algorithm]
    if options.seed is not None:
        pack = partial(pack, seed=options.seed)
    return pack(
        found.pieces.lengths[found.trains],
        options.capacity,
        max_per_row=options.max_per_row,
        align_to=options.align_to,
    )


def _arrays(found: _Measured, plan: PackPlan, options: PlanOptions) -> PlanArrays:
    order = np.flatnonzero(found.trains)[plan.rows.indices]  # pieces, row after row
    example, start, stop = (
        array[order] for array in (found.pieces.example, found.pieces.start, found.pieces.stop)
    )
    cuts = np.flatnonzero((start > 0) | (stop < found.lengths[example]))
    dropped = found.pieces.long if options.long == "drop" else found.pieces.long[:0]
    return PlanArrays(
        counts=np.diff(plan.rows.offsets),
        examples=example,
        cut_pieces=cuts,
        cut_starts=start[cuts],
        cut_stops=stop[cuts],
        too_long=dropped,
        trains_nothing=found.pieces.example[~found.trains],
    )


def _metrics(found: _Measured, plan: PackPlan, options: PlanOptions) -> PlanMetrics:
    pieces, trains, long = found.pieces, found.trains, found.pieces.long
    num_long = len(long)
    rule = {name: num_long if options.long == name else 0 for name in get_args(LongRule)}
    joins = pieces.joins()
    repeated = trains[joins] & trains[joins - 1]
    idle_tokens = int(pieces.lengths[~trains].sum()) - int(np.count_nonzero(~repeated))
    cut_tokens = cut_labels = 0
    if options.long == "truncate":
        kept = np.searchsorted(pieces.example, long)  # one piece each
        cut_tokens = int((found.lengths[long] - pieces.stop[kept]).sum())
        cut_labels = int((found.long_labels - found.labels[kept]).sum())
    too_long = LeftOut(
        pieces=rule["drop"],
        tokens=int(found.lengths[long].sum()) if rule["drop"] else 0,
        labels=int(found.long_labels.sum()) if rule["drop"] else 0,
    )
    idle = LeftOut(pieces=int(np.count_nonzero(~trains)), tokens=idle_tokens, labels=0)
    return PlanMetrics(
        num_rows=len(plan),
        lower_bound=plan.metrics.lower_bound,
        num_examples=len(found.lengths),
        num_empty=int(np.count_nonzero(found.lengths == 0)),
        num_pieces=plan.metrics.num_items,
        num_tokens=plan.metrics.num_tokens,
        repeated_tokens=int(np.count_nonzero(repeated)),
        trained_labels=int(found.labels.sum()),
        num_split=rule["split"],
        num_truncated=rule["truncate"],
        truncated_tokens=cut_tokens,
        truncated_labels=cut_labels,
        left_out={"too_long": too_long, "trains_nothing": idle},
    )


def _check_account(store: Store, split: str, metrics: PlanMetrics) -> None:
    """Nothing is lost in silence: the sums of `PlanMetrics`, against the store itself."""
    starts, bits = store.document_starts(split), store.chat_arrays(split).mask_bits
    num_tokens, chat = store.num_tokens(split), store.manifest.splits[split].chat
    trained = int(trained_before(bits, np.array([num_tokens]))[0])
    if chat is None or trained != chat.trained_tokens:
        raise _damaged(store, split, f"its mask trains {trained:,} tokens, its manifest others")
    firsts = starts[np.diff(starts, append=num_tokens) > 0]
    labels = trained - int(np.count_nonzero(is_trained(bits, firsts)))
    out = metrics.left_out.values()
    kept = metrics.num_tokens - metrics.repeated_tokens + metrics.truncated_tokens
    assert kept + sum(entry.tokens for entry in out) == num_tokens
    told = metrics.trained_labels + metrics.truncated_labels
    assert told + sum(entry.labels for entry in out) == labels


def _damaged(store: Store, split: str, what: str) -> DamagedStoreError:
    return DamagedStoreError(
        f"{store.folder}, split {split!r}: {what}; check it with `shardmill verify`, then copy or "
        "build it again"
    )
