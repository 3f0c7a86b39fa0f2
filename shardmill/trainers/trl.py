"""Pairs and labelled answers for TRL, as the columns its trainers make from text.

`to_datasets` gives them as a `datasets.Dataset`, in the order of the store: `prompt_ids`,
`chosen_ids`, `rejected_ids` for `DPOTrainer`, whole conversations under the last two names for
`RewardTrainer`, `prompt_ids`, `completion_ids`, `label` for `KTOTrainer`. TRL 1.16 prepares every
dataset of `DPOTrainer` from text; `HasTokens` before the trainer's class leaves ours as it is.

TRL trains all tokens of an answer. Tokens after the end that the store does not train (a line break
of the template) are left out here, unless `whole`: no trained token comes after them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from shardmill.errors import OptionError
from shardmill.loading.preferences import Pairs, PreferenceSource
from shardmill.records import ChatExamples, Ragged
from shardmill.storage.hub import open_datasets

_NO_LIMIT = 2**62


class HasTokens:
    """For `class Trainer(HasTokens, DPOTrainer)`: its datasets hold tokens already."""

    def _prepare_dataset(self, dataset: Any, *_rest: Any, **_more: Any) -> Any:
        return dataset


def to_datasets(
    store: str | Path,
    split: str = "train",
    *,
    form: Literal["dpo", "reward", "kto"] | None = None,
    seq_len: int | None = None,
    pairs: Pairs = "all",
    whole: bool = False,
) -> Any:
    """A `datasets.Dataset` of the pairs or labelled answers of a split; it holds all their tokens.

    `form` None: "dpo", or "kto" for labels. What is longer than `seq_len`, or excluded, is left
    out; without it `max_length` of TRL cuts answers. `pairs`: see `pairs_of`.
    """
    source = PreferenceSource(store, seq_len=seq_len or _NO_LIMIT, split=split, pairs=pairs)
    forms = ("dpo", "reward") if source.kind == "ranks" else ("kto",)
    if form not in (None, *forms):
        raise OptionError(
            f"{{form}}: {source.path} holds {source.kind}; wanted {' or '.join(map(repr, forms))}",
            form=form,
        )
    items = np.arange(len(source))
    if source.excluded is not None:
        items = items[~source.excluded.hits(items)]
    prompts, branches = source.examples(items)
    answers = [_answers(one, whole=whole) for one in branches]
    columns: dict[str, Any] = {"prompt_ids": _lists(prompts)}
    if source.kind == "labels":
        columns["completion_ids"] = _lists(answers[0])
        columns["label"] = pa.array(source.labels_of(items))
    elif form == "reward":
        del columns["prompt_ids"]
        answers = [_joined(prompts, one) for one in answers]
    if source.kind == "ranks":
        columns |= {"chosen_ids": _lists(answers[0]), "rejected_ids": _lists(answers[1])}
    datasets = open_datasets()
    return datasets.Dataset(datasets.table.InMemoryTable(pa.table(columns)))


def _answers(found: ChatExamples, *, whole: bool) -> Ragged:
    """Answers up to their last trained token, or whole."""
    trained, ends = np.flatnonzero(found.mask), found.ids.offsets[1:]
    lengths = trained[np.searchsorted(trained, ends) - 1] + 1 - found.ids.offsets[:-1]
    if int(lengths.sum()) != len(trained):
        raise OptionError(
            "an answer has untrained tokens between trained ones, and TRL trains all "
            "of an answer; read the store with shardmill.load"
        )
    return found.ids if whole else Ragged.from_lengths(found.ids.values[found.mask], lengths)


def _joined(left: Ragged, right: Ragged) -> Ragged:
    """Each sequence of `left` with that of `right` after it."""
    lengths = np.stack((left.lengths, right.lengths), axis=1)
    is_left = np.repeat(np.tile([True, False], len(left)), lengths.reshape(-1))
    values = np.empty(len(is_left), left.values.dtype)
    values[is_left], values[~is_left] = left.values, right.values
    return Ragged.from_lengths(values, lengths.sum(axis=1))


def _lists(ids: Ragged) -> Any:
    """Tokens as Arrow lists of int64, as TRL's own columns are."""
    return pa.LargeListArray.from_arrays(ids.offsets, ids.values.astype(np.int64))
