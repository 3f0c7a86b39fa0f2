"""Where turns and trained tokens are in what a template wrote, for all conversations written alike.

A template writes literals and texts of the conversation, with marks where it came to a message, and
edges of generation blocks. `lay_out` finds the turns from the marks, and what is trained from the
prompt: an answer starts where the rendering of the messages before it, with the generation prompt,
ends, and goes on up to the special tokens that end a turn. Both renderings must agree piece for
piece, not just letter for letter, so what is found holds for every text that is written that way.

Special tokens split what is written into sections, which a tokenizer encodes apart:

    <|im_start|>  user\\n + m[0]['content']  <|im_end|>  \\n  <|im_start|>  assistant\\n + ...
    marker        section with a text         marker    fixed marker        section with a text

A position inside a section is the number of tokens of what precedes it there; `forms.py` checks
that they are the first tokens of the section.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from shardmill.chat.jinja.values import Edge, Mark, Trace, TracedText, parts_of, said, source_of
from shardmill.chat.policy import ASSISTANT, TOOL, CheckedMessage, Dropped
from shardmill.records import BoolArray

Cut: TypeAlias = tuple[int, int]
"""A position: (piece, characters of it before the position)."""


class Written(NamedTuple):
    """One rendering."""

    pieces: list[str]  # literals and texts; no two literals next to each other
    marks: list[tuple[int, Cut]]  # (message, where the template came to it)
    edges: list[tuple[bool, Cut]]  # (opens, where)


def written_of(outputs: Iterable[str]) -> Written:
    """What a template wrote, with literals joined."""
    pieces: list[str] = []
    marks: list[tuple[int, Cut]] = []
    edges: list[tuple[bool, Cut]] = []
    for part in parts_of(outputs):
        ends_literal = bool(pieces) and not isinstance(pieces[-1], TracedText)
        here = (len(pieces) - 1, len(pieces[-1])) if ends_literal else (len(pieces), 0)
        if isinstance(part, Mark):
            marks.append((part._index, here))
        elif isinstance(part, Edge):
            edges.append((part._opens, here))
        elif isinstance(part, TracedText):
            pieces.append(part)
        elif ends_literal:
            pieces[-1] += part
        elif part:
            pieces.append(part)

    def settled(cut: Cut) -> Cut:
        """The end of a literal is the start of what follows."""
        piece, at = cut
        ends = piece < len(pieces) and not isinstance(pieces[piece], TracedText)
        return (piece + 1, 0) if ends and at == len(pieces[piece]) else cut

    return Written(
        pieces, [(n, settled(cut)) for n, cut in marks], [(o, settled(cut)) for o, cut in edges]
    )


def text_of(written: Written) -> str:
    return "".join(p._said if isinstance(p, TracedText) else p for p in written.pieces)


def common_end(first: Written, other: Written) -> Cut:
    """Up to where two renderings are the same, piece for piece."""
    for number, (one, two) in enumerate(zip(first.pieces, other.pieces, strict=False)):
        if isinstance(one, TracedText) or isinstance(two, TracedText):
            if not (
                isinstance(one, TracedText)
                and isinstance(two, TracedText)
                and one._source == two._source
            ):
                return number, 0
        elif one != two:
            same = 0
            while same < min(len(one), len(two)) and one[same] == two[same]:
                same += 1
            return (number + 1, 0) if same == len(one) else (number, same)
    return min(len(first.pieces), len(other.pieces)), 0


def end_of(written: Written) -> Cut:
    return len(written.pieces), 0


def end_as_prefix(part: Written, whole: Written) -> Cut | None:
    """Where a rendering ends that is the beginning of another; None if it is not."""
    if not part.pieces:
        return 0, 0
    last = len(part.pieces) - 1
    found = common_end(whole, part)
    if found > (last, 0) and isinstance(part.pieces[last], TracedText):
        return found
    if (
        found >= (last, 0)
        and not isinstance(part.pieces[last], TracedText)
        and last < len(whole.pieces)
    ):
        longer = whole.pieces[last]
        if not isinstance(longer, TracedText) and longer.startswith(part.pieces[last]):
            same = longer == part.pieces[last]
            return (last + 1, 0) if same else (last, len(part.pieces[last]))
    return None


# Items: markers, and sections between them.


class TextSection(NamedTuple):
    fragments: tuple[str, ...]  # literals and texts

    @property
    def is_fixed(self) -> bool:
        return not any(isinstance(part, TracedText) for part in self.fragments)

    def source(self) -> str:
        return " + ".join(map(source_of, self.fragments))


Item: TypeAlias = "int | TextSection"  # the id of a marker, or a section


class ItemPosition(NamedTuple):
    """A position among items: inside a section after `prefix`, else before the item."""

    item: int
    prefix: tuple[str, ...] = ()


class Items:
    """What was written as markers and sections."""

    def __init__(self, written: Written, literals: re.Pattern[str], ids: Mapping[str, int]) -> None:
        self.items: list[Item] = []
        self._cuts: list[list[tuple[Cut, str]]] = []  # of each item: where its fragments start
        for number, piece in enumerate(written.pieces):
            parts = [piece] if isinstance(piece, TracedText) else literals.split(piece)
            at = 0
            for turn, part in enumerate(parts):
                if turn % 2:
                    self.items.append(ids[part])
                    self._cuts.append([((number, at), part)])
                elif isinstance(part, TracedText) or part:
                    self._add((number, at), part)
                at += 1 if isinstance(part, TracedText) else len(part)

    def _add(self, cut: Cut, part: str) -> None:
        if self.items and isinstance(self.items[-1], TextSection):
            self.items[-1] = TextSection((*self.items[-1].fragments, part))
            self._cuts[-1].append((cut, part))
        else:
            self.items.append(TextSection((part,)))
            self._cuts.append([(cut, part)])

    def position(self, cut: Cut, *, before_marker: bool = False) -> ItemPosition:
        """Dropped if it is inside a marker, unless that is to start there."""
        flat = self._flat
        after = bisect_left(flat, cut, key=lambda one: one[0])  # starts there or later
        if after:
            start, number, at = flat[after - 1]
            part = self._cuts[number][at][1]
            is_literal = not isinstance(part, TracedText) and cut[0] == start[0]
            if is_literal and cut[1] < start[1] + len(part):
                if not isinstance(self.items[number], TextSection):
                    if before_marker:
                        return ItemPosition(number)
                    raise Dropped("tokens_merge")
                return ItemPosition(number, (*self._before(number, at), part[: cut[1] - start[1]]))
        if after == len(flat):
            return ItemPosition(len(self.items))
        _, number, at = flat[after]
        return ItemPosition(number, self._before(number, at))

    def _before(self, number: int, at: int) -> tuple[str, ...]:
        return tuple(text for _, text in self._cuts[number][:at])

    @cached_property
    def _flat(self) -> list[tuple[Cut, int, int]]:
        """All fragments: where each starts, its item, its number there."""
        return [
            (start, number, at)
            for number, fragments in enumerate(self._cuts)
            for at, (start, _) in enumerate(fragments)
        ]

    def cut(self, position: ItemPosition) -> Cut:
        """The inverse of `position`."""
        if position.item == len(self.items):
            return (sys.maxsize, 0)
        if not position.prefix:
            return self._cuts[position.item][0][0]
        (piece, at), _ = self._cuts[position.item][len(position.prefix) - 1]
        last = position.prefix[-1]
        return (piece + 1, 0) if isinstance(last, TracedText) else (piece, at + len(last))

    def fragments(self, start: ItemPosition, stop: ItemPosition) -> list[str]:
        """What is in the sections from one position to another."""
        found: list[str] = []
        for number in range(start.item, min(stop.item + 1, len(self.items))):
            item = self.items[number]
            parts = item.fragments if isinstance(item, TextSection) else ()
            if number == stop.item:
                parts = stop.prefix
            if number == start.item and start.prefix:
                # A prefix may end inside a literal, never inside a text.
                *whole, last = start.prefix
                rest = parts[len(whole) :]
                parts = (
                    rest[0][len(last) :] if not isinstance(last, TracedText) else "",
                    *rest[1:],
                )
            found += [part for part in parts if isinstance(part, TracedText) or part]
        return found

    def last_text(self, start: ItemPosition, stop: ItemPosition) -> ItemPosition:
        """After the last text from one position to another."""
        for number in range(min(stop.item, len(self.items) - 1), start.item - 1, -1):
            item = self.items[number]
            parts = item.fragments if isinstance(item, TextSection) else ()
            if number == stop.item:
                parts = stop.prefix
            texts = [at for at, part in enumerate(parts) if isinstance(part, TracedText)]
            if texts and isinstance(item, TextSection) and texts[-1] + 1 == len(item.fragments):
                return ItemPosition(number + 1)
            if texts:
                return ItemPosition(number, parts[: texts[-1] + 1])
        return stop

    def texts(self, start: ItemPosition, stop: ItemPosition) -> list[TracedText]:
        return [part for part in self.fragments(start, stop) if isinstance(part, TracedText)]

    def source(self, start: ItemPosition, stop: ItemPosition) -> str:
        return " + ".join(map(source_of, self.fragments(start, stop)))

    def said(self, parts: Sequence[tuple[ItemPosition, ItemPosition]]) -> str:
        return "".join("".join(map(said, self.fragments(*part))) for part in parts)


# Turns and what is trained.


class TrainedSpan(NamedTuple):
    start: ItemPosition
    stop: ItemPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn: some messages, from where it starts."""

    messages: tuple[int, ...]
    start: Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The items of a conversation, and positions among them."""

    items: list[Item]
    markers: Mapping[str, int]  # literal -> id
    turn_starts: list[ItemPosition]
    turn_roles: list[int]
    trained: list[TrainedSpan]


def find_turns(written: Written, roles: Sequence[int], bos: str) -> list[Turn]:
    """The turns, in order. A message without a turn of its own is part of the turn after it."""
    runs: list[dict[int, Cut]] = [{}]  # of each pass over the messages: where it wrote something
    last = -1
    for index, cut, writes in _passed(written):
        if index <= last:
            runs.append({})
        if writes:
            runs[-1].setdefault(index, cut)
        last = index
    # A template may look at all messages before it writes them, and write something in between.
    starts = max(reversed(runs), key=len)
    if not starts:
        raise Dropped("no_turns")
    ordered = list(starts)
    turns: list[Turn] = []
    waiting: list[int] = []
    first = starts[ordered[0]]
    early = {
        index
        for index in range(ordered[0])
        if any(_is_of(piece, index) for piece in written.pieces[: first[0] + bool(first[1])])
    }
    if early:  # written before the loop
        turns.append(Turn(messages=tuple(range(ordered[0])), start=(0, 0)))
    for index in range(ordered[0] if early else 0, len(roles)):
        waiting.append(index)
        if index not in starts:
            continue
        turns.append(Turn(messages=tuple(waiting), start=starts[index]))
        waiting = []
    if waiting:
        raise Dropped("content_changed")
    if bos and turns[0].start == (0, 0) and written.pieces[0].startswith(bos):
        start = (1, 0) if written.pieces[0] == bos else (0, len(bos))
        turns[0] = Turn(messages=turns[0].messages, start=start)
    return turns


def _passed(written: Written) -> list[tuple[int, Cut, bool]]:
    """The marks, and whether something was written there. While it is at one message, a template
    may look through others without writing; what follows is still of the first."""
    found: list[tuple[int, Cut, bool]] = []
    ends = [*(cut for _, cut in written.marks[1:]), end_of(written)]
    for (index, cut), end in zip(written.marks, ends, strict=False):  # no marks: no turns
        pieces = written.pieces[cut[0] + bool(cut[1]) : end[0]]
        texts = [piece for piece in pieces if isinstance(piece, TracedText)]
        if texts and not any(_is_of(text, index) for text in texts):
            owner = len(found) - 1
            while owner >= 0 and not any(_is_of(text, found[owner][0]) for text in texts):
                owner = -1 if found[owner][2] else owner - 1
            if owner >= 0:
                found[owner:] = [(*found[owner][:2], True)]
                continue
        found.append((index, cut, end > cut))
    return found


def _is_of(piece: str, index: int) -> bool:
    return isinstance(piece, TracedText) and f"m[{index}]" in piece._source


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """One conversation to lay out."""

    trace: Trace
    whole: Written
    write: Callable[[int, bool], Written]  # the first so many messages, with the prompt or without
    messages: Sequence[Mapping[str, Any]]
    checked: Sequence[CheckedMessage]
    num_tools: int
    trained: BoolArray  # (messages,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What does not depend on the conversation."""

    bos: str
    opening: str
    literals: re.Pattern[str]
    markers: Mapping[str, int]
    end_ids: frozenset[int]
    closing: frozenset[int]
    has_blocks: bool
    any_prompt: bool  # an answer starts where it is no longer what the prompt has, at the latest
    train_ends: bool


def lay_out(talk: Talk, rules: Rules) -> Layout:
    """Where everything is; Dropped if that cannot be shown."""
    whole = talk.whole
    items = Items(whole, rules.literals, rules.markers)
    roles = [message.role for message in talk.checked]
    turns = may_merge(find_turns(whole, roles, rules.bos), whole, items, roles)
    sources = "\n".join(piece._source for piece in whole.pieces if isinstance(piece, TracedText))
    if talk.num_tools and not _has_json("t", sources):
        talk.trace.pin("len(t)", talk.num_tools)
        if any(f"t[{number}]" not in sources for number in range(talk.num_tools)):
            raise Dropped("no_place_for_tools")
    stops = [*(turn.start for turn in turns[1:]), end_of(whole)]
    blocks = _blocks(whole, turns, stops, roles)
    spans: list[TrainedSpan] = []
    for number, (turn, stop) in enumerate(zip(turns, stops, strict=True)):
        is_trained = talk.trained[list(turn.messages)]
        if is_trained.any() != is_trained.all():
            raise Dropped("mixed_train")
        bounds = items.position(turn.start), items.position(stop)
        found = [bounds]
        if is_trained.all():
            if roles[turn.messages[-1]] == ASSISTANT and rules.has_blocks:
                found = [
                    (items.position(one), items.position(two))
                    for one, two in blocks.get(number, ())
                ]
                if not found:
                    raise Dropped("mask_disagrees")
                _check_own(items, turn, found, roles)
                run, _ = end_of_turn(items, *bounds, rules)
                spans += [
                    TrainedSpan(one, two if rules.train_ends else min(two, run))
                    for one, two in found
                    if rules.train_ends or one < run
                ]
            else:
                words = _start_of_words(talk, rules, whole, items, turn)
                run, after = end_of_turn(items, words, bounds[1], rules)
                _check_same_when_last(talk, whole, items, turn, after)
                found = [(words, run)]
                _check_own(items, turn, [(words, after)], roles)
                spans.append(TrainedSpan(words, after if rules.train_ends else run))
        is_needed = bool(is_trained.all()) or roles[turn.messages[-1]] != ASSISTANT
        _check_turn(talk, items, turn, bounds, found, is_needed)
    if not spans:
        raise Dropped("nothing_trained")
    return Layout(
        items=items.items,
        markers=rules.markers,
        turn_starts=[items.position(turn.start) for turn in turns],
        turn_roles=[roles[turn.messages[-1]] for turn in turns],
        trained=spans,
    )


def _blocks(
    whole: Written, turns: Sequence[Turn], stops: Sequence[Cut], roles: Sequence[int]
) -> dict[int, list[tuple[Cut, Cut]]]:
    """The generation blocks of each turn; only an assistant's turn may have some."""
    found: dict[int, list[tuple[Cut, Cut]]] = {}
    opened: list[Cut] = []
    for opens, cut in whole.edges:
        if opens:
            opened.append(cut)
            continue
        start = opened.pop()
        if opened or start == cut:  # inside another one, or empty
            continue
        number = next((n for n, turn in enumerate(turns) if turn.start <= start < stops[n]), None)
        if number is None or cut > stops[number] or roles[turns[number].messages[-1]] != ASSISTANT:
            raise Dropped("trains_others")
        found.setdefault(number, []).append((start, cut))
    return found


def _start_of_words(
    talk: Talk, rules: Rules, whole: Written, items: Items, turn: Turn
) -> ItemPosition:
    """Where a trained turn starts to be trained: after the prompt that it answers."""
    index = turn.messages[-1]
    if talk.checked[index].role != ASSISTANT:
        # Other turns are trained from the first of their words.
        for number, piece in enumerate(whole.pieces):
            if (number, 0) >= turn.start and any(_is_of(piece, at) for at in turn.messages):
                return items.position((number, 0))
        raise Dropped("content_changed")
    if index == 0:
        first, at = turn.start
        if not whole.pieces[first][at:].startswith(rules.opening):
            raise Dropped("template_refuses")
        return items.position((first, at + len(rules.opening)))
    prompt = talk.write(index, True)
    cut = end_as_prefix(prompt, whole)
    if cut is None:
        cut = common_end(whole, prompt)
        if cut < turn.start:
            raise Dropped("prefix_changes")
        if not rules.any_prompt:
            raise Dropped("prompt_changes")
        first, at = turn.start
        if whole.pieces[first][at:].startswith(rules.opening):
            cut = first, at + len(rules.opening)
        elif talk.checked[index - 1].role != TOOL:
            raise Dropped("prompt_changes")
        return items.position(cut, before_marker=True)
    return items.position(cut)


_STRINGS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_WORDS = re.compile(r"m\[\d+\]\['(?:content|reasoning_content|thinking|reasoning)'\]")
_NAMES = re.compile(r"\bm\[(\d+)\]|\b(m|t)\b")


def _check_own(
    items: Items,
    turn: Turn,
    parts: Sequence[tuple[ItemPosition, ItemPosition]],
    roles: Sequence[int],
) -> None:
    """What is trained comes from the turn's own messages, and nothing they say is there twice."""
    said_once: set[str] = set()
    wholes: list[str] = []
    spoken: list[str] = []
    for text in (text for part in parts for text in items.texts(*part)):
        for number, other in _NAMES.findall(_STRINGS.sub("''", text._source)):
            if int(number) not in turn.messages if number else other == "m":
                raise Dropped("trains_others")
            if other == "t" and roles[turn.messages[-1]] == ASSISTANT:
                raise Dropped("trains_others")
        words = _WORDS.search(text._source)
        if words is None:
            continue
        if text._source in said_once:
            raise Dropped("content_changed")
        said_once.add(text._source)
        spoken.append(words.group())
        wholes += [text._origin] if text._origin else []
    if any(spoken.count(one) > 1 for one in wholes):
        raise Dropped("content_changed")


def _check_same_when_last(
    talk: Talk, whole: Written, items: Items, turn: Turn, after: ItemPosition
) -> None:
    """A trained turn is written the same when nothing follows it: as it would be generated."""
    index = turn.messages[-1]
    if index + 1 < len(talk.messages) and talk.checked[index].role == ASSISTANT:
        last = talk.write(index + 1, False)
        if common_end(whole, last) < items.cut(after):
            raise Dropped("prefix_changes")


def end_of_turn(
    items: Items, start: ItemPosition, stop: ItemPosition, rules: Rules
) -> tuple[ItemPosition, ItemPosition]:
    """Where the run of end markers starts and stops that closes a turn."""
    runs: list[tuple[int, int]] = []
    for number in range(start.item + bool(start.prefix), stop.item):
        item = items.items[number]
        if isinstance(item, int) and item in rules.end_ids:
            if runs and runs[-1][1] == number:
                runs[-1] = (runs[-1][0], number + 1)
            else:
                runs.append((number, number + 1))
    # Reasoning may end like a turn; what a template adds after the words and their end is its own.
    closed = [
        run
        for run in runs
        if any(items.items[at] in rules.closing for at in range(*run))
        and not items.texts(ItemPosition(run[1]), stop)
    ]
    for run in closed[:1] or runs[-1:]:
        return ItemPosition(run[0]), ItemPosition(run[1])
    last = items.last_text(start, stop)
    return last, (stop if rules.train_ends else last)


def _check_turn(
    talk: Talk,
    items: Items,
    turn: Turn,
    bounds: tuple[ItemPosition, ItemPosition],
    parts: Sequence[tuple[ItemPosition, ItemPosition]],
    is_needed: bool,
) -> None:
    """Every message of a turn is whole in these parts of it; otherwise Dropped.

    A text that was stripped, or written as a JSON string, is whole. One that was changed otherwise
    is looked for. is_needed: reasoning and calls, too; templates leave them out of the past. What
    is empty here is asked about: it may not be in another conversation that is written alike.
    """
    texts = [text for part in parts for text in items.texts(*part)]
    whole = {text._origin for text in texts}
    sources = "\n".join(text._source for text in texts)
    everywhere = "\n".join(text._source for text in items.texts(*bounds))
    written = " + ".join(filter(None, (items.source(*part) for part in parts))) or "''"

    def missing(is_elsewhere: bool, reason: str) -> Dropped:
        return Dropped("mask_disagrees" if is_elsewhere else reason)

    for index in turn.messages:
        message, fields = talk.checked[index], talk.messages[index]
        keys = [(["content"], message.text, "content_changed")]
        if is_needed:
            reasoning = ["reasoning_content", "thinking", "reasoning"]
            keys.append((reasoning, message.reasoning, "no_place_for_reasoning"))
        for key, words, reason in keys:
            names = [f"m[{index}][{one!r}]" for one in key]
            if type(fields.get(key[0])) is not str or words is None or whole & set(names):
                continue
            if not talk.trace.ask(f"bool({names[0]}.strip())", bool(words.strip())):
                continue
            if not any(name in sources for name in names):
                raise missing(any(name in everywhere for name in names), reason)
            there = words.strip() in items.said(parts)
            if not talk.trace.ask(f"{names[0]}.strip() in {written}", there):
                raise Dropped("content_changed")
            said_of_it = [text for text in texts if any(n in text._source for n in names)]
            size = sum(len(text._said) for text in said_of_it)
            pieces = " + ".join(map(source_of, said_of_it))
            if not talk.trace.ask(f"len({pieces}) <= len({names[0]})", size <= len(words)):
                raise Dropped("content_changed")  # some of it twice
        if message.text is None and message.role == ASSISTANT:
            literals = [one for part in parts for one in items.fragments(*part)]
            if any(not isinstance(one, TracedText) and "None" in one for one in literals):
                raise Dropped("content_changed")
        if message.role == ASSISTANT and is_needed:
            _check_order([text._source for text in texts], index)
        calls, base = fields.get("tool_calls"), f"m[{index}]['tool_calls']"
        if not is_needed or type(calls) is not list or _has_json(base, sources):
            continue
        talk.trace.pin(f"len({base})", len(calls))
        for number, call in enumerate(calls):
            one = f"{base}[{number}]"
            inner = f"{one}['function']" if "function" in call else one
            if _has_json(one, sources) or _has_json(inner, sources):
                continue
            for part in ("name", "arguments"):
                place = f"{inner}[{part!r}]"
                given = bool(call.get("function", call).get(part))
                if place not in sources and talk.trace.ask(f"bool({place})", given):
                    is_elsewhere = place in everywhere or any(
                        _has_json(value, everywhere) for value in (inner, one, base)
                    )
                    raise missing(is_elsewhere, "no_place_for_tool_calls")


def _has_json(place: str, sources: str) -> bool:
    """Whether a value was written as JSON, whole."""
    return f"json({place})" in sources or f"json({place}, " in sources


def _check_order(sources: Sequence[str], index: int) -> None:
    """Reasoning comes before words, and words before calls: a template that writes calls first has
    put the words into another turn."""
    found = []
    for keys in (("reasoning_content", "thinking", "reasoning"), ("content",), ("tool_calls",)):
        names = [f"m[{index}][{key!r}]" for key in keys]
        places = (at for at, source in enumerate(sources) if any(name in source for name in names))
        found += [place for place in [next(places, None)] if place is not None]
    if found != sorted(found):
        raise Dropped("content_changed")


def may_merge(
    turns: Sequence[Turn], whole: Written, items: Items, roles: Sequence[int]
) -> list[Turn]:
    """Turns that open with a marker or at least say something: a tool's result that does not open
    with one belongs to the turn before it, and a turn of nothing to the one after it."""
    found: list[Turn] = []
    for turn in turns:
        position = items.position(turn.start)
        item = items.items[position.item] if position.item < len(items.items) else None
        opens = not position.prefix and isinstance(item, int)
        is_tool = roles[turn.messages[-1]] == TOOL
        if found and is_tool and not opens and roles[found[-1].messages[-1]] == TOOL:
            last = found.pop()
            turn = Turn(messages=(*last.messages, *turn.messages), start=last.start)
        elif found and not any(
            whole.pieces[found[-1].start[0] : turn.start[0] + bool(turn.start[1])]
        ):
            turn = Turn(messages=(*found.pop().messages, *turn.messages), start=turn.start)
        found.append(turn)
    return found
