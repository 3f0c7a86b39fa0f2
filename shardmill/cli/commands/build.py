"""`shardmill build` and `shardmill build chats`: documents or conversations to a token store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from shardmill.building import BuildPlan, BuildReport, BuildSpec, has_unfinished_build, plan_store
from shardmill.building.api import build as build_any
from shardmill.building.api import open_feed, output_folder
from shardmill.chat import KNOWN_TEMPLATES
from shardmill.cli.options import AsJson, Field, Special, TokenizerName, parse_bytes, parse_special
from shardmill.cli.printing import Answer
from shardmill.cli.terminal import build_progress
from shardmill.errors import OptionError
from shardmill.sources import SHAPES
from shardmill.store import is_finished
from shardmill.tokenizers import open_tokenizer
from shardmill.urls import Url


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of every build."""

    inputs: list[str]
    out: Annotated[str, "Where the store goes: a folder, or s3://bucket/path."]
    tokenizer: TokenizerName
    name: Annotated[str | None, "Name of the data, recorded."] = None
    on_bad: Annotated[
        Literal["error", "skip"] | None,
        "Rows that cannot be read: stop at the first, or skip and list them.",
    ] = None
    shard_bytes: Annotated[str, "Size of a shard, e.g. 128MiB."] = "128MiB"
    engine: Annotated[Literal["auto", "fast", "reference"], "How text is encoded."] = "auto"
    resume: Annotated[bool, "Continue an unfinished build."] = False
    overwrite: Annotated[bool, "Replace a store, or start again."] = False
    scratch: Annotated[
        Path | None, "Where a store for a URL is built before it is sent. Default: cache."
    ] = None
    report: Annotated[Path | None, "Write time, machine and counts to this JSON file."] = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class BuildCommand(BuildOptions):
    """Prints one line: documents, tokens and shards of the store, what was left out and why, time
    and memory. Conversations have their own command, `shardmill build chats`; a folder that is
    called chats is written ./chats here.

    Example: shardmill build 'data/*.jsonl' --out store --tokenizer spm.model

    Example: shardmill build books --out s3://bucket/books --tokenizer spm.model --json

    Exit 0: built, or planned. Exit 2: a mistake in the call or its input; what is done is kept.
    Exit 130: stopped with Ctrl-C; continue with --resume.
    """

    inputs: Annotated[
        list[str],
        "INPUTS",
        "Folders, files or globs of .txt .md .jsonl .parquet, here or at a URL (s3://, gs://, "
        "hf://); or a dataset, hub:owner/name.",
    ]
    field: Field = None
    val_tokens: Annotated[int, "How many tokens go to 'val', the first ones."] = 0
    max_tokens: Annotated[int | None, "Stop when 'train' has this many tokens."] = None
    seed: Annotated[int | None, "Read files in an order drawn from it. Default: by name."] = None
    dtype: Annotated[Literal["uint16", "uint32"] | None, "Default: by vocabulary."] = None
    append_eot: Annotated[bool, "Put the end token after each document."] = True
    eot: Annotated[str | None, "The end token, when the tokenizer does not name it."] = None
    engine_check: Annotated[
        Literal["sample", "full"], "How much of the text a fast engine is compared on."
    ] = "sample"
    run_on: Annotated[Literal["local", "ray"], "Where the work is done."] = "local"
    ray_address: Annotated[
        str | None, "Ray cluster: auto, or host:port. Default: one is started here."
    ] = None
    workers: Annotated[int | None, "Processes. Default: one per core; 1: only this one."] = None
    unit_bytes: Annotated[str | None, "Input per unit of work. Default: 64MiB."] = None
    memory: Annotated[str | None, "What all processes together may use, e.g. 4GiB."] = None
    append: Annotated[bool, "Keep the store, and add the files that are new."] = False
    dry_run: Annotated[bool, "Print the plan and what it takes; build nothing."] = False

    def run(self) -> Answer:
        sizes = {
            name: None if text is None else parse_bytes(text, name)
            for name, text in (("unit_bytes", self.unit_bytes), ("memory", self.memory))
        }
        if self.dry_run:
            plan = _plan(self, sizes)
            return Answer({**asdict(plan), "disk_bytes": plan.disk_bytes}, _plan_lines(plan))
        return _run_build(self, **sizes)


@dataclass(frozen=True, kw_only=True)
class BuildChatsCommand(BuildOptions):
    """Prints one line: conversations, turns, tokens, how many are trained, what was left out and
    why. The template's mask is proved first; a template that fails is refused. To tokenise the
    texts of a folder called chats, write ./chats.

    Example: shardmill build chats c.jsonl --out c --tokenizer spm.model --template chatml

    Exit 0: built. Exit 2: a mistake in the call or its input; what is done is kept. Exit 130:
    stopped with Ctrl-C; continue with --resume.
    """

    inputs: Annotated[
        list[str], "INPUTS", "Folders, files or globs of .jsonl .json .parquet, or hub:owner/name."
    ]
    template: Annotated[
        str,
        f"{', '.join(KNOWN_TEMPLATES)}; a .json or .toml file of the same kind; 'jinja' for the "
        "tokenizer's own template, or a .jinja file.",
    ]
    special: Special = None
    shape: Annotated[str | None, f"Shape of the records: {', '.join(SHAPES)}. Default: found."] = (
        None
    )
    train_on: Annotated[
        Literal["assistant", "last-assistant", "all"], "Which turns are trained."
    ] = "assistant"
    train_on_eot: Annotated[bool, "A trained turn trains its end token too."] = True
    val_fraction: Annotated[float, "About this share of conversations goes to 'val'."] = 0.0
    seed: Annotated[int, "Decides which conversations go to 'val'."] = 0

    def run(self) -> Answer:
        return _run_build(self, special=parse_special(self.special))


def _run_build(options: BuildOptions, **more: Any) -> Answer:
    """Build with these options; `more` replaces options."""
    keywords = {**vars(options), "shard_bytes": parse_bytes(options.shard_bytes, "shard_bytes")}
    keywords = {name: keywords[name] for name in keywords if name not in ("as_json", "dry_run")}
    # Ray prints to stdout what goes wrong on its nodes
    with build_progress() as progress, redirect_stdout(sys.stderr):
        try:
            done = build_any(**(keywords | more), on_progress=progress.show, on_push=progress.push)
        except KeyboardInterrupt:
            print(_how_to_resume(options), file=sys.stderr)
            raise
    return Answer(done.to_json(), [_receipt(options, done)])


def _receipt(options: BuildOptions, done: BuildReport) -> str:
    """One line: what was built, what was left out, time and memory."""
    ledger, documents = done.manifest.ledger, done.manifest.ledger.documents
    where = done.url or Path(options.out)
    if ledger.chat is None:
        shards = sum(len(split.shards) for split in done.manifest.splits.values())
        empty = {"empty": documents.empty} if documents.empty else {}
        reasons = {**empty, **documents.dropped}
        why = f" ({_counts(reasons)})" if reasons else ""
        text = (
            f"{where}: {documents.kept:,} documents, {ledger.tokens.kept:,} tokens, "
            f"{shards:,} shards; left out: {sum(reasons.values()):,} documents{why}, over budget: "
            f"{ledger.tokens.over_budget:,} tokens"
        )
    else:
        text = (
            f"{where}: {documents.kept:,} conversations, {ledger.chat.turns:,} turns, "
            f"{ledger.tokens.kept:,} tokens, {ledger.chat.trained_tokens:,} trained; "
            f"left out: {_counts(documents.dropped) or 'none'}"
        )
    if ledger.repaired:
        text += f"; repaired: {_counts(ledger.repaired)}"
    if ledger.chat is not None:
        text += "; mask proved"
    text += f"; {done.seconds:.1f} s"
    if done.cost is not None and done.utilisation is not None:
        workers = f"{done.cost.num_workers} workers, " if done.cost.num_workers > 1 else ""
        text += (
            f" ({workers}{done.utilisation:.0%} of {done.cost.num_cores} cores, at most "
            f"{done.cost.peak_bytes / 2**20:,.0f} MiB a process)"
        )
    return text


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {why}" for why, count in counts.items())


def _how_to_resume(options: BuildOptions) -> str:
    """After Ctrl-C: whether anything was kept, and how to continue."""
    folder, url = output_folder(options.out, options.scratch)
    # a finished store in the scratch folder is only sent again
    kept = has_unfinished_build(folder) or (url is not None and is_finished(folder))
    what = "what is done is kept: continue with --resume" if kept else "nothing was kept"
    return f"{folder if url is None else str(Url(url)).rstrip('/')}: stopped; {what}"


def _plan(options: BuildCommand, sizes: dict[str, Any]) -> BuildPlan:
    if options.append:
        raise OptionError("--dry-run prints the plan of a whole build: leave out --append")

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(options, name) for name in names}

    folder, _ = output_folder(options.out, options.scratch)
    source = given("field", "on_bad", "seed", "val_tokens", "max_tokens")
    specials = {"eot": options.eot} if options.eot else None
    return plan_store(
        [open_feed(options.inputs, **source)],
        folder,
        tokenizer=open_tokenizer(options.tokenizer, specials=specials),
        spec=BuildSpec(**given("dtype", "append_eot")),
        **given("workers", "ray_address"),
        **sizes,
    )


def _plan_lines(plan: BuildPlan) -> Iterator[str]:
    for feed in plan.feeds:
        tokens = "an unknown number of" if feed.num_tokens is None else f"{feed.num_tokens:,}"
        yield (
            f"{feed.source}: {_size(feed.num_bytes)} of input in {feed.num_units:,} units, about "
            f"{tokens} tokens, {_size(feed.disk_bytes)} on disk until it is done"
        )
    yield (
        f"workers: {plan.workers}; memory: about {_size(plan.memory_bytes)}; largest document: "
        f"{_size(plan.most_document)}; disk: about {_size(plan.disk_bytes)}, "
        f"{_size(plan.free_bytes)} are free"
    )


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e6:,.1f} MB"
