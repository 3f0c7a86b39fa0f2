"""Build a store of conversations: source to rendered examples to shards with mask and turns.

In: a source, a template bound to a tokenizer, a policy, a spec.  Out: a finished store.
Promise: same input, same bytes, killed and resumed or not; no mask without a proof; nothing is
cut, so a store serves every sequence length; every conversation read is kept or among the drops.
Not here: shapes of records (sources), ids and mask (chat), rows (loading).

Conversations of a source to examples in the dtype of the store, each with its split.

In: a source, a template, a policy, where to go on.  Out: portions for the journal.
Promise: a portion for each batch of the source, in order; every conversation is in it, whole, or
among its drops; a conversation's split depends on the seed and its group (or else its place among
all conversations of the source) and on nothing else, so a group never parts.
Not here: what a template does (chat), where bytes go (segments.py, commit.py).

Build a store of examples: a stream of tokenised examples, split once their number is known.

In: batches of examples and a rule that assigns example numbers to splits.  Out: a finished store
with one token file for each split.
Promise: every example is in one split or among the drops; within a split the order is the
input's; memory holds a few bytes for each example, never its tokens.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardmill.building.assembly import Books, ExamplePlaces
from shardmill.building.encode import EncoderDesk, EngineDesk, TokenRules, plan_memory, token_rules
from shardmill.building.run import BuildJob, run_build
from shardmill.building.segments import (
    ChatPart,
    Portion,
    Receipt,
    SegmentWriter,
    SourceCounts,
    UnitKey,
    load_segment,
)
from shardmill.building.spec import (
    BuildReport,
    BuildSpec,
    ExampleBatch,
    Progress,
    describe_difference,
    store_facts,
)
from shardmill.building.units import FeedGrains, Unit
from shardmill.building.workplace import open_workplace, target_of
from shardmill.chat.policy import ChatTemplate, Rendered, TrainPolicy
from shardmill.chat.proof import Certificate, prove_mask
from shardmill.errors import BuildError, OptionError, SourceError, TokenRangeError
from shardmill.protocols import ConversationSource, Encoder, Tokenizer
from shardmill.records import (
    JSON,
    ChatExamples,
    Conversation,
    ConversationBatch,
    Cursor,
    IntArray,
    OffsetArray,
)
from shardmill.sources import limited
from shardmill.store import StoreWriter, check_target, publish_folder
from shardmill.threads import read_ahead
from shardmill.tokenizers import EngineCheck, EngineChoice

log = logging.getLogger(__name__)


MAX_EXAMPLE_TOKENS = 2**31 - 1
"""One conversation; more is a mistake in the input, and rows count in 32 bits elsewhere."""

Bind = Callable[[Encoder], ChatTemplate]
"""A template over the encoder that a build chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Train or val, by a hash. The number of a split is its place in `splits`."""

    seed: int
    val_fraction: float

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "val") if self.val_fraction else ("train",)

    def words(self) -> str:
        if not self.val_fraction:
            return "all to train"
        return (
            f"val when the hash of (seed, group, else position) is in the lowest "
            f"{self.val_fraction:g} of its range, else train"
        )

    def assign(self, conversations: Iterable[Conversation], *, first: int) -> npt.NDArray[np.uint8]:
        """The split of each; `first` is the number of conversations of the source before them."""
        limit = int(self.val_fraction * 2**64)
        if not limit:
            return np.zeros(len(list(conversations)), np.uint8)
        numbers = [
            self._hash(position, conversation.group) < limit
            for position, conversation in enumerate(conversations, start=first)
        ]
        return np.array(numbers, np.uint8)

    def _hash(self, position: int, group: str | None) -> int:
        key = ("position", position) if group is None else ("group", group)
        digest = hashlib.sha256(repr((self.seed, "split", *key)).encode()).digest()
        return int.from_bytes(digest[:8], "little")


class ChatFeeder:
    """The conversations of a source on their way into the journal. Reading, rendering and what
    the caller does with portions go on at the same time, each in a thread of its own."""

    def __init__(
        self,
        source: ConversationSource,
        bind: Bind,
        policy: TrainPolicy,
        *,
        desk: EncoderDesk,
        rules: TokenRules,
        split_rule: SplitRule,
    ) -> None:
        self._source, self._bind, self._policy = source, bind, policy
        self._desk, self._rules, self._split_rule = desk, rules, split_rule
        self._given = 0

    def portions(
        self, cursor: Cursor | None, given: int
    ) -> Generator[tuple[Portion, SourceCounts], None, None]:
        """What follows `cursor`, before which lie `given` conversations."""
        self._given = given
        with closing(read_ahead(self._source.batches(cursor))) as batches:
            first = next(batches, None)
            template = self._bind(self._desk.encoder(_contents(first)))
            rest = chain([first], batches) if first is not None else iter(())
            with closing(read_ahead(self._rendered(rest, template))) as rendered:
                for batch, result in rendered:
                    yield self._portion(batch, result)

    def _rendered(
        self, batches: Iterator[ConversationBatch], template: ChatTemplate
    ) -> Iterator[tuple[ConversationBatch, Rendered]]:
        name = self._source.name
        for batch in batches:
            given = len(batch.conversations)
            if batch.num_read != given + len(batch.drops):
                raise SourceError(
                    f"source {name!r} says it read {batch.num_read:,} conversations, but gave "
                    f"{given:,} and dropped {len(batch.drops):,}: each is one or the other"
                )
            result = template.render(batch.conversations, self._policy)
            found = len(result.examples.ids)
            if found + len(result.drops) != given or found != len(result.kept):
                raise BuildError(
                    f"template {template.name!r} made {found:,} examples and {len(result.drops):,} "
                    f"drops of {given:,} conversations: each must become one or the other"
                )
            yield batch, result

    def _portion(self, batch: ConversationBatch, result: Rendered) -> tuple[Portion, SourceCounts]:
        examples = self._fitted(result.examples)
        splits = self._split_rule.assign(batch.conversations, first=self._given)
        part = ChatPart(examples=examples, splits=splits[result.kept])
        self._given += len(batch.conversations)
        account = SourceCounts(
            num_read=batch.num_read,
            num_given=len(batch.conversations),
            num_bytes=4 * len(examples.ids.values),  # nobody counts bytes of records
            counts=batch.counts,
            cursor=batch.cursor,
        )
        drops = (*batch.drops, *result.drops)
        return Portion(documents=examples.ids, drops=drops, chat=part), account

    def _fitted(self, examples: ChatExamples) -> ChatExamples:
        longest = int(examples.ids.lengths.max(initial=0))
        if longest > MAX_EXAMPLE_TOKENS:
            raise TokenRangeError(
                f"source {self._source.name!r}: a conversation of {longest:,} tokens; one may have "
                f"{MAX_EXAMPLE_TOKENS:,}: cut it in the input"
            )
        ids = self._rules.fit(examples.ids, source=self._source.name, first=self._given)
        return ChatExamples(
            ids=ids,
            mask=examples.mask,
            turn_starts=examples.turn_starts,
            turn_roles=examples.turn_roles,
        )


def _contents(batch: ConversationBatch | None) -> list[str]:
    """Texts of the first conversations, to try an engine on."""
    conversations = batch.conversations if batch is not None else ()
    contents = (
        message.get("content")
        for conversation in conversations
        for message in conversation.messages
        if isinstance(message, dict)
    )
    return [content for content in contents if isinstance(content, str)]


def build_chats(
    source: ConversationSource,
    folder: str | Path,
    *,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    policy: TrainPolicy | None = None,
    certificate: Certificate | None = None,
    val_fraction: float = 0.0,
    bind: Bind | None = None,
    engine: EngineChoice = "auto",
    engine_check: EngineCheck = "sample",
    resume: bool = False,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> BuildReport:
    """Render conversations into a store at `folder`.

    Without a `certificate` the mask is proved first, and a template that fails is refused.
    `bind` puts the template over a faster encoder of the same ids; without it no fast engine is
    used. `resume` and `overwrite` as in `build_store`.
    """
    policy = policy or TrainPolicy()
    source = limited(source, plan_memory(1, None, asked=False).most_document(tokenizer))
    rule = _split_rule(spec, val_fraction)
    rules = token_rules(replace(spec, append_eot=False), tokenizer)
    proof = certificate or prove_mask(template, tokenizer, policy)
    _check_proof(proof, template, policy)
    facts = _chat_facts(template, policy, val_fraction)

    def portions(
        _unit: Unit, cursor: Cursor | None, given: int, desk: EngineDesk
    ) -> Generator[tuple[Portion, SourceCounts], None, None]:
        feeder = ChatFeeder(
            source,
            bind or (lambda _encoder: template),
            policy,
            desk=desk,
            rules=rules,
            split_rule=rule,
        )
        return feeder.portions(cursor, given)

    stored = replace(spec, append_eot=False, split_rule=spec.split_rule or rule.words())
    job = BuildJob(
        target=target_of(folder),
        sources=[source],
        splits=rule.splits,
        rules=rules,
        tokenizer=tokenizer,
        spec=stored,
        plan={
            "kind": "chats",
            "source": source.describe(),
            "chat": facts,
            "spec": {**asdict(stored), "dtype": rules.dtype, "options": dict(spec.options)},
            "tokenizer": tokenizer.fingerprint,
        },
        chat=True,
        options={"chat": facts},
        produced_by={"mask_proof": proof.to_json()},
        limits=[None],
        cut=lambda: [FeedGrains(source=source, grains=(source,), sizes=(0,))],
        make_portions=portions,
        open_places=lambda out: ExamplePlaces(source.name, rule.splits, out),
        on_progress=on_progress,
    )
    done = run_build(
        job,
        engine=engine if bind else "reference",
        engine_check=engine_check,
        resume=resume,
        overwrite=overwrite,
    )
    _warn_of_empty_splits(done, rule)
    return done


def _split_rule(spec: BuildSpec, val_fraction: float) -> SplitRule:
    number = isinstance(val_fraction, int | float) and not isinstance(val_fraction, bool)
    if not number or not 0 <= val_fraction < 1:
        raise OptionError(
            f"val_fraction={val_fraction!r}: wanted the share of conversations that go to 'val', "
            "from 0 up to but not including 1"
        )
    return SplitRule(seed=spec.seed, val_fraction=float(val_fraction))


def _chat_facts(
    template: ChatTemplate, policy: TrainPolicy, val_fraction: float
) -> dict[str, JSON]:
    """What a reader of the store wants to know of its conversations."""
    return {
        "template": template.describe(),
        "marker_ids": list[JSON](sorted(template.marker_ids)),
        "train_on": policy.train_on,
        "train_on_eot": policy.train_on_eot,
        "val_fraction": float(val_fraction),
    }


def _check_proof(proof: Certificate, template: ChatTemplate, policy: TrainPolicy) -> None:
    """A certificate speaks of one template and one policy."""
    changes = describe_difference(
        {"template": proof.template, "policy": proof.policy},
        {"template": template.describe(), "policy": {**asdict(policy)}},
    )
    if changes:
        raise OptionError(
            f"the certificate is of another template or policy ({changes[0]}); prove this one, or "
            "pass none"
        )


def _warn_of_empty_splits(done: BuildReport, rule: SplitRule) -> None:
    for split in rule.splits:
        if not done.manifest.splits[split].documents:
            log.warning("%s: split %r got no conversation", done.folder, split)


Assign = Callable[[int], Mapping[str, IntArray]]


def build_examples(
    batches: Iterable[ExampleBatch],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    assign: Assign,
    produced_by: dict[str, JSON] | None = None,
    overwrite: bool = False,
) -> BuildReport:
    """Write examples to a store at `folder`.

    `assign(num_read)` tells the numbers of the examples of each split, over all that were read.
    """
    started = time.monotonic()
    target = target_of(folder)
    rules = token_rules(spec, tokenizer)
    check_target(target, overwrite=overwrite)
    with open_workplace(target, {}, stamps=[], resume=False) as work:
        receipts, numbers = _spool(batches, work.segments, rules, spec.dataset_name or target.name)
        splits, owner = _owners(assign, sum(receipt.num_read for receipt in receipts))
        staged = work.staging()
        with StoreWriter(staged, splits=splits, dtype=rules.dtype, shard_bytes=None) as out:
            books = Books()
            for receipt, number in zip(receipts, numbers, strict=True):
                first = 0
                for portion, account in load_segment(work.segments, receipt, rules.dtype):
                    examples, stop = portion.documents, first + len(portion.documents)
                    for index, split in enumerate(splits):
                        out.append(split, examples.keep(owner[number[first:stop]] == index))
                    out.record_drops(portion.drops)
                    kept = {"documents": len(examples), "tokens": len(examples.values)}
                    books.add(portion, account, portion.drops, kept)
                    first = stop
            facts = store_facts(
                spec,
                tokenizer,
                sources=[],
                ledger=books.ledger(),
                produced_by=produced_by or {},
                options={},
                unit="example",
            )
            manifest = out.finish(facts)
        publish_folder(staged, target, overwrite=overwrite)
    seconds = time.monotonic() - started
    return BuildReport(folder=target, manifest=manifest, seconds=seconds, resumed=False)


def _spool(
    batches: Iterable[ExampleBatch], folder: Path, rules: TokenRules, source: str
) -> tuple[list[Receipt], list[OffsetArray]]:
    """Segments on disk, and for each the numbers of its examples among all that were read."""
    receipts: list[Receipt] = []
    numbers: list[OffsetArray] = []
    read = 0
    key = UnitKey(feed=0, start=0, stop=1, plan="", inputs="")
    segment, mine = SegmentWriter(folder, key, after=None), [np.empty(0, np.int64)]
    try:
        for batch in batches:
            examples = rules.fit(batch.ids, source=source, first=read)
            portion = Portion(documents=examples, drops=batch.drops)
            segment.add(portion, SourceCounts(num_read=batch.num_read))
            mine.append(batch.kept + read)
            read += batch.num_read
            if segment.due:
                receipts.append(segment.seal({}, last=False))
                numbers.append(np.concatenate(mine))
                segment = SegmentWriter(folder, key, after=receipts[-1])
                mine = [np.empty(0, np.int64)]
        receipts.append(segment.seal({}, last=True))
        numbers.append(np.concatenate(mine))
    finally:
        segment.abandon()
    return receipts, numbers


def _owners(assign: Assign, num_read: int) -> tuple[tuple[str, ...], npt.NDArray[np.int16]]:
    """For each example the number of its split; refuses what is not a partition."""
    assigned = assign(num_read)
    owner = np.full(num_read, -1, np.int16)
    for index, examples in enumerate(assigned.values()):
        owner[examples] = index
    if (owner < 0).any() or sum(map(len, assigned.values())) != num_read:
        raise OptionError(
            f"the split rule must put each of {num_read:,} examples into one split; it gave "
            + ", ".join(f"{split}: {len(numbers):,}" for split, numbers in assigned.items())
        )
    return tuple(assigned), owner
