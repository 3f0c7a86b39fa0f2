"""What must not change between a stop and a resume, on one machine.

`describe` identifies input on any machine, so it cannot see an edit in the middle of a large file
that keeps its size. A stamp may hold what only this machine knows, such as times; it stays in the
workplace of a build and never reaches a store.
"""

from __future__ import annotations

from shardmill.protocols import ConversationSource, Source
from shardmill.records import JSON


def stamp_of(source: Source | ConversationSource) -> JSON:
    """The source's own stamp; None when it has none."""
    stamp = getattr(source, "stamp", None)
    found: JSON = stamp() if callable(stamp) else None
    return found
