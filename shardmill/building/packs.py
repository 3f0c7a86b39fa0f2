"""Pack a chat store: write a plan of which conversations share a row into its folder `packs`.

Same store and options, same bytes. Every piece of every example is in exactly one row, or is left
out with its number and a reason; every row trains at least one label; all tokens and trained labels
of the split are accounted for. Only the index and the loss mask are read, the mask a block at a
time, so memory grows with the number of pieces, never with tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import LossError, OptionError
from shardmill.packing import Long, PackPlan, Pieces, cut_examples, packer_named
from shardmill.records import OffsetArray
from shardmill.store import PlanOptions, Store, StoredPlan, open_store, read_plan
from shardmill.store.branches import refuse_preferences
from shardmill.store.plans import (
    LeftOut,
    PlanArrays,
    PlanFacts,
    PlanMetrics,
    check_plan,
    option_problems,
    plan_path,
    write_plan,
)

_BLOCK = 2**17  # bytes of a mask at a time: a million tokens


def build_plan(
    folder: str | Path,
    split: str = "train",
    *,
    options: PlanOptions,
    name: str | None = None,
    overwrite: bool = False,
    allow_empty: bool = False,
) -> StoredPlan:
    """Write the plan of a split to `folder/packs/split-name.plan` and open it.

    A row has `seq_len + 1` tokens: inputs are all but its last, labels all but its first.
    With `align_to`, every piece starts at a multiple of it, and `seq_len` must be a multiple too. A
    row then holds `seq_len` tokens of pieces, each rounded up, and its last token is padding, so
    that the rounded inputs of every piece end within the row. `long` says what happens to examples
    over that capacity; "split" repeats one token between pieces, so no trained label is lost.
    Without a `name` the options give one. Writing an equal plan again is fine; a different plan of
    that name is replaced only with `overwrite`. A plan without a row is a `LossError` unless
    `allow_empty`.
    """
    options = _checked(options)
    store = open_store(folder)
    refuse_preferences(store, "a pack plan would part them")
    if not store.is_chat:
        raise OptionError(
            f"{store.folder}: a store of documents, which have no loss mask; it needs no plan: "
            "shardmill.TokenSource cuts it into windows of any length"
        )
    path = plan_path(store.folder, split, plan_name(options) if name is None else name)
    cut = _cut_split(store, split, options)
    pack = packer_named(options.algorithm, options.seed)
    plan = pack(
        cut.pieces.lengths[cut.labels > 0],
        options.capacity,
        max_per_row=options.max_per_row,
        align_to=options.align_to,
    )
    metrics = _metrics(cut, plan, options)
    _check_totals(store, split, metrics)
    if not metrics.num_rows and not allow_empty:
        raise _nothing_packed(store, split, cut, options)
    facts = PlanFacts(store=store.fingerprint, split=split, options=options, metrics=metrics)
    write_plan(path, facts, _arrays(cut, plan, options), overwrite=overwrite)
    written = read_plan(path)
    check_plan(written, open_store(folder))  # refused if the store was rebuilt in the meantime
    return written


def _nothing_packed(store: Store, split: str, cut: _CutSplit, options: PlanOptions) -> LossError:
    """Why no example is in a row; the first ones of each reason, with how they begin in tokens."""
    found = {
        "too_long": cut.pieces.long if options.long == "drop" else cut.pieces.long[:0],
        "trains_nothing": cut.pieces.example[cut.labels == 0],
    }
    reasons = {why: len(numbers) for why, numbers in found.items() if len(numbers)}
    first = {why: int(found[why][0]) for why in reasons}
    examples = {
        why: (f"example {number:,}", f"{cut.lengths[number]:,} tokens")
        for why, number in first.items()
    }
    lines = [
        f"{reasons[why]:,} {why}, as {id}: {size}" for why, (id, size) in examples.items()
    ] or [f"the split has {len(cut.lengths):,} examples"]
    return LossError(
        "\n  ".join(
            [
                f"{store.folder}, split {split!r}: no row is packed; nothing was written",
                *lines,
                f"a row holds {options.capacity:,} tokens: pack with another {{seq_len}} or "
                "{long}, or write a plan without rows with {allow_empty}",
            ]
        ),
        reasons=reasons,
        num_read=len(cut.lengths),
        examples=examples,
        seq_len=...,
        long="split",
        allow_empty=True,
    )


def plan_name(options: PlanOptions) -> str:
    """`8192` for the default options, else with what differs from them: `8192-first-fit-split`."""
    parts = [str(options.seq_len)]
    parts += [options.algorithm] * (options.algorithm != "best-fit")
    parts += [f"s{options.seed}"] * (options.seed is not None)
    parts += [f"max{options.max_per_row}"] * (options.max_per_row is not None)
    parts += [f"align{options.align_to}"] * (options.align_to != 1)
    parts += [options.long] * (options.long != "error")
    return "-".join(parts)


def _checked(options: PlanOptions) -> PlanOptions:
    """The same options as plain numbers; OptionError if one makes no sense."""
    packer_named(options.algorithm, options.seed)
    if options.long not in get_args(Long):
        raise OptionError(f"{{long}}: wanted one of {', '.join(get_args(Long))}", long=options.long)
    seed, most = options.seed, options.max_per_row
    checked = PlanOptions(
        seq_len=whole_number(options.seq_len, "seq_len"),
        algorithm=options.algorithm,
        seed=None if seed is None else whole_number(seed, "seed", least=0),
        max_per_row=None if most is None else whole_number(most, "max_per_row"),
        align_to=whole_number(options.align_to, "align_to"),
        long=options.long,
    )
    if checked.seed is not None and checked.seed >= 2**62:
        raise OptionError("{seed}: wanted less than 2**62", seed=checked.seed)
    for problem in option_problems(checked):
        raise problem
    return checked


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _CutSplit:
    """The examples of a split, cut into pieces that fit a row, with the labels each one trains.

    A label is a trained token with a token of the same piece before it. Split pieces share one
    token with the next, so every label of an example is in exactly one of its pieces.
    """

    lengths: OffsetArray  # of every example
    pieces: Pieces
    labels: OffsetArray  # trained labels of every piece; a piece with none is left out
    long_labels: OffsetArray  # trained labels of every example in `pieces.long`, uncut


def _cut_split(store: Store, split: str, options: PlanOptions) -> _CutSplit:
    starts, bits = store.document_starts(split), store.chat_arrays(split).mask_bits
    lengths = np.diff(starts, append=store.num_tokens(split))
    if len(lengths) and lengths.min() < 0:
        example = int(np.flatnonzero(lengths < 0)[0])
        raise store.damaged(split, f"example {example:,} ends before it starts")
    pieces = cut_examples(lengths, options.capacity, options.long, overlap=1)
    begins, long = starts[pieces.example], pieces.long
    return _CutSplit(
        lengths=lengths,
        pieces=pieces,
        labels=count_labels(bits, begins + pieces.start, begins + pieces.stop),
        long_labels=count_labels(bits, starts[long], starts[long] + lengths[long]),
    )


def count_labels(
    mask_bits: npt.NDArray[np.uint8], starts: OffsetArray, stops: OffsetArray
) -> OffsetArray:
    """Trained tokens of each span except its first token, which nothing predicts.

    Spans are not empty, ascend, and overlap by at most one token.
    """
    edges = np.stack((starts + 1, stops), axis=1)
    before = trained_before(mask_bits, edges.reshape(-1)).reshape(edges.shape)
    return before[:, 1] - before[:, 0]


def trained_before(mask_bits: npt.NDArray[np.uint8], positions: OffsetArray) -> OffsetArray:
    """How many tokens before each position are trained; positions never decrease."""
    found = np.empty(len(positions), np.int64)
    trained = done = 0
    for first in range(0, len(mask_bits) + 1, _BLOCK):  # + 1: a position after the last token
        packed = mask_bits[first : first + _BLOCK]
        words = np.zeros(len(packed) // 8 + 1, np.dtype("<u8"))  # ends with at least one zero bit
        words.view(np.uint8)[: len(packed)] = packed
        sums = np.zeros(len(words) + 1, np.int64)
        np.cumsum(np.bitwise_count(words), out=sums[1:])
        stop = int(np.searchsorted(positions, 8 * (first + _BLOCK)))
        here = positions[done:stop] - 8 * first
        word = here >> 6
        below = (np.uint64(1) << (here & 63).astype(np.uint64)) - np.uint64(1)
        found[done:stop] = trained + sums[word] + np.bitwise_count(words[word] & below)
        trained, done = trained + int(sums[-1]), stop
    return found


def _arrays(cut: _CutSplit, plan: PackPlan, options: PlanOptions) -> PlanArrays:
    pieces = cut.pieces
    order = np.flatnonzero(cut.labels)[plan.rows.indices]  # pieces, row after row
    example, start, stop = pieces.example[order], pieces.start[order], pieces.stop[order]
    cuts = np.flatnonzero((start > 0) | (stop < cut.lengths[example]))
    return PlanArrays(
        counts=np.diff(plan.rows.offsets),
        examples=example,
        cut_pieces=cuts,
        cut_starts=start[cuts],
        cut_stops=stop[cuts],
        too_long=pieces.long if options.long == "drop" else pieces.long[:0],
        trains_nothing=pieces.example[cut.labels == 0],
    )


def _metrics(cut: _CutSplit, plan: PackPlan, options: PlanOptions) -> PlanMetrics:
    pieces, long, trains = cut.pieces, cut.pieces.long, cut.labels > 0
    joins = np.flatnonzero(pieces.start)  # pieces whose first token ends the piece before
    repeated = int(np.count_nonzero(trains[joins] & trains[joins - 1]))
    idle_tokens = int(pieces.lengths[~trains].sum()) - (len(joins) - repeated)
    truncated_tokens = truncated_labels = 0
    too_long = LeftOut(pieces=0, tokens=0, labels=0)
    if options.long == "truncate":
        kept = np.searchsorted(pieces.example, long)  # one piece each
        truncated_tokens = int((cut.lengths[long] - pieces.stop[kept]).sum())
        truncated_labels = int((cut.long_labels - cut.labels[kept]).sum())
    if options.long == "drop":
        tokens, labels = int(cut.lengths[long].sum()), int(cut.long_labels.sum())
        too_long = LeftOut(pieces=len(long), tokens=tokens, labels=labels)
    idle = LeftOut(pieces=int(np.count_nonzero(~trains)), tokens=idle_tokens, labels=0)
    return PlanMetrics(
        num_rows=len(plan),
        lower_bound=plan.metrics.lower_bound,
        num_examples=len(cut.lengths),
        num_empty=int(np.count_nonzero(cut.lengths == 0)),
        num_pieces=plan.metrics.num_items,
        num_tokens=plan.metrics.num_tokens,
        repeated_tokens=repeated,
        trained_labels=int(cut.labels.sum()),
        num_split=len(long) if options.long == "split" else 0,
        num_truncated=len(long) if options.long == "truncate" else 0,
        truncated_tokens=truncated_tokens,
        truncated_labels=truncated_labels,
        left_out={"too_long": too_long, "trains_nothing": idle},
    )


def _check_totals(store: Store, split: str, metrics: PlanMetrics) -> None:
    """No token and no label is lost silently: compare the sums of the metrics with the store."""
    starts, bits = store.document_starts(split), store.chat_arrays(split).mask_bits
    num_tokens, chat = store.num_tokens(split), store.manifest.splits[split].chat
    trained = int(trained_before(bits, np.array([num_tokens]))[0])
    if chat is None or trained != chat.trained_tokens:
        raise store.damaged(
            split, f"its mask trains {trained:,} tokens, its manifest says otherwise"
        )
    firsts = starts[np.diff(starts, append=num_tokens) > 0]
    first_bits = bits[firsts >> 3] >> (firsts & 7).astype(np.uint8)
    labels = trained - int(np.count_nonzero(first_bits & 1))
    left_out = metrics.left_out.values()
    kept = metrics.num_tokens - metrics.repeated_tokens + metrics.truncated_tokens
    assert kept + sum(entry.tokens for entry in left_out) == num_tokens
    kept_labels = metrics.trained_labels + metrics.truncated_labels
    assert kept_labels + sum(entry.labels for entry in left_out) == labels
