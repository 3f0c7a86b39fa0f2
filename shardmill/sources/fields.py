"""Which field of a row is the text.

In: the fields of the first row, or a schema, and the caller's wish.  Out: one field name.
Promise: the wish; else "text"; else the first field that holds a string, announced; else an error
that lists what there is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from shardmill.errors import SourceError

logger = logging.getLogger(__name__)

PREFERRED = "text"


def choose_field(fields: Iterable[tuple[str, bool]], *, wanted: str | None, where: str) -> str:
    """`fields` are pairs of name and whether it holds a string, in the input's order."""
    known = dict(fields)
    if wanted is not None:
        if wanted not in known:
            raise SourceError(f"{where}: no field {wanted!r}; {_listed(known)}")
        return wanted
    if PREFERRED in known:
        return PREFERRED
    for name, is_string in known.items():
        if is_string:
            logger.info("%s: no field 'text'; the documents are taken from %r", where, name)
            return name
    raise SourceError(
        f"{where}: neither a field 'text' nor any string field; {_listed(known)}; "
        "say which holds the documents with field="
    )


def _listed(fields: dict[str, bool]) -> str:
    names = ", ".join(map(repr, fields)) or "none"
    return f"found the fields {names}"
