"""Preferences as tokens: each prompt once, then its answers.

The design. A record is a prompt and its answers (a chosen and a rejected one, a ranked list, or one
answer with a label). Every answer is rendered as a whole conversation, and only its last turn is
trained. The prefix of an answer is everything before its first trained token. All answers of a
record must have the same prefix, token for token, else the record is dropped: nothing is tokenised
in parts, so prefix and branch together are exactly what the template writes. A store holds a prefix
as one example that trains nothing, followed by its branches as examples; a row of `links` for each
branch names its example, its prefix, its record, and its rank or label. Neighbouring records with
the same prefix share it. Pairs, batches and packs are made from the links when they are read: a
pair is a better and a worse branch of one record, and the unit of order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardmill.chat.policy import ASSISTANT, ChatTemplate, TrainPolicy
from shardmill.records import BoolArray, ChatExamples, Conversation, Drop, OffsetArray, Ragged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RenderedRecords:
    """What a template made of some records of preferences."""

    examples: ChatExamples  # every prefix, followed by its branches
    links: OffsetArray  # (branches, 4): example, prefix, record, value; counted from 0
    record_of: OffsetArray  # (examples,) the kept record that an example is of, from 0
    kept: OffsetArray  # (records,) position of each in the input, ascending
    drops: tuple[Drop, ...]  # the others, in order


def render_records(
    template: ChatTemplate,
    records: Sequence[Conversation],
    policy: TrainPolicy,
    splits: npt.NDArray[np.uint8],
) -> RenderedRecords:
    """Records as prefixes and branches. Those of different `splits`, one of each, share nothing."""
    sizes = np.array([len(record.branches) for record in records], np.int64)
    wholes = [
        replace(record, messages=branch.messages, branches=())
        for record in records
        for branch in record.branches
    ]
    owner = np.repeat(np.arange(len(records)), sizes)
    values = np.array([b.value for record in records for b in record.branches], np.int64)
    result = template.render(wholes, policy)
    reasons: dict[int, str] = {}  # of a record, that of its first answer that has one
    dropped = np.delete(np.arange(len(wholes)), result.kept)
    for number, drop in zip(owner[dropped].tolist(), result.drops, strict=True):
        reasons.setdefault(number, drop.reason)
    owner, values = owner[result.kept], values[result.kept]
    _refuse_unequal(result.examples, owner, values, reasons)
    sound = ~np.isin(owner, list(reasons))
    kept = np.delete(np.arange(len(records)), sorted(reasons))
    numbers = np.searchsorted(kept, owner[sound])
    found = _divided(result.examples.keep(sound), numbers, values[sound], splits[kept])
    drops = tuple(
        Drop(id=records[at].id, reason=reasons[at], row=records[at].row) for at in sorted(reasons)
    )
    return replace(found, kept=kept, drops=drops)


def _refuse_unequal(
    examples: ChatExamples, owner: OffsetArray, values: OffsetArray, reasons: dict[int, str]
) -> None:
    """Note the records whose answers follow other tokens, or none, or are the same."""
    firsts = _first_trained(examples)
    for number in owner[firsts == 0].tolist():
        reasons.setdefault(number, "no_prompt")
    same = _same_beginnings(examples.ids, firsts)
    for number in owner[1:][(owner[1:] == owner[:-1]) & ~same].tolist():
        reasons.setdefault(number, "prompts_differ")
    seen: dict[tuple[int, bytes], int] = {}
    # Each whole example, as bytes: lists are short, and an answer may be equal to any other of it.
    for number, value, ids in zip(owner.tolist(), values.tolist(), examples.ids, strict=True):
        if seen.setdefault((number, ids.tobytes()), value) != value:
            reasons.setdefault(number, "same_answers")


def _first_trained(examples: ChatExamples) -> OffsetArray:
    """How many tokens each example has before the first one that is trained."""
    trained, starts = np.flatnonzero(examples.mask), examples.ids.offsets[:-1]
    return trained[np.searchsorted(trained, starts)] - starts if len(starts) else starts


def _positions(starts: OffsetArray, lengths: OffsetArray) -> OffsetArray:
    """Positions of ranges end to end: starts [5 9], lengths [2 1] -> [5 6 9]."""
    before = np.cumsum(lengths) - lengths
    found: OffsetArray = np.repeat(starts - before, lengths)
    found += np.arange(len(found))
    return found


def _same_beginnings(ids: Ragged, firsts: OffsetArray) -> BoolArray:
    """Of each example but the first: whether it begins with the same prefix as the one before."""
    same: BoolArray = firsts[1:] == firsts[:-1]
    at = np.flatnonzero(same)
    lengths, starts = firsts[at], ids.offsets[:-1]
    left = ids.values[_positions(starts[at], lengths)]
    right = ids.values[_positions(starts[at + 1], lengths)]
    same[np.repeat(at, lengths)[left != right]] = False
    return same


def _divided(
    examples: ChatExamples,
    numbers: OffsetArray,
    values: OffsetArray,
    splits: npt.NDArray[np.uint8],
) -> RenderedRecords:
    """Whole examples as prefixes and branches; `numbers`: of the record of each, from 0, rising."""
    ids, firsts = examples.ids, _first_trained(examples)
    is_new = np.ones(len(ids), np.bool_)  # whether a prefix is written before it
    here = splits[numbers]
    is_new[1:] = ~(_same_beginnings(ids, firsts) & (here[1:] == here[:-1]))
    # branches a b c d, new at a and c -> examples: prefix a b prefix c d
    branch = np.arange(len(ids)) + np.cumsum(is_new)
    prefix = np.maximum.accumulate(np.where(is_new, branch - 1, 0))
    num_examples = len(ids) + int(is_new.sum())
    starts, lengths = np.empty((2, num_examples), np.int64)
    starts[branch], lengths[branch] = ids.offsets[:-1] + firsts, ids.lengths - firsts
    starts[branch[is_new] - 1], lengths[branch[is_new] - 1] = (
        ids.offsets[:-1][is_new],
        firsts[is_new],
    )
    record_of = np.empty(num_examples, np.int64)
    record_of[branch] = numbers
    record_of[branch[is_new] - 1] = numbers[is_new]
    where = _positions(starts, lengths)
    divided = Ragged.from_lengths(ids.values[where], lengths)
    # A turn stays where its prefix is; the answer itself is one more turn, which opens its branch.
    owners = np.searchsorted(ids.offsets, examples.turn_starts, side="right") - 1
    within = examples.turn_starts - ids.offsets[owners]
    stay = is_new[owners] & (within < firsts[owners])
    moved = divided.offsets[branch[owners[stay]] - 1] + within[stay]
    turns = np.concatenate((moved, divided.offsets[branch]))
    roles = np.concatenate((examples.turn_roles[stay], np.full(len(branch), ASSISTANT, np.uint8)))
    order = np.argsort(turns, kind="stable")
    return RenderedRecords(
        examples=ChatExamples(
            ids=divided,
            mask=examples.mask[where],
            turn_starts=turns[order],
            turn_roles=roles[order],
        ),
        links=np.stack((branch, prefix, numbers, values), axis=1),
        record_of=record_of,
        kept=np.empty(0, np.int64),
        drops=(),
    )
