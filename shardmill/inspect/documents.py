"""Documents of a store: a list, their lengths, one token by token, and a search.

Work and memory are those of what is asked for. Lengths of many documents are those of evenly spread
runs of them, and the answer says of how many. There is no index: a search reads the store, for
about a second or up to 50 matches; continued with its cursor, it looks at every document once, from
the first to the last, and finds a document once, at its first match.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import OptionError, TokenizerError
from shardmill.inspect.stores import NotThereError, OpenStore
from shardmill.inspect.tokens import LEAD, MOST_VIEW, TAIL, TokenTexts, preview, shown
from shardmill.records import JSON, ROLES, BoolArray, IntArray
from shardmill.store import read_origins
from shardmill.store.plans import FEED

if TYPE_CHECKING:
    from shardmill.inspect.api import Desk, Query

PREVIEW = 160  # characters
_PREVIEW_TOKENS = 96
_BLOCK = 2**16  # documents or bytes looked at a time
LOOK_AT_ALL = 2**22
"""Documents whose lengths are all counted; of more, a part is."""
MOST_TURNS = 2000
SECONDS = 1.0
MOST_MATCHES = 50
MOST_QUERY = 200  # characters
_TOKENS = 4096  # of a document, searched at a time
_PAGE = 256  # documents whose starts are read at a time
_CURSOR = re.compile(r"([0-9]{1,16})\.([0-9]{1,16})", re.ASCII)


def document_page(desk: Desk, query: Query) -> JSON:
    """Some documents in their order, with how they begin."""
    opened, split = desk.split(query)
    start, limit = query.page()
    total = opened.store.num_documents(split)
    first = min(start, total)
    edges = opened.spans(split, first, min(first + limit, total)).tolist()
    documents: list[JSON] = []
    for number, (start, stop) in enumerate(pairwise(edges), first):
        role, text = beginning(opened, split, start, stop)
        documents.append(
            {
                "document": number,
                "start": start,
                "tokens": stop - start,
                "trained": trained_in(opened, split, start, stop),
                "role": role,
                "preview": text,
            }
        )
    return {"total": total, "documents": documents}


def beginning(opened: OpenStore, split: str, start: int, stop: int) -> tuple[str | None, str]:
    """The role (None: no conversation) and the first words that a document is listed with.

    Of a conversation it is the first user turn, since agents share their system prompts; one
    without a user is listed with its first turn.
    """
    role = None
    if opened.is_chat:
        arrays = opened.chat_arrays(split)
        first, last = np.searchsorted(arrays.turn_starts, (start, stop)).tolist()
        roles = np.array(arrays.turn_roles[first : min(last, first + MOST_TURNS)])
        if len(roles):
            turn = int(np.argmax(roles == ROLES.index("user")))  # 0 when there is no user
            role = _role(int(roles[turn]))
            start = int(arrays.turn_starts[first + turn])
            if first + turn + 1 < last:
                stop = int(arrays.turn_starts[first + turn + 1])
    opening = opened.keep(("opening", role), partial(_opening, opened, role))
    most = _PREVIEW_TOKENS + len(opening)
    ids = opened.open_tokens(split).read(start, min(stop, start + most))
    text = preview(ids, opened.reading, PREVIEW + len(opening))
    return role, text.removeprefix(opening)[:PREVIEW]


def _opening(opened: OpenStore, role: str | None) -> str:
    """The text that the chat template writes before a turn of this role, such as
    "<|im_start|>user"; "" when the store does not record it, as with a Jinja template."""
    texts, options = opened.reading.texts, opened.store.manifest.options
    if texts is None or role is None:
        return ""
    try:
        template: dict[str, Any] = options["chat"]["template"]
        ids, parts = template["markers"], template["spec"]["roles"][role]["before"]
        return "".join(
            texts.decode(np.array([ids[part["marker"]]])) if "marker" in part else part["text"]
            for part in parts
        )
    except (KeyError, TypeError, TokenizerError):  # then it is listed with the text
        return ""


def _role(number: int) -> str:
    return ROLES[number] if number < len(ROLES) else f"role {number}"


def trained_in(opened: OpenStore, split: str, start: int, stop: int) -> int | None:
    """How many of these tokens are trained; None: no conversations."""
    if not opened.is_chat:
        return None
    blocks = range(start, stop, 8 * _BLOCK)
    masks = (_mask(opened, split, at, min(at + 8 * _BLOCK, stop)) for at in blocks)
    return sum(int(np.count_nonzero(mask)) for mask in masks)


def document_view(desk: Desk, query: Query) -> JSON:
    """The tokens start..start + limit of a document, and its turns."""
    number, (skip, limit) = query.number("document"), query.page(2000, most=MOST_VIEW)
    opened, split = desk.split(query)
    total = opened.store.num_documents(split)
    if number >= total:
        has = f"has {total:,}, numbered 0 to {total - 1:,}" if total else "is empty"
        raise NotThereError(f"there is no document {number:,}: split {split!r} {has}")
    begin, end = opened.spans(split, number, number + 1).tolist()
    start = min(begin + skip, end)
    stop = min(start + limit, end)
    lead = max(begin, start - LEAD)
    ids = opened.open_tokens(split).read(lead, min(end, stop + TAIL))
    span, at = (start - lead, stop - lead), lead - begin
    trained = turn = turns = None
    if opened.is_chat:
        trained = _mask(opened, split, start, stop)
        turn, turns = _turns(opened, split, (begin, end), (start, stop))
    return {
        "document": number,
        "split": split,
        "first_token": begin,
        "num_tokens": end - begin,
        "kind": "chat" if opened.is_chat else "text",
        "view": shown(ids, span, opened.reading, at=at, trained=trained, turn=turn),
        "turns": turns,
    }


def _mask(opened: OpenStore, split: str, start: int, stop: int) -> BoolArray:
    bits = opened.chat_arrays(split).mask_bits[start >> 3 : (stop + 7) >> 3]
    spread = np.unpackbits(bits, bitorder="little").view(np.bool_)
    return spread[start & 7 : (start & 7) + stop - start]


def _turns(
    opened: OpenStore, split: str, document: tuple[int, int], seen: tuple[int, int]
) -> tuple[IntArray, list[JSON]]:
    """Which turn each seen token is in, and the turns: all, or those that are seen if there are
    too many."""
    arrays = opened.chat_arrays(split)
    first, last = np.searchsorted(arrays.turn_starts, document).tolist()
    turn = np.searchsorted(arrays.turn_starts[first:last], np.arange(*seen), side="right") - 1
    low, high = 0, last - first
    if high > MOST_TURNS:
        low, high = (max(0, int(turn[0])), int(turn[-1]) + 1) if len(turn) else (0, 0)
    chosen = slice(first + low, first + min(high, low + MOST_TURNS))
    starts = arrays.turn_starts[chosen].tolist()
    end = int(arrays.turn_starts[chosen.stop]) if chosen.stop < last else document[1]
    roles = arrays.turn_roles[chosen].tolist()
    turns: list[JSON] = [
        {
            "turn": number,
            "role": _role(role),
            "start": start - document[0],
            "stop": stop - document[0],
            "trained": trained_in(opened, split, start, stop),
        }
        for number, (role, (start, stop)) in enumerate(
            zip(roles, pairwise([*starts, end]), strict=True), low
        )
    ]
    return turn, turns


def histogram(desk: Desk, query: Query) -> JSON:
    """Lengths of documents by powers of two. Made once."""
    opened, split = desk.split(query)
    return opened.keep(("histogram", split), lambda: _histogram(opened, split))


def _histogram(opened: OpenStore, split: str) -> dict[str, JSON]:
    total = opened.store.num_documents(split)
    lengths = np.concatenate(
        [np.empty(0, np.int64)]
        + [np.diff(opened.spans(split, *run)) for run in even_runs(total, LOOK_AT_ALL, _BLOCK)]
    )
    looked_at = len(lengths)
    if not looked_at:
        nothing: dict[str, JSON] = dict.fromkeys(("shortest", "longest", "mean", "median"))
        return {"bins": [], **nothing, "looked_at": 0, "documents": total}
    counts = np.bincount(np.frexp(lengths)[1])  # lengths 0 | 1 | 2 3 | 4 5 6 7 | ...
    used = np.flatnonzero(counts)
    middle = (looked_at - 1) // 2, looked_at // 2
    facts: dict[str, JSON] = {
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
        "mean": float(lengths.mean()),
    }
    lengths.partition(middle)  # in place: the order is not needed any more
    return {
        "bins": [
            {"from": 0 if at == 0 else 1 << (at - 1), "to": 1 << at, "count": int(counts[at])}
            for at in range(int(used[0]), int(used[-1]) + 1)
        ],
        **facts,
        "median": float(lengths[list(middle)].mean()),
        "looked_at": looked_at,
        "documents": total,
    }


def even_runs(total: int, most: int, run: int) -> list[tuple[int, int]]:
    """Half-open runs of up to `run` numbers: all of 0..total, or about `most`, evenly spread."""
    if total <= most:
        return [(start, min(start + run, total)) for start in range(0, total, run)]
    count = most // run
    starts = [(total - run) * number // max(1, count - 1) for number in range(count)]
    return [(start, start + run) for start in starts]


def search(desk: Desk, query: Query) -> JSON:
    """Documents that match, in their order; continues `after` the "next" of an earlier answer."""
    opened, split = desk.split(query)
    kind = query.choice("kind", ("text", "id", "source"), "text")
    text, after = query.text("q"), query.optional("after")
    total, cursor = opened.store.num_documents(split), (0, 0)
    if after is not None:
        known = _CURSOR.fullmatch(after)
        if known is None or int(known[1]) >= total:
            raise OptionError(f"after={after[:40]!r}: wanted the `next` of the previous answer")
        cursor = int(known[1]), int(known[2])
    if kind == "text":
        found = _by_text(opened, split, text, cursor)
    elif kind == "id":
        found = _by_number(opened, split, text)
    else:
        found = _by_source(opened, split, text, cursor[0])
    return {"next": None, "unreadable": 0, **found, "total": total}


def _by_number(opened: OpenStore, split: str, text: str) -> dict[str, JSON]:
    total = opened.store.num_documents(split)
    number = int(text) if re.fullmatch(r"[0-9]{1,16}", text, re.ASCII) else total
    if number >= total:
        raise OptionError(
            f"q={text[:40]!r}: no document of split {split!r}; wanted a number from 0 to "
            f"{total - 1:,}"
        )
    return {"matches": [_first_lines(opened, split, number)], "scanned": 1}


def _by_source(opened: OpenStore, split: str, text: str, first: int) -> dict[str, JSON]:
    """All documents of a store of one source; of several, its table of origins says which."""
    names = [str(source.get("name")) for source in opened.store.manifest.sources]
    if text not in names:
        raise OptionError(f"q={text[:80]!r}: no source of this store; wanted one of {names[:20]}")
    start, end = 0, opened.store.num_documents(split)
    if len(names) > 1:
        origins = read_origins(opened.folder, opened.store.manifest)
        if origins is None:
            raise OptionError(
                f"{opened.folder}: has several sources and no table of origins, so it is not known "
                "which source a document came from; search for text"
            )
        # the documents of one source follow one another
        edges = np.append(origins.first(split), end)
        source = names.index(text)
        start, end = edges[origins.table[:, FEED].searchsorted([source, source + 1])].tolist()
    start = max(start, first)
    stop = max(start, min(end, start + MOST_MATCHES))
    return {
        "matches": [_first_lines(opened, split, number) for number in range(start, stop)],
        "scanned": stop - start,
        "next": f"{stop}.0" if stop < end else None,
    }


def _first_lines(opened: OpenStore, split: str, number: int) -> JSON:
    start, stop = opened.spans(split, number, number + 1).tolist()
    role, snippet = beginning(opened, split, start, stop)
    return {"document": number, "at": None, "role": role, "snippet": snippet, "from": 0, "to": 0}


def _by_text(opened: OpenStore, split: str, text: str, cursor: tuple[int, int]) -> dict[str, JSON]:
    texts = opened.reading.texts
    if texts is None:
        raise OptionError(f"text cannot be searched: {opened.reading.why}")
    if len(text) > MOST_QUERY:
        raise OptionError(f"q: {len(text):,} characters; wanted at most {MOST_QUERY:,}")
    end, matches = time.monotonic() + SECONDS, list[JSON]()
    scanned = unreadable = 0

    def answer(cursor: str | None) -> dict[str, JSON]:
        counts = {"scanned": scanned, "unreadable": unreadable}
        return {"matches": matches, **counts, "next": cursor}

    for number, start, stop in _documents(opened, split, cursor[0]):
        at = cursor[1] if number == cursor[0] else 0
        while at == 0 or at < stop - start:
            if time.monotonic() > end or len(matches) >= MOST_MATCHES:
                return answer(f"{number}.{at}")
            try:
                match, looked = _match(opened, split, (start, stop), at, text, texts)
            except TokenizerError:  # the view of the document says why
                unreadable += 1
                break
            if match is not None:
                matches.append({"document": number, **match})
                break
            at += looked
        scanned += 1
    return answer(None)


def _documents(opened: OpenStore, split: str, first: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and stop of each document from `first` on."""
    total = opened.store.num_documents(split)
    for begin in range(first, total, _PAGE):
        end = min(begin + _PAGE, total)
        edges = opened.spans(split, begin, end).tolist()
        yield from zip(range(begin, end), edges[:-1], edges[1:], strict=True)


def _match(
    opened: OpenStore, split: str, document: tuple[int, int], at: int, text: str, texts: TokenTexts
) -> tuple[dict[str, JSON] | None, int]:
    """The first match in the next tokens from `at` on, and how many were looked at."""
    begin, end = document
    lead = min(at, LEAD)
    over = 4 * len(text)  # a match may continue after them: a character has at most four tokens
    ids = opened.open_tokens(split).read(begin + at - lead, min(end, begin + at + _TOKENS + over))
    most = texts.fitting(ids)
    if most <= lead:  # what comes before is too long to be decoded with it
        ids, lead = ids[lead:], 0
        most = texts.fitting(ids)
    looked = _TOKENS if most == len(ids) else max(1, most - lead - over)
    ids = ids[:most]
    whole = texts.decode(ids)
    start = whole.find(text)
    if start < 0:
        return None, looked
    offsets = texts.offsets(ids, whole)
    last = int(np.searchsorted(offsets, start, side="right")) - 1
    token = int(np.searchsorted(offsets, offsets[last]))  # the first of a character's tokens
    return {"at": at - lead + token, **_snippet(whole, start, len(text))}, looked


def _snippet(whole: str, at: int, length: int) -> dict[str, JSON]:
    """A match with what is around it. Its ends count UTF-16 units, as a page does."""
    start = max(0, at - max(0, PREVIEW - length) // 2)
    snippet = whole[start : max(at + length, start + PREVIEW)]
    before = len(whole[start:at].encode("utf-16-le", "surrogatepass")) // 2
    inside = len(whole[at : at + length].encode("utf-16-le", "surrogatepass")) // 2
    return {"snippet": snippet, "from": before, "to": before + inside}
