"""Pack the conversations of a store: which of them share a row, as a plan beside it.

In: the folder of a chat store, a split, options.  Out: a plan in its folder `packs`, read back.
Promise: same store and options, same bytes; every piece of every example is in exactly one row, or
is left out with its number and a reason; every row trains at least one token; the tokens and the
trained labels of the split are accounted for to the last one. Only the index and the mask are read.
Not here: choosing rows (packing), the file (shards), rows of tokens (mapped).

Examples become pieces that fit into a row, each with the labels it trains.

In: lengths, the bits of a loss mask, a rule for examples over capacity.  Out: `Pieces`.
Promise: a label is a trained token with a token of its own piece in front of it. Split pieces share
one token with the next, so every label of an example is in exactly one of its pieces. Bits are
counted a block at a time: memory grows with pieces, never with tokens.
Not here: which pieces share a row (packing), the account (packs).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import DamagedStoreError, OptionError
from shardmill.packing import PACKERS, PackPlan
from shardmill.records import BoolArray, OffsetArray
from shardmill.store import (
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
from shardmill.store.plans import Algorithm, LongRule, option_problems

_BLOCK = 2**17  # bytes of a mask at a time: a million tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledPieces:
    """Piece `i` is `start[i]..stop[i]` of the tokens of `example[i]`, by example and start."""

    example: OffsetArray  # (n,) never falls
    start: OffsetArray  # (n,)
    stop: OffsetArray  # (n,)
    long: OffsetArray  # numbers of the examples over capacity, whatever became of them

    @property
    def lengths(self) -> OffsetArray:
        return self.stop - self.start

    def joins(self) -> OffsetArray:
        """Numbers of the pieces whose first token is also the last of the piece before."""
        return np.flatnonzero(self.start)


def cut_examples(lengths: OffsetArray, capacity: int, rule: LongRule) -> LabelledPieces:
    """The pieces of all examples. One without tokens gives none."""
    long = np.flatnonzero(lengths > capacity)
    if len(long) and rule == "error":
        raise OptionError(
            f"example {long[0]:,}: {lengths[long[0]]:,} tokens, but a row holds {capacity:,} "
            f"({len(long):,} of {len(lengths):,} examples are too long): long='split' trains all "
            "of them in pieces, 'truncate' cuts off their ends, 'drop' leaves them out"
        )
    if rule == "split" and len(long):
        return _split(lengths, capacity, long)
    kept = lengths > 0
    if rule == "drop":
        kept[long] = False
    example = np.flatnonzero(kept)
    stop = np.minimum(lengths[example], capacity)
    return LabelledPieces(example=example, start=np.zeros_like(stop), stop=stop, long=long)


def _split(lengths: OffsetArray, capacity: int, long: OffsetArray) -> LabelledPieces:
    # capacity 4, length 8: 0..4, 3..7, 6..8. Each piece but the first repeats a token, so it
    # brings capacity - 1 transitions from a token to the next, of which 8 tokens have 7.
    step = capacity - 1
    counts = np.minimum(lengths, 1)
    counts[long] = -(-(lengths[long] - 1) // step)
    example = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts  # the number of each example's first piece
    start = (np.arange(len(example)) - first[example]) * step
    stop = np.minimum(start + capacity, lengths[example])
    return LabelledPieces(example=example, start=start, stop=stop, long=long)


def count_labels(
    mask_bits: npt.NDArray[np.uint8], starts: OffsetArray, stops: OffsetArray
) -> OffsetArray:
    """(n,) trained tokens of each span of a split but its first, which nothing predicts.

    Spans hold tokens, rise, and overlap by one token at most.
    """
    edges = np.stack((starts + 1, stops), axis=1)
    before = trained_before(mask_bits, edges.reshape(-1)).reshape(edges.shape)
    return before[:, 1] - before[:, 0]


def trained_before(mask_bits: npt.NDArray[np.uint8], positions: OffsetArray) -> OffsetArray:
    """(n,) how many tokens in front of each position are trained; positions never fall."""
    found = np.empty(len(positions), np.int64)
    trained = done = 0
    for first in range(0, len(mask_bits) + 1, _BLOCK):  # + 1: a position behind the last token
        words = _words(mask_bits[first : first + _BLOCK])
        sums = np.zeros(len(words) + 1, np.int64)
        np.cumsum(np.bitwise_count(words), out=sums[1:])
        stop = int(np.searchsorted(positions, 8 * (first + _BLOCK)))
        here = positions[done:stop] - 8 * first
        word = here >> 6
        below = (np.uint64(1) << (here & 63).astype(np.uint64)) - np.uint64(1)
        found[done:stop] = trained + sums[word] + np.bitwise_count(words[word] & below)
        trained, done = trained + int(sums[-1]), stop
    return found


def is_trained(mask_bits: npt.NDArray[np.uint8], positions: OffsetArray) -> BoolArray:
    """(n,) whether the tokens at these positions are trained."""
    bits = mask_bits[positions >> 3] >> (positions & 7).astype(np.uint8)
    trained: BoolArray = (bits & 1).view(np.bool_)
    return trained


def _words(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """64 bits each, the lowest first, and at least one bit 0 behind the last."""
    words = np.zeros(len(packed) // 8 + 1, np.dtype("<u8"))
    words.view(np.uint8)[: len(packed)] = packed
    return words


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
    pieces: LabelledPieces
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
