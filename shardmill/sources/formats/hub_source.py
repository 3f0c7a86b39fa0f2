"""A Hugging Face dataset as documents.

In: "owner/name", and which configuration, split, revision and order.  Out: a `Source`.
Promise: the revision is resolved to a commit before reading and pinned; with `shuffle` the order is
exactly the client's own `shuffle(seed=..., buffer_size=...)`; a cursor resumes exactly or is
refused. A null is dropped as "no_text", with the id "owner/name:row 40", counted from 0.
Not here: the network; see `hub`, which is imported on first use and needs the extra "hub".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, Cursor, Drop, TextBatch
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, counts_of, fields_of
from shardmill.sources.cleaning import choose_field, clean, strings_to_arrow
from shardmill.storage.retry import RetryPolicy
from shardmill.urls import Url

if TYPE_CHECKING:
    from shardmill.sources.formats.hub_rows import HubCursor, Trail
    from shardmill.storage.hub import HubDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """Everything about a hub dataset but its name."""

    config: str | None = None
    split: str = "train"
    field: str | None = None  # None: "text", else the first string column
    revision: str | None = None  # a branch, tag or commit; None: the head
    shuffle: tuple[int, int] | None = None  # seed and buffer size
    max_retries: int = 5
    retry_delay: float = 1.0  # seconds before the first retry; doubles each time

    def __post_init__(self) -> None:
        if self.max_retries < 0 or self.retry_delay < 0:
            raise OptionError("max_retries and retry_delay must be 0 or more")
        if self.shuffle is not None and self.shuffle[1] < 1:
            raise OptionError(f"shuffle={self.shuffle}: wanted (seed, buffer size of at least 1)")


def hub_options(dataset: str, options: dict[str, Any]) -> HubOptions:
    """The options of a caller, or an error that names the dataset."""
    try:
        return HubOptions(**options)
    except TypeError as error:
        raise OptionError(f"hub dataset {dataset}: {error}") from error


class HubSource:
    """One split of a hub dataset. Options are those of `HubOptions`."""

    def __init__(
        self,
        dataset: str,
        *,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
        **options: Any,
    ) -> None:
        self._options = hub_options(dataset, options)
        self._dataset = dataset
        self._name = name or dataset
        self._limits = limits
        self._revision: str | None = None
        self._field: str | None = None

    def __repr__(self) -> str:
        return f"HubSource({str(Url(self._dataset))!r}, split={self._options.split!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def revision(self) -> str:
        """The commit; asks the hub once."""
        if self._revision is None:
            self._revision = pinned_commit(self._dataset, self._options)
        return self._revision

    def describe(self) -> dict[str, JSON]:
        """Asks the hub for the commit, and for the columns when no field was named."""
        from shardmill.storage.hub import client_version

        shuffle: JSON = None
        if self._options.shuffle is not None:
            seed, size = self._options.shuffle
            # The order is the client's, so its version belongs to it.
            shuffle = {"seed": seed, "buffer_size": size, "by": client_version()}
        return {
            "kind": "hub",
            "name": self._name,
            "dataset": self._dataset,
            "config": self._options.config,
            "split": self._options.split,
            "revision": self.revision,
            "field": self._text_field(),
            "shuffle": shuffle,
        }

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        place = None if cursor is None else place_of(cursor, self._name)
        return self._read(place)

    def _read(self, place: HubCursor | None) -> Iterator[TextBatch]:
        from shardmill.sources.formats.hub_rows import Trail, stream_rows

        text_field = self._text_field()
        trail = Trail(place.rows if place else 0)
        texts: list[str | None] = []
        num_bytes = 0
        pinned = pin_dataset(self._dataset, self.revision, self._options, (text_field,))
        for row, state in stream_rows(pinned, place, retry_of(self._options)):
            text = self._checked(row[text_field], trail.num_rows, text_field)
            size = 0 if text is None else len(text.encode("utf-8", "surrogatepass"))
            is_full = (
                num_bytes + size > self._limits.num_bytes
                or len(texts) == self._limits.num_documents
            )
            if texts and is_full:
                yield _batch(texts, trail, self._dataset)
                texts, num_bytes = [], 0
            trail.add(row, state)
            texts.append(text)
            num_bytes += size
        if texts:
            yield _batch(texts, trail, self._dataset)

    def _text_field(self) -> str:
        if self._field is None:
            from shardmill.sources.formats.hub_rows import column_kinds

            pinned = pin_dataset(self._dataset, self.revision, self._options, None)
            columns = column_kinds(pinned, retry_of(self._options))
            self._field = choose_field(
                columns, wanted=self._options.field, where=f"hub dataset {self._dataset}"
            )
        return self._field

    def _checked(self, value: object, number: int, text_field: str) -> str | None:
        if value is None or isinstance(value, str):
            return value
        raise SourceError(
            f"hub dataset {self._dataset}, row {number:,}: the column {text_field!r} holds "
            f"{type(value).__name__} {value!r:.60}, wanted a string; name another with field="
        )


def _batch(texts: list[str | None], trail: Trail, dataset: str) -> TextBatch:
    """The texts of the last rows of the trail."""
    array, repaired = strings_to_arrow(texts)
    missing = array.is_null().to_numpy(zero_copy_only=False)
    if repaired is not None:
        repaired = repaired[~missing]
    cleaned = clean(array.drop_null(), repaired=repaired)
    place = trail.place()
    assert place is not None
    first = trail.num_rows - len(texts)
    return TextBatch(
        texts=cleaned.texts,
        num_read=len(texts),
        counts=cleaned.counts,
        drops=tuple(
            Drop(id=f"{dataset}:row {first + number}", reason="no_text")
            for number in np.flatnonzero(missing).tolist()
        ),
        cursor={
            "rows": place.rows,
            "overlap": place.overlap,
            "digest": place.digest,
            "state": place.state,
        },
    )


def iter_rows(dataset: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Whole rows of a hub dataset, in order, with the retries of `HubSource`.

    For chats and other sets that are more than one text. Options are those of `HubOptions`.
    """
    from shardmill.sources.formats.hub_rows import stream_rows

    source = HubSource(dataset, **options)
    settings = source._options
    if settings.field is not None:
        raise OptionError("iter_rows gives whole rows: field= has no meaning here")
    pinned = pin_dataset(dataset, source.revision, settings, None)
    return (row for row, _ in stream_rows(pinned, None, retry_of(settings)))


def pinned_commit(dataset: str, options: HubOptions) -> str:
    from shardmill.storage.hub import resolve_revision

    return resolve_revision(dataset, options.revision, retry_of(options))


def retry_of(options: HubOptions) -> RetryPolicy:
    return RetryPolicy(max_retries=options.max_retries, delay=options.retry_delay)


def pin_dataset(
    dataset: str, revision: str, options: HubOptions, columns: tuple[str, ...] | None
) -> HubDataset:
    from shardmill.storage.hub import HubDataset

    return HubDataset(
        dataset=dataset,
        config=options.config,
        split=options.split,
        revision=revision,
        shuffle=options.shuffle,
        columns=columns,
    )


def place_of(cursor: Cursor, name: str) -> HubCursor:
    from shardmill.sources.formats.hub_rows import HubCursor

    keys = ("rows", "overlap", "digest", "state")
    rows, overlap, digest, state = fields_of(cursor, keys, name)
    counts = counts_of({"rows": rows, "overlap": overlap}, ("rows", "overlap"), name)
    if not isinstance(digest, str) or not 0 < counts[1] <= counts[0]:
        raise SourceError(
            f"source {name!r}: no place in a hub dataset: {cursor!r:.200}; use a cursor that "
            "this source gave, or start anew"
        )
    return HubCursor(rows=counts[0], overlap=counts[1], digest=digest, state=state)
