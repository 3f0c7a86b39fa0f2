"""`shardmill look`: what is in files, what would be trained, and the command to run next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from shardmill.arguments import whole_number
from shardmill.building.loss import MAX_LOSS
from shardmill.chat import KNOWN_TEMPLATES
from shardmill.cli.options import (
    AsJson,
    Field,
    IgnoreColumns,
    RoleMap,
    Special,
    parse_role_map,
    parse_special,
)
from shardmill.cli.printing import Answer, Heading, Line, Span
from shardmill.cli.terminal import one_line, visible
from shardmill.inspect.look import Lengths, Look, LookedColumn, look
from shardmill.sources import SHAPES


@dataclass(frozen=True, kw_only=True)
class LookCommand:
    """Prints the columns, the shape or field, three examples, their lengths, and the command to run
    next. What would be trained is green, or in [[ ]]. Reads the first rows only; writes nothing.

    Example: shardmill look c.jsonl

    Example: shardmill look c.jsonl --tokenizer spm.model --template chatml

    Example: shardmill look 'data/*.jsonl' --rows 20 --json

    Exit 0: looked. Exit 1: nothing in it can be built. Exit 2: a mistake in the call or its input.
    """

    inputs: Annotated[
        list[str], "INPUTS", "Files, folders, globs, URLs or hub:owner/name, as for build."
    ]
    shape: Annotated[str | None, f"Shape of the records: {', '.join(SHAPES)}. Default: found."] = (
        None
    )
    field: Field = None
    messages_field: Annotated[str | None, "Column that holds the turns. Default: found."] = None
    role_field: Annotated[str | None, "Key of a turn: who speaks. Default: role or from."] = None
    content_field: Annotated[str | None, "And what is said. Default: content or value."] = None
    role_map: RoleMap = None
    split_think: Annotated[
        bool, "<think>...</think> before an assistant's words is its reasoning."
    ] = False
    ignore_columns: IgnoreColumns = None
    tokenizer: Annotated[str | None, "To count tokens, as for build."] = None
    template: Annotated[
        str | None, f"To render conversations, with --tokenizer: {', '.join(KNOWN_TEMPLATES)}."
    ] = None
    special: Special = None
    rows: Annotated[int, "The most rows to read."] = 100
    examples: Annotated[int, "How many examples to show."] = 3
    as_json: AsJson = False

    def run(self) -> Answer:
        keywords = {name: value for name, value in vars(self).items() if name != "as_json"}
        found = look(
            **keywords
            | {
                "special": parse_special(self.special),
                "role_map": parse_role_map(self.role_map),
                "rows": whole_number(self.rows, "rows"),
                "examples": whole_number(self.examples, "examples", least=0),
            }
        )
        problems = [one_line(problem) for problem in found.problems]
        return Answer(found.to_json(), _lines(found), problems, found=not found.commands, indent=2)


def _lines(found: Look) -> Iterator[Line]:
    formats = ", ".join(f"{count:,} of {name}" for name, count in found.formats.items())
    size = "" if found.num_bytes is None else f", {found.num_bytes:,} bytes"
    more = "all there are" if found.is_all else "of more"
    names = " ".join(map(one_line, found.inputs))
    yield f"{names}: files: {formats}{size}; {found.num_rows:,} rows seen, {more}"
    for column in found.columns:
        yield f"  {_column(column)}"
    what = {
        "documents": "documents" + (f" in the field {found.field!r}" if found.field else ""),
        "conversations": f"conversations of the shape {found.shape!r}",
        "unknown": "nothing that can be built",
    }[found.kind]
    yield one_line(f"{what}: {found.why}")
    for meaning in found.meanings:
        yield one_line(f"would be ignored: {meaning}")
    if found.characters is not None:
        yield f"lengths in characters: {_lengths(found.characters)}"
    if found.tokens is not None:
        yield f"lengths in tokens: {_lengths(found.tokens)}"
    if found.left_out:
        counts = ", ".join(f"{count:,} {why}" for why, count in found.left_out.items())
        share = sum(found.left_out.values()) / max(found.num_rows, 1)
        limit = f"; a build refuses more than {MAX_LOSS:.0%} without --max-loss"
        yield f"would be left out: {counts}{limit if share > MAX_LOSS else ''}"
    for example in found.examples:
        yield Heading(visible(example.id))
        for part in example.parts:
            is_end = part.text == "\n" and part.marker and not found.is_rendered
            text = part.text if is_end else visible(part.text)
            yield Span(text=text, trained=part.trained, marker=part.marker)
        if example.num_left_out:
            yield Heading(f"... {example.num_left_out:,} characters left out")
    if found.commands:
        yield "to build it:" if len(found.commands) == 1 else "to build it, choose one:"
    for command in found.commands:
        if command.why:
            yield one_line(f"  where {command.why}:")
        yield one_line(f"  {command.line}")


def _column(column: LookedColumn) -> str:
    kinds = ", ".join(f"{kind} in {count:,}" for kind, count in column.kinds.items())
    null = f"null or missing in {column.num_null:,}" if column.num_null else ""
    return one_line(f"{column.name}: {', '.join(filter(None, [kinds, null]))}")


def _lengths(lengths: Lengths) -> str:
    return (
        f"{lengths.least:,} to {lengths.most:,}, half of them up to {lengths.median:,}; "
        f"{lengths.total:,} in all"
    )
