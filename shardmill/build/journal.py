"""Fill the journal and the store: the portions of each feed, in segments.

In: feeders, the receipts of the segments that are done.  Out: the rest of the segments.
Promise: the documents in the journal are those of the sources from the start, in order, whatever
was killed and resumed.
Not here: how a source's batches become portions (tokenise.py, render.py).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

from shardmill.build.commit import Committer
from shardmill.build.portion import Account, Portion
from shardmill.build.segments import Receipt, SegmentWriter
from shardmill.records import Cursor


class Feeder(Protocol):
    """One feed on its way from its source to portions."""

    def portions(self, done: Sequence[Receipt]) -> Generator[tuple[Portion, Account], None, None]:
        """What follows the segments that are `done`, until the feed ends or is full."""


def fill_journal(
    feeders: Sequence[Feeder], folder: Path, done: Sequence[Receipt], committer: Committer
) -> None:
    """Go on behind the segments that are done until every feed is."""
    number = len(done)
    for index, feeder in enumerate(feeders):
        mine = [receipt for receipt in done if receipt.feed == index]
        if mine and mine[-1].last:
            continue
        start = mine[-1].cursor if mine else {}
        with closing(feeder.portions(mine)) as portions:
            number = _write_segments(
                portions, folder, committer, number=number, feed=index, start=start
            )


def _write_segments(
    portions: Iterator[tuple[Portion, Account]],
    folder: Path,
    committer: Committer,
    *,
    number: int,
    feed: int,
    start: Cursor,
) -> int:
    """Write a feed's portions to segments and store; the last segment is marked, and may be empty.

    Gives the number of the segment that comes next.
    """
    cursor = start
    segment = SegmentWriter(folder, number=number, feed=feed)
    try:
        for portion, account in portions:
            segment.add(portion, account)
            committer.add(feed, portion)
            cursor = account.cursor
            if segment.due:
                committer.seal(segment.seal(cursor, last=False))
                number += 1
                segment = SegmentWriter(folder, number=number, feed=feed)
        committer.seal(segment.seal(cursor, last=True))
    finally:
        segment.abandon()
    return number + 1
