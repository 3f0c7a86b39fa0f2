"""Tokens as a page shows them: what each one adds to the text.

The texts of all tokens, joined, are the decoded text, whatever the tokenizer does; a character that
is spread over several tokens is shown at the last of them. Without a tokenizer, or with ids that it
does not have, the ids themselves are the texts, and a note says why.

A text is decoded once, as a whole; then the offset of each token is found in it. What a token adds
after another one is remembered by its id and is right nearly always, so this is one walk along the
text:
    ids 12 7 7      " the" "a" "a"      the text " theaa": offsets 0 4 5 6
Where it is wrong (parts of a character, a space that is dropped at the start), the tokens around
are decoded one more at a time and compared with the text.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardmill.errors import TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.records import JSON, BoolArray, IntArray, OffsetArray
from shardmill.store import Manifest
from shardmill.tokenizers import model_sha256_of

MOST_CHARACTERS = 2**22
"""Of a text that is decoded at once: a token may be megabytes long."""

LEAD, TAIL = 32, 8
"""Tokens before and after the wanted ones that are decoded with them: a character has at most four
bytes, and a tokenizer may look at what comes before a token."""

MOST_VIEW = 10_000
"""Tokens of a document or row in one answer."""

MOST_TEXT = 300
"""Characters of one token that are shown."""

_BEFORE, _RUN = 8, 16  # tokens around an offset where the walk failed
_MOST_PREFIXES = 64  # whole prefixes decoded in one call, when nothing else helps
_LONG = 4096  # characters of a token that is not remembered
_BROKEN = "\ufffd"


def tokenizer_mismatch(manifest: Manifest, tokenizer: Tokenizer, name: str) -> str | None:
    """Why this tokenizer, called `name` by the user, cannot read the ids of a store; or None."""
    known = {manifest.tokenizer_fingerprint, manifest.tokenizer_sha256} - {None}
    if known & {tokenizer.fingerprint, model_sha256_of(tokenizer)}:
        return None
    return (
        f"{name}: not the tokenizer of this store (fingerprint {tokenizer.fingerprint[:16]}, the "
        f"store's is {(manifest.tokenizer_fingerprint or 'unknown')[:16]}); its ids would be read "
        "as other text: name the one that the store was built with, with the same --special"
    )


class TokenTexts:
    """The texts of the tokens of one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.decode = tokenizer, tokenizer.decode
        self._known: dict[int, tuple[int, str | None]] = {}  # id: length, and what it adds
        self._lock = threading.Lock()
        anchor = tokenizer.encode("a")[-1:]
        self._anchor = anchor, self.decode(np.array(anchor, np.int64))

    def fitting(self, ids: IntArray) -> int:
        """How many of the ids may be decoded at once; at least one, if there is one."""
        unique, inverse = np.unique(ids, return_inverse=True)
        lengths = np.array([self._of(number)[0] for number in unique.tolist()], np.int64)
        total = np.cumsum(lengths[inverse])
        return min(len(ids), max(1, int(np.searchsorted(total, MOST_CHARACTERS))))

    def texts(self, ids: IntArray, start: int = 0, stop: int | None = None) -> list[str]:
        """The texts of the tokens start..stop of `ids`, decoded among the others."""
        if not len(ids):
            return []
        text = self.decode(ids)
        offsets = self.offsets(ids, text).tolist()
        return [text[first:last] for first, last in pairwise(offsets)][start:stop]

    def offsets(self, ids: IntArray, text: str) -> OffsetArray:
        """(len(ids) + 1,) where in `text`, which is theirs, each token starts, and the end."""
        listed = ids.tolist()
        offsets = [0]
        prefixes = _MOST_PREFIXES
        while len(offsets) <= len(listed):
            at, offset = len(offsets) - 1, offsets[-1]
            piece = self._of(listed[at])[1]
            if piece is not None and text.startswith(piece, offset):
                offsets.append(offset + len(piece))
                continue
            near = self._near(ids, at, offset, text)
            if near is None:
                prefix = self.decode(ids[: at + 1]) if prefixes else ""
                prefixes = max(0, prefixes - 1)
                near = [max(offset, common(prefix, text))]
            offsets += near
        offsets[-1] = len(text)
        return np.minimum(np.maximum.accumulate(np.array(offsets, np.int64)), len(text))

    def _near(self, ids: IntArray, at: int, offset: int, text: str) -> list[int] | None:
        """Where the tokens from `at` on end, if what is decoded around them is the text at
        `offset`."""
        first, last = max(0, at - _BEFORE), min(len(ids), at + _RUN)
        around = self.decode(ids[first : min(len(ids), last + TAIL)])
        known = [
            common(self.decode(ids[first:stop]) if stop > first else "", around)
            for stop in range(at, last + 1)
        ]
        if not text.startswith(around[known[0] : max(known)], offset):
            return None
        return [offset + max(0, one - known[0]) for one in known[1:]]

    def _of(self, number: int) -> tuple[int, str | None]:
        """Characters of a token, and what it adds after another one; None: unknown."""
        found = self._known.get(number)
        if found is None:
            anchor, before = self._anchor
            both = self.decode(np.array([*anchor, number], np.int64))
            piece = both[len(before) :]
            sound = both.startswith(before) and _BROKEN not in piece and len(piece) <= _LONG
            found = max(1, len(piece)), piece if sound and anchor else None
            with self._lock:
                self._known[number] = found
        return found


def common(prefix: str, text: str) -> int:
    """How many characters at the front of both are the same."""
    if text.startswith(prefix):
        return len(prefix)
    sound = len(prefix.rstrip(_BROKEN))  # what a cut character looks like
    if not text.startswith(prefix[:sound]):
        differs = range(sound + 1)
        return bisect_left(differs, 1, key=lambda n: prefix[:n] != text[:n]) - 1
    while sound < len(prefix) and text[sound : sound + 1] == _BROKEN:
        sound += 1
    return sound


class Piece(NamedTuple):
    """Some tokens of a document or conversation that one text became."""

    start: int  # in the document; one that was cut may end before `stop`
    stop: int
    part: str | None  # "content", "reasoning", "tool_call" or "tools"; None: of a document
    text: str  # as it was encoded
    content: str  # of its row or message, where that holds the whole text; else the text
    lead: int  # characters of the content before the text


def span_finder(
    tokenizer: Tokenizer, piece: Piece, stored: IntArray
) -> Callable[[int], tuple[int, int] | None]:
    """A function from the number of a token of the piece to its characters start..stop of the
    piece's content. `stored` are the ids that the piece is in.

    Exact where the tokenizer has `spans`, as those of this library do. For any other, the text is
    decoded up to the token and compared; what does not decode to the text has no characters.
    """
    spans = getattr(tokenizer, "spans", None)
    known = spans(piece.text) if callable(spans) else None
    if known is not None and len(known) == piece.stop - piece.start:
        return lambda at: (int(known[at][0]) + piece.lead, int(known[at][1]) + piece.lead)
    ids = stored[piece.start : piece.stop]

    def decoded_span(at: int) -> tuple[int, int] | None:
        before = _reached(tokenizer.decode(ids[:at]), piece.text)
        after = _reached(tokenizer.decode(ids[: at + 1]), piece.text)
        if before is None or after is None:
            return None
        return before[0] + piece.lead, after[1] + piece.lead

    return decoded_span


def _reached(decoded: str, text: str) -> tuple[int, int] | None:
    """How far a beginning of the text reaches: in whole characters, and with one that is begun."""
    if text.startswith(decoded):
        return len(decoded), len(decoded)
    whole = decoded.rstrip(_BROKEN)
    if text.startswith(whole) and whole != decoded:
        return len(whole), min(len(whole) + 1, len(text))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How ids of a store become text."""

    texts: TokenTexts | None  # None: there is no tokenizer
    why: str | None  # then: why, and what to do
    markers: IntArray  # ids that are structure
    name: str | None = None  # of the tokenizer, as it was named


def shown(
    ids: IntArray,
    span: tuple[int, int],
    reading: Reading,
    *,
    at: int = 0,
    edges: Iterable[int] = (),
    **columns: IntArray | BoolArray | None,
) -> dict[str, JSON]:
    """The "view" of an answer: those of the ids that are in `span`, decoded among the others.

    `at` is the offset of the first id in its document or row. Texts that start at `edges` are each
    decoded alone. There are lists with one entry for each token, as the columns "trained", "piece"
    and "turn" have. A view ends early when the texts are too long to be decoded at once.
    """
    first = max(0, span[0] - LEAD)
    start, stop = span[0] - first, span[1] - first
    around = ids[first : span[1] + TAIL]
    texts, note = _texts(around, start, stop, [edge - first for edge in edges], reading)
    ids = around[start : start + len(texts)]
    listed: dict[str, JSON] = {
        name: values[: len(ids)].astype(np.int64).tolist()
        for name, values in columns.items()
        if values is not None
    }
    return {
        "start": at + span[0],
        "stop": at + span[0] + len(ids),
        "ids": ids.tolist(),
        "texts": [text[:MOST_TEXT] for text in texts],
        "cut": [at for at, text in enumerate(texts) if len(text) > MOST_TEXT],
        "marker": np.isin(ids, reading.markers).astype(int).tolist(),
        "note": note,
        **{name: listed.get(name) for name in ("trained", "piece", "turn")},
    }


def preview(ids: IntArray, reading: Reading, most: int) -> str:
    """The beginning of a text."""
    if reading.texts is not None:
        try:
            return reading.texts.decode(ids[: reading.texts.fitting(ids)])[:most]
        except TokenizerError:  # the view of the document says why
            pass
    return " ".join(map(str, ids.tolist()))[:most]


def _texts(
    ids: IntArray, start: int, stop: int, edges: Sequence[int], reading: Reading
) -> tuple[list[str], str | None]:
    """Of the tokens start..stop, fewer of them when they are too long; and a note."""
    numbers = [str(number) for number in ids[start:stop].tolist()]
    if reading.texts is None:
        return numbers, reading.why
    try:
        most = reading.texts.fitting(ids)
        if start and most <= start:  # what comes before is too long to be decoded with it
            ids, edges = ids[start:], [edge - start for edge in edges]
            start, stop, most = 0, stop - start, reading.texts.fitting(ids)
        ids, stop = ids[:most], min(stop, most)
        inner = [edge for edge in sorted({*edges}) if 0 < edge < len(ids)]
        texts: list[str] = []
        for first, last in pairwise([0, *inner, len(ids)]):
            if last > start and first < stop:
                part = max(start, first) - first, min(stop, last) - first
                texts += reading.texts.texts(ids[first:last], *part)
    except TokenizerError as error:
        return numbers, f"ids are shown: {error}"
    return texts, None
