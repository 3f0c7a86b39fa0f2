"""Build a store: sources to tokens to shards.

In: feeds (sources and the splits they fill), a tokenizer, a spec.  Out: a finished store.
Promise: same input, same bytes, killed and resumed or not; the store appears whole or not at all;
every document and token read is in one bucket of the ledger; memory does not grow with input.
Not here: reading formats (sources), ids (tokenizer), bytes of the store (shards), the run (run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardmill.build.commit import DocumentPlaces
from shardmill.build.engine import EngineDesk
from shardmill.build.run import Job, run_build
from shardmill.build.spec import BuildReport, BuildSpec, Feed, Progress, check_feeds, plan_json
from shardmill.build.tokenise import TextFeeder, token_rules
from shardmill.protocols import Tokenizer
from shardmill.tokenizer import EngineCheck, EngineChoice


def build_store(
    feeds: Sequence[Feed],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    engine: EngineChoice = "auto",
    engine_check: EngineCheck = "sample",
    resume: bool = False,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> BuildReport:
    """Tokenise the feeds into a store at `folder`.

    `resume` goes on where an equal build stopped (and returns at once when it had finished);
    without it a build starts from the beginning. `overwrite` replaces a finished store, in the
    moment the new one is whole.
    """
    splits, rules = check_feeds(feeds), token_rules(spec, tokenizer)
    tell = on_progress or (lambda _: None)

    def open_feeders(segments: Path, desk: EngineDesk) -> list[TextFeeder]:
        return [
            TextFeeder(feed, segments, desk=desk, rules=rules, on_progress=tell) for feed in feeds
        ]

    job = Job(
        target=Path(folder).resolve(),
        sources=[feed.source for feed in feeds],
        splits=splits,
        rules=rules,
        tokenizer=tokenizer,
        spec=spec,
        plan=plan_json(feeds, spec, tokenizer, rules.dtype),
        open_feeders=open_feeders,
        open_places=lambda out: DocumentPlaces(feeds, out),
    )
    return run_build(
        job, engine=engine, engine_check=engine_check, resume=resume, overwrite=overwrite
    )
