"""Whether any row has the field that --field names.

In: a source that was opened with that field.  Out: nothing, or an error with the fields there are.
Promise: a build whose every row would be left out for want of the field is refused before it
begins; the source is read up to its first text, which is in its first batch unless texts are rare.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from shardmill.arguments import choices
from shardmill.errors import SourceError
from shardmill.protocols import Source
from shardmill.sources import ConcatSource, JsonlSource, iter_jsonl_rows

_ROWS = 1000
"""The fields of so many rows are listed."""


def check_field(source: Source, field: str) -> None:
    """Refuse a field that no row has."""
    num_rows = 0
    for batch in source.batches():
        if len(batch.texts) or batch.counts.get("empty"):
            return
        num_rows += batch.num_read
    if not num_rows:
        return  # nothing is read, so nothing is left out
    names = sorted({name for row in _first_rows(source) for name in row})
    told = f"; {choices(field, names, verb='the fields are')}" if names else ""
    raise SourceError(
        f"{source.name}: none of {num_rows:,} rows has text in the field {field!r}{told}; name the "
        "field that holds the documents (field=)"
    )


def _first_rows(source: Source) -> Iterator[dict[str, object]]:
    parts = source.parts if isinstance(source, ConcatSource) else [source]
    files = [file for part in parts if isinstance(part, JsonlSource) for file in part.files]
    places = [file.place for file in files if isinstance(file.place, Path)]
    if places:
        yield from islice(iter_jsonl_rows(places), _ROWS)
