"""Batches of preferences: pairs for DPO and reward models, answers with a label for KTO.

The unit of order is a pair, a better and a worse answer to one prompt, or one labelled answer.
`PreferenceSource` lists them: of a record with two answers one pair, of a ranked list every pair
whose ranks differ, so an epoch gives each once, in the order that the seed draws. A pair is never
divided by a batch or a rank. Positions, mixtures, exclusions and states are as in every `Loader`.

A row is a prompt and one answer, `seq_len` tokens with its padding, not shifted: models of
transformers and the trainers of TRL take it so. Packed, a row has whole pairs, each answer after a
prompt of its own; then the unit of order is such a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, SupportsIndex, Unpack, get_args

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.loading.exclusion import excluded_items
from shardmill.loading.loader import Loader, WorkAhead
from shardmill.loading.order import SampleStream, Step, Steps
from shardmill.loading.packed_rows import checked_pad_id
from shardmill.loading.rows import RowSource, RowSpan, checked_name
from shardmill.machine import check_memory
from shardmill.packing import BinAssignment, best_fit_decreasing
from shardmill.records import (
    IGNORE_INDEX,
    BoolArray,
    ChatExamples,
    IntArray,
    OffsetArray,
    Ragged,
)
from shardmill.sampling.order import by_value
from shardmill.store import Store, open_store, read_exclusions
from shardmill.store.exclusions import touched
from shardmill.store.readers import ChatSpace
from shardmill.store.readers.documents import Borders, spread
from shardmill.store.readers.token_space import ReaderName, item_numbers

log = logging.getLogger(__name__)

LongPairs = Literal["drop", "cut-prompt"]
Pairs = Literal["all", "best"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreferenceBatch:
    """The rows of one step: of `n` pairs the chosen ones, then the rejected ones in the same order;
    of `n` labelled answers each one; of `n` packed rows each one. The width is `seq_len`; padding
    is on the right."""

    input_ids: OffsetArray  # (rows, T)
    attention_mask: OffsetArray  # (rows, T) 0: padding
    completion_mask: OffsetArray  # (rows, T) 1: this token is a training target
    labels: OffsetArray  # (rows, T) the token where it is trained, else IGNORE_INDEX; not shifted
    prompt_lengths: OffsetArray | None = None  # (rows,) tokens before the answer; not packed
    segment_ids: OffsetArray | None = None  # (rows, T) packed: 1 and 2 for the chosen and the
    # rejected answer of the first pair, each with its prompt, 3 and 4 of the next; 0: padding
    position_ids: OffsetArray | None = None  # (rows, T) packed: from 0 in every segment
    label: BoolArray | None = None  # (n,) of labelled answers: is it a good one?
    samples: range = range(0)  # the global sample numbers
    source: OffsetArray | None = None  # (n,) which source of the mixture
    epoch: OffsetArray | None = None  # (n,) which pass over that source, from 0
    item: OffsetArray | None = None  # (n,) which pair, answer or row of that source
    max_seqlen: int | None = field(default=None, repr=False)  # not known

    def __len__(self) -> int:
        """Pairs, labelled answers, or packed rows."""
        return len(self.samples)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that are set, by name."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The same under the names of TRL's collators of pairs: `chosen_input_ids`, ...; of
        labelled answers `completion_input_ids`, ... and `label`. `prompt_...` is the prompt alone,
        with its padding on the left."""
        names = ("input_ids", "attention_mask", "completion_mask", "labels")
        if self.prompt_lengths is None:
            raise OptionError("packed rows have no columns of TRL; read them without {packed}")
        parts = ("chosen", "rejected") if self.label is None else ("completion",)
        num = len(self.input_ids) // len(parts)
        found = {
            f"{part}_{name}": getattr(self, name)[number * num : (number + 1) * num]
            for number, part in enumerate(parts)
            for name in names
        }
        width = self.input_ids.shape[1]
        column = np.arange(width) - (width - self.prompt_lengths[:num, None])
        is_prompt = (column >= 0).astype(np.int64)
        ids = np.take_along_axis(self.input_ids[:num], np.maximum(column, 0), axis=1)
        # as padding: what the row has there, or its first token when the row is full
        padding = self.input_ids[:num, -1:] * (1 - self.attention_mask[:num, -1:])
        found["prompt_input_ids"] = np.where(is_prompt, ids, padding)
        found["prompt_attention_mask"] = is_prompt
        return found if self.label is None else {**found, "label": self.label}


def pairs_of(links: OffsetArray, rule: Pairs) -> OffsetArray:
    """(pairs, 2) positions of a better and a worse branch of one record, record after record.

    "all": every two whose ranks differ. "best": only the best ones, each with all that are worse.
    """
    record, rank = links[:, 2], links[:, 3]
    found = [np.empty((0, 2), np.int64)]
    for step in range(1, len(links)):
        together = record[step:] == record[:-step]
        if not together.any():
            break
        better = together & (rank[:-step] < rank[step:])
        if rule == "best":
            better &= rank[:-step] == 0
        at = np.flatnonzero(better)
        found.append(np.stack((at, at + step), axis=1))
    pairs = np.concatenate(found)
    return pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]


class PreferenceSource(RowSource):
    """The pairs of a split, or its labelled answers: a read-only sequence without a state.

    `long`: what happens to a pair that is longer than `seq_len`: "drop" leaves it out, "cut-prompt"
    takes tokens off the beginning of its prompt, for both answers the same. An answer is never cut:
    one that leaves no place for a token of its prompt is left out. `num_too_long` and `num_cut`
    count both. `pairs` is for ranked lists; see `pairs_of`. `name`, `reader`: as in `TokenSource`;
    `pad_id`: as in `PackSource`. With `packed` an item is a row of whole pairs (best fit), and what
    must fit is a pair with both prompts. Holds 16 bytes a pair.
    """

    def __init__(
        self,
        folder: str | Path | Store,
        *,
        seq_len: int,
        split: str = "train",
        long: LongPairs = "drop",
        pairs: Pairs = "all",
        packed: bool = False,
        name: str | None = None,
        pad_id: int | None = None,
        reader: ReaderName = "auto",
    ) -> None:
        store = folder if isinstance(folder, Store) else open_store(folder)
        if store.preference is None:
            raise OptionError(
                f"{store.folder}: holds no preferences; build them from a file with chosen and "
                "rejected, or a label"
            )
        for option, value, wanted in (("long", long, LongPairs), ("pairs", pairs, Pairs)):
            known = get_args(wanted)
            if value not in known:
                words = " or ".join(map(repr, known))
                raise OptionError(f"{{{option}}}: wanted {words}", **{option: value})
        self._options: dict[str, Any] = {
            "seq_len": seq_len,
            "split": split,
            "long": long,
            "pairs": pairs,
            "packed": packed,
            "name": name,
            "pad_id": pad_id,
            "reader": reader,
        }
        self.store, self.path = store, store.folder
        self.split = self._split = split
        self.kind = "packed" if packed else store.preference
        if packed and store.preference == "labels":
            raise OptionError("{packed}: for pairs; labelled answers have no other", packed=True)
        self.seq_len = whole_number(seq_len, "seq_len")
        self.name = checked_name(self.path.name if name is None else name)
        self.pad_id = checked_pad_id(store.manifest, str(store.folder), pad_id)
        self._links = np.array(store.branches(split))
        self._space = ChatSpace(store, split, reader=reader)
        self.reader = self._space.reader
        self._unit = "pair" if store.preference == "ranks" else "answer"
        items = np.arange(len(self._links))[:, None]
        if store.preference == "ranks":
            items = pairs_of(self._links, pairs)
        self._packed: BinAssignment | None = None
        self._choose(items, long)
        self.fingerprint = f"{store.fingerprint}/{split}/{pairs}/{long}"
        if self._packed is not None:
            self._unit, self.fingerprint = "row", f"{self.fingerprint}/packed"
        self.excluded = self._find_excluded()

    def _choose(self, items: OffsetArray, long: LongPairs) -> None:
        """Keep the items that fit, and count the others."""
        lengths = self._space.lengths()
        prompts = lengths[self._links[items[:, 0], 1]]
        answers = lengths[self._links[items, 0]]
        if self.kind == "packed":  # half of what is too much, of each prompt
            over = np.maximum(2 * prompts + answers.sum(axis=1) - self.seq_len + 1, 0) // 2
        else:
            over = np.maximum(prompts + answers.max(axis=1, initial=0) - self.seq_len, 0)
        fits = over == 0 if long == "drop" else over < prompts
        self.num_too_long = int(np.count_nonzero(~fits))
        self.num_cut = int(np.count_nonzero(over[fits]))
        self._items, self._cut = items[fits], over[fits]
        sizes = (answers.sum(axis=1) + items.shape[1] * (prompts - over))[fits]
        self.num_tokens = int(sizes.sum())
        if not len(self._items):
            raise OptionError(
                f"{self.path}: none of the {len(items):,} {self._unit}s of split {self.split!r} "
                "fits {seq_len}; choose a larger one, or cut prompts with "
                "PreferenceSource(..., long='cut-prompt')",
                seq_len=self.seq_len,
            )
        itemsize = np.dtype(self.store.dtype).itemsize
        if self.kind == "packed":
            self._packed = best_fit_decreasing(sizes, self.seq_len).rows
        self.window_bytes = -(-self.num_tokens * itemsize // len(self))
        if self.num_too_long or self.num_cut:
            log.warning(
                "%s: of %s %ss of split %r, %s are longer than seq_len=%s and left out, and %s "
                "lose the beginning of their prompt",
                *(self.path, f"{len(items):,}", self._unit, self.split, f"{self.num_too_long:,}"),
                *(f"{self.seq_len:,}", f"{self.num_cut:,}"),
            )

    def __len__(self) -> int:
        return len(self._items) if self._packed is None else len(self._packed)

    def rows(self, items: npt.ArrayLike) -> PreferenceBatch:
        """These items as a batch; `item` holds their numbers."""
        numbers = item_numbers(items, len(self), self._unit)
        more: dict[str, Any] = {}
        if self._packed is None:
            # chosen first: items (n, 2) -> rows of all first columns, then of all second ones
            branches = self._items[numbers].T.reshape(-1)
            cut = np.tile(self._cut[numbers], self._items.shape[1])
            ids, trained, prompts, answers = self._said(branches, cut)
            sizes, more["prompt_lengths"] = prompts + answers, prompts
            if self.kind == "labels":
                more["label"] = self._links[branches, 3] == 1
        else:
            pairs, edges = self._pairs_in(numbers)
            branches, cut = self._items[pairs].reshape(-1), np.repeat(self._cut[pairs], 2)
            ids, trained, prompts, answers = self._said(branches, cut)
            segments = prompts + answers
            sizes = np.diff(np.concatenate(([0], np.cumsum(segments)))[2 * edges])
            more = _segments(segments, 2 * edges)
        inside = np.arange(self.seq_len) < sizes[:, None]
        if self._packed is not None:
            more = {name: _placed(inside, values) for name, values in more.items()}
        input_ids, mask = _placed(inside, ids, self.pad_id), _placed(inside, trained)
        return PreferenceBatch(
            input_ids=input_ids,
            attention_mask=inside.astype(np.int64),
            completion_mask=mask,
            labels=np.where(mask == 1, input_ids, IGNORE_INDEX),
            samples=range(len(numbers)),
            item=numbers,
            **more,
        )

    def _said(
        self, branches: OffsetArray, cut: OffsetArray
    ) -> tuple[IntArray, BoolArray, OffsetArray, OffsetArray]:
        """Ids and mask of these branches end to end, each after its prefix without its first `cut`
        tokens; the tokens of each prefix, and of each branch."""
        found = self._space.examples(self._links[branches][:, [1, 0]].reshape(-1))
        prompts, answers = found.ids.lengths.reshape(-1, 2).T
        kept = np.ones(len(found.mask), np.bool_)
        starts = found.ids.offsets[:-1:2]
        kept[spread(starts, starts + cut)[0]] = False
        return found.ids.values[kept], found.mask[kept], prompts - cut, answers

    def _pairs_in(self, rows: OffsetArray) -> tuple[OffsetArray, OffsetArray]:
        """The pairs of some packed rows, row after row, and how many come before each row."""
        assert self._packed is not None
        at, edges = spread(self._packed.offsets[rows], self._packed.offsets[rows + 1])
        return self._packed.indices[at].astype(np.int64), edges

    def examples_of(self, items: npt.ArrayLike) -> OffsetArray:
        """(n, 2) or (n, 3): of each item (packed: of each pair in them) its prefix, then its chosen
        and rejected or only branch, as examples of the split."""
        numbers = item_numbers(items, len(self), self._unit)
        if self._packed is not None:
            numbers = self._pairs_in(numbers)[0]
        branches = self._items[numbers]
        prefix = self._links[branches[:, :1], 1]
        return np.concatenate((prefix, self._links[branches, 0]), axis=1)

    def examples(self, items: npt.ArrayLike) -> tuple[Ragged, list[ChatExamples]]:
        """Of these pairs, or labelled answers, the prompts, whole, and the chosen and rejected
        answers, or the only ones."""
        columns = self.examples_of(items).T
        prompts, *answers = (self._space.examples(column) for column in columns)
        return prompts.ids, answers

    def labels_of(self, items: npt.ArrayLike) -> BoolArray:
        """Whether these labelled answers are good ones."""
        numbers = item_numbers(items, len(self), self._unit)
        good: BoolArray = self._links[self._items[numbers, 0], 3] == 1
        return good

    def span(self, item: int) -> RowSpan:
        """Its documents are its prefix and its answers."""
        examples = self.examples_of([item]).reshape(-1).tolist()
        starts, stops = self._space.spans(examples)
        documents = tuple(zip(examples, starts.tolist(), stops.tolist(), strict=True))
        return RowSpan(int(starts[0]), int(stops[-1]), documents)

    def borders(self, items: OffsetArray) -> Borders:  # noqa: ARG002 - there are none
        raise OptionError("{documents}: rows of preferences hold one conversation", documents=True)

    def prefetch(self, items: npt.ArrayLike) -> None:
        """Nothing: answers are short, and lie together with their prompt."""

    def close(self) -> None:
        self._space.close()

    def _read(self, items: OffsetArray) -> tuple[IntArray, None]:  # noqa: ARG002
        raise OptionError(f"{self!r}: gives {self._unit}s, not rows; read it with `rows`")

    def _find_excluded(self) -> Any:
        spans = read_exclusions(self.store).spans(self._split)
        if not len(spans):
            return None
        hit = touched(spans, *self._space.spans(np.arange(len(self._space))))
        items = hit[self._links[self._items, 0]].any(axis=1)
        items |= hit[self._links[self._items[:, 0], 1]]
        if self._packed is not None:
            items = np.logical_or.reduceat(items[self._packed.indices], self._packed.offsets[:-1])
        return excluded_items(spans, items, name=self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(PreferenceSource, **self._options)
        return make, (self.store,), {"excluded": self.excluded}

    def __repr__(self) -> str:
        return (
            f"PreferenceSource({str(self.path)!r}, split={self.split!r}, name={self.name!r}, "
            f"seq_len={self.seq_len:,}, {self._unit}s={len(self):,}, reader={self.reader!r})"
        )


def _placed(inside: BoolArray, values: npt.NDArray[Any], padding: int = 0) -> OffsetArray:
    """Values of all rows end to end as rows with padding."""
    found = np.full(inside.shape, padding, np.int64)
    found[inside] = values
    return found


def _segments(sizes: OffsetArray, edges: OffsetArray) -> dict[str, Any]:
    """Numbers of the segments of each row, from 1, and positions in each, end to end."""
    number = np.arange(len(sizes)) - np.repeat(edges[:-1], np.diff(edges)) + 1
    starts = np.cumsum(sizes) - sizes
    positions = np.arange(int(sizes.sum())) - np.repeat(starts, sizes)
    return {"segment_ids": np.repeat(number, sizes), "position_ids": positions}


class PreferenceLoader(Loader[PreferenceBatch]):
    """The steps of one rank, in pairs or labelled answers; everything else as in `Loader`."""

    def __init__(
        self,
        stream: SampleStream,
        *,
        batch_size: SupportsIndex,
        rank: SupportsIndex = 0,
        world: SupportsIndex = 1,
        num_samples: SupportsIndex | None = None,
        **work_ahead: Unpack[WorkAhead],
    ) -> None:
        super().__init__(
            stream,
            batch_size=batch_size,
            rank=rank,
            world=world,
            num_samples=num_samples,
            documents=False,
            **work_ahead,
        )

    def _check_kind(self) -> None:
        if self.stream.kind == "rows":
            raise OptionError(f"{self.stream!r}: has no preferences; read it with a Loader")

    def _check_memory(self) -> None:
        rows = self._shape.batch_size * (2 if self.stream.kind == "ranks" else 1)
        check_memory(
            max(2, self.ahead + 1) * rows * self.stream.seq_len * 8 * 5,
            f"batch_size={self._shape.batch_size:,}: {rows:,} rows of {self.stream.seq_len:,}",
            "lower batch_size, ahead or seq_len",
        )

    def _maker(self, steps: Steps) -> Callable[[int], PreferenceBatch]:
        return partial(_make, steps)


def _make(steps: Steps, number: int) -> PreferenceBatch:
    step, sources = steps.at(number), steps.stream.sources
    parts = [
        (rows, _source(sources[one]).rows(step.item[rows])) for one, rows in by_value(step.source)
    ]
    first, num = parts[0][1], len(step.item)
    if len(parts) == 1:
        return _numbered(first, step)
    joined: dict[str, Any] = {}
    for name, array in first.arrays().items():
        times = len(array) // len(first)  # 2 where chosen and rejected have a row each
        joined[name] = np.empty((times * num, *array.shape[1:]), array.dtype)
        for rows, part in parts:
            # of 8 pairs the second: rows 1 and 9
            targets = np.add.outer(np.arange(times) * num, np.arange(num)[rows]).reshape(-1)
            joined[name][targets] = getattr(part, name)
    return _numbered(PreferenceBatch(**joined), step)


def _numbered(batch: PreferenceBatch, step: Step) -> PreferenceBatch:
    own = {name: getattr(batch, name) for name in PreferenceBatch.__dataclass_fields__}
    return PreferenceBatch(**{**own, **step._asdict()})


def _source(source: RowSource) -> PreferenceSource:
    assert isinstance(source, PreferenceSource), "the stream has been checked"
    return source
