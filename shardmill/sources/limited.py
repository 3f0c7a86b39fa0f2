"""A bound on the size of one document, where a source can keep to it.

In: a source, bytes.  Out: the same source, which refuses a larger document while it reads it.
Promise: names, descriptions, batches and cursors stay as they are. A source that has no such bound,
such as one of a user, is given back as it is: what it gives has been read when it can be measured.
Not here: how much is allowed; who builds knows what memory there is.
"""

from __future__ import annotations

from typing import Protocol, Self, TypeVar, cast, runtime_checkable

AnySource = TypeVar("AnySource")


@runtime_checkable
class LimitedSource(Protocol):
    """A source that can refuse what is too large before it holds it."""

    def limited(self, num_bytes: int) -> Self: ...


def limited(source: AnySource, num_bytes: int) -> AnySource:
    """The source, bounded as far as it can be."""
    if isinstance(source, LimitedSource):
        return cast(AnySource, source.limited(num_bytes))
    return source
