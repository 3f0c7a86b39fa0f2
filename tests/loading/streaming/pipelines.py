"""Small pipelines for tests: every token of every document is another number.

A document is the text "number:length"; its ids are number * SPAN + 1, + 2, ... + length.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shardmill.loading.streaming.documents import StreamOrder
from shardmill.loading.streaming.rows import BinRules
from shardmill.loading.streaming.stream import BatchShape, LossRules, Pipeline, TextStream
from shardmill.loading.streaming.tokenizer import StreamTokenizer
from shardmill.protocols import Texts
from shardmill.records import Batch, Ragged
from tests.loading.streaming.encoded import framing
from tests.loading.streaming.units import UnitsSource

SPAN, EOS, PAD = 1000, 999_999, 0
ARRAYS = ("input_ids", "labels", "attention_mask", "segment_ids")


class NumberEncoder:
    """ "7:3" becomes 7001 7002 7003."""

    def encode_batch(self, texts: Texts) -> Ragged:
        pairs = [str(text).split(":") for text in texts]
        return Ragged.from_sequences(
            [int(number) * SPAN + 1 + np.arange(int(length)) for number, length in pairs],
            dtype=np.int32,
        )


@dataclass(frozen=True, kw_only=True)
class NumberTokenizer(StreamTokenizer):
    """Its engine is `engine_class`, whatever the texts are."""

    engine_class: type[NumberEncoder] = NumberEncoder

    def encoder(self, **options: Any) -> Any:
        return self.engine_class()


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a pipeline is made from."""

    units: tuple[tuple[int, ...], ...]  # the lengths of the documents of each unit
    batch_rows: int = 3
    order: StreamOrder = field(default_factory=StreamOrder)
    bins: BinRules | None = None
    shape: BatchShape = field(default_factory=lambda: BatchShape(batch_size=2, seq_len=5))
    max_doc_tokens: int | None = None
    num_streams: int | None = None

    @property
    def lengths(self) -> list[int]:
        return [length for unit in self.units for length in unit]

    def pipeline(self, *, encoder: type[NumberEncoder] = NumberEncoder, **changes: Any) -> Pipeline:
        framed = framing(eos_id=EOS, max_doc_tokens=self.max_doc_tokens)
        options = {one.name: getattr(framed, one.name) for one in fields(framed)}
        numbers = iter(range(1, len(self.lengths) + 1))
        rows = [[f"{next(numbers)}:{length}" for length in unit] for unit in self.units]
        parts: dict[str, Any] = {
            "source": UnitsSource(rows, batch_rows=self.batch_rows),
            "tokenizer": NumberTokenizer(engine_class=encoder, **options),
            "order": self.order,
            "bins": self.bins,
            "loss": LossRules(mask_boundary_loss=False),
            "shape": self.shape,
            "num_streams": self.num_streams,
        }
        return Pipeline(**(parts | changes))

    def open(self, rank: int = 0, world: int = 1) -> TextStream:
        return TextStream(self.pipeline(), rank=rank, world=world)

    def expected(self) -> Counter[int]:
        """Every token that the documents of one epoch must give."""
        found: Counter[int] = Counter()
        most = self.max_doc_tokens or 10**9
        for number, length in enumerate(self.lengths, 1):
            found.update(number * SPAN + 1 + i for i in range(min(length, most)))
            found[EOS] += length <= most
        return +found


@st.composite
def cases(draw: st.DrawFn, *, repeat: bool | None = None, streams: int = 1) -> Case:
    """Documents of several units, all kinds of shuffling and packing."""
    unit = st.lists(st.integers(1, 14), min_size=streams, max_size=streams + 8)
    bins = st.builds(
        BinRules,
        buffer_documents=st.integers(1, 12),
        buffer_tokens=st.integers(1, 60),
        max_per_row=st.none() | st.integers(1, 3),
        algorithm=st.sampled_from(["best-fit", "first-fit"]),
        seed=st.none() | st.integers(0, 3),
    )
    order = StreamOrder(
        seed=draw(st.integers(0, 3)),
        shuffle=draw(st.booleans()),
        buffer_documents=draw(st.integers(1, 12)),
        buffer_bytes=draw(st.sampled_from([1, 20, 10_000])),
        repeat=draw(st.booleans()) if repeat is None else repeat,
    )
    return Case(
        units=tuple(map(tuple, draw(st.lists(unit, min_size=1, max_size=4)))),
        batch_rows=draw(st.integers(1, 5)),
        order=order,
        bins=draw(st.none() | bins),
        shape=BatchShape(
            grad_accum=draw(st.integers(1, 2)),
            batch_size=draw(st.integers(1, 3)),
            seq_len=draw(st.integers(1, 9)),
        ),
        max_doc_tokens=draw(st.none() | st.integers(1, 10)),
    )


def some(batches: Iterable[Batch], most: int = 14) -> list[Batch]:
    return list(islice(batches, most))


def with_states(iterator: Any, most: int = 14) -> tuple[list[Batch], list[dict[str, Any]]]:
    """Batches, and the state before each and after the last."""
    batches, states = [], [iterator.get_state()]
    for batch in islice(iterator, most):
        batches.append(batch)
        states.append(iterator.get_state())
    return batches, states


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def assert_equal(found: Sequence[Batch], wanted: Sequence[Batch]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        for name in ARRAYS:
            array, right = getattr(one, name), getattr(other, name)
            np.testing.assert_array_equal(array, right, err_msg=name)
            assert array.dtype == right.dtype


def rows_of(batches: Iterable[Batch]) -> Iterator[tuple[int, ...]]:
    """The tokens of each row that is not all padding. For mask_boundary_loss=False."""
    for batch in batches:
        flat = [array.reshape(-1, array.shape[-1]) for array in batch.arrays().values()]
        for inputs, labels, attended, _ in zip(*flat, strict=True):
            last = [int(labels[-1])] if labels[-1] != -100 else []
            row = (*inputs[attended].tolist(), *last)
            if row:
                yield row


def tokens_of(batches: Iterable[Batch]) -> Counter[int]:
    return Counter(token for row in rows_of(batches) for token in row)


def with_order(case: Case, **changes: Any) -> Case:
    return replace(case, order=replace(case.order, **changes))
