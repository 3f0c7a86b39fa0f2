"""`shardmill blame`: from a token of a store to its file, its row and its characters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from shardmill.building.api import open_template, recorded_template
from shardmill.cli.options import Special, parse_special
from shardmill.cli.printing import Answer, escape_brackets
from shardmill.cli.steps import Rank, TrainingOrder, find_moment
from shardmill.cli.terminal import visible
from shardmill.errors import OptionError
from shardmill.inspect.blame import Blame, blame_document, blame_tokens
from shardmill.inspect.inputs import AnySource, recorded_reading, recorded_rules
from shardmill.inspect.stores import open_named
from shardmill.sources import open_chats, open_source
from shardmill.store import Store, open_store

_AROUND = 60
"""Characters that are shown on each side."""


@dataclass(frozen=True, kw_only=True)
class BlameCommand(TrainingOrder):
    """The row is read and encoded again, and must give the stored tokens. Instead of --token, a
    token of a document (--document, --offset) or of a training's batch (--step, --batch-size,
    --seq-len, --row, --column) can be asked for.

    Prints source, file, row and characters of each token, with the text around it.

    Example: shardmill blame store --token 99 --input 'data/*.jsonl' --tokenizer spm.model

    Exit 0: found and proved. Exit 2: a mistake in the call, or another input than the build had.
    """

    folder: Annotated[Path, "FOLDER", "The store."]
    tokenizer: Annotated[str, "The tokenizer that the store was built with."]
    token: Annotated[int | None, "Position of the token in the split."] = None
    stop: Annotated[int | None, "Up to this one: several tokens."] = None
    document: Annotated[int | None, "Instead of --token: which document, from 0."] = None
    offset: Annotated[int | None, "Which token of it. Default: 0."] = None
    inputs: Annotated[
        list[str] | None, "--input", "What the store was built from, as it was given to `build`."
    ] = None
    field: Annotated[str | None, "As the build had it."] = None
    on_bad: Annotated[Literal["error", "skip"] | None, "As the build had it."] = None
    map: Annotated[str | None, "The --map of the build, if it had one: it is run again."] = None
    file_seed: Annotated[int | None, "The --seed of the build, if it had one."] = None
    shape: Annotated[str | None, "Of chats, as the build had it."] = None
    template: Annotated[str | None, "Of chats. Default: the one that the store records."] = None
    special: Special = None
    fill: Annotated[
        str | None, "Order of the splits, e.g. val,train, if the store does not record it."
    ] = None
    step: Annotated[int | None, "Instead of --token: a step of a training, from 0."] = None
    rank: Rank = None
    row: Annotated[int, "Which row of the batch."] = 0
    column: Annotated[int, "Which token of the row."] = 0
    as_json: Annotated[bool, "--json", "Print one object."] = False

    def run(self) -> Answer:
        store = open_store(self.folder)
        split, token = _find_token(store, self)
        special, template = parse_special(self.special), None
        tokenizer = open_named(self.tokenizer, special, store)
        recorded = (store.manifest.options.get("chat") or {}).get("template") or {}
        if self.template is not None:
            _, template, _ = open_template(self.template, self.tokenizer, special)
        elif recorded.get("kind") == "jinja" and "source" in recorded:
            template = recorded_template(recorded, self.tokenizer, tokenizer)
        found = blame_tokens(
            store,
            split,
            range(token, token + 1 if self.stop is None else self.stop),
            inputs=_open_inputs(store, self),
            tokenizer=tokenizer,
            template=template,
            fill=None if self.fill is None else self.fill.split(","),
        )
        facts = {"store": str(self.folder), "tokens": [asdict(one) for one in found]}
        return Answer(facts, (line for one in found for line in _lines(one)))


def _find_token(store: Store, options: BlameCommand) -> tuple[str, int]:
    """The split and the position of the token that the options name."""
    chosen = [name for name in ("token", "document", "step") if getattr(options, name) is not None]
    given = options.given()
    if len(chosen) != 1 or (given and chosen != ["step"]):
        flags = [f"--{name}" for name in chosen if name != "step"] + given
        raise OptionError(
            f"found {' and '.join(flags) or 'no token'}; wanted one of --token, --document and "
            "--step, with its own options"
        )
    if options.step is not None:
        return _token_of_step(options)
    split = options.split or "train"
    if options.document is None:
        assert options.token is not None, "one of the three is given"
        return split, options.token
    tokens, offset = blame_document(store, split, options.document), options.offset or 0
    if not 0 <= offset < len(tokens):
        raise OptionError(f"--offset {offset}: the document has {len(tokens):,} tokens")
    return split, tokens[offset]


def _token_of_step(options: BlameCommand) -> tuple[str, int]:
    """The token at a column of a row of a batch."""
    _, moment = find_moment(options.folder, options)
    with closing(moment.stream):
        planned = moment.plan()
    row, column = options.row, options.column
    if not 0 <= row < len(planned):
        raise OptionError(f"--row {row}: the batch has {len(planned)} rows")
    plan = planned[row]
    if not 0 <= column < plan.stop - plan.start:
        raise OptionError(f"--column {column}: a row has {plan.stop - plan.start:,} tokens")
    return plan.split or "train", plan.start + column


def _open_inputs(store: Store, options: BlameCommand) -> AnySource | None:
    if options.inputs is None:
        return None
    wanted = {
        "field": options.field,
        "on_bad": options.on_bad,
        "seed": options.file_seed,
        "shape": options.shape,
    }
    given = recorded_rules(store.manifest.sources, options.map)
    if not store.is_chat:
        given |= recorded_reading(store.manifest.sources)
    given |= {key: value for key, value in wanted.items() if value is not None}
    return (open_chats if store.is_chat else open_source)(options.inputs, **given)


def _lines(one: Blame) -> Iterator[str]:
    own = f" (id {visible(one.own_id)})" if one.own_id is not None else ""
    turn = "" if one.turn is None else f", turn {one.turn} ({one.role})"
    part = f" {one.part}" if one.part not in (None, "content") else ""
    yield (
        f"split {one.split!r}, token {one.token:,} = id {one.token_id}: document {one.document:,}, "
        f"token {one.offset:,} of it"
    )
    yield (
        f"  from {visible(one.source)}, {visible(one.row_id)}{own}{turn}{part}; found by "
        f"{one.found_by}"
    )
    if one.start is None or one.stop is None:
        yield f"  {one.note}"
        return
    before = one.text[max(0, one.start - _AROUND) : one.start]
    after = one.text[one.stop : one.stop + _AROUND]
    shown = f"{_inline(before)}[[{_inline(one.characters)}]]{_inline(after)}"
    yield f"  characters {one.start:,}..{one.stop:,}: {shown}"


def _inline(text: str) -> str:
    """One line, nothing invisible, no brackets like ours."""
    return escape_brackets(visible(text).replace("\\n\n", "\\n"))
