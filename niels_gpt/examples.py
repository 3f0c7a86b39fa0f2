"""Conversations into a store of examples, with the splits train and val.

The split is `torch.randperm(n)` over the n examples read: its first `max(1, int(n * val_frac))` are
val (none when n < 2), and both splits keep the input's order. A split by tree draws groups of chats
instead and keeps each on one side. What cannot be rendered is dropped with an id and a reason.
Memory does not grow with the tokens: they wait in a file until the last example is read, because
only then can the splits be drawn.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from niels_gpt.cache_tokenizer import CacheTokenizer
from niels_gpt.data.files import SPLITS, num_val
from niels_gpt.messages import Chat, Message, SplitUnit
from niels_gpt.seeds import seeded
from niels_gpt.special_tokens import ROLE_NAMES
from shardmill.building import BuildReport, BuildSpec, Progress
from shardmill.building.finish import LedgerCounter
from shardmill.building.loss import check_kept, check_max_loss
from shardmill.building.run import store_facts
from shardmill.building.worker import TokenRules
from shardmill.building.workplace import open_workplace, target_of
from shardmill.chat import TrainPolicy, bind_template, known_template
from shardmill.errors import LossError, OptionError
from shardmill.records import JSON, Conversation, Drop, IntArray, OffsetArray, Ragged
from shardmill.sources.rows import snippet_of
from shardmill.storage.atomic import HashedFile
from shardmill.store import StoreWriter, check_target, publish_folder
from shardmill.threads import read_ahead

log = logging.getLogger(__name__)

BATCH_EXAMPLES = 1024
BATCH_CHARACTERS = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """How examples are split; its text is the `split_rule` of meta.json."""

    val_frac: float
    seed: int
    unit: SplitUnit = "example"

    def __post_init__(self) -> None:
        if self.unit not in ("example", "tree"):
            raise OptionError(f"sft_split={self.unit!r}: wanted 'example' or 'tree'")

    def __str__(self) -> str:
        rule = (
            f"torch.randperm(n, seed {self.seed}): the first max(1, int(n * {self.val_frac})) to "
            "val (none when n < 2), the rest to train"
        )
        if self.unit == "example":
            return f"by example: {rule}"
        # Kept word for word, so that caches from when this was the only rule can resume.
        return f"{rule}; chats of one tree count as one"


@dataclass(slots=True)
class _Groups:
    """Which group each example belongs to, as it is read."""

    numbers: list[int] = field(default_factory=list)  # group of each example
    _named: dict[str, int] = field(default_factory=dict)
    _next: Iterator[int] = field(default_factory=count)

    def add(self, examples: Iterable[object]) -> None:
        for example in examples:
            name = example.group if isinstance(example, Chat) else None
            if name is None:
                self.numbers.append(next(self._next))
            else:
                if name not in self._named:
                    self._named[name] = next(self._next)
                self.numbers.append(self._named[name])

    def assign(self, rule: SplitRule) -> Mapping[str, IntArray]:
        group = np.asarray(self.numbers, np.int64)
        drawn = group if rule.unit == "tree" else np.arange(len(group))
        total = int(drawn.max(initial=-1)) + 1
        order = torch.randperm(total, generator=seeded(rule.seed)).numpy()
        is_val = np.zeros(total, np.bool_)
        is_val[order[: num_val(total, rule.val_frac)]] = True
        chosen = is_val[drawn]
        num_cut = len(np.intersect1d(group[chosen], group[~chosen]))
        if num_cut:
            log.warning(
                "%d of %d trees have chats in both train and val, so val holds questions that "
                "train has too; --sft-split tree keeps each tree on one side (recommended)",
                num_cut,
                len(self._named),
            )
        return {"train": np.flatnonzero(~chosen), "val": np.flatnonzero(chosen)}


def write_examples(
    examples: Iterable[list[Message]],
    folder: str | Path,
    *,
    tokenizer: CacheTokenizer,
    rule: SplitRule,
    spec: BuildSpec,
    overwrite: bool = False,
    max_loss: float = 1.0,
    on_progress: Callable[[Progress], None] | None = None,
) -> BuildReport:
    """Read, render, split and write, each in a separate thread.

    `spec` says what the manifest records beside that. A loss above `max_loss`, and a store without
    an example, is a `LossError`.
    """
    check_max_loss(max_loss)
    num_val(0, rule.val_frac)  # an invalid share or seed is refused before any work
    seeded(rule.seed)
    started, target, groups = time.monotonic(), target_of(folder), _Groups()
    rules = TokenRules.of(spec, tokenizer)
    fit = partial(rules.fit, source=spec.dataset_name or target.name)
    check_target(target, overwrite=overwrite)
    with (
        open_workplace(target, {}, stamps=[], resume=False) as work,
        closing(read_ahead(_chunks(examples))) as chunks,
        closing(read_ahead(_batches(chunks, tokenizer, groups, fit))) as batches,
    ):
        staged = work.output().store
        with StoreWriter(staged, splits=SPLITS, dtype=rules.dtype, shard_bytes=None) as out:
            shown = _told(batches, spec.dataset_name or "examples", on_progress)
            counter, path = LedgerCounter(), staged.with_name("tokens")
            waiting = _spool(shown, path, out, counter)
            tokens = np.memmap(path, np.dtype(rules.dtype).newbyteorder("<"), "r")
            _write_splits(tokens, waiting, groups.assign(rule), out)
            facts = store_facts(
                spec,
                tokenizer,
                sources=[],
                ledger=counter.ledger(),
                produced_by=_produced_by(tokenizer),
                options={},
                unit="example",
            )
            manifest = out.finish(facts)
        check_kept(
            target,
            manifest,
            staged,
            [],
            max_loss=max_loss,
            allow_empty=False,
            keeps_work=False,
        )
        publish_folder(staged, target, overwrite=overwrite)
    seconds = time.monotonic() - started
    return BuildReport(folder=target, manifest=manifest, seconds=seconds, resumed=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batch:
    """What a group of examples became."""

    examples: Ragged
    numbers: OffsetArray  # of these among all that were read
    drops: tuple[Drop, ...]
    num_read: int


def _spool(
    batches: Iterable[_Batch], path: Path, out: StoreWriter, counter: LedgerCounter
) -> list[tuple[OffsetArray, OffsetArray]]:
    """Write the tokens to a file and everything else to where it stays; offsets and numbers of the
    examples of each batch."""
    waiting, file = [], HashedFile(path)
    try:
        for batch in batches:
            examples = batch.examples
            file.write(np.ascontiguousarray(examples.values).view(np.uint8).data)
            waiting.append((examples.offsets, batch.numbers))
            out.record_drops(batch.drops)
            made = {"documents": len(examples), "tokens": len(examples.values)}
            counter.add(read=batch.num_read, counts={}, drops=batch.drops, **made)
            counter.keep(**made)
        file.finish()
    finally:
        file.abort()
    return waiting


def _write_splits(
    tokens: IntArray,
    waiting: Iterable[tuple[OffsetArray, OffsetArray]],
    splits: Mapping[str, IntArray],
    out: StoreWriter,
) -> None:
    """Each example to its split, one token file for each."""
    owner = np.empty(sum(map(len, splits.values())), np.int16)
    for index, members in enumerate(splits.values()):
        owner[members] = index
    start = 0
    for offsets, numbers in waiting:
        stop = start + int(offsets[-1])
        examples, start = Ragged(tokens[start:stop], offsets), stop
        for index, split in enumerate(splits):
            out.append(split, examples.keep(owner[numbers] == index))


def _batches(
    chunks: Iterable[list[list[Message]]],
    tokenizer: CacheTokenizer,
    groups: _Groups,
    fit: Callable[..., Ragged],
) -> Iterator[_Batch]:
    tokenizer.chat_ids()  # says which are missing
    template = bind_template(known_template("four-marker"), tokenizer)
    num_read = num_kept = 0
    reasons: Counter[str] = Counter()
    first: dict[str, tuple[str, str]] = {}  # by reason: a conversation, and how it begins
    for chunk in chunks:
        chats = [_conversation(one, number) for number, one in enumerate(chunk, start=num_read)]
        groups.add(chunk)
        rendered = template.render(chats, TrainPolicy())
        ids = fit(rendered.examples.ids, first=num_read)
        for drop in rendered.drops:
            reasons[drop.reason] += 1
            if drop.reason not in first:
                found = next(
                    example
                    for chat, example in zip(chats, chunk, strict=True)
                    if chat.id == drop.id
                )
                first[drop.reason] = (drop.id, snippet_of(found))
        yield _Batch(
            examples=ids,
            numbers=rendered.kept + num_read,
            drops=rendered.drops,
            num_read=len(chunk),
        )
        num_read += len(chunk)
        num_kept += len(rendered.kept)
    if not num_kept:
        lines = [f"{reasons[why]:,} {why}, as {id}: {text}" for why, (id, text) in first.items()]
        head = (
            f"none of {num_read:,} conversations can be used; each needs at least one assistant "
            "message: check the input and its fields"
        )
        raise LossError(
            "\n  ".join([head, *lines]), reasons=reasons, num_read=num_read, examples=first
        )


def _conversation(example: object, number: int) -> Conversation:
    name = (example.id if isinstance(example, Chat) else "") or f"example {number}"
    messages: Any = example  # whatever it is: what is no list of messages is dropped by name
    if isinstance(example, Sequence) and not isinstance(example, str | bytes):
        messages = [_message(message) for message in example]
    return Conversation(messages=messages, id=name)


def _message(message: object) -> object:
    """Role and content alone, and these as the recipe wants them: no other name for a role, no
    content in parts. What is not so becomes what the template drops for that reason."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        return None
    role, content = message["role"], message["content"]
    return {
        "role": role if isinstance(role, str) and role in ROLE_NAMES else None,
        "content": content if isinstance(content, str) else None,
    }


def _chunks(examples: Iterable[list[Message]]) -> Iterator[list[list[Message]]]:
    """Groups of examples with a few megabytes of text each."""
    chunk: list[list[Message]] = []
    size = 0
    for example in examples:
        chunk.append(example)
        size += _num_characters(example)
        if len(chunk) >= BATCH_EXAMPLES or size >= BATCH_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _num_characters(example: object) -> int:
    """About how much text there is; whatever is no text has none, and is dropped later."""
    if not isinstance(example, list):
        return 0
    contents = [m.get("content") for m in example if isinstance(m, Mapping)]
    return sum(len(content) for content in contents if isinstance(content, str))


def _told(
    batches: Iterator[_Batch], source: str, tell: Callable[[Progress], None] | None
) -> Iterator[_Batch]:
    documents = tokens = 0
    for batch in batches:
        yield batch
        documents += len(batch.examples)
        tokens += len(batch.examples.values)
        if tell is not None:
            tell(Progress(source=source, documents=documents, tokens=tokens, share=None))


def _produced_by(tokenizer: CacheTokenizer) -> dict[str, JSON]:
    """Chats are encoded by the reference engine: they are few, and short."""
    source = tokenizer.engine_source
    if source is None:
        return {"engine": "the caller's tokenizer"}
    return {"engine": source.library, "versions": {source.library: source.library_version}}


__all__ = ["SplitRule", "write_examples"]
