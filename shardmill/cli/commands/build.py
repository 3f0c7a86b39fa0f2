"""`shardmill build` and `shardmill build chats`: documents or conversations to a token store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from shardmill.building import BuildPlan, BuildReport, BuildSpec, plan_store
from shardmill.building.api import build as build_any
from shardmill.building.api import open_feed
from shardmill.building.loss import MAX_LOSS
from shardmill.building.splits import hash_split
from shardmill.building.workplace import workplace_at
from shardmill.chat import KNOWN_TEMPLATES
from shardmill.cli.options import (
    AsJson,
    Ext,
    Field,
    Fields,
    Filter,
    IgnoreColumns,
    Join,
    Kind,
    Map,
    RoleMap,
    Special,
    TokenizerName,
    parse_bytes,
    parse_fields,
    parse_join,
    parse_role_map,
    parse_special,
    parse_template_vars,
)
from shardmill.cli.printing import Answer
from shardmill.cli.terminal import build_progress
from shardmill.errors import OptionError, StoreError
from shardmill.sources import SHAPES
from shardmill.tokenizers import open_tokenizer


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of every build."""

    inputs: list[str]
    out: Annotated[str, "Where the store goes: a folder, or s3://bucket/path."]
    tokenizer: TokenizerName
    name: Annotated[str | None, "Name of the data, recorded."] = None
    ext: Ext = None
    on_bad: Annotated[
        Literal["error", "skip"] | None,
        "Rows that cannot be read: stop at the first, or skip and list them.",
    ] = None
    filter: Filter = None
    map: Map = None
    ignore_columns: IgnoreColumns = None
    max_loss: Annotated[float, "The share of rows that may be lost; else nothing is built."] = (
        MAX_LOSS
    )
    allow_empty: Annotated[bool, "A store that keeps no row may be built."] = False
    shard_bytes: Annotated[str, "Size of a shard, e.g. 128MiB."] = "128MiB"
    engine: Annotated[Literal["auto", "fast", "reference"], "How text is encoded."] = "auto"
    resume: Annotated[bool, "Continue an unfinished build."] = False
    overwrite: Annotated[bool, "Replace a store, or start again."] = False
    scratch: Annotated[
        Path | None, "Of a store at a URL: local folder for shards at work. Default: TMPDIR."
    ] = None
    report: Annotated[Path | None, "Write time, machine and counts to this JSON file."] = None
    val_fraction: Annotated[
        float, "About this share goes to 'val', drawn by --seed: the same in any order of files."
    ] = 0.0
    test_fraction: Annotated[float, "About this share goes to 'test', as for 'val'."] = 0.0
    run_on: Annotated[Literal["local", "ray"], "Where the work is done."] = "local"
    ray_address: Annotated[
        str | None, "Ray cluster: auto, or host:port. Default: one is started here."
    ] = None
    workers: Annotated[int | None, "Processes. Default: one per core; 1: only this one."] = None
    unit_bytes: Annotated[
        str | None, "Input that a worker takes at a time; never changes a byte. Default: 256MiB."
    ] = None
    memory: Annotated[str | None, "What all processes together may use, e.g. 4GiB."] = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class BuildCommand(BuildOptions):
    """Prints one line: documents, tokens and shards of the store, what was left out and why, time
    and memory. Conversations have their own command, `shardmill build chats`; a folder that is
    called chats is written ./chats here.

    Example: shardmill build 'data/*.jsonl' --out store --tokenizer spm.model

    Example: shardmill build books --out s3://bucket/books --tokenizer spm.model --json

    Exit 0: built, or planned. Exit 1: too many rows were lost, so nothing was built; what is done
    is kept. Exit 2: a mistake in the call or its input; what is done is kept. Exit 130: stopped
    with Ctrl-C; continue with --resume.
    """

    inputs: Annotated[
        list[str],
        "INPUTS",
        "Folders, files or globs of texts, source code, .jsonl .json .csv .tsv .parquet .arrow "
        ".tar .zip, here or at a URL (s3://, gs://, hf://); or a dataset, hub:owner/name.",
    ]
    field: Field = None
    kind: Kind = None
    split_on: Annotated[
        str | None,
        "Parts text files: line, blank-line, or a regular expression that begins a document where "
        "it matches the start of a line.",
    ] = None
    fields: Fields = None
    join: Join = None
    strip_front_matter: Annotated[
        bool, "Leave out the YAML or TOML block that a text begins with."
    ] = False
    val_tokens: Annotated[int, "How many tokens go to 'val', the first ones."] = 0
    max_tokens: Annotated[int | None, "Stop when 'train' has this many tokens."] = None
    seed: Annotated[
        int | None, "Draws the order of files (default: by name), and 'val' and 'test' by share."
    ] = None
    dtype: Annotated[Literal["uint16", "uint32"] | None, "Default: by vocabulary."] = None
    append_eot: Annotated[bool, "Put the end token after each document."] = True
    eot: Annotated[str | None, "The end token, when the tokenizer does not name it."] = None
    engine_check: Annotated[
        Literal["sample", "full"], "How much of the text a fast engine is compared on."
    ] = "sample"
    append: Annotated[bool, "Keep the store, and add the files that are new."] = False
    dry_run: Annotated[bool, "Print the plan and what it takes; build nothing."] = False

    def run(self) -> Answer:
        if self.dry_run:
            plan = _plan(self)
            return Answer(plan.to_json(), _plan_lines(plan))
        return _run_build(self, fields=parse_fields(self.fields), join=parse_join(self.join))


@dataclass(frozen=True, kw_only=True)
class BuildChatsCommand(BuildOptions):
    """Prints one line: conversations, turns, tokens, how many are trained, what was left out and
    why. The template's mask is proved first; a template that fails is refused. To tokenise the
    texts of a folder called chats, write ./chats.

    Example: shardmill build chats c.jsonl --out c --tokenizer spm.model --template chatml

    Exit 0: built. Exit 1: too many rows were lost, so nothing was built; what is done is kept.
    Exit 2: a mistake in the call or its input; what is done is kept. Exit 130: stopped with Ctrl-C;
    continue with --resume.
    """

    inputs: Annotated[
        list[str],
        "INPUTS",
        "Folders, files or globs of .jsonl .json .csv .tsv .parquet .arrow .tar .zip, or "
        "hub:owner/name.",
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
    messages_field: Annotated[str | None, "Column that holds the turns. Default: found."] = None
    role_field: Annotated[str | None, "Key of a turn: who speaks. Default: role or from."] = None
    content_field: Annotated[str | None, "And what is said. Default: content or value."] = None
    role_map: RoleMap = None
    split_think: Annotated[
        bool, "<think>...</think> before an assistant's words is its reasoning."
    ] = False
    chat_template: Annotated[
        str | None, "Of a tokenizer with several Jinja templates, the name of one."
    ] = None
    template_vars: Annotated[
        list[str] | None,
        "--template-var",
        "NAME=VALUE for a Jinja template, as enable_thinking=false.",
    ] = None
    template_date: Annotated[
        str | None, "The date for a Jinja template that writes today's, as 2024-07-26."
    ] = None
    any_prompt: Annotated[
        bool, "Answers of a Jinja template need not follow its generation prompt."
    ] = False
    train_on: Annotated[
        Literal["assistant", "last-assistant", "all"], "Which turns are trained."
    ] = "assistant"
    fan_out: Annotated[
        bool,
        "An example for each answer with all before it, for templates that change the past.",
    ] = False
    train_on_eot: Annotated[bool, "A trained turn trains its end token too."] = True
    seed: Annotated[int, "Decides which conversations go to 'val' and 'test'."] = 0

    def run(self) -> Answer:
        given = {"special": parse_special(self.special), "role_map": parse_role_map(self.role_map)}
        return _run_build(self, **given, template_vars=parse_template_vars(self.template_vars))


def _sizes(options: BuildOptions) -> dict[str, Any]:
    """The options that are sizes, in bytes."""
    given = {name: getattr(options, name) for name in ("shard_bytes", "unit_bytes", "memory")}
    return {name: None if text is None else parse_bytes(text, name) for name, text in given.items()}


def _run_build(options: BuildOptions, **more: Any) -> Answer:
    """Build with these options; `more` replaces options."""
    keywords = {**vars(options), **_sizes(options)}
    other = ("as_json", "dry_run")
    keywords = {name: keywords[name] for name in keywords if name not in other}
    # Ray prints to stdout what goes wrong on its nodes
    with build_progress() as progress, redirect_stdout(sys.stderr):
        try:
            done = build_any(**(keywords | more), on_progress=progress.show)
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
        unlisted = {"empty": documents.empty, "filtered": documents.filtered}
        reasons = {name: count for name, count in unlisted.items() if count} | documents.dropped
        why = f" ({_counts(reasons)})" if reasons else ""
        text = (
            f"{where}: {documents.kept:,} documents, {ledger.tokens.kept:,} tokens, "
            f"{shards:,} shards; left out: {sum(reasons.values()):,} documents{why}, over budget: "
            f"{ledger.tokens.over_budget:,} tokens"
        )
    else:
        what = "records of preferences" if done.manifest.version == 3 else "conversations"
        filtered = {"filtered": documents.filtered} if documents.filtered else {}
        reasons = filtered | documents.dropped
        text = (
            f"{where}: {documents.kept:,} {what}, {ledger.chat.turns:,} turns, "
            f"{ledger.tokens.kept:,} tokens, {ledger.chat.trained_tokens:,} trained; "
            f"left out: {_counts(reasons) or 'none'}"
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
    work = workplace_at(options.out, options.scratch)
    try:
        is_kept = work.has_unfinished_build()
    except StoreError as error:
        return f"{error}; when it answers, continue with --resume"
    what = "what is done is kept: continue with --resume" if is_kept else "nothing was kept"
    return f"{work}: stopped; {what}"


def _plan(options: BuildCommand) -> BuildPlan:
    if options.append:
        raise OptionError("--dry-run prints the plan of a whole build: leave out --append")

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(options, name) for name in names}

    sizes = _sizes(options)
    work = workplace_at(options.out, options.scratch)
    source = given("kind", "ext", "split_on", "on_bad", "seed", "val_tokens", "max_tokens")
    columns = given("field", "filter", "map", "strip_front_matter")
    columns |= {"fields": parse_fields(options.fields), "join": parse_join(options.join)}
    source |= {key: value for key, value in columns.items() if value not in (None, False)}
    source["ignore_columns"] = options.ignore_columns or ()
    by_hash = hash_split(options.seed or 0, options.val_fraction, options.test_fraction)
    specials = {"eot": options.eot} if options.eot else None
    return plan_store(
        [open_feed(options.inputs, by_hash=by_hash, **source)],
        work.folder,
        tokenizer=open_tokenizer(options.tokenizer, specials=specials),
        spec=BuildSpec(**given("dtype", "append_eot"), shard_bytes=sizes.pop("shard_bytes")),
        to_url=work.url is not None,
        **given("engine", "workers", "ray_address"),
        **sizes,
    )


def _plan_lines(plan: BuildPlan) -> Iterator[str]:
    for feed in plan.feeds:
        yield (
            f"{feed.source}: {_size(feed.num_bytes)} of input in {_number(feed.num_units)} units; "
            f"about {_number(feed.num_tokens)} tokens in {_number(feed.num_shards)} shards"
        )
    who = "in one process" if plan.workers == 1 else f"with {plan.workers} workers"
    yield (
        f"time: about {_time(plan.hours)} {who} on {plan.cores} cores; CPU: about "
        f"{_time(plan.worker_hours)} to read, encode and write ({plan.engine}), "
        f"{_time(plan.coordinator_hours)} to coordinate"
    )
    if plan.requests is not None:
        yield f"requests: about {plan.requests:,}"
    is_local = plan.requests is None
    disk = f"about {_size(plan.disk_bytes)}" if is_local else "for shards at work"
    yield (
        f"memory: about {_size(plan.memory_bytes)}; largest document: {_size(plan.most_document)}; "
        f"disk: {disk}, {_size(plan.free_bytes)} are free"
    )


def _number(count: int | None) -> str:
    return "an unknown number of" if count is None else f"{count:,}"


def _time(hours: float | None) -> str:
    if hours is None:
        return "an unknown time"
    seconds = 3600 * hours
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{hours:,.1f} h"


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e6:,.1f} MB"
