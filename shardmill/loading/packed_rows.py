"""Rows of conversations: packed by a plan (`PackSource`), or one conversation per row (`ChatRows`).

Every row trains at least one token. Nothing is packed or copied on disk here: another `seq_len` of
`ChatRows` needs no build, and a plan is made by `shardmill.pack`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.chat.fit import Fit, FitCounts, FitPlan, FittedRows, fit_rows, plan_fit
from shardmill.errors import OptionError
from shardmill.loading.exclusion import excluded_rows
from shardmill.loading.rows import RowSource, RowSpan, checked_name
from shardmill.records import (
    Batch,
    BoolArray,
    ChatExamples,
    IntArray,
    OffsetArray,
    next_token_pairs,
)
from shardmill.store import Manifest, find_plan, open_store, read_exclusions, read_plan
from shardmill.store.branches import refuse_preferences
from shardmill.store.exclusions import touched
from shardmill.store.readers import ChatSpace, PackedRows, PackSpace
from shardmill.store.readers.documents import Borders
from shardmill.store.readers.token_space import ReaderName, as_positions

log = logging.getLogger(__name__)

_CHUNK = 4096  # examples planned at a time
_IDLE = "nothing_trained_in_row"

EXCLUDED = "excluded"
"""The reason why an example with an excluded token gives no row."""


class ChatRows:
    """The conversations of a split, each as a row of `seq_len + 1` tokens.

    A row is a function of its example, `seq_len` and the fit, not of the batch it comes in. An
    example that gives no row is reported by number and reason, and nothing replaces it.
    """

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
        """`pad_id` None: the end of a turn in the store's template. `reader`: see `TokenSource`."""
        store = open_store(folder)
        refuse_preferences(store, "a row would hold one of them alone")
        self.space = ChatSpace(store, split, reader=reader)
        self.seq_len = whole_number(seq_len, "seq_len")
        if fit not in list(Fit):
            raise OptionError(f"{{fit}}: wanted one of {', '.join(Fit)}", fit=fit)
        self.fit = Fit(fit)
        self.pad_id = checked_pad_id(store.manifest, str(store.folder), pad_id)
        self._spans = read_exclusions(store).spans(split)  # as they were when it was opened
        self._warned = False

    def __len__(self) -> int:
        """Examples of the split, including those that give no row at this length."""
        return len(self.space)

    def rows(self, indices: npt.ArrayLike) -> FittedRows:
        """The rows of these examples. Their plan counts examples within `indices`."""
        examples, excluded = self._examples(indices)
        rows = fit_rows(examples, self.seq_len, fit=self.fit, pad_id=self.pad_id)
        if excluded.any():
            rows = replace(rows, plan=_with_reason(rows.plan, excluded))
        if rows.plan.dropped and not self._warned:
            self._warned = True
            log.warning(
                "%r: some examples give no row (%s); `fit_counts()` counts them all",
                self,
                ", ".join(f"{reason}: {len(who):,}" for reason, who in rows.plan.dropped.items()),
            )
        return rows

    def batch(self, indices: npt.ArrayLike) -> Batch:
        """Inputs and labels; `item` holds the examples. One without a row is missing there."""
        rows = self.rows(indices)
        input_ids, labels = next_token_pairs(rows.ids, rows.mask)
        item = np.asarray(indices, np.int64)[rows.plan.kept]
        return Batch(input_ids=input_ids, labels=labels, item=item)

    def fit_counts(self) -> FitCounts:
        """What becomes of every example and token of the split. Reads all of it, in parts."""
        total = FitCounts(dropped={})
        for start in range(0, len(self), _CHUNK):
            examples, excluded = self._examples(np.arange(start, min(start + _CHUNK, len(self))))
            plan = plan_fit(examples, self.seq_len, self.fit)
            total += (_with_reason(plan, excluded) if excluded.any() else plan).counts
        return total

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
    """The plan with the excluded examples under their own reason."""
    idle = plan.dropped[_IDLE]
    dropped = {**plan.dropped, _IDLE: idle[~excluded[idle]], EXCLUDED: np.flatnonzero(excluded)}
    return replace(plan, dropped={reason: who for reason, who in dropped.items() if len(who)})


def checked_pad_id(manifest: Manifest, where: str, asked: int | None) -> int:
    """The id asked for, or else the one that ends a turn in this store."""
    if asked is None:
        ends: Any = manifest.options
        for key in ("chat", "template", "end_ids"):
            ends = ends.get(key) if isinstance(ends, Mapping) else None
        named = manifest.special_token_ids
        use_ends = isinstance(ends, list) and ends
        asked = ends[-1] if use_ends else named.get("eot", named.get("eos"))
    if asked is None:
        raise OptionError(
            f"{where}: the store names no end of turn, 'eot' or 'eos' to pad with; pass "
            "{pad_id}, any id of the vocabulary: padding is never trained",
            pad_id=...,
        )
    pad_id = whole_number(asked, "pad_id", least=0)
    if manifest.vocab_size is not None and pad_id >= manifest.vocab_size:
        raise OptionError(
            f"{{pad_id}}: the vocabulary has {manifest.vocab_size:,} ids", pad_id=pad_id
        )
    return pad_id


class PackSource(RowSource):
    """Every row of a pack plan over a chat store: a read-only sequence without a state.

    `plan`: its name ("train-8192", as `shardmill pack --list` prints it), its path, or its
    `seq_len` when the store has one plan of that length. `name` and `reader`: as in `TokenSource`.
    `pad_id` None: the end of a turn in the store's template.

    Labels are IGNORE_INDEX where the token is not trained, at the first token of a piece and in
    padding. Documents are pieces. The padding after the last piece of a row is one more document,
    so that nothing attends to it but itself; what `align_to` put between two pieces belongs to the
    first, after all its tokens, where causal attention does not see it.
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
        refuse_preferences(store, "a pack plan would part them")
        found = read_plan(find_plan(store.folder, plan))
        self.pad_id = checked_pad_id(store.manifest, str(store.folder), pad_id)
        if self.pad_id > np.iinfo(store.dtype).max:
            raise OptionError(
                f"{{pad_id}}: tokens of {store.folder} are {store.dtype}", pad_id=self.pad_id
            )
        self._space = PackSpace(store, found, pad_id=self.pad_id, reader=reader)
        self.reader = self._space.reader
        self.path = store.folder
        self.split = found.facts.split  # never None: a plan is of a store
        self.plan = found.path
        self.seq_len = found.facts.options.seq_len
        self.name = checked_name(self.path.name if name is None else name)
        self.fingerprint = found.fingerprint
        self.num_tokens = found.facts.metrics.num_tokens
        self.window_bytes = found.facts.row_len * self._space.dtype.itemsize
        self.excluded = excluded_rows(
            read_exclusions(store).spans(found.facts.split), self._space, name=self.name
        )

    def __len__(self) -> int:
        return len(self._space)

    def rows(self, indices: npt.ArrayLike) -> PackedRows:
        """Rows of these numbers as they are packed, not shifted."""
        return self._space.rows(indices)

    def batch(self, indices: npt.ArrayLike) -> Batch:
        """Inputs and labels of these rows; `item` holds their numbers."""
        item = as_positions(indices)
        input_ids, labels = np.empty((2, len(item), self.seq_len), np.int64)
        self.fill(item, input_ids, labels)
        return Batch(input_ids=input_ids, labels=labels, item=item)

    def _read(self, items: OffsetArray) -> tuple[IntArray, BoolArray]:
        found = self._space.rows(items)
        return found.ids, found.trained

    def borders(self, items: OffsetArray) -> Borders:
        """Where pieces begin in these rows, and the padding after the last one."""
        pieces, length = self._space.pieces(items), self.seq_len + 1
        row = np.repeat(np.arange(len(items)), np.diff(pieces.offsets))
        inner = np.flatnonzero(pieces.columns)
        padded = np.flatnonzero(pieces.used < length)
        places = np.concatenate(
            (row[inner] * length + pieces.columns[inner], padded * length + pieces.used[padded])
        )
        places.sort()
        return Borders(len(items), length, places)

    def span(self, item: int) -> RowSpan:
        """From the first token of its first piece to the last of its last; documents are pieces."""
        pieces = self._space.pieces([item])
        starts, stops = pieces.starts, pieces.starts + pieces.lengths
        documents = zip(pieces.examples.tolist(), starts.tolist(), stops.tolist(), strict=True)
        return RowSpan(int(starts[0]), int(stops[-1]), tuple(documents))

    def prefetch(self, items: npt.ArrayLike) -> None:
        self._space.prefetch(items)

    def close(self) -> None:
        self._space.close()

    def __repr__(self) -> str:
        return (
            f"PackSource({str(self.path)!r}, {self.plan.stem!r}, name={self.name!r}, "
            f"seq_len={self.seq_len:,}, rows={len(self):,}, reader={self.reader!r})"
        )


def checked_plan(source: PackSource, seq_len: int, split: str | None, at: str) -> PackSource:
    """The source, if its plan is of this length and split (None: any); else it is closed."""
    wanted = split or source.split
    if (source.seq_len, source.split) != (seq_len, wanted):
        source.close()
        raise OptionError(
            f"{at}: this plan is of split {source.split!r} with {{seq_len}}; wanted {wanted!r} "
            f"with {seq_len:,}",
            seq_len=source.seq_len,
        )
    return source
