"""One named origin of packed rows: a pack plan over a chat store.

In: a store and one of its plans; then row numbers.  Out: inputs and labels in int64 rows.
Promise: row `i` is row `i` of the plan: inputs are all its tokens but the last, labels all but the
first, IGNORE_INDEX where they are not trained, at the first token of a piece and in padding; every
row trains at least one token, and all rows train each label of the plan once an epoch. Nothing is
packed or copied here. It pickles by path, forks and spawns; threads may share it. `excluded` says
which rows a stream must not give, as it was when the source was opened.
Not here: making plans (build, `shardmill pack`), which rows and when (stream), what is given in
place of excluded rows (exclusion); `fill` and `batch` give any row.

With `documents=True` a document is a piece. Padding behind the last piece of a row is one more, so
that nothing attends to it but itself. What `align_to` put between two pieces belongs to the one
before it: there it comes behind all its tokens, which causal attention does not see.

Conversations of a store as rows of one length.

In: a store, a split, `seq_len`, a fit; then example numbers.  Out: rows, or inputs and labels.
Promise: a row is a function of its example, `seq_len` and the fit, not of the batch it comes in;
every row trains at least one token; an example that gives no row is told by number and reason,
and nothing takes its place: those with an excluded token are among them. The store is not touched:
another `seq_len` needs no build.
Not here: which examples come when (sampling), several examples in one row (packing).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.chat.fit import Fit, FitCounts, FitPlan, FittedRows, fit_rows, plan_fit
from shardmill.errors import OptionError
from shardmill.loading.exclusion import ExcludedItems, excluded_rows
from shardmill.loading.rows import RowSpan, check_fill, checked_name, row_blocks
from shardmill.records import (
    IGNORE_INDEX,
    BoolArray,
    ChatExamples,
    IntArray,
    OffsetArray,
    next_token_pairs,
    write_next_token_pairs,
)
from shardmill.store import Manifest, find_plan, open_store, read_exclusions, read_plan
from shardmill.store.exclusions import touched
from shardmill.store.readers import ChatSpace, PackedRows, PackSpace
from shardmill.store.readers.documents import Borders
from shardmill.store.readers.token_space import ReaderName, as_positions

log = logging.getLogger(__name__)


_CHUNK = 4096  # examples planned at a time
_IDLE = "nothing_trained_in_row"

EXCLUDED = "excluded"
"""The reason of an example that has an excluded token."""


class ChatBatch(TypedDict):
    """Inputs and labels of n examples."""

    input_ids: IntArray  # (n, seq_len) int64
    labels: IntArray  # (n, seq_len) int64; the next token, or IGNORE_INDEX where it is not trained
    loss_mask: BoolArray  # (n, seq_len) where labels count
    examples: OffsetArray  # (n,) the number of the example in each row


class ChatRows:
    """The conversations of a split, each as a row of `seq_len + 1` tokens."""

    def __init__(
        self,
        folder: str | Path,
        split: str = "train",
        *,
        seq_len: int,
        fit: Fit | str = Fit.DROP_OLDEST_TURNS,
        pad_id: int | None = None,
        reader: ReaderName = "auto",
    ) -> None:
        """`pad_id` None: the end of a turn, as the store's template has it. `reader`: as in
        `TokenSource`."""
        store = open_store(folder)
        self.space = ChatSpace(store, split, reader=reader)
        self.seq_len = whole_number(seq_len, "seq_len")
        if fit not in list(Fit):
            raise OptionError(f"fit={fit!r}: wanted one of {', '.join(Fit)}")
        self.fit = Fit(fit)
        self.pad_id = checked_pad_id(store.manifest, str(store.folder), pad_id)
        self._spans = read_exclusions(store).spans(split)  # as they were when it was opened
        self._told = False

    def __len__(self) -> int:
        """Examples of the split, those included that give no row at this length."""
        return len(self.space)

    def rows(self, indices: npt.ArrayLike) -> FittedRows:
        """The rows of these examples. Their plan counts examples within `indices`."""
        examples, excluded = self._examples(indices)
        rows = fit_rows(examples, self.seq_len, fit=self.fit, pad_id=self.pad_id)
        if excluded.any():
            rows = replace(rows, plan=_with_reason(rows.plan, excluded))
        if rows.plan.dropped and not self._told:
            self._told = True
            log.warning(
                "%r: some examples give no row (%s); `fit_counts()` counts them all",
                self,
                ", ".join(f"{reason}: {len(who):,}" for reason, who in rows.plan.dropped.items()),
            )
        return rows

    def batch(self, indices: npt.ArrayLike) -> ChatBatch:
        """Inputs and labels, shifted. An example without a row is missing in `examples`."""
        rows = self.rows(indices)
        x, y = next_token_pairs(rows.ids, rows.mask)
        loss_mask = rows.mask[:, 1:].copy()
        chosen = np.asarray(indices, np.int64)[rows.plan.kept]
        return ChatBatch(input_ids=x, labels=y, loss_mask=loss_mask, examples=chosen)

    def fit_counts(self) -> FitCounts:
        """What becomes of every example and token of the split. Reads all of it, in parts."""
        starts = range(0, len(self), _CHUNK)
        parts = [np.arange(start, min(start + _CHUNK, len(self))) for start in starts]
        return reduce(add, (self._plan(part).counts for part in parts), FitCounts(dropped={}))

    def _plan(self, indices: OffsetArray) -> FitPlan:
        examples, excluded = self._examples(indices)
        plan = plan_fit(examples, self.seq_len, self.fit)
        return _with_reason(plan, excluded) if excluded.any() else plan

    def _examples(self, indices: npt.ArrayLike) -> tuple[ChatExamples, BoolArray]:
        """These examples, and which are excluded: those train nothing, so they give no row."""
        examples = self.space.examples(indices)
        if not len(self._spans):
            return examples, np.zeros(len(examples.ids), np.bool_)
        excluded = touched(self._spans, *self.space.spans(indices))
        mask = examples.mask & ~np.repeat(excluded, examples.ids.lengths)
        return replace(examples, mask=mask), excluded

    def __repr__(self) -> str:
        return (
            f"ChatRows({str(self.space.store.folder)!r}, {self.space.split!r}, "
            f"seq_len={self.seq_len:,}, fit={self.fit.value!r}, examples={len(self):,})"
        )


def _with_reason(plan: FitPlan, excluded: BoolArray) -> FitPlan:
    """The excluded ones told as such."""
    idle = plan.dropped[_IDLE]
    dropped = {**plan.dropped, _IDLE: idle[~excluded[idle]], EXCLUDED: np.flatnonzero(excluded)}
    left = {reason: who for reason, who in dropped.items() if len(who)}
    counts = replace(plan.counts, dropped={reason: len(who) for reason, who in left.items()})
    return replace(plan, dropped=left, counts=counts)


def _end_ids(options: Mapping[str, Any]) -> list[Any]:
    """What ends a turn, as the template says; none when the manifest says something else there."""
    found: Any = options
    for key in ("chat", "template", "end_ids"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, list) else []


def checked_pad_id(manifest: Manifest, where: str, asked: int | None) -> int:
    """The id asked for, or else the one that ends a turn in this store."""
    if asked is None:
        named = manifest.special_token_ids
        ends = _end_ids(manifest.options)
        asked = ends[-1] if ends else named.get("eot", named.get("eos"))
    if asked is None:
        raise OptionError(
            f"{where}: the store names no end of turn, 'eot' or 'eos' to pad with; pass pad_id, "
            "any id of the vocabulary: padding is never trained"
        )
    pad_id = whole_number(asked, "pad_id", least=0)
    if manifest.vocab_size is not None and pad_id >= manifest.vocab_size:
        raise OptionError(f"pad_id={pad_id:,}: the vocabulary has {manifest.vocab_size:,} ids")
    return pad_id


class PackBatch(TypedDict):
    """Inputs and labels of n rows of a plan."""

    input_ids: OffsetArray  # (n, seq_len)
    labels: OffsetArray  # (n, seq_len) the next token, or IGNORE_INDEX where it is not trained
    loss_mask: BoolArray  # (n, seq_len) where labels count
    rows: OffsetArray  # (n,) the number of each row in the plan


class PackSource:
    """Every row of a plan: a read-only sequence without a state.

    `plan`: its name ("train-8192", as `shardmill pack --list` prints it), its path, or its
    `seq_len` when the store has one plan of that length. `name` is part of the order, as in
    `TokenSource`; without one it is the name of the folder. `pad_id` None: the end of a turn, as
    the store's template has it. `reader`: as in `TokenSource`.
    """

    def __init__(
        self,
        folder: str | Path,
        plan: str | Path | int,
        *,
        name: str | None = None,
        pad_id: int | None = None,
        reader: ReaderName = "auto",
    ) -> None:
        store = open_store(folder)
        found = read_plan(find_plan(store.folder, plan))
        self.pad_id = checked_pad_id(store.manifest, str(store.folder), pad_id)
        if self.pad_id > np.iinfo(store.dtype).max:
            raise OptionError(f"pad_id={self.pad_id:,}: tokens of {store.folder} are {store.dtype}")
        self._space = PackSpace(store, found, pad_id=self.pad_id, reader=reader)
        self.reader = self._space.reader
        self.path = store.folder
        self.split: str | None = found.facts.split  # never None: a plan is of a store
        self.plan = found.path
        self.seq_len = found.facts.options.seq_len
        self.name = checked_name(self.path.name if name is None else name)
        self.fingerprint = found.fingerprint
        self.num_tokens = found.facts.metrics.num_tokens
        self.window_bytes = found.facts.row_len * self._space.dtype.itemsize
        self.excluded: ExcludedItems | None = excluded_rows(
            read_exclusions(store).spans(found.facts.split), self._space, name=self.name
        )

    def __len__(self) -> int:
        return len(self._space)

    def rows(self, indices: npt.ArrayLike) -> PackedRows:
        """Rows of these numbers as they are packed, not shifted."""
        return self._space.rows(indices)

    def batch(self, indices: npt.ArrayLike) -> PackBatch:
        """Inputs and labels of these rows."""
        rows = as_positions(indices)
        input_ids, labels = np.empty((2, len(rows), self.seq_len), np.int64)
        self.fill(rows, input_ids, labels)
        return PackBatch(
            input_ids=input_ids, labels=labels, loss_mask=labels != IGNORE_INDEX, rows=rows
        )

    def fill(
        self,
        items: npt.ArrayLike,
        input_ids: OffsetArray,
        labels: OffsetArray,
        rows: OffsetArray | None = None,
    ) -> None:
        """Row `items[i]` becomes row `i`, or row `rows[i]`, of both: (n, seq_len), int64."""
        numbers = check_fill(self, items, input_ids, labels, unit="row")
        self.fill_unchecked(numbers, input_ids, labels, rows)

    def fill_unchecked(
        self,
        items: OffsetArray,
        input_ids: OffsetArray,
        labels: OffsetArray,
        rows: OffsetArray | None = None,
    ) -> None:
        """`fill` for items that an order gave, into fitting rows."""
        for part in row_blocks(len(items), self.window_bytes):
            found = self._space.rows(items[part])
            where = part if rows is None else rows[part]
            write_next_token_pairs(found.ids, found.trained, input_ids, labels, where)

    def borders(self, items: OffsetArray) -> Borders:
        """Where pieces begin in these rows, and where the padding behind the last one does."""
        pieces, length = self._space.pieces(items), self.seq_len + 1
        row = np.repeat(np.arange(len(items)), np.diff(pieces.offsets))
        inner = np.flatnonzero(pieces.places)
        padded = np.flatnonzero(pieces.used < length)
        places = np.concatenate(
            (row[inner] * length + pieces.places[inner], padded * length + pieces.used[padded])
        )
        places.sort()
        return Borders(len(items), length, places)

    def place(self, item: int) -> RowSpan:
        """From the first token of its first piece to the last of its last; documents are pieces."""
        pieces = self._space.pieces([item])
        starts, stops = pieces.starts, pieces.starts + pieces.lengths
        told = zip(pieces.examples.tolist(), starts.tolist(), stops.tolist(), strict=True)
        return RowSpan(int(starts[0]), int(stops[-1]), tuple(told))

    def prefetch(self, items: npt.ArrayLike) -> None:
        """Ask the kernel to read these rows ahead: a system call a piece; returns at once."""
        self._space.prefetch(items)

    def close(self) -> None:
        """Let go of the token files; may be called again."""
        self._space.close()

    def __repr__(self) -> str:
        return (
            f"PackSource({str(self.path)!r}, {self.plan.stem!r}, name={self.name!r}, "
            f"seq_len={self.seq_len:,}, rows={len(self):,}, reader={self.reader!r})"
        )
