"""Read numbers and names out of a cursor, or refuse it by name.

In: a cursor (untrusted JSON from a journal).  Out: checked values.
Promise: exact keys, exact types; nothing is defaulted.
"""

from __future__ import annotations

from shardmill.errors import SourceError
from shardmill.records import JSON, Cursor


def cursor_count(cursor: Cursor | None, key: str, source: str) -> int:
    """The one count of a cursor `{key: count}`; 0 when there is no cursor."""
    if cursor is None:
        return 0
    (count,) = counts_of(cursor, (key,), source)
    return count


def counts_of(cursor: JSON, keys: tuple[str, ...], source: str) -> tuple[int, ...]:
    """The counts of a cursor that holds exactly `keys`."""
    found = fields_of(cursor, keys, source)
    for key, value in zip(keys, found, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _bad(cursor, source, f"{key!r} must be a count, 0 or more")
    return tuple(value for value in found if isinstance(value, int))


def fields_of(cursor: JSON, keys: tuple[str, ...], source: str) -> tuple[JSON, ...]:
    """The values of a cursor that holds exactly `keys`."""
    if not isinstance(cursor, dict) or set(cursor) != set(keys):
        raise _bad(cursor, source, f"wanted exactly the keys {', '.join(map(repr, keys))}")
    return tuple(cursor[key] for key in keys)


def _bad(cursor: JSON, source: str, wanted: str) -> SourceError:
    return SourceError(
        f"source {source!r} cannot resume from the cursor {cursor!r:.200}: {wanted}; "
        "use a cursor that this kind of source gave, or start anew"
    )
