"""Compiled forms: how all conversations of one shape and the same answers are written.

A `Form` is one Python function over the messages and tools. It checks every recorded answer and
gives the texts to encode; everything else about those conversations (fixed tokens, turns, what is
trained) is in arrays, so that `assemble` makes ids and mask of a whole batch without a loop over
conversations' tokens.

    fixed tokens   <|im_start|>           <|im_end|> \\n <|im_start|>                <|im_end|>
    texts                       "user\\nhi"                            "assistant\\nyo"
    trained                                                                      yo  <|im_end|>
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.chat.jinja.layout import ItemPosition, Layout, TextSection
from shardmill.chat.jinja.values import NAMES, TracedText, said, source_of
from shardmill.records import BoolArray, ChatExamples, IntArray, OffsetArray, Ragged

Texts: TypeAlias = tuple[str, ...]
Write: TypeAlias = "Callable[[Any, Any], Texts | None]"
Encode: TypeAlias = Callable[[Sequence[str]], Ragged]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """Positions among the tokens of a conversation: fixed tokens before, whole texts before, and
    tokens of the next text before, which are the tokens of a prefix of it."""

    fixed: IntArray
    texts: IntArray
    inside: IntArray


def _no_ids() -> IntArray:
    return np.empty(0, np.int64)


def _write_nothing(messages: object, tools: object) -> None:
    """Of a form that was not compiled."""


class Learnt(NamedTuple):
    """A form that is not compiled, and its texts as what they were joined from."""

    form: Form
    texts: list[tuple[str, ...]]

    def said(self) -> Texts:
        """The texts of the conversation that it was learnt from."""
        return tuple("".join(map(said, parts)) for parts in self.texts)

    def sources(self) -> list[str]:
        return [" + ".join(map(source_of, parts)) or "''" for parts in self.texts]

    def compiled(self, guards: Iterable[str]) -> tuple[Form, int] | None:
        """The form and the characters of its source; None if Python cannot compile that: a text
        that was changed 300 times has 300 brackets inside each other."""
        sources = self.sources()
        guards = list(guards)
        try:
            form = replace(self.form, write=compile_write(guards, sources))
        except (SyntaxError, MemoryError, RecursionError):
            return None
        return form, sum(map(len, guards)) + sum(map(len, sources))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """How conversations with the same answers are written, or why they are dropped."""

    write: Write = _write_nothing  # the texts; None if an answer differs
    reason: str | None = None
    # Written and encoded as one text, where a tokenizer does not encode sections apart.
    is_whole: bool = False
    markers: IntArray = field(default_factory=_no_ids)  # all markers, in order
    fixed: IntArray = field(default_factory=_no_ids)  # all fixed tokens, in order
    fixed_before: IntArray = field(
        default_factory=_no_ids
    )  # (texts,) fixed tokens before each text
    markers_before: IntArray = field(default_factory=_no_ids)  # (texts,) likewise
    bounds: Bounds | None = None  # turn starts, then start and stop of each trained part
    roles: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))  # (turns,)
    # What texts must start with: prefix_ids[i] is token prefix_at[i] of text prefix_text[i].
    prefix_ids: IntArray = field(default_factory=_no_ids)
    prefix_text: IntArray = field(default_factory=_no_ids)
    prefix_at: IntArray = field(default_factory=_no_ids)
    # (bound, text, text of its prefix) where the prefix is not the same for all.
    own_prefixes: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_texts(self) -> int:
        return len(self.fixed_before)


def compile_write(guards: Iterable[str], texts: Sequence[str]) -> Write:
    """A function of messages `m` and tools `t`; what is asked is asked in the recorded order."""
    asked = " and ".join(f"({guard})" for guard in guards) or "True"
    made = "".join(f"{text}, " for text in texts)
    code = f"lambda m, t: ({made}) if {asked} else None"
    # The sources consist of paths, literals and str methods that `values.py` wrote.
    found: Write = eval(compile(code, "<chat template>", "eval"), dict(NAMES))
    return found


def dropped_form(reason: str) -> Learnt:
    return Learnt(Form(reason=reason), [])


def make_form(layout: Layout, encode: Encode) -> Learnt:
    """The form of a layout. encode: the ids of texts, each encoded apart."""
    fixed: list[IntArray] = []
    num_fixed = 0
    before: list[int] = []
    markers: list[int] = []
    markers_before: list[int] = []
    texts: list[tuple[str, ...]] = []
    where: list[tuple[int, int]] = []  # of each item: fixed tokens and texts before it
    for item in layout.items:
        where.append((num_fixed, len(texts)))
        if isinstance(item, TextSection) and not item.is_fixed:
            before.append(num_fixed)
            markers_before.append(len(markers))
            texts.append(item.fragments)
            continue
        if isinstance(item, TextSection):
            ids = encode(["".join(item.fragments)])[0]
        else:
            ids = np.array([item])
            markers.append(item)
        fixed.append(np.asarray(ids, np.int64))
        num_fixed += len(fixed[-1])
    where.append((num_fixed, len(texts)))
    positions = [*layout.turn_starts, *(end for span in layout.trained for end in span)]
    inside = np.zeros(len(positions), np.int64)
    prefixes: list[tuple[int, IntArray]] = []
    own: list[tuple[int, int, int]] = []
    extra: list[tuple[str, ...]] = []
    for number, position in enumerate(positions):
        if not position.prefix:
            continue
        text = where[position.item][1]
        if any(isinstance(part, TracedText) for part in position.prefix):
            own.append((number, text, len(extra)))
            extra.append(position.prefix)
            continue
        ids = np.asarray(encode(["".join(position.prefix)])[0], np.int64)
        inside[number] = len(ids)
        prefixes.append((_text_or_fixed(layout, position, text, ids, encode), ids))
    in_texts = [(text, ids) for text, ids in prefixes if text >= 0]
    form = Form(
        markers=np.array(markers, np.int64),
        markers_before=np.array(markers_before, np.int64),
        fixed=np.concatenate([np.empty(0, np.int64), *fixed]),
        fixed_before=np.array(before, np.int64),
        bounds=Bounds(
            fixed=np.array([where[one.item][0] for one in positions], np.int64),
            texts=np.array([where[one.item][1] for one in positions], np.int64),
            inside=inside,
        ),
        roles=np.array(layout.turn_roles, np.uint8),
        prefix_ids=np.concatenate([np.empty(0, np.int64), *(ids for _, ids in in_texts)]),
        prefix_text=np.repeat(
            np.array([text for text, _ in in_texts], np.int64), [len(ids) for _, ids in in_texts]
        ),
        prefix_at=np.concatenate(
            [np.empty(0, np.int64), *(np.arange(len(ids)) for _, ids in in_texts)]
        ),
        own_prefixes=tuple((number, text, len(texts) + at) for number, text, at in own),
    )
    return Learnt(form, [*texts, *extra])


def make_whole_form(layout: Layout) -> Learnt:
    """The same where everything is one text, and positions are found with prefixes of it."""
    literal = {number: text for text, number in layout.markers.items()}
    parts = [(literal[item],) if isinstance(item, int) else item.fragments for item in layout.items]
    positions = [*layout.turn_starts, *(end for span in layout.trained for end in span)]
    texts = [tuple(part for item in parts for part in item)]
    for position in positions:
        before = [part for item in parts[: position.item] for part in item]
        texts.append((*before, *position.prefix))
    zeros = np.zeros(len(positions), np.int64)
    form = Form(
        is_whole=True,
        markers=np.array([item for item in layout.items if isinstance(item, int)], np.int64),
        fixed_before=np.zeros(1, np.int64),
        bounds=Bounds(fixed=zeros, texts=zeros, inside=zeros),
        roles=np.array(layout.turn_roles, np.uint8),
        own_prefixes=tuple((number, 0, number + 1) for number in range(len(positions))),
    )
    return Learnt(form, texts)


_EDGES = ("", "a", " ", " a", "a ", "  a", "\n", "\na", "a\n", "a\n\n", "\ta", "A.", "1", "e\u0301")


class Neighbours(NamedTuple):
    """What is beside a text that a tokenizer encodes apart: markers ("" at the ends of a
    conversation), and literals at its own ends."""

    marker_before: str
    start: str
    stop: str
    marker_after: str


def neighbours(layout: Layout) -> set[Neighbours]:
    literal = {number: text for text, number in layout.markers.items()}
    names = [literal[item] if isinstance(item, int) else "" for item in layout.items]
    return {
        Neighbours(before, *_ends_of(item), after)
        for before, item, after in zip(["", *names], layout.items, [*names[1:], ""], strict=False)
        if isinstance(item, TextSection) and not item.is_fixed
    }


def _ends_of(section: TextSection) -> tuple[str, str]:
    first, last = section.fragments[0], section.fragments[-1]
    return (
        "" if isinstance(first, TracedText) else first,
        "" if isinstance(last, TracedText) else last,
    )


def encodes_apart(
    around: Neighbours, markers: Mapping[str, int], whole: Encode, apart: Encode
) -> bool:
    """Whether a text between these is encoded the same alone and between them, whatever blanks it
    begins or ends with: a marker may take the blanks beside it, and some tokenizers write a blank
    before the first word only."""
    texts = [around.start + text + around.stop for text in _EDGES]
    between = whole([around.marker_before + text + around.marker_after for text in texts])
    alone = apart(texts)
    before = [markers[name] for name in (around.marker_before,) if name]
    after = [markers[name] for name in (around.marker_after,) if name]
    return all(
        between[number].tolist() == [*before, *alone[number].tolist(), *after]
        for number in range(len(texts))
    )


def cut_texts(form: Form, ids: IntArray, is_marker: BoolArray) -> list[IntArray] | None:
    """The ids of each text among those of a conversation; None if markers or fixed tokens differ.

    A text reaches from one marker to the next:  <|im_start|> x x x <|im_end|> \n <|im_start|> x x
    """
    at = np.flatnonzero(is_marker)
    if not np.array_equal(ids[at], form.markers):
        return None
    edges = np.concatenate(([-1], at, [len(ids)]))
    starts, stops = edges[form.markers_before] + 1, edges[form.markers_before + 1]
    change = np.zeros(len(ids) + 1, np.int8)
    change[starts] += 1
    change[stops] -= 1
    if not np.array_equal(ids[np.cumsum(change[:-1], dtype=np.int8) == 0], form.fixed):
        return None
    return [ids[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]


def _text_or_fixed(
    layout: Layout, position: ItemPosition, text: int, ids: IntArray, encode: Encode
) -> int:
    """The number of the text a prefix is in; -1 for a fixed section, which is compared here."""
    item = layout.items[position.item]
    assert isinstance(item, TextSection)
    if not item.is_fixed:
        return text
    whole = np.asarray(encode(["".join(item.fragments)])[0], np.int64)
    if not np.array_equal(whole[: len(ids)], ids):
        raise TokensMerge
    return -1


class TokensMerge(Exception):
    """A token spans the border of two turns, in every conversation of a form."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assembled:
    examples: ChatExamples
    num_trained: IntArray  # (conversations,)
    merges: BoolArray  # (conversations,) a token spans a position, so the example is wrong


def assemble(forms: Sequence[Form], texts: Ragged, num_given: Sequence[int]) -> Assembled:
    """Conversations of these forms.

    texts: those of all conversations, one after another, each followed by the texts of its own
    prefixes.  num_given: how many each conversation has.
    """
    count = len(forms)
    num_texts = np.array([form.num_texts for form in forms], np.int64)
    first_given = np.concatenate(([0], np.cumsum(num_given))).astype(np.int64)
    if (num_texts != np.diff(first_given)).any():
        own = _without_prefixes(texts, num_texts, first_given)
    else:
        own = texts
    first_text = np.concatenate(([0], np.cumsum(num_texts)))
    num_fixed = np.array([len(form.fixed) for form in forms], np.int64)
    first_fixed = np.concatenate(([0], np.cumsum(num_fixed)))
    reach = own.offsets  # reach[k]: tokens of all texts before text k
    # Texts among the fixed tokens.
    before = _joined([form.fixed_before for form in forms])
    before += np.repeat(first_fixed[:-1], num_texts)
    total = int(first_fixed[-1] + reach[-1])
    # Fixed tokens and texts by turns:  . . x x x . x x .  is 2 fixed, 3 of a text, 1 fixed, ...
    runs = np.empty(2 * len(before) + 1, np.int64)
    runs[::2] = np.diff(before, prepend=0, append=first_fixed[-1])
    runs[1::2] = own.lengths
    is_text = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    fixed = _joined([form.fixed for form in forms])
    dtype = np.result_type(own.values.dtype, np.min_scalar_type(int(fixed.max(initial=0))))
    values: IntArray = np.empty(total, dtype)
    values[is_text] = own.values  # both in order
    values[~is_text] = fixed
    offsets: OffsetArray = first_fixed + reach[first_text]
    # Positions.
    bounds = [form.bounds for form in forms]
    sizes = np.array([len(one.fixed) if one else 0 for one in bounds], np.int64)
    owners = np.repeat(np.arange(count), sizes)
    inside = _joined([one.inside for one in bounds if one])  # a copy
    merges = np.zeros(count, np.bool_)
    _compare_prefixes(forms, own, first_text, merges)
    first_bound = np.concatenate(([0], np.cumsum(sizes)))
    for number, form in enumerate(forms):
        for bound, text, prefix in form.own_prefixes:
            whole = texts[int(first_given[number]) + text]
            part = texts[int(first_given[number]) + prefix]
            inside[first_bound[number] + bound] = len(part)
            merges[number] |= not np.array_equal(whole[: len(part)], part)
    place: OffsetArray = _joined([one.fixed for one in bounds if one]) + first_fixed[owners]
    place += reach[_joined([one.texts for one in bounds if one]) + first_text[owners]] + inside
    num_turns = np.array([len(form.roles) for form in forms], np.int64)
    is_start = np.arange(len(place)) - first_bound[owners] < num_turns[owners]
    merges[owners[is_start & (place >= offsets[1:][owners])]] = True  # a turn of no token
    # Where tokens merge, a prefix can have more of them than its text: into the next conversation.
    place = np.where(merges[owners], offsets[owners], place)
    roles = np.concatenate([np.empty(0, np.uint8), *(form.roles for form in forms)])
    edges = place[~is_start]  # start and stop of each trained part; they follow one another
    mask: BoolArray = np.repeat(
        np.arange(len(edges) + 1) % 2 == 1, np.diff(edges, prepend=0, append=total)
    )
    trained = np.bincount(owners[~is_start][::2], edges[1::2] - edges[::2], count)
    return Assembled(
        examples=ChatExamples(
            ids=Ragged(values, offsets),
            mask=mask,
            turn_starts=place[is_start & ~merges[owners]],
            turn_roles=roles[~np.repeat(merges, num_turns)],
        ),
        num_trained=trained.astype(np.int64),
        merges=merges,
    )


def _joined(arrays: Sequence[IntArray]) -> OffsetArray:
    found: OffsetArray = np.concatenate([np.empty(0, np.int64), *arrays])
    return found


def _without_prefixes(texts: Ragged, num_texts: IntArray, first_given: IntArray) -> Ragged:
    """The texts without those of prefixes."""
    kept = np.zeros(len(texts), np.bool_)
    for number, size in enumerate(num_texts.tolist()):
        kept[first_given[number] : first_given[number] + size] = True
    return texts.keep(kept)


def _compare_prefixes(
    forms: Sequence[Form], own: Ragged, first_text: IntArray, merges: BoolArray
) -> None:
    """Mark the conversations in which a text does not start with the tokens of its prefix."""
    counts = np.array([len(form.prefix_ids) for form in forms], np.int64)
    owners = np.repeat(np.arange(len(forms)), counts)
    text = _joined([form.prefix_text for form in forms]) + first_text[owners]
    at = _joined([form.prefix_at for form in forms])
    is_short = at >= own.lengths[text]
    place = np.where(is_short, 0, own.offsets[text] + at)
    wanted = _joined([form.prefix_ids for form in forms])
    if len(place):
        found = own.values[place] if len(own.values) else np.full(len(place), -1)
        merges[owners[is_short | (found != wanted)]] = True
