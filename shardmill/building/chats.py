"""Build a store of conversations: rendered examples with loss mask and turns.

No mask is written without a proof. Nothing is cut, so a store serves every sequence length. Every
conversation is kept whole or listed among the drops. Its split depends on the seed and its group
(else its messages) and on nothing else, so a group is never divided.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Unpack

from shardmill.building.plan import BuildSpec, Unit
from shardmill.building.resources import WorkerKeywords, open_resources
from shardmill.building.run import BuildJob, BuildReport, RunKeywords, run_build
from shardmill.building.scheduler import OnProgress
from shardmill.building.segments import EncodedBatch
from shardmill.building.splits import HashSplit, hash_split
from shardmill.building.worker import EncoderProvider, ReadBatch, TokenRules, read_batches
from shardmill.building.workplace import workplace_at
from shardmill.chat.branches import RenderedRecords, render_records
from shardmill.chat.policy import ChatTemplate, Rendered, TrainPolicy
from shardmill.chat.proof.prove import Certificate, prove_mask
from shardmill.chat.token_template import with_encoder
from shardmill.errors import BuildError, OptionError, SourceError, TokenRangeError
from shardmill.protocols import ConversationSource, Tokenizer
from shardmill.records import JSON, Conversation
from shardmill.sources import limited
from shardmill.sources.preferences import preference_kind
from shardmill.storage.files import describe_difference
from shardmill.threads import read_ahead

log = logging.getLogger(__name__)

MAX_EXAMPLE_TOKENS = 2**31 - 1
"""Of one conversation; more is a mistake in the input, and rows count in 32 bits elsewhere."""


class ChatKeywords(RunKeywords, WorkerKeywords, total=False):
    """The rarer options of `build_chats`."""

    certificate: Certificate | None  # of the template and policy; None: the mask is proved first
    any_encoder: bool  # whether the template may use a fast engine in place of its own encoder
    on_progress: OnProgress | None
    test_fraction: float  # of a split "test", beside "val"; 0: none


def build_chats(
    source: ConversationSource,
    folder: str | Path,
    *,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    policy: TrainPolicy | None = None,
    val_fraction: float = 0.0,
    **options: Unpack[ChatKeywords],
) -> BuildReport:
    """Render conversations into a store at `folder`. A template whose mask fails is refused.

    For the other options see `ChatKeywords` and `RunKeywords`.
    """
    run: dict[str, Any] = {**options}
    certificate, any_encoder = run.pop("certificate", None), run.pop("any_encoder", False)
    test_fraction = run.pop("test_fraction", 0.0)
    if not any_encoder:
        run["engine"] = "reference"
    if spec.exact_shards:
        raise OptionError("{exact_shards}: only for documents", exact_shards=True)
    policy = policy or TrainPolicy()
    preference = preference_kind(source)
    if preference is not None:
        policy = _of_answers(policy, source)
    if source.describe().get("fan_out") and policy.train_on != "last-assistant":
        raise OptionError(
            "{fan_out}: gives every answer a conversation that ends with it, so only the last "
            f"answer of each is trained, not {policy.train_on!r}: use {{train_on}}",
            fan_out=True,
            train_on="last-assistant",
        )
    dividing = {key: run.pop(key) for key in WorkerKeywords.__annotations__ if key in run}
    rule = hash_split(spec.seed, val_fraction, test_fraction)
    rules = TokenRules.of(replace(spec, append_eot=False), tokenizer)
    proof = certificate or prove_mask(template, tokenizer, policy)
    _check_proof(proof, template, policy)
    facts: dict[str, JSON] = {
        "template": template.describe(),
        "marker_ids": list[JSON](sorted(template.marker_ids)),
        "train_on": policy.train_on,
        "train_on_eot": policy.train_on_eot,
        "val_fraction": float(val_fraction),
    }
    if test_fraction:
        facts["test_fraction"] = float(test_fraction)
    stored = replace(spec, append_eot=False, split_rule=spec.split_rule or rule.words())
    with open_resources(**dividing) as resources:
        source = limited(source, resources.max_document(tokenizer))
        job = BuildJob(
            target=workplace_at(folder, run.pop("scratch", None)),
            sources=[source],
            splits=rule.splits,
            encoder=(ChatEncoder if preference is None else PreferenceEncoder)(
                rules=rules,
                template=template,
                any_encoder=any_encoder,
                policy=policy,
                by_hash=rule,
            ),
            tokenizer=tokenizer,
            spec=stored,
            plan={
                "kind": "chats",
                "source": source.describe(),
                "chat": facts,
                "spec": stored.to_json(dtype=rules.dtype),
                "tokenizer": tokenizer.fingerprint,
            },
            options={"chat": facts},
            produced_by={"mask_proof": proof.to_json()},
            preference=preference,
            **run,
        )
        done = run_build(job, resources)
    for split in rule.splits:
        if not done.manifest.splits[split].documents:
            log.warning("%s: split %r got no conversation", done.url or done.folder, split)
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEncoder:
    """The `UnitEncoder` of conversations."""

    rules: TokenRules
    template: ChatTemplate
    any_encoder: bool
    policy: TrainPolicy
    by_hash: HashSplit

    def first_texts(self, unit: Unit) -> list[str]:
        with closing(read_batches([unit])) as batches:
            return _contents(next(batches, None))

    def batches(
        self, units: Sequence[Unit], provider: EncoderProvider
    ) -> Generator[EncodedBatch, None, None]:
        """With spare cores, reading, rendering and the caller run at the same time, each in its own
        thread."""
        spare, found, given = provider.has_spare_cores, read_batches(units), Counter[int]()
        with closing(read_ahead(found) if spare else found) as batches:
            first = next(batches, None)
            encoder, template = provider.encoder(_contents(first)), self.template
            if self.any_encoder:
                template = with_encoder(template, encoder)
            rest = chain([first], batches) if first is not None else iter(())
            made = self._rendered(rest, template)
            with closing(read_ahead(made) if spare else made) as rendered:
                for batch, result in rendered:
                    yield self._encoded(batch, result, given[batch.unit.number])
                    given[batch.unit.number] += len(batch.read.conversations)

    def _rendered(
        self, batches: Iterator[ReadBatch], template: ChatTemplate
    ) -> Generator[tuple[ReadBatch, Rendered | RenderedRecords], None, None]:
        for batch in batches:
            source, read = batch.unit.source, batch.read
            given = len(read.conversations)
            if read.num_read != given + len(read.drops) + read.counts.get("filtered", 0):
                raise SourceError(
                    f"source {source!r} says it read {read.num_read:,} conversations, but gave "
                    f"{given:,} and dropped {len(read.drops):,}: each is one or the other"
                )
            result = self._render(read.conversations, template)
            found = len(result.kept)
            if found + len(result.drops) != given:
                raise BuildError(
                    f"template {template.name!r} made {found:,} examples and {len(result.drops):,} "
                    f"drops of {given:,} conversations: each must become one or the other"
                )
            yield batch, result

    def _render(
        self, conversations: Sequence[Conversation], template: ChatTemplate
    ) -> Rendered | RenderedRecords:
        result = template.render(conversations, self.policy)
        if len(result.examples.ids) != len(result.kept):
            raise BuildError(
                f"template {template.name!r} made {len(result.examples.ids):,} examples of "
                f"{len(result.kept):,} conversations: wanted one of each"
            )
        return result

    def _encoded(
        self, batch: ReadBatch, result: Rendered | RenderedRecords, given: int
    ) -> EncodedBatch:
        unit, chunk, read = batch
        longest = int(result.examples.ids.lengths.max(initial=0))
        if longest > MAX_EXAMPLE_TOKENS:
            raise TokenRangeError(
                f"source {unit.source!r}: a conversation of {longest:,} tokens; one may have "
                f"{MAX_EXAMPLE_TOKENS:,}: cut it in the input"
            )
        ids = self.rules.fit(result.examples.ids, source=unit.name, first=given)
        splits = self.by_hash.of_conversations(read.conversations)[result.kept]
        links = None
        if isinstance(result, RenderedRecords):
            splits, links = splits[result.record_of], result.links
        elif repeated := _repeated_tokens(read.conversations, result):
            read = replace(read, counts={**read.counts, "repeated_tokens": repeated})
        return EncodedBatch(
            unit=unit.number,
            chunk=chunk,
            read=read,
            num_given=len(read.conversations),
            num_bytes=4 * len(ids.values),  # the bytes of records are not counted
            documents=ids,
            drops=(*read.drops, *result.drops),
            examples=replace(result.examples, ids=ids),
            splits=splits,
            links=links,
        )


class PreferenceEncoder(ChatEncoder):
    """The `UnitEncoder` of prompts with their answers."""

    def _render(
        self, conversations: Sequence[Conversation], template: ChatTemplate
    ) -> RenderedRecords:
        splits = self.by_hash.of_conversations(conversations)
        return render_records(template, conversations, self.policy, splits)


def _of_answers(policy: TrainPolicy, source: ConversationSource) -> TrainPolicy:
    """The policy of preferences: the last answer, and only that."""
    if source.describe().get("fan_out"):
        raise OptionError(
            "{fan_out}: of preferences only the last answers are trained; leave it out",
            fan_out=True,
        )
    if policy.train_on == "all":
        raise OptionError(
            "{train_on}: of preferences only the last answers are trained; leave it out",
            train_on="all",
        )
    return replace(policy, train_on="last-assistant")


def _repeated_tokens(conversations: Sequence[Conversation], result: Rendered) -> int:
    """The tokens of beginnings that a longer example of the same conversation follows."""
    wholes = [conversations[at].part_of for at in result.kept.tolist()]
    lengths = result.examples.ids.lengths.tolist()
    following = zip(lengths, pairwise(wholes), strict=False)
    return sum(size for size, (one, two) in following if one is not None and one is two)


def _contents(first: ReadBatch | None) -> list[str]:
    """Texts of the first conversations, to try an engine on."""
    conversations = first.read.conversations if first is not None else ()
    contents = (
        message.get("content")
        for conversation in conversations
        for message in conversation.messages
        if isinstance(message, dict)
    )
    return [content for content in contents if isinstance(content, str)]


def _check_proof(proof: Certificate, template: ChatTemplate, policy: TrainPolicy) -> None:
    """A certificate is of one template and one policy."""
    changes = describe_difference(
        {"template": proof.template, "policy": proof.policy},
        {"template": template.describe(), "policy": {**asdict(policy)}},
    )
    if changes:
        raise OptionError(
            f"the certificate is of another template or policy ({changes[0]}); prove this one, or "
            "pass none"
        )
