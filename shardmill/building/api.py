"""The front door of the offline half: `shardmill.build` and `shardmill.pack`.

Names, defaults and refusals are those of the commands `shardmill build`, `shardmill build chats`
and `shardmill pack`, which call these functions and print what they return.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from shardmill.arguments import choices
from shardmill.building.advice import advised
from shardmill.building.chats import build_chats
from shardmill.building.loss import MAX_LOSS
from shardmill.building.packs import build_plan
from shardmill.building.plan import BuildSpec, Feed
from shardmill.building.resources import RunOn
from shardmill.building.run import BuildReport, build_store
from shardmill.building.scheduler import OnProgress
from shardmill.building.splits import HashSplit, hash_split
from shardmill.building.workplace import Workplace, workplace_at, workplace_of
from shardmill.chat.policy import ChatTemplate, TrainOn, TrainPolicy
from shardmill.chat.template_spec import (
    TemplateSpec,
    known_template,
    load_template_spec,
    spec_from_json,
)
from shardmill.chat.token_template import bind_template
from shardmill.errors import (
    BuildError,
    OptionError,
    SourceError,
    TemplateError,
    UnfinishedBuildError,
)
from shardmill.packing import Algorithm, Long
from shardmill.protocols import ConversationSource, Source, Tokenizer
from shardmill.records import JSON
from shardmill.sources import ConcatSource, JsonlSource, iter_jsonl_rows, open_chats, open_source
from shardmill.sources.preferences import preference_kind
from shardmill.sources.rows import check_columns
from shardmill.storage.files import Endings
from shardmill.store import PlanOptions, StoredPlan
from shardmill.tokenizers import EngineCheck, EngineChoice, open_tokenizer

Inputs = str | Path | Sequence[str | Path]
OnBad = Literal["error", "skip"]
_MAPPING = ("fields", "join", "filter", "map", "strip_front_matter")
_DOCUMENTS_ONLY = (
    *("field", "fields", "join", "strip_front_matter", "kind", "split_on", "val_tokens"),
    *("max_tokens", "dtype", "append_eot", "engine_check", "append"),
)
_READ_RULES = (
    *("messages_field", "role_field", "content_field", "role_map", "split_think", "fan_out"),
)
_TEMPLATE_OPTIONS = ("chat_template", "template_vars", "template_date", "any_prompt")
_CHATS_ONLY = ("shape", *_READ_RULES, *_TEMPLATE_OPTIONS, "train_on", "train_on_eot")
_FIELD_ROWS = 1000
"""How many rows are read to list the fields there are."""


def build(
    inputs: Inputs,
    out: str | Path,
    *,
    tokenizer: str | Path | Tokenizer,
    template: str | Path | ChatTemplate | None = None,
    name: str | None = None,
    ext: Endings = None,
    on_bad: OnBad | None = None,
    ignore_columns: Sequence[str] | None = None,
    max_loss: float = MAX_LOSS,
    allow_empty: bool = False,
    seed: int | None = None,
    shard_bytes: int = 128 * 2**20,
    eot: str | None = None,
    special: Mapping[str, str] | None = None,
    engine: EngineChoice = "auto",
    resume: bool = False,
    overwrite: bool = False,
    scratch: str | Path | None = None,
    report: str | Path | None = None,
    on_progress: OnProgress | None = None,
    val_fraction: float = 0.0,
    test_fraction: float = 0.0,
    workers: int | None = None,
    unit_bytes: int | None = None,
    memory: int | None = None,
    run_on: RunOn = "local",
    ray_address: str | None = None,
    filter: str | None = None,
    map: str | Callable[[dict[str, Any]], Any] | None = None,
    # documents only
    field: str | None = None,
    kind: str | None = None,
    split_on: str | None = None,
    fields: Sequence[str] | None = None,
    join: str | None = None,
    strip_front_matter: bool = False,
    val_tokens: int = 0,
    max_tokens: int | None = None,
    dtype: Literal["uint16", "uint32"] | None = None,
    append_eot: bool = True,
    engine_check: EngineCheck = "sample",
    append: bool = False,
    # conversations only
    shape: str | None = None,
    messages_field: str | None = None,
    role_field: str | None = None,
    content_field: str | None = None,
    role_map: Mapping[str, str] | None = None,
    split_think: bool = False,
    fan_out: bool = False,
    chat_template: str | None = None,
    template_vars: Mapping[str, JSON] | None = None,
    template_date: str | None = None,
    any_prompt: bool = False,
    train_on: TrainOn = "assistant",
    train_on_eot: bool = True,
) -> BuildReport:
    """Tokenise documents, or with a `template` conversations, into a store at `out`.

    `inputs` are files, folders, globs, URLs or hub datasets (`hub:owner/name`); with `ext` only
    files of these endings (".c,.h") in them, or members of archives. `out` is a folder,
    or a URL: then workers send their shards there, and `scratch` (default: the temporary folder)
    holds those at work. `template` is a known name, a .json or .toml file, "jinja" for the template
    of the tokenizer, or a .jinja file. `eot` and `special` give the literal strings of special
    tokens that the tokenizer does not name.

    A column that changes what is trained (`chosen`, `label`, `images`, ...) is refused unless it is
    read or named in `ignore_columns`. A build that loses more than `max_loss` of its rows, or keeps
    none without `allow_empty`, raises a `LossError` and publishes nothing; its work is kept.

    An unfinished build at `out` is refused unless `resume` (continue it) or `overwrite` (start
    again, replace a finished store) is given. `report` is a JSON file for times and counts.
    `on_progress` is called during the build.

    About `val_fraction` of the documents go to the split "val" and `test_fraction` to "test",
    chosen by a hash of `seed` and text (of a conversation its group, else its messages): the same
    ones in any order of the files. `workers` processes use at most `memory` bytes together, each
    with `unit_bytes` of input at a time; with `run_on="ray"` they run on the Ray cluster at
    `ray_address`. How the work is divided never changes a byte.

    `filter` is an expression over the columns of a row, which is kept where it is true:
    `lang == "en" and score > 0.6`. `map` names a function, "module:function", that workers import:
    it takes a row as a dict, and gives the text (of conversations the row) or None, which leaves it
    out.

    Documents: `kind` says how files are read ("text": each as one text, whatever it is called), and
    `split_on` parts text files ("line", "blank-line", or a regular expression). `field` holds the
    text, or `fields`, joined by `join` (default: a blank line). `strip_front_matter` leaves out the
    YAML or TOML block that a text begins with. The first `val_tokens` tokens go to "val" (or a
    share, as above), and up to `max_tokens` to "train". With `seed` the files are read in an order
    drawn from it. `append` adds new files to a finished store.

    Conversations: `shape` names the form of the records (default: found in the first one),
    `messages_field` their column of turns, `role_field` and `content_field` the keys of a turn, and
    `role_map` what the file's names of roles mean. With `split_think`, <think>...</think> before an
    assistant's words is its reasoning. `train_on` says which turns carry loss. With `fan_out` each
    answer becomes an example with everything before it, as a template writes it when it ends there.

    Jinja templates: `chat_template` names one of several that the tokenizer has, `template_vars`
    are its variables (`{"enable_thinking": False}`), `template_date` is today for it
    ("2024-07-26"), and with `any_prompt` answers need not follow the generation prompt.
    """
    given = locals()
    _refuse_other_kind(given)
    work = workplace_at(out, scratch)
    _check_target(work, report, may_exist=resume or overwrite)
    specials = {**(special or {}), **({"eot": eot} if eot else {})} or None
    run: Callable[..., BuildReport]
    source: Source | ConversationSource
    advice: Callable[[], AbstractContextManager[None]] = nullcontext
    how: dict[str, Any] = {"engine": engine, "resume": resume, "overwrite": overwrite}
    how |= {"scratch": scratch, "on_progress": on_progress}
    how |= {"max_loss": max_loss, "allow_empty": allow_empty}
    how |= {"workers": workers, "unit_bytes": unit_bytes, "memory": memory}
    how |= {"run_on": run_on, "ray_address": ray_address}
    if template is None:
        feed = open_feed(
            inputs,
            kind=kind,
            ext=ext,
            split_on=split_on,
            on_bad=on_bad,
            seed=seed,
            val_tokens=val_tokens,
            max_tokens=max_tokens,
            by_hash=hash_split(seed or 0, val_fraction, test_fraction),
            ignore_columns=ignore_columns or (),
            **{key: given[key] for key in ("field", *_MAPPING) if given[key] not in (None, False)},
        )
        source = feed.source
        split_rule = "all to train"
        if feed.by_hash is not None:
            split_rule = feed.by_hash.words()
        elif val_tokens:
            split_rule = f"the first {val_tokens:,} tokens to val, then train"
        run = partial(
            build_store,
            [feed],
            tokenizer=_open_tokenizer(tokenizer, specials),
            spec=BuildSpec(
                dataset_name=name or source.name,
                split_rule=split_rule,
                seed=seed or 0,
                shard_bytes=shard_bytes,
                dtype=dtype,
                append_eot=append_eot,
            ),
            engine_check=engine_check,
            append=append,
            **how,
        )
    else:
        rules = {key: given[key] for key in (*_READ_RULES, "ignore_columns") if given[key]}
        rules |= {key: given[key] for key in ("filter", "map") if given[key] is not None}
        source = open_chats(
            inputs, shape=shape, name=name, ext=ext, on_bad=on_bad or "error", **rules
        )
        options = {key: given[key] for key in _TEMPLATE_OPTIONS if given[key]}
        if fan_out and train_on == "all":
            raise OptionError(
                "{fan_out}: trains the last answer of each example; leave out {train_on}",
                fan_out=True,
                train_on="all",
            )
        last = fan_out or (train_on != "all" and preference_kind(source) is not None)
        policy = TrainPolicy(
            train_on="last-assistant" if last else train_on, train_on_eot=train_on_eot
        )
        any_encoder = True
        if is_jinja(template):
            opened = _open_tokenizer(tokenizer, specials)
            reopen = partial(_jinja_template, str(template), tokenizer, opened)
            advice = partial(advised, reopen, options, opened, source, policy)
            with advice():
                chosen = reopen(**options)
        else:
            opened, chosen, any_encoder = open_template(template, tokenizer, specials, **options)
        run = partial(
            build_chats,
            source,
            template=chosen,
            tokenizer=opened,
            any_encoder=any_encoder,
            spec=BuildSpec(
                dataset_name=name or source.name, seed=seed or 0, shard_bytes=shard_bytes
            ),
            policy=policy,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            **how,
        )
    _check_report(report, source)
    _check_inputs(work, source)
    with advice():
        done = run(out)
    if report is not None:
        try:
            Path(report).write_text(json.dumps(done.to_json(), indent=2) + "\n")
        except OSError as error:
            raise BuildError(
                f"{{report}}: cannot be written: {error.strerror}; the store at {work} is "
                "complete: for its report name another file, and pass {resume}",
                report=str(report),
                resume=True,
            ) from error
    return done


def pack(
    store: str | Path,
    seq_len: int,
    *,
    split: str = "train",
    algorithm: Algorithm = "best-fit",
    seed: int | None = None,
    max_per_row: int | None = None,
    align_to: int = 1,
    long: Long = "error",
    name: str | None = None,
    overwrite: bool = False,
    allow_empty: bool = False,
) -> StoredPlan:
    """Decide which conversations of a chat store share a row of `seq_len + 1` tokens.

    Writes a plan beside the store; no token is copied. `long` says what happens to conversations
    that no row holds. `seed` belongs to "first-fit-shuffle". Every conversation starts at a
    multiple of `align_to`, and a row has at most `max_per_row` of them. `name` defaults to one made
    from the options; `overwrite` allows another plan of that name to be replaced. When no row is
    packed, a `LossError` is raised unless `allow_empty`.
    """
    options = PlanOptions(
        seq_len=seq_len,
        algorithm=algorithm,
        seed=seed,
        max_per_row=max_per_row,
        align_to=align_to,
        long=long,
    )
    return build_plan(
        store, split, options=options, name=name, overwrite=overwrite, allow_empty=allow_empty
    )


def open_feed(
    inputs: Inputs,
    *,
    kind: str | None = None,
    ext: Endings = None,
    split_on: str | None = None,
    on_bad: OnBad | None = None,
    seed: int | None = None,
    val_tokens: int = 0,
    max_tokens: int | None = None,
    by_hash: HashSplit | None = None,
    ignore_columns: Sequence[str] = (),
    **columns: Any,
) -> Feed:
    """Documents, and the splits they fill: "val" first if `val_tokens` is given, then "train"; or
    those that `by_hash` chooses. `columns`: the options that say what of a row becomes a document.
    A `field` that no row has is refused, before a build would leave out every row, and so are
    columns that change what documents mean."""
    for key, limit in (("val_tokens", val_tokens), ("max_tokens", max_tokens or 0)):
        if limit < 0:
            raise OptionError(f"{{{key}}}: wanted 0 or more", **{key: limit})
    given = {"on_bad": on_bad, "kind": kind, "ext": ext, "split": split_on}
    options = columns | {key: value for key, value in given.items() if value}
    source = open_source(inputs, seed=seed, **options)
    if list(columns) == ["field"]:  # a mapping looks for its columns itself
        _check_field(source, columns["field"])
    check_columns(source, field=columns.get("field"), ignored=ignore_columns)
    if by_hash is not None and by_hash.fractions:
        if val_tokens or max_tokens is not None:
            key = "val_tokens" if val_tokens else "max_tokens"
            raise OptionError(
                f"{{{key}}}: counts tokens in the order of the input, which a split by a hash does "
                "not have: leave it out, or leave out {val_fraction} and {test_fraction}",
                **{key: val_tokens or max_tokens},
                val_fraction=...,
                test_fraction=...,
            )
        fill = tuple((split, None) for split in by_hash.splits)
        return Feed(source=source, fill=fill, by_hash=by_hash)
    val = (("val", val_tokens),) if val_tokens else ()
    return Feed(source=source, fill=(*val, ("train", max_tokens)))


def open_template(
    template: str | Path | ChatTemplate,
    tokenizer: str | Path | Tokenizer,
    special: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[Tokenizer, ChatTemplate, bool]:
    """A template by its name, from a file, or the tokenizer's own ("jinja"); before it its
    tokenizer, after it whether it may use a fast engine. `options`: those of Jinja templates."""
    opened = _open_tokenizer(tokenizer, special)
    path = Path(template) if isinstance(template, str | Path) else None
    if is_jinja(template):
        return opened, _jinja_template(str(template), tokenizer, opened, **options), True
    for name in options:
        raise OptionError(
            f"{{{name}}}: is for Jinja templates; use it with {{template}}, or a .jinja file",
            **{name: options[name]},
            template="jinja",
        )
    if path is None:
        assert not isinstance(template, str | Path)
        return opened, template, False
    is_file = path.suffix in (".json", ".toml")
    spec: TemplateSpec = load_template_spec(path) if is_file else known_template(str(template))
    return opened, bind_template(spec, opened), True


def is_jinja(template: str | Path | ChatTemplate) -> bool:
    """Whether this names a Jinja template."""
    if not isinstance(template, str | Path):
        return False
    return str(template) == "jinja" or Path(template).suffix in (".jinja", ".jinja2")


def _jinja_template(
    template: str,
    tokenizer: str | Path | Tokenizer,
    opened: Tokenizer,
    *,
    chat_template: str | None = None,
    template_vars: Mapping[str, JSON] | None = None,
    template_date: str | None = None,
    any_prompt: bool = False,
) -> ChatTemplate:
    text = chat_template
    if template != "jinja":
        if chat_template is not None:
            raise OptionError(
                "{chat_template}: names one of the tokenizer's own templates; use it with "
                "{template}",
                chat_template=chat_template,
                template="jinja",
            )
        try:
            text = Path(template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f"{{template}}: cannot be read: {error}", template=template
            ) from error
    if not isinstance(tokenizer, str | Path) or str(tokenizer).partition(":")[0] == "byte":
        raise OptionError(
            "{tokenizer}: has no Jinja template and takes none; wanted a folder or hub id that "
            "transformers opens, or a {template} made of tokens",
            tokenizer=str(tokenizer),
            template=...,
        )
    from shardmill.chat.jinja.template import open_jinja_template
    from shardmill.tokenizers.huggingface import load_transformers

    try:
        return open_jinja_template(
            load_transformers(_folder_of(tokenizer)),
            chat_template=text,
            variables=template_vars,
            now=None if template_date is None else _date(template_date),
            encoder=opened,
            any_prompt=any_prompt,
        )
    except TemplateError as error:
        raise TemplateError("{template}: {error}", template=template, error=error) from error


def _folder_of(tokenizer: str | Path) -> str:
    """What transformers opens: the folder of a tokenizer.json, a folder, or the id of a hub."""
    path = Path(tokenizer)
    is_file = path.name == "tokenizer.json" and path.is_file()
    return str(path.parent if is_file else tokenizer)


def _date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(
            "{template_date}: wanted a date such as 2024-07-26", template_date=text
        ) from None


def recorded_template(
    recorded: Mapping[str, Any], tokenizer: str | Path, opened: Tokenizer
) -> ChatTemplate:
    """The template that a store was rendered with, from what its manifest records."""
    if "spec" in recorded:
        return bind_template(spec_from_json(recorded["spec"]), opened)
    from shardmill.chat.jinja.template import open_jinja_template
    from shardmill.tokenizers.huggingface import load_transformers

    return open_jinja_template(
        load_transformers(_folder_of(tokenizer)),
        chat_template=recorded["source"],
        name=recorded["name"],
        variables=recorded["variables"],
        now=_date(recorded["date"]) if "date" in recorded else None,
        encoder=opened,
        any_prompt=recorded.get("any_prompt", False),
    )


def _open_tokenizer(
    tokenizer: str | Path | Tokenizer, special: Mapping[str, str] | None
) -> Tokenizer:
    if isinstance(tokenizer, str | Path):
        return open_tokenizer(tokenizer, specials=special)
    if special:
        raise OptionError(
            "{special}: names tokens of a tokenizer that is opened here; this one is open already",
            special=...,
        )
    return tokenizer


def _refuse_other_kind(given: Mapping[str, object]) -> None:
    """Refuse options that the other kind of build has."""
    is_chat = given["template"] is not None
    defaults: Mapping[str, object] = build.__kwdefaults__ or {}
    for name in _DOCUMENTS_ONLY if is_chat else _CHATS_ONLY:
        if given[name] != defaults[name]:
            why = (
                "is for documents, but a template makes these inputs conversations"
                if is_chat
                else "is for conversations, but without a template the inputs are documents"
            )
            raise OptionError(f"{{{name}}}: {why}", **{name: given[name]})


def _check_target(work: Workplace, report: str | Path | None, *, may_exist: bool) -> None:
    """Before any work: is an unfinished build in the way, can the report be written?"""
    if not may_exist and work.has_unfinished_build():
        raise UnfinishedBuildError(
            f"{work}: an earlier build did not finish: continue it with {{resume}}, or start "
            "again with {overwrite}",
            resume=True,
            overwrite=True,
        )
    if report is None:
        return
    path = Path(report)
    if not path.parent.is_dir():
        raise OptionError(f"{{report}}: there is no folder {path.parent}", report=str(path))
    if _is_inside(work, path.parent.resolve() / path.name):
        raise OptionError(
            f"{{report}}: is for the store alone, which goes to {work}; name a file elsewhere",
            report=str(path),
        )
    if path.is_dir():
        raise OptionError("{report}: this is a folder; name a file in it", report=str(path))


def _check_report(report: str | Path | None, source: object) -> None:
    """Refuse a report that would overwrite an input file."""
    if report is None or not Path(report).exists():
        return
    for file in getattr(source, "files", ()):
        if isinstance(file.place, Path) and file.place.samefile(report):
            raise OptionError(
                "{report}: this file is an input; name another for the report", report=str(report)
            )


def _check_inputs(work: Workplace, source: object) -> None:
    """Refuse input where the store goes: to replace the store would remove it."""
    places = {file.place for file in getattr(source, "files", ())}
    folders = {str(place).rpartition("/")[0]: place for place in places}
    for folder, place in folders.items():
        if _is_inside(work, Path(folder).resolve() if isinstance(place, Path) else folder):
            raise OptionError(
                f"{place}: an input, but it is in {work}, where the store goes: build elsewhere, "
                "or name the input without it, with a glob"
            )


def _is_inside(work: Workplace, place: Path | str) -> bool:
    """Whether something is, or would be, the folder of the store or in it."""
    target = re.sub("^(?:file|local)://", "", str(work))
    if target.startswith("/"):
        folder = Path(target).resolve()
        return bool({folder, workplace_of(folder)} & {place, *Path(place).parents})
    # memory:///bucket is memory://bucket
    return re.sub(":/+", "://", f"{place}/").startswith(re.sub(":/+", "://", f"{target}/"))


def _check_field(source: Source, field: str) -> None:
    """Refuse a field that no row has. Reads up to the first text, usually one batch."""
    num_rows = 0
    for batch in source.batches():
        if len(batch.texts) or batch.counts.get("empty"):
            return
        num_rows += batch.num_read
    if not num_rows:
        return
    names = sorted({name for row in _first_rows(source) for name in row})
    known = f"; {choices(field, names, verb='the fields are')}" if names else ""
    raise SourceError(
        f"{source.name}: none of {num_rows:,} rows has text in the field {field!r}{known}; name "
        "the field that holds the documents with {field}",
        field=...,
    )


def _first_rows(source: Source) -> Iterator[dict[str, object]]:
    parts = source.parts if isinstance(source, ConcatSource) else [source]
    files = [file for part in parts if isinstance(part, JsonlSource) for file in part.files]
    paths = [file.place for file in files if isinstance(file.place, Path)]
    if paths:
        yield from islice(iter_jsonl_rows(paths), _FIELD_ROWS)
