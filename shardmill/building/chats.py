"""Build a store of conversations: rendered examples with loss mask and turns.

No mask is written without a proof. Nothing is cut, so a store serves every sequence length. Every
conversation is kept whole or listed among the drops. Its split depends on the seed and its group
(else its position in the source) and on nothing else, so a group is never divided.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from shardmill.building.journal import EncodedBatch
from shardmill.building.plan import BuildSpec, Unit
from shardmill.building.resources import open_resources
from shardmill.building.run import BuildJob, BuildReport, RunKeywords, run_build
from shardmill.building.scheduler import OnProgress
from shardmill.building.worker import EncoderProvider, TokenRules
from shardmill.building.workplace import target_of
from shardmill.chat.policy import ChatTemplate, Rendered, TrainPolicy
from shardmill.chat.proof.prove import Certificate, prove_mask
from shardmill.errors import BuildError, OptionError, SourceError, TokenRangeError
from shardmill.protocols import ConversationSource, Encoder, Tokenizer
from shardmill.records import JSON, Conversation, ConversationBatch, Cursor
from shardmill.sources import limited
from shardmill.storage.files import describe_difference
from shardmill.threads import read_ahead

log = logging.getLogger(__name__)

MAX_EXAMPLE_TOKENS = 2**31 - 1
"""Of one conversation; more is a mistake in the input, and rows count in 32 bits elsewhere."""

Bind = Callable[[Encoder], ChatTemplate]
"""Puts a template over the encoder that a build chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Train or val, by a hash. The number of a split is its position in `splits`."""

    seed: int
    val_fraction: float

    def __post_init__(self) -> None:
        share = self.val_fraction
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or not 0 <= share < 1:
            raise OptionError(
                "{val_fraction}: wanted the share of conversations that go to 'val', from 0 up to "
                "but not including 1",
                val_fraction=share,
            )

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "val") if self.val_fraction else ("train",)

    def words(self) -> str:
        """For the manifest."""
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


class ChatKeywords(RunKeywords, total=False):
    """The rarer options of `build_chats`."""

    certificate: Certificate | None  # of the template and policy; None: the mask is proved first
    bind: Bind | None  # puts the template over a faster encoder; None: no fast engine is used
    on_progress: OnProgress | None


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
    certificate, bind = run.pop("certificate", None), run.pop("bind", None)
    if bind is None:
        run["engine"] = "reference"
    policy = policy or TrainPolicy()
    with open_resources(workers=1) as resources:
        source = limited(source, resources.max_document(tokenizer))
    rule = SplitRule(seed=spec.seed, val_fraction=val_fraction)
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
    stored = replace(spec, append_eot=False, split_rule=spec.split_rule or rule.words())
    job = BuildJob(
        target=target_of(folder),
        sources=[source],
        splits=rule.splits,
        encoder=ChatEncoder(
            source=source,
            rules=rules,
            bind=bind or (lambda _encoder: template),
            policy=policy,
            split_rule=rule,
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
        **run,
    )
    done = run_build(job, resources)
    for split in rule.splits:
        if not done.manifest.splits[split].documents:
            log.warning("%s: split %r got no conversation", done.folder, split)
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEncoder:
    """The `UnitEncoder` of conversations, which are one unit."""

    source: ConversationSource
    rules: TokenRules
    bind: Bind
    policy: TrainPolicy
    split_rule: SplitRule

    def batches(
        self,
        unit: Unit,  # noqa: ARG002 - there is one
        cursor: Cursor | None,
        given: int,
        provider: EncoderProvider,
    ) -> Generator[EncodedBatch, None, None]:
        """Reading, rendering and the caller run at the same time, each in its own thread."""
        with closing(read_ahead(self.source.batches(cursor))) as batches:
            first = next(batches, None)
            template = self.bind(provider.encoder(_contents(first)))
            rest = chain([first], batches) if first is not None else iter(())
            with closing(read_ahead(self._rendered(rest, template))) as rendered:
                for batch, result in rendered:
                    yield self._encoded(batch, result, given)
                    given += len(batch.conversations)

    def _rendered(
        self, batches: Iterator[ConversationBatch], template: ChatTemplate
    ) -> Iterator[tuple[ConversationBatch, Rendered]]:
        for batch in batches:
            given = len(batch.conversations)
            if batch.num_read != given + len(batch.drops):
                raise SourceError(
                    f"source {self.source.name!r} says it read {batch.num_read:,} conversations, "
                    f"but gave {given:,} and dropped {len(batch.drops):,}: each is one or the other"
                )
            result = template.render(batch.conversations, self.policy)
            found = len(result.examples.ids)
            if found + len(result.drops) != given or found != len(result.kept):
                raise BuildError(
                    f"template {template.name!r} made {found:,} examples and {len(result.drops):,} "
                    f"drops of {given:,} conversations: each must become one or the other"
                )
            yield batch, result

    def _encoded(self, batch: ConversationBatch, result: Rendered, given: int) -> EncodedBatch:
        longest = int(result.examples.ids.lengths.max(initial=0))
        if longest > MAX_EXAMPLE_TOKENS:
            raise TokenRangeError(
                f"source {self.source.name!r}: a conversation of {longest:,} tokens; one may have "
                f"{MAX_EXAMPLE_TOKENS:,}: cut it in the input"
            )
        ids = self.rules.fit(result.examples.ids, source=self.source.name, first=given)
        splits = self.split_rule.assign(batch.conversations, first=given)
        return EncodedBatch(
            documents=ids,
            drops=(*batch.drops, *result.drops),
            examples=replace(result.examples, ids=ids),
            splits=splits[result.kept],
            num_read=batch.num_read,
            num_given=len(batch.conversations),
            num_bytes=4 * len(ids.values),  # the bytes of records are not counted
            counts=batch.counts,
            cursor=batch.cursor,
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
