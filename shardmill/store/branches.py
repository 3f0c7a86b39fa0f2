"""The file of a preference store that says which examples are prompts, and which their answers.

`<split>_branches.bin` has four int64 for each branch: its example, its prefix, its record and its
value (a rank from 0, the best, or a label). Examples without a row are prefixes. `problems_of` is
the one owner of what such rows may say: writer, readers and `verify` ask it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from shardmill.errors import OptionError
from shardmill.records import BoolArray, OffsetArray, PreferenceKind

if TYPE_CHECKING:
    from shardmill.store.store import Store

COLUMNS = ("example", "prefix", "record", "value")
BRANCH_BYTES = 8 * len(COLUMNS)


def refuse_preferences(store: Store, what: str) -> None:
    """Refuse a preference store where `what` would take prompts and answers for conversations."""
    if store.preference is not None:
        raise OptionError(
            f"{store.folder}: a store of preferences, whose examples are prompts and the answers "
            f"that follow them; {what}. Read it with shardmill.load(folder, ...), or "
            "shardmill.PreferenceSource"
        )


def is_branch(links: OffsetArray, num_examples: int) -> BoolArray:
    """Of each example whether it is a branch; `links` as `problems_of` accepts them."""
    found = np.zeros(num_examples, np.bool_)
    found[links[:, 0]] = True
    return found


def saved_tokens(links: OffsetArray, lengths: OffsetArray) -> int:
    """Tokens that would be stored if every branch had its own prefix."""
    return int(lengths[links[:, 1]].sum() - lengths[np.unique(links[:, 1])].sum())


def num_records(links: OffsetArray) -> int:
    return int(links[-1, 2]) + 1 if len(links) else 0


def links_of(links: OffsetArray, chosen: BoolArray) -> OffsetArray:
    """The rows of the chosen examples, which are whole records, counted among them."""
    own = links[chosen[links[:, 0]]]
    example = np.cumsum(chosen) - 1
    records = np.unique(own[:, 2], return_inverse=True)[1]
    return np.stack((example[own[:, 0]], example[own[:, 1]], records, own[:, 3]), axis=1)


def problems_of(links: OffsetArray, kind: PreferenceKind, num_examples: int) -> Iterator[str]:
    """What cannot be true of the branches of a split, the most telling first."""
    if not len(links):
        if num_examples:
            yield f"no branch among {num_examples:,} examples"
        return
    example, prefix, record, value = links.T
    steps = np.diff(example, prepend=-1)
    # compared as they are: a difference of two numbers that anybody may have written could overflow
    rises = (example[1:] > example[:-1]).all() and example[0] == 1
    if not rises or example[-1] != num_examples - 1:
        yield f"its examples do not rise from 1 to the last one, {num_examples - 1:,}"
        return
    if steps.max() > 2:
        yield f"example {example[steps > 2][0] - 2:,} is neither a branch nor followed by one"
        return
    # branches 1 2 4: the prefixes are 0, 0 and 3
    wanted = np.maximum.accumulate(np.where(steps == 2, example - 1, 0))
    if (prefix != wanted).any():
        at = int((prefix != wanted).argmax())
        yield f"branch {at:,} names the prefix {prefix[at]:,}, wanted {wanted[at]:,}"
    moves = np.diff(record)
    if record[0] != 0 or ((moves != 0) & (moves != 1)).any() or record[-1] >= len(links):
        yield "records are not counted from 0"
        return
    first = np.concatenate(([True], moves == 1))
    if ((steps == 2) & ~first).any():
        at = int(((steps == 2) & ~first).argmax())
        yield f"record {record[at]:,} has answers with two prefixes"
    yield from _value_problems(record, value, first, kind)


def _value_problems(
    record: OffsetArray, value: OffsetArray, first: BoolArray, kind: PreferenceKind
) -> Iterator[str]:
    if kind == "labels":
        if ((value != 0) & (value != 1)).any():
            yield "a label that is neither 0 nor 1"
        if not first.all():
            yield f"record {record[~first][0]:,} has more than one answer, but labels are of one"
        return
    rises = np.diff(value, prepend=0)
    wrong = np.where(first, value != 0, (rises != 0) & (rises != 1))
    if wrong.any():
        yield f"record {record[wrong][0]:,}: ranks are not counted from 0, the best first"
        return
    last = np.concatenate((first[1:], [True]))
    alone = last & (value == 0)
    if alone.any():
        yield f"record {record[alone][0]:,} has no answer that is worse than another"
