"""Fill in the middle: documents of some rows, rearranged when the row is read.

A document that lies whole inside a row of `seq_len + 1` tokens is cut between its tokens into a
prefix, a middle and a suffix, which are written in one of two forms, with three tokens as marks:

    PSM   <prefix> prefix <suffix> suffix <middle> middle
    SPM   <prefix> <suffix> suffix <middle> prefix middle

Its start token stays first and its end token stays last. The row keeps its length: what follows a
document moves right by three columns, and what leaves the row at its end, padding first, is cut and
counted. A document that would not stay whole is not rearranged.

Which rows: of the samples of a source, counted from the start of the run, the share `rate`, evenly
spread; in such a row all whole documents of at least `LEAST_TOKENS` tokens are rearranged. Where a
document is cut, and its form, are a hash of (seed, global sample number, column). So ranks, batch
sizes and resumes change nothing, and no state is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from operator import add, sub
from typing import Annotated, Any, NamedTuple, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.loading.rows import RowSource
from shardmill.records import JSON, BoolArray, IntArray, OffsetArray, write_next_token_pairs
from shardmill.sampling.order import by_value, checked_seed, fingerprint_of, mixed_words, words_at
from shardmill.store.readers.documents import Borders, spread
from shardmill.tokenizers.base import USUAL_NAMES

LEAST_TOKENS = 8
"""Of a document, its start and end token included: three more are a large part of a shorter one."""
EXTRA_TOKENS = 3

_BAR, _GAP = "\uff5c", "\u2581"  # as DeepSeek and SentencePiece write | and a space
_USUAL = (  # prefix, suffix and middle
    *(("fim_prefix", "fim_suffix", "fim_middle"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    tuple(f"<{_BAR}fim{_GAP}{part}{_BAR}>" for part in ("begin", "hole", "end")),
    *(tuple(f"{gap}<{part}>" for part in ("PRE", "SUF", "MID")) for gap in (_GAP, "")),
    ("prefix", "suffix", "middle"),
)
"""Names in StarCoder, Qwen-Coder and CodeGemma, SantaCoder, DeepSeek-Coder, CodeLlama."""
_MOST_RATES = 200  # characters of the rates in a state; more are hashed
_WHOLE = 2**64  # shares and phases are parts of it: exact, and they wrap around by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class FimTokens:
    """The ids that mark the parts of a document."""

    prefix: int
    suffix: int
    middle: int
    end: int | None = None  # stays last in its document; None: the end that the data name

    def __post_init__(self) -> None:
        for name in ("prefix", "suffix", "middle"):
            whole_number(getattr(self, name), name, least=0)
        if self.end is not None:
            whole_number(self.end, "end", least=0)
        if len({*self.ids, self.end}) < 4:
            raise OptionError(f"{self}: wanted different ids")

    @property
    def ids(self) -> tuple[int, int, int]:
        return self.prefix, self.suffix, self.middle


@dataclass(frozen=True, slots=True, kw_only=True)
class FimOptions:
    """Which documents are rearranged, and how."""

    rate: float | Mapping[str, float]  # share of rows; or by source, 0 for those without one
    spm_rate: float = 0.5  # share of SPM among the documents
    seed: int | None = None  # None: that of the order
    tokens: FimTokens | None = None  # None: found by their usual names

    def __post_init__(self) -> None:
        rates = self.rate.values() if isinstance(self.rate, Mapping) else (self.rate,)
        for name, value in (*(("fim", rate) for rate in rates), ("spm_rate", self.spm_rate)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= 1:
                raise OptionError(f"{{{name}}}: wanted a share from 0 to 1", **{name: value})
        if self.seed is not None:
            checked_seed(self.seed)


Fim: TypeAlias = float | Mapping[str, float] | FimOptions | None
"""What `load` and `stream` take: a share, one for each source, or all options."""


def fim_options(fim: Fim) -> FimOptions | None:
    """None when nothing is rearranged."""
    options = fim if isinstance(fim, FimOptions) else FimOptions(rate=0 if fim is None else fim)
    rates = options.rate.values() if isinstance(options.rate, Mapping) else (options.rate,)
    return options if any(rates) else None


def find_tokens(named: Mapping[str, int], where: str) -> FimTokens:
    """The tokens among named special tokens, by the usual names."""
    for names in _USUAL:
        if all(name in named for name in names):
            prefix, suffix, middle = (named[name] for name in names)
            return FimTokens(prefix=prefix, suffix=suffix, middle=middle)
    raise OptionError(
        f"{{fim}}: {where} names no tokens to mark prefix, suffix and middle with (its special "
        f"tokens: {', '.join(sorted(named)) or 'none'}; looked for fim_prefix, fim_suffix and "
        "fim_middle, and how StarCoder, CodeLlama and DeepSeek-Coder spell them). Name them when "
        "the tokenizer is opened (special=), so that no text becomes one, or give their ids: "
        "FimOptions(rate=..., tokens=FimTokens(prefix=..., suffix=..., middle=...))",
        fim=...,
    )


class FimCounts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What was rearranged."""

    rows: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0  # with such a document
    documents: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    tokens_cut: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0  # at the ends of these rows

    def __add__(self, other: FimCounts) -> FimCounts:
        return FimCounts(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: FimCounts) -> FimCounts:
        return FimCounts(*map(sub, astuple(self), astuple(other)))

    def to_dict(self) -> dict[str, JSON]:
        return msgspec.structs.asdict(self)


# which documents, and where everything goes


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FimPlan:
    """The documents to rearrange, in the rows that have one. Positions are `row * length + column`,
    counted over these rows alone."""

    rows: OffsetArray  # (n,) which of the rows that were looked at
    length: int
    starts: OffsetArray  # (k,) ascending
    stops: OffsetArray  # (k,)
    row: OffsetArray  # (k,)
    rank: OffsetArray  # (k,) 1, 2, ... in each row

    @property
    def each(self) -> OffsetArray:
        """(n,) documents of each row, at least one."""
        return np.bincount(self.row, minlength=len(self.rows)).astype(np.int64)

    @property
    def moved_starts(self) -> OffsetArray:
        """(k,) where the documents begin afterwards."""
        return self.starts + EXTRA_TOKENS * (self.rank - 1)

    def moved(self, positions: OffsetArray) -> OffsetArray:
        """Where the tokens at these positions go, -1 for those that are cut.

        Exact for the starts of documents, and for all tokens that are not inside of one.
        """
        row = positions // self.length
        before = self.stops.searchsorted(row * self.length, side="right")
        shift = self.stops.searchsorted(positions, side="right") - before
        found = positions + EXTRA_TOKENS * shift
        return np.where(found < (row + 1) * self.length, found, -1)

    def stretched(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(n, length) what holds for whole documents, such as segment ids, moved."""
        counts = np.ones(values.size, np.int64)
        counts[self.stops - 1] += EXTRA_TOKENS
        ends = np.arange(1, len(self.rows) + 1) * self.length
        counts[spread(ends - EXTRA_TOKENS * self.each, ends)[0]] = 0
        return np.repeat(values.reshape(-1), counts).reshape(values.shape)


def plan_fim(length: int, starts: OffsetArray, stops: OffsetArray) -> FimPlan:
    """Of these whole documents those that are long enough and stay whole, the first ones of a row
    before the last ones."""
    chosen = stops - starts >= LEAST_TOKENS
    starts, stops = starts[chosen], stops[chosen]
    row = starts // length
    rank = np.arange(1, len(row) + 1) - row.searchsorted(row)
    # the new stops ascend in a row, so those that fit are its first ones
    fits = stops - row * length + EXTRA_TOKENS * rank <= length
    rows, number = np.unique(row[fits], return_inverse=True)
    moved = (row[fits] - number) * length
    return FimPlan(
        rows=rows,
        length=length,
        starts=starts[fits] - moved,
        stops=stops[fits] - moved,
        row=number,
        rank=rank[fits],
    )


# one kind of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FimRules:
    """What happens to the rows of one source."""

    options: FimOptions  # with one rate, the seed and the tokens
    tokens: FimTokens
    first: tuple[int, ...]  # ids that stay at the start of a document
    last: tuple[int, ...]  # and at its end
    share: int  # of 2**64 rows
    spm_share: int  # of 2**32 documents
    offset: int  # where the even spacing begins, below 2**64
    keys: tuple[int, ...]  # of the hash: for a row, and for the three draws of a document

    def of_stream(self, stream: int, num_streams: int) -> Self:
        """The rules of one of several streams that give rows in turn, each counting its own rows.

        Evenly spaced offsets, so that all streams together keep to the share too: the sum over s
        of floor(x + s / S) is floor(S x).
        """
        return replace(self, offset=(self.offset + stream * _WHOLE // num_streams) % _WHOLE)

    def chosen(self, numbers: OffsetArray) -> BoolArray:
        """Which rows of the source, counted from the start of the run, are rearranged.

        floor((n + 1) rate + offset) - floor(n rate + offset): of any run of rows that is the share
        to less than one row. The fractional part of `n rate + offset` is a 64-bit word that
        wraps around, so it is exact for any n; a row is chosen where the next one wraps.
        """
        if self.share in (0, _WHOLE):
            return np.full(len(numbers), self.share > 0)
        points = numbers.astype(np.uint64) * np.uint64(self.share) + np.uint64(self.offset)
        return np.asarray(points >= np.uint64(_WHOLE - self.share))

    def rearranged(self, ids: IntArray, plan: FimPlan, samples: OffsetArray) -> IntArray:
        """The plan's rows (n, length), rearranged; `samples` are their global numbers."""
        if not len(plan.rows):
            return ids
        flat, length, row = ids.reshape(-1), plan.length, plan.row
        begins = plan.starts + np.isin(flat[plan.starts], self.first)
        ends = plan.stops - np.isin(flat[plan.stops - 1], self.last)
        low, high, is_spm = self._cuts(ends - begins, samples[row], plan.starts - row * length)
        # SPM is PSM without a prefix, whose middle is the prefix and the middle
        split = begins + np.where(is_spm, 0, low)
        high += begins
        # before the first document of a row: the rest of the row before it, and its own beginning
        is_first, tail_stop = plan.rank == 1, (row + 1) * length - EXTRA_TOKENS * plan.each[row]
        before, tail = np.append(0, ends[:-1]), np.append(0, tail_stop[:-1])
        marks = flat.size + np.arange(3)  # prefix, suffix, middle
        pieces = [
            (before, np.where(is_first, tail, before)),
            (np.where(is_first, row * length, before), begins),
            (marks[0], marks[0] + 1),
            (begins, split),
            (marks[1], marks[1] + 1),
            (high, ends),
            (marks[2], marks[2] + 1),
            (split, high),
        ]
        spans = np.empty((2, len(row), len(pieces)), np.int64)
        for number, (start, stop) in enumerate(pieces):
            spans[0, :, number], spans[1, :, number] = start, stop
        # after the last document the rest of its row
        starts = np.append(spans[0].reshape(-1), ends[-1])
        index, _ = spread(starts, np.append(spans[1].reshape(-1), tail_stop[-1]))
        table = np.concatenate((flat, np.array(self.tokens.ids, flat.dtype)))
        return table[index].reshape(ids.shape)

    def _cuts(
        self, lengths: OffsetArray, samples: OffsetArray, columns: OffsetArray
    ) -> tuple[OffsetArray, OffsetArray, BoolArray]:
        """For documents of `lengths` tokens the start and stop of the middle, and whether SPM.

        Every pair of two different edges is as likely as every other, so no middle is empty.
        """
        (rows,) = mixed_words(self.keys[:1], samples.astype(np.uint64))
        draws = mixed_words(self.keys[1:], rows + columns.astype(np.uint64)) >> np.uint64(32)
        sizes = lengths.astype(np.uint64)
        one, two = (draws[:2] * np.stack((sizes + np.uint64(1), sizes))) >> np.uint64(32)
        two += two >= one
        low, high = np.minimum(one, two), np.maximum(one, two)
        return low.astype(np.int64), high.astype(np.int64), draws[2] < np.uint64(self.spm_share)


def check_vocabulary(tokens: FimTokens, vocab_size: int | None, where: str) -> None:
    if vocab_size is not None and max(tokens.ids) >= vocab_size:
        raise OptionError(
            f"{{fim}}: the id {max(tokens.ids):,} is given, but {where} has a vocabulary of "
            f"{vocab_size:,} ids",
            fim=...,
        )


def fim_rules(
    options: FimOptions, named: Mapping[str, int], where: str, *, seed: int, path: Sequence[str]
) -> FimRules:
    """Rules for rows whose tokens have these special ids. `path` tells sources of a run apart;
    `options.rate` is a number."""
    assert not isinstance(options.rate, Mapping)
    tokens = options.tokens or find_tokens(named, where)
    first, last = (
        tuple(sorted({named[name] for name in USUAL_NAMES[role] if name in named}))
        for role in ("bos", "eos")
    )
    used = seed if options.seed is None else int(options.seed)
    (offset,) = words_at(used, ("fim", "rows", *path), 1)
    return FimRules(
        options=replace(options, seed=used, tokens=tokens),
        tokens=tokens,
        first=first,
        last=last if tokens.end is None else (tokens.end,),
        share=round(Fraction(options.rate) * _WHOLE),
        spm_share=round(Fraction(options.spm_rate) * 2**32),
        offset=offset,
        keys=words_at(used, ("fim", "documents"), 4),
    )


def fim_facts(options: FimOptions) -> dict[str, JSON]:
    """What a state records of the options of rules."""
    assert not isinstance(options.rate, Mapping)
    assert options.tokens is not None
    return {
        "rate": float(options.rate),
        "spm_rate": float(options.spm_rate),
        "seed": options.seed,
        "tokens": asdict(options.tokens),
    }


# the sources of a stream


class FimChange(NamedTuple):
    """What happens to the rows of one source in a step."""

    rows: OffsetArray  # (n,) which rows of the step
    plan: FimPlan  # of these rows
    rules: FimRules


class SourcesFim:
    """Which rows of a stream are rearranged, and how: a function of the numbers of its samples."""

    def __init__(self, options: FimOptions, sources: Sequence[RowSource], *, seed: int) -> None:
        self._sources = sources
        rates = _rates(options, [source.name for source in sources])
        self.rules = tuple(
            _rules_of(source, options, rate, seed) if rate else None
            for source, rate in zip(sources, rates, strict=True)
        )
        used = next(rules.options for rules in self.rules if rules is not None)
        for source, rules in zip(sources, self.rules, strict=True):
            if rules is not None and rules.options.tokens != used.tokens:
                raise OptionError(
                    f"{{fim}}: source {source.name!r} marks the parts of a document with "
                    f"{rules.options.tokens}, an earlier one with {used.tokens}: they are of other "
                    "tokenizers",
                    fim=...,
                )
        listed: JSON = dict(zip((source.name for source in sources), rates, strict=True))
        if len(set(rates)) == 1:
            listed = rates[0]
        elif len(json.dumps(listed)) > _MOST_RATES:
            listed = fingerprint_of(rates=listed)[:16]
        self.facts = fim_facts(used) | {"rate": listed}

    def changes(
        self, source: OffsetArray, number: OffsetArray, item: OffsetArray
    ) -> list[FimChange]:
        """`number`: which sample of its source each one is, from the start of the run.

        No token of a store is read: its index says where documents are.
        """
        found = []
        for at, chosen in by_value(source):
            rules = self.rules[at]
            if rules is None:
                continue
            rows = np.arange(len(source))[chosen]
            rows = rows[rules.chosen(number[rows])]
            documents = self._sources[at].whole_documents(item[rows])
            plan = plan_fim(self._sources[at].seq_len + 1, *documents)
            if len(plan.rows):
                found.append(FimChange(rows[plan.rows], plan, rules))
        return found


def _rates(options: FimOptions, names: Sequence[str]) -> list[float]:
    """The rate of each source."""
    if not isinstance(options.rate, Mapping):
        return [float(options.rate)] * len(names)
    unknown = sorted(set(options.rate) - set(names))
    if unknown:
        raise OptionError(
            f"{{fim}}: there is no source {unknown[0]!r}; the sources are {', '.join(names)}",
            fim=dict(options.rate),
        )
    return [float(options.rate.get(name, 0)) for name in names]


def _rules_of(source: RowSource, options: FimOptions, rate: float, seed: int) -> FimRules:
    named = source.special_token_ids
    source.whole_documents(np.empty(0, np.int64))  # an error when it does not know them
    where = f"source {source.name!r} ({source.path})"
    rules = fim_rules(replace(options, rate=rate), named, where, seed=seed, path=(source.name,))
    check_vocabulary(rules.tokens, source.vocab_size, where)
    return rules


def count_change(change: FimChange) -> FimCounts:
    """What the rows of a store lose is three tokens a document: they have no padding."""
    documents = len(change.plan.starts)
    tokens_cut = EXTRA_TOKENS * documents
    return FimCounts(rows=len(change.rows), documents=documents, tokens_cut=tokens_cut)


def moved_borders(borders: Borders, changes: Sequence[FimChange]) -> Borders:
    """Where documents begin in the rows of a step after the changes."""
    if not changes:
        return borders
    length, positions = borders.length, borders.positions.copy()
    row = positions // length
    for rows, plan, _ in changes:
        place = np.full(borders.num_windows, -1)
        place[rows] = np.arange(len(rows))
        own = np.flatnonzero(place[row] >= 0)
        shift = (row[own] - place[row[own]]) * length  # from rows of the plan to rows of the step
        found = plan.moved(positions[own] - shift)
        positions[own] = np.where(found < 0, -1, found + shift)
    return Borders(borders.num_windows, length, positions[positions >= 0])


def rearrange(
    samples: npt.ArrayLike, changes: Sequence[FimChange], inputs: OffsetArray, labels: OffsetArray
) -> None:
    """Apply the changes to the inputs and labels of a step, all of whose labels are trained."""
    for rows, plan, rules in changes:
        before = np.concatenate((inputs[rows], labels[rows, -1:]), axis=1)
        ids = rules.rearranged(before, plan, np.asarray(samples)[rows])
        write_next_token_pairs(ids, None, inputs, labels, rows)
