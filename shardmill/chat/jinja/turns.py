"""The turns of a conversation and its loss mask, proved on its own tokens.

In: what a template wrote (writing.py) and the tokens of it.  Out: `Turns`, or the reason why
the conversation is dropped; then the mask under a policy.
Promise: every turn starts where the rendering of the messages before it ends, token for token; an
assistant's words start where its generation prompt ends, token for token; the words are there;
structure is the template's alone.

The end of a turn is its last run of special tokens. A trained turn is trained from its first word
up to and including that run; what the template writes behind it (ChatML: a newline) is no one's
words and is not trained. Without `train_on_eot` the run is not trained either. With generation
blocks the template says itself how much of the run and of what follows is trained; all before the
run must be (transformers leaves out the last bytes of a block whose last character is several
tokens: such a conversation is dropped), and a missing `train_on_eot` takes the rest away.

Two kinds of neighbours may share a turn when a template writes them as one: a run of tool results,
and a system message folded into the turn behind it. The turn then has the role of its last message.

Many renderings of one conversation as tokens, each stretch of text encoded once.

In: texts, most of them prefixes of one another.  Out: the ids of each.
Promise: a text is cut at its special tokens and the stretches between them are encoded apart, as
tokenizers do themselves. That they do is not taken on trust: `encode_apart` is only a proposal, and
the caller compares it with the tokenizer's own ids of every whole conversation, and takes
`encode_whole` where they differ (a special token that swallows blanks, a mark at the start of a
text).
Cost: linear in the text, where encoding every prefix would be quadratic in the turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardmill.chat.jinja.engine import JinjaEngine
from shardmill.chat.jinja.facts import TemplateFacts, lost_words
from shardmill.chat.jinja.writing import Writing
from shardmill.chat.policy import ASSISTANT, SYSTEM, TOOL
from shardmill.records import BoolArray, IntArray

Encoded = dict[str, IntArray]


def encode_whole(engine: JinjaEngine, texts: Iterable[str]) -> Encoded:
    """Each text as the tokenizer encodes it, in one call."""
    unique = list(dict.fromkeys(texts))
    return dict(zip(unique, engine.ids(unique), strict=True))


def encode_apart(engine: JinjaEngine, facts: TemplateFacts, texts: Iterable[str]) -> Encoded:
    """Each text as its special tokens and the stretches between them."""
    if not facts.literals:
        return encode_whole(engine, texts)
    cut = re.compile("(" + "|".join(map(re.escape, facts.literals)) + ")")
    parts = {text: cut.split(text) for text in dict.fromkeys(texts)}
    # Odd parts are special tokens; they too are encoded alone, once each.
    unique = list(dict.fromkeys(part for text in parts.values() for part in text if part))
    ids = dict(zip(unique, engine.ids(unique), strict=True))
    nothing = np.empty(0, np.int64)
    return {
        text: np.concatenate([nothing, *(ids[part] for part in split if part)])
        for text, split in parts.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnSpans:
    """Where the turns of one conversation lie in its ids."""

    ids: IntArray
    first: list[int]  # the first message of each turn, ascending; the last ends the conversation
    starts: IntArray  # (turns,) where each turn starts
    words: IntArray  # (turns,) where its words start; -1 where nobody asked
    roles: IntArray  # (turns,) places in ROLES


def find_turns(writing: Writing, encoded: Encoded, facts: TemplateFacts) -> TurnSpans | str:
    """The turns, with every check that needs no policy."""
    ids = encoded[writing.whole]
    if not _same_structure(ids, encoded[writing.harmless], facts):
        return "special_in_text"
    stops = _stops(writing, encoded, facts)
    if isinstance(stops, str):
        return stops
    roles = np.array([message.role for message in writing.checked], np.uint8)
    closed = _close(stops, _begin(writing, encoded, stops), roles)
    if isinstance(closed, str):
        return closed
    first, starts = closed
    words = _words(writing, encoded, first)
    if isinstance(words, str):
        return words
    last = [after - 1 for after in [*first[1:], len(roles)]]
    return _with_words(writing, first) or TurnSpans(
        ids=ids, first=first, starts=np.array(starts, np.int64), words=words, roles=roles[last]
    )


def _begin(writing: Writing, encoded: Encoded, stops: list[int | None]) -> int:
    """Where the first turn starts: behind the longest opening that leaves something for it."""
    first = min(stop for stop in stops if stop is not None)
    counts = (_num_before(opening, writing.whole, encoded) or 0 for opening in writing.openings)
    return max(count if count < first else 0 for count in counts)


def _same_structure(ids: IntArray, plain: IntArray, facts: TemplateFacts) -> bool:
    """Whether the markers are those of the same conversation with harmless texts."""
    markers = np.array(sorted(facts.marker_ids), np.int64)
    return np.array_equal(ids[np.isin(ids, markers)], plain[np.isin(plain, markers)])


def _num_before(part: str, whole: str, encoded: Encoded) -> int | None:
    """How many tokens a part has, when its tokens are the first ones of the whole."""
    mine, all_ids = encoded[part], encoded[whole]
    return len(mine) if np.array_equal(mine, all_ids[: len(mine)]) else None


def _stops(writing: Writing, encoded: Encoded, facts: TemplateFacts) -> list[int | None] | str:
    """Where each message ends in the tokens; None where two messages share a turn."""
    roles = [message.role for message in writing.checked]
    stops: list[int | None] = []
    for place, prefix in enumerate(writing.prefixes):
        found = None
        folded = facts.folds_system and set(roles[: place + 1]) == {SYSTEM}
        if prefix is not None and writing.whole.startswith(prefix) and not folded:
            found = _num_before(prefix, writing.whole, encoded)
        if found is None and not _may_share(roles, place):
            moved = prefix is None or not writing.whole.startswith(prefix)
            return "prefix_changes" if moved else "tokens_merge"
        stops.append(found)
    return stops


def _may_share(roles: list[int], place: int) -> bool:
    """Whether a message and the next may be one turn."""
    if place + 1 == len(roles):
        return False
    return set(roles[: place + 1]) == {SYSTEM} or roles[place] == roles[place + 1] == TOOL


def _close(
    stops: list[int | None], begin: int, roles: IntArray
) -> tuple[list[int], list[int]] | str:
    """The first message and the first token of each turn."""
    first, starts = [0], [begin]
    for place, stop in enumerate(stops):
        empty = stop is not None and stop <= starts[-1]
        if empty and not _may_share(roles.tolist(), place):
            return "content_changed"
        if stop is not None and not empty and place + 1 < len(stops):
            first.append(place + 1)
            starts.append(stop)
    return first, starts


def _words(writing: Writing, encoded: Encoded, first: list[int]) -> IntArray | str:
    """Where the words of each turn start."""
    found = np.full(len(first), -1, np.int64)
    for turn, place in enumerate(first):
        before = writing.words.get(place)
        if before is None:
            continue
        if not writing.whole.startswith(before):
            return "prompt_changes"
        count = _num_before(before, writing.whole, encoded)
        if count is None:
            return "tokens_merge"
        found[turn] = count
    return found


def _with_words(writing: Writing, first: list[int]) -> str | None:
    """Why some message was not written as it was said, or None."""
    start = 0
    for turn, place in enumerate(first):
        after = first[turn + 1] if turn + 1 < len(first) else len(writing.checked)
        prefix = writing.prefixes[after - 1]
        assert prefix is not None  # a turn ends only where a rendering does
        written, start_next = prefix[start:], len(prefix)
        before = writing.words.get(place)
        answer = None if before is None else prefix[len(before) :]
        for message in writing.checked[place:after]:
            reason = lost_words(message, written, answer)
            if reason:
                return reason
        start = start_next
    return None


def mask_of(
    turns: TurnSpans,
    trained: BoolArray,
    facts: TemplateFacts,
    *,
    train_ends: bool,
    generated: BoolArray | None,
) -> BoolArray | str:
    """The loss mask, or why there is none.

    trained: (turns,).  generated: what the template's generation blocks hold, when it has them.
    """
    mask = np.zeros(len(turns.ids), np.bool_)
    is_end = np.isin(turns.ids, np.array(sorted(facts.end_ids), np.int64))
    stops = [*turns.starts[1:].tolist(), len(turns.ids)]
    held = 0
    for turn, (words, stop) in enumerate(zip(turns.words.tolist(), stops, strict=True)):
        if words < 0:
            continue
        ends = _end_of(is_end[words:stop])
        run, behind = (stop, stop) if ends is None else (words + ends[0], words + ends[1])
        blocks = generated if turns.roles[turn] == ASSISTANT else None
        if blocks is not None:
            if not (blocks[words:run].all() and blocks[words:stop].any()):
                return "mask_disagrees"
            behind = words + int(np.flatnonzero(blocks[words:stop])[-1]) + 1
            held += int(blocks[words:stop].sum())
        if not trained[turn]:
            continue
        if ends is None and not train_ends:
            return "no_end"
        stop_at = behind if train_ends else run
        mask[words:stop_at] = True if blocks is None else blocks[words:stop_at]
    if generated is not None and held != generated.sum():
        return "trains_others"
    return mask if mask.any() else "nothing_trained"


def _end_of(is_end: BoolArray) -> tuple[int, int] | None:
    """The last run of end ids, start and stop."""
    places = np.flatnonzero(is_end)
    if not len(places):
        return None
    stop = int(places[-1]) + 1
    plain = np.flatnonzero(~is_end[:stop])
    return (int(plain[-1]) + 1 if len(plain) else 0), stop
