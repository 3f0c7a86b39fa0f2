"""Options that several commands share, and values as people type them.

A command is a frozen record of its options, its docstring is its help, and `run` gives its answer.
A field is an option with the words of its annotation:

    out: Annotated[str, "Where the store goes."]                     --out, required
    resume: Annotated[bool, "Continue an unfinished build."] = False --resume
    steps: Annotated[str | None, "--step", "Steps A:B."] = None      another flag than its name
    folder: Annotated[Path, "FOLDER", "The store."]                  an argument

Each option has the name of the keyword of the function that it is passed to. `app.py` makes typer's
parameters of them; a field without such words is no option.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from shardmill.errors import OptionError, ShardmillError, StateMismatchError


def complete_split(ctx: Any, incomplete: str) -> list[str]:
    """The splits of the first store named before the option, for the shell's completion.

    Whatever is wrong with a store, nothing is offered and nothing is printed. An option that waits
    for its value leaves the words before it unparsed.
    """
    from shardmill.store.manifest import read_manifest

    folders = [ctx.params.get("folder"), ctx.params.get("source"), *ctx.args]
    for folder in filter(None, folders):
        try:
            splits = read_manifest(Path(folder)).splits
        except (ShardmillError, OSError, ValueError):
            continue
        return [name for name in splits if name.startswith(incomplete)]
    return []


AsJson = Annotated[bool, "--json", "Print the receipt as JSON."]
TokenizerName = Annotated[str, "'byte', a .model file, a tokenizer.json, a folder or a hub id."]
Special = Annotated[
    list[str] | None, "NAME=STRING, once per special token that the tokenizer does not name."
]
RoleMap = Annotated[
    str | None,
    "NAME=ROLE,NAME=ROLE: what the file's names of roles mean, as human=user,ai=assistant.",
]
Split = Annotated[str | None, "Default: 'train'.", complete_split]
SplitOfStore = Annotated[str, "Of the store.", complete_split]
Field = Annotated[str | None, "Field that holds the text."]
Kind = Annotated[
    Literal["jsonl", "json", "csv", "tsv", "parquet", "arrow", "tar", "zip", "text"] | None,
    "How files are read, whatever they are called; text: each is one document.",
]
Ext = Annotated[
    str | None, "Only files of these endings, or members of archives, as .c,.h; *: any."
]
Fields = Annotated[
    str | None, "NAME,NAME: fields that are joined, instead of --field; empty ones are left out."
]
Join = Annotated[
    str | None, r"What is put between --fields; \n is a line end, \t a tab. Default: a blank line."
]
Filter = Annotated[
    str | None, "Keep rows for which this is true, as 'lang == \"en\" and score > 0.6'."
]
Map = Annotated[
    str | None, "MODULE:FUNCTION that makes the text of a row, a dict; None leaves it out."
]
IgnoreColumns = Annotated[
    list[str] | None,
    "--ignore-column",
    "A column such as label or chosen that changes nothing here; once for each.",
]
DataConfigFile = Annotated[Path | None, "A TOML file whose \\[data] table names the sources."]


def parse_special(items: list[str] | None) -> dict[str, str] | None:
    """["eot=<|end|>"] as a dict; None when none was given."""
    found: dict[str, str] = {}
    for item in items or ():
        name, equals, text = item.partition("=")
        if not (name and equals and text) or name in found:
            raise OptionError(f"--special {item!r}: wanted NAME=STRING, each name once")
        found[name] = text
    return found or None


def parse_template_vars(items: list[str] | None) -> dict[str, Any] | None:
    """["enable_thinking=false"] as a dict; a value that is not JSON is a text."""
    found: dict[str, Any] = {}
    for item in items or ():
        name, equals, text = item.partition("=")
        if not (name and equals) or name in found:
            raise OptionError(f"--template-var {item!r}: wanted NAME=VALUE, each name once")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found or None


def parse_role_map(text: str | None) -> dict[str, str] | None:
    """ "human=user,ai=assistant" as a dict; None when none was given."""
    found: dict[str, str] = {}
    for item in (text or "").split(",") if text is not None else ():
        name, equals, role = (part.strip() for part in item.rpartition("="))
        if not (name and equals and role) or name in found:
            raise OptionError(
                "{role_map}: wanted NAME=ROLE,NAME=ROLE, each name once", role_map=text
            )
        found[name] = role
    return found or None


def parse_fields(text: str | None) -> list[str] | None:
    """ "title,text" as a list."""
    return None if text is None else [name.strip() for name in text.split(",")]


def parse_join(text: str | None) -> str | None:
    r"""With \n, \t and \\ as what they stand for."""
    known = {"n": "\n", "t": "\t", "\\": "\\"}
    return None if text is None else re.sub(r"\\([nt\\])", lambda found: known[found[1]], text)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str, option: str) -> int:
    """A size such as 134217728, 128MiB or 1GB; KiB is 1024 bytes, KB 1000."""
    match = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise OptionError(
            f"{{{option}}}: wanted a number of bytes, or a size like 128MiB or 1GB",
            **{option: text},
        )
    return int(match[1]) * _UNITS[match[2].upper()]


def read_state(path: Path) -> dict[str, Any]:
    """The state of a loader or stream from a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"--state {path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise StateMismatchError(
            f"--state {path}: a {type(found).__name__}, wanted a state that was saved as JSON"
        )
    return found
