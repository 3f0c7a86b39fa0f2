"""Documents of a store: a list, their lengths, and one of them token by token.

In: a store that is open, a split, numbers.  Out: facts for JSON.
Promise: work and memory are those of what is asked for; a histogram of many documents is one of
evenly spread runs of them, and says of how many; the trained tokens are those of the loss mask.
Not here: searching (search), texts of tokens (words).
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from shardmill.errors import TokenizerError
from shardmill.inspector.opened import OpenStore
from shardmill.inspector.query import NotThereError
from shardmill.inspector.view import Tokens, preview, shown
from shardmill.inspector.words import LEAD, TAIL
from shardmill.records import JSON, ROLES, BoolArray, IntArray, OffsetArray

PREVIEW = 160  # characters
_PREVIEW_TOKENS = 96
_BLOCK = 2**16  # documents or bytes looked at a time
LOOK_AT_ALL = 2**22
"""Documents whose lengths are all counted; of more a part is."""
MOST_TURNS = 2000


def document_page(opened: OpenStore, split: str, page: tuple[int, int]) -> dict[str, JSON]:
    """Some documents in their order, with how they begin."""
    total = opened.store.num_documents(split)
    first = min(page[0], total)
    edges = opened.spans(split, first, min(first + page[1], total)).tolist()
    documents: list[JSON] = []
    for place, (start, stop) in enumerate(pairwise(edges)):
        role, text = beginning(opened, split, start, stop)
        documents.append(
            {
                "document": first + place,
                "start": start,
                "tokens": stop - start,
                "trained": trained_in(opened, split, start, stop),
                "role": role,
                "preview": text,
            }
        )
    return {"total": total, "documents": documents}


def beginning(opened: OpenStore, split: str, start: int, stop: int) -> tuple[str | None, str]:
    """What a document is listed with: its first words, and who says them (None: no conversation).

    Of a conversation it is the first user turn, since agents share their system prompts; one
    without a user is listed with its first turn.
    """
    role = None
    if opened.is_chat:
        arrays = opened.chat_arrays(split)
        first, last = np.searchsorted(arrays.turn_starts, (start, stop)).tolist()
        roles = np.array(arrays.turn_roles[first : min(last, first + MOST_TURNS)])
        if len(roles):
            turn = int(np.argmax(roles == ROLES.index("user")))  # 0 when no user is there
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
    "<|im_start|>user"; "" when the store does not say, as with a Jinja template."""
    words, options = opened.reading.words, opened.store.manifest.options
    if words is None or role is None:
        return ""
    try:
        template: dict[str, Any] = options["chat"]["template"]
        ids, parts = template["markers"], template["spec"]["roles"][role]["before"]
        return "".join(
            words.decode(np.array([ids[part["marker"]]])) if "marker" in part else part["text"]
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
    bits = opened.chat_arrays(split).mask_bits
    count = 0
    for first in range(start >> 3, (stop + 7) >> 3, _BLOCK):
        last = min(first + _BLOCK, (stop + 7) >> 3)
        part = np.array(bits[first:last])
        if first == start >> 3:
            part[0] &= 0xFF << (start & 7) & 0xFF  # bits of tokens before
        if last == (stop + 7) >> 3 and stop & 7:
            part[-1] &= (1 << (stop & 7)) - 1  # bits of tokens behind
        count += int(np.bitwise_count(part).sum())
    return count


def document_view(
    opened: OpenStore, split: str, number: int, page: tuple[int, int]
) -> dict[str, JSON]:
    """The tokens start..start + limit of a document, and its turns."""
    total = opened.store.num_documents(split)
    if number >= total:
        has = f"has {total:,}, numbered 0 to {total - 1:,}" if total else "is empty"
        raise NotThereError(f"there is no document {number:,}: split {split!r} {has}")
    begin, end = opened.spans(split, number, number + 1).tolist()
    start = min(begin + page[0], end)
    stop = min(start + page[1], end)
    lead, tail = max(begin, start - LEAD), min(end, stop + TAIL)
    tokens = Tokens(
        ids=opened.open_tokens(split).read(lead, tail),
        start=start - lead,
        stop=stop - lead,
        at=start - begin,
    )
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
        "view": shown(tokens, opened.reading, trained=trained, turn=turn),
        "turns": turns,
    }


def _mask(opened: OpenStore, split: str, start: int, stop: int) -> BoolArray:
    bits = opened.chat_arrays(split).mask_bits[start >> 3 : (stop + 7) >> 3]
    spread = np.unpackbits(bits, bitorder="little").view(np.bool_)
    return spread[start & 7 : (start & 7) + stop - start]


def _turns(
    opened: OpenStore, split: str, document: tuple[int, int], seen: tuple[int, int]
) -> tuple[IntArray, list[JSON]]:
    """Which turn each seen token is of, and the turns: all, or those that are seen if there are
    too many."""
    arrays = opened.chat_arrays(split)
    first, last = np.searchsorted(arrays.turn_starts, document).tolist()
    place = np.arange(*seen)
    turn = np.searchsorted(arrays.turn_starts[first:last], place, side="right") - 1
    low, high = 0, last - first
    if high > MOST_TURNS:
        low, high = (max(0, int(turn[0])), int(turn[-1]) + 1) if len(turn) else (0, 0)
    chosen = slice(first + low, first + min(high, low + MOST_TURNS))
    starts: OffsetArray = np.array(arrays.turn_starts[chosen], np.int64)
    behind = chosen.stop
    end = int(arrays.turn_starts[behind]) if behind < last else document[1]
    roles = arrays.turn_roles[chosen].tolist()
    turns: list[JSON] = [
        {
            "turn": low + number,
            "role": _role(role),
            "start": start - document[0],
            "stop": stop - document[0],
            "trained": trained_in(opened, split, start, stop),
        }
        for number, (role, (start, stop)) in enumerate(
            zip(roles, pairwise([*starts.tolist(), end]), strict=True)
        )
    ]
    return turn, turns


def histogram(opened: OpenStore, split: str) -> dict[str, JSON]:
    """Lengths of documents by powers of two. Made once."""
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
    # lengths 0 | 1 | 2 3 | 4 5 6 7 | ...
    edges = 1 << np.arange(63, dtype=np.int64)
    counts = np.zeros(64, np.int64)
    for start in range(0, looked_at, _BLOCK):
        places = np.searchsorted(edges, lengths[start : start + _BLOCK], side="right")
        counts += np.bincount(places, minlength=64)
    used = np.flatnonzero(counts)
    bins: list[JSON] = [
        {
            "from": 0 if place == 0 else 1 << (place - 1),
            "to": 1 << place,
            "count": int(counts[place]),
        }
        for place in range(int(used[0]), int(used[-1]) + 1)
    ]
    middle = (looked_at - 1) // 2, looked_at // 2
    facts: dict[str, JSON] = {
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
        "mean": float(lengths.mean()),
    }
    lengths.partition(middle)  # in place: the order is not needed any more
    facts["median"] = float(lengths[list(middle)].mean())
    return {"bins": bins, **facts, "looked_at": looked_at, "documents": total}


def even_runs(total: int, most: int, run: int) -> list[tuple[int, int]]:
    """Half-open runs of up to `run` numbers: all of 0..total, or about `most`, evenly spread."""
    if total <= most:
        return [(start, min(start + run, total)) for start in range(0, total, run)]
    count = most // run
    starts = [(total - run) * place // max(1, count - 1) for place in range(count)]
    return [(start, start + run) for start in starts]
