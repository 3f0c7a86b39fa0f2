"""Build a store of conversations: source to rendered examples to shards with mask and turns.

In: a source, a template bound to a tokenizer, a policy, a spec.  Out: a finished store.
Promise: same input, same bytes, killed and resumed or not; no mask without a proof; nothing is
cut, so a store serves every sequence length; every conversation read is kept or among the drops.
Not here: shapes of records (sources), ids and mask (chat), rows (loading).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from pathlib import Path

from shardmill.build.commit import ExamplePlaces
from shardmill.build.engine import EngineDesk
from shardmill.build.memory import plan_memory
from shardmill.build.portion import Account, Portion
from shardmill.build.render import Bind, ChatFeeder, SplitRule
from shardmill.build.run import Job, run_build
from shardmill.build.spec import BuildReport, BuildSpec, Progress, describe_difference
from shardmill.build.tokenise import token_rules
from shardmill.build.units import FeedGrains, Unit
from shardmill.build.workplace import target_of
from shardmill.chat.contract import ChatTemplate, TrainPolicy
from shardmill.chat.proof import Certificate, prove_mask
from shardmill.errors import OptionError
from shardmill.protocols import ConversationSource, Tokenizer
from shardmill.records import JSON, Cursor
from shardmill.sources import limited
from shardmill.tokenizer import EngineCheck, EngineChoice

log = logging.getLogger(__name__)


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
    ) -> Generator[tuple[Portion, Account], None, None]:
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
    job = Job(
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
