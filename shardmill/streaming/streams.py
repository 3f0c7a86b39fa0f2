"""Several streams of rows become one, a row of each in turn.

In: streams of `Rows`, each at a position.  Out: rows, copied into the arrays of a batch.
Promise: the next row comes from the living stream that has given the fewest (the first of those),
so the order is a function of the positions alone; a stream that has ended is passed over.
Not here: threads, batches, states.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from shardmill.streaming.positions import Position
from shardmill.streaming.records import Rows, Tokens
from shardmill.streaming.stats import Counts


class RowStream:
    """The rows of one stream from a position on. Nothing is opened before the first is wanted."""

    def __init__(self, number: int, rows: Generator[Rows, None, None], position: Position) -> None:
        self.number = number
        self._rows = rows
        self._position = position  # before the rows `_counted.._taken` of the chunk
        self._chunk: Rows | None = None
        self._counted = self._taken = 0
        self._num_given = position.counts.rows

    @property
    def turn(self) -> tuple[int, int]:
        """The stream with the smallest is next."""
        return self._num_given, self.number

    def position(self) -> Position:
        """Behind the last row taken."""
        if self._chunk is not None and self._counted < self._taken:
            counts = self._position.counts.after_rows(self._chunk, self._counted, self._taken)
            self._position = Position(mark=self._chunk.mark_after(self._taken - 1), counts=counts)
            self._counted = self._taken
        return self._position

    def has_rows(self) -> bool:
        """Whether another row comes; waits for it."""
        while self._chunk is None or self._taken == len(self._chunk):
            position, chunk = self.position(), next(self._rows, None)
            if chunk is None:
                return False
            self._chunk, self._counted, self._taken = chunk, 0, 0
            if not len(chunk):  # what was read at the end and gave no row
                counts = position.counts.with_input(chunk.read)
                self._position = Position(mark=position.mark, counts=counts)
        return True

    def take(self, most: int) -> tuple[Tokens, Tokens]:
        """Tokens and segments of the next rows, at least one, as views. After `has_rows`."""
        assert self._chunk is not None
        start = self._taken
        stop = self._taken = min(start + most, len(self._chunk))
        self._num_given += stop - start
        return self._chunk.tokens[start:stop], self._chunk.segments[start:stop]

    def count_filler(self, rows: int, row_len: int) -> None:
        """Rows of padding alone, which this stream answers for."""
        before = self.position()
        counts = before.counts + Counts.of_filler(rows, row_len)
        self._position = Position(mark=before.mark, counts=counts)
        self._num_given += rows

    def close(self) -> None:
        self._rows.close()


class RowsInTurn:
    """The rows of all streams."""

    def __init__(self, streams: Sequence[RowStream]) -> None:
        self._streams = tuple(streams)
        self._living = list(streams)

    def fill(self, tokens: Tokens, segments: Tokens) -> int:
        """Write rows into both arrays; gives how many, fewer than there is room for at the end.

        What stays free is padding: it counts for the first stream, if there were rows at all.
        """
        filled = 0
        while self._living and filled < len(tokens):
            stream = min(self._living, key=lambda one: one.turn)
            if not stream.has_rows():
                self._living.remove(stream)
                stream.close()
                continue
            most = min(len(tokens) - filled, self._rows_until_another(stream))
            some_tokens, some_segments = stream.take(most)
            tokens[filled : filled + len(some_tokens)] = some_tokens
            segments[filled : filled + len(some_tokens)] = some_segments
            filled += len(some_tokens)
        if 0 < filled < len(tokens):
            self._streams[0].count_filler(len(tokens) - filled, tokens.shape[1])
        return filled

    def positions(self) -> dict[int, Position]:
        return {stream.number: stream.position() for stream in self._streams}

    def close(self) -> None:
        """End all threads."""
        for stream in self._streams:
            stream.close()

    def _rows_until_another(self, stream: RowStream) -> int:
        """How many rows this stream may give before it is another's turn."""
        others = [one.turn for one in self._living if one is not stream]
        if not others:
            return 2**63 - 1
        rows, number = min(others)
        return rows - stream.turn[0] + (stream.number < number)
