"""Find documents by text, number or source, a second at a time.

In: a store that is open, a split, what to look for, a cursor.  Out: matches and the next cursor.
Promise: a call ends after about a second or 50 matches; going on with the cursor looks at every
document once, from the first to the last, however long they are; a document is told once, with its
first match.
Not here: an index. Every search reads the store.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardmill.errors import OptionError, TokenizerError
from shardmill.inspector.documents import PREVIEW, beginning
from shardmill.inspector.opened import OpenStore
from shardmill.inspector.words import LEAD, Words
from shardmill.records import JSON
from shardmill.shards import read_origins
from shardmill.shards.origins import FEED

SECONDS = 1.0
MOST_MATCHES = 50
MOST_QUERY = 200  # characters
_TOKENS = 4096  # of a document, looked at a time
_PAGE = 256  # documents whose places are read at a time
_CURSOR = re.compile(r"([0-9]{1,16})\.([0-9]{1,16})", re.ASCII)
KINDS = ("text", "id", "source")


class Place(NamedTuple):
    """Where a search goes on."""

    document: int
    token: int = 0  # of the document

    def __str__(self) -> str:
        return f"{self.document}.{self.token}"


@dataclass(slots=True)
class Found:
    """What a call has so far."""

    matches: list[JSON]
    scanned: int = 0  # documents
    unreadable: int = 0  # those of them with ids that are no text
    next: Place | None = None


def search(
    opened: OpenStore, split: str, kind: str, text: str, after: str | None
) -> dict[str, JSON]:
    """Documents that match, in their order."""
    total = opened.store.num_documents(split)
    place = _cursor(after, total)
    if kind == "text":
        found = _by_text(opened, split, text, place)
    elif kind == "id":
        found = _by_number(opened, split, text)
    else:
        found = _by_source(opened, split, text, place)
    after = None if found.next is None else str(found.next)
    return {
        "matches": found.matches,
        "next": after,
        "scanned": found.scanned,
        "unreadable": found.unreadable,
        "total": total,
    }


def _cursor(after: str | None, total: int) -> Place:
    if after is None:
        return Place(0)
    known = _CURSOR.fullmatch(after)
    if known is None or int(known[1]) >= total:
        raise OptionError(f"after={after[:40]!r}: wanted the `next` of the answer before")
    return Place(int(known[1]), int(known[2]))


def _by_number(opened: OpenStore, split: str, text: str) -> Found:
    total = opened.store.num_documents(split)
    number = int(text) if re.fullmatch(r"[0-9]{1,16}", text, re.ASCII) else total
    if number >= total:
        raise OptionError(
            f"q={text[:40]!r}: no document of split {split!r}; wanted a number from 0 to "
            f"{total - 1:,}"
        )
    return Found([_first_lines(opened, split, number)], scanned=1)


def _by_source(opened: OpenStore, split: str, text: str, place: Place) -> Found:
    """A store of one source has no other documents; of several its table of origins tells."""
    names = [str(source.get("name")) for source in opened.store.manifest.sources]
    if text not in names:
        raise OptionError(f"q={text[:80]!r}: no source of this store; wanted one of {names[:20]}")
    first, end = 0, opened.store.num_documents(split)
    if len(names) > 1:
        first, end = _documents_of(opened, split, names.index(text))
    start = max(first, place.document)
    stop = max(start, min(end, start + MOST_MATCHES))
    numbers = range(start, stop)
    matches = [_first_lines(opened, split, number) for number in numbers]
    return Found(matches, scanned=len(numbers), next=Place(stop) if stop < end else None)


def _documents_of(opened: OpenStore, split: str, feed: int) -> tuple[int, int]:
    """The documents start..stop of a split that one of its sources gave; they are neighbours."""
    origins = read_origins(opened.folder, opened.store.manifest)
    if origins is None:
        raise OptionError(
            f"{opened.folder}: of several sources, and it has no table of origins, which would "
            "tell from which one a document is; search for text"
        )
    edges = np.append(origins.first(split), opened.store.num_documents(split))
    rows = origins.table[:, FEED].searchsorted([feed, feed + 1])
    return int(edges[rows[0]]), int(edges[rows[1]])


def _first_lines(opened: OpenStore, split: str, number: int) -> JSON:
    start, stop = opened.spans(split, number, number + 1).tolist()
    role, snippet = beginning(opened, split, start, stop)
    return {"document": number, "at": None, "role": role, "snippet": snippet, "from": 0, "to": 0}


def _by_text(opened: OpenStore, split: str, text: str, place: Place) -> Found:
    words = opened.reading.words
    if words is None:
        raise OptionError(f"text cannot be searched: {opened.reading.why}")
    if len(text) > MOST_QUERY:
        raise OptionError(f"q: {len(text):,} characters; wanted at most {MOST_QUERY:,}")
    end, found = time.monotonic() + SECONDS, Found([])
    for number, start, stop in _documents(opened, split, place.document):
        at = place.token if number == place.document else 0
        while at == 0 or at < stop - start:
            if time.monotonic() > end or len(found.matches) >= MOST_MATCHES:
                found.next = Place(number, at)
                return found
            try:
                match, looked = _match(opened, split, (start, stop), at, text, words)
            except TokenizerError:  # the document itself says why
                found.unreadable += 1
                break
            if match is not None:
                found.matches.append({"document": number, **match})
                break
            at += looked
        found.scanned += 1
    return found


def _documents(opened: OpenStore, split: str, first: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and stop of each document from `first` on."""
    total = opened.store.num_documents(split)
    for begin in range(first, total, _PAGE):
        end = min(begin + _PAGE, total)
        edges = opened.spans(split, begin, end).tolist()
        yield from zip(range(begin, end), edges[:-1], edges[1:], strict=True)


def _match(
    opened: OpenStore, split: str, document: tuple[int, int], at: int, text: str, words: Words
) -> tuple[dict[str, JSON] | None, int]:
    """The first match in the next tokens from `at` on, and how many were looked at."""
    begin, end = document
    lead = min(at, LEAD)
    over = 4 * len(text)  # a match goes on behind them: a character has at most four tokens
    ids = opened.open_tokens(split).read(begin + at - lead, min(end, begin + at + _TOKENS + over))
    most = words.fitting(ids)
    if most <= lead:  # what stands before is too long to be decoded with it
        ids, lead = ids[lead:], 0
        most = words.fitting(ids)
    looked = _TOKENS if most == len(ids) else max(1, most - lead - over)
    ids = ids[:most]
    whole = words.decode(ids)
    place = whole.find(text)
    if place < 0:
        return None, looked
    borders = words.borders(ids, whole)
    last = int(np.searchsorted(borders, place, side="right")) - 1
    token = int(np.searchsorted(borders, borders[last]))  # the first of a character's tokens
    return {"at": at - lead + token, **_snippet(whole, place, len(text))}, looked


def _snippet(whole: str, place: int, length: int) -> dict[str, JSON]:
    """The match with what is around it. Its borders count UTF-16 units, as a page does."""
    start = max(0, place - max(0, PREVIEW - length) // 2)
    snippet = whole[start : max(place + length, start + PREVIEW)]
    before = len(whole[start:place].encode("utf-16-le", "surrogatepass")) // 2
    inside = len(whole[place : place + length].encode("utf-16-le", "surrogatepass")) // 2
    return {"snippet": snippet, "from": before, "to": before + inside}
