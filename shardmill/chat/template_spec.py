"""Chat templates as data: which tokens and which fixed text surround the words of a turn.

A template is a JSON or TOML file, or the same as a dict. Every turn opens and ends with a marker, a
token that no text can become, so no text can imitate a turn.

    {"name": "chatml",
     "begin": [],                                  opens a conversation
     "roles": {"user": {"before": [{"marker": "<|im_start|>"}, {"text": "user\\n"}],
                        "end": [{"marker": "<|im_end|>"}],    trained with a trained turn
                        "after": [{"text": "\\n"}]}, ...},     never trained
     "fold_system": "\\n\\n",    instead of roles.system: put it at the start of the user turn
     "trim": true,               strip white space around contents
     "reasoning": {"before": [...], "after": [...]},                       before the words
     "tool_call": {"before": [...], "after": [...], "between": [...]},     after them, each call
     "tools": {"before": [...], "after": [...], "between": [...]}}         in the system turn

`between` is written only if something of the turn precedes it. A missing key is empty; a
conversation that needs a missing role, reasoning, tool_call or tools is dropped with a reason.

The known templates are such files in `templates/`. They follow the models' own, without additions
of newer versions such as a date:

four-marker  one token opens each role, one ends every message; no tools
chatml       <|im_start|>role ... <|im_end|>; tools, calls and results as JSON in tags, <think>
llama-3      header tokens; contents are trimmed
gemma        system is folded into the first user turn; the assistant is called model; trimmed
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from shardmill.arguments import choices
from shardmill.chat.policy import has_bytes
from shardmill.errors import OptionError, TemplateError
from shardmill.records import JSON, ROLES


@dataclass(frozen=True, slots=True)
class Marker:
    """One special token, by its name ("eot") or its literal string ("<|im_end|>")."""

    marker: str


@dataclass(frozen=True, slots=True)
class Text:
    """Fixed text, encoded on its own."""

    text: str


Fragments: TypeAlias = tuple[Marker | Text, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """What surrounds the words of one role's turns."""

    before: Fragments = ()  # opens the turn; never trained
    end: Fragments = ()  # trained with a trained turn, if the policy trains ends
    after: Fragments = ()  # never trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Insert:
    """What surrounds reasoning, a call or tools inside a turn; trained with the turn."""

    between: Fragments = ()  # before `before`, if something of the turn precedes it
    before: Fragments = ()
    after: Fragments = ()


Surrounding = TypeVar("Surrounding", RoleSpec, Insert)
INSERTS = ("reasoning", "tool_call", "tools")
"""The fields of a spec that are an `Insert`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSpec:
    """One template, not yet bound to a tokenizer."""

    name: str
    begin: Fragments = ()
    roles: Mapping[str, RoleSpec]  # user and assistant at least
    fold_system: str | None = None  # between a system message and the user's words after it
    trim: bool = False
    reasoning: Insert | None = None
    tool_call: Insert | None = None
    tools: Insert | None = None

    def to_json(self) -> dict[str, JSON]:
        """`spec_from_json` gives an equal spec back."""
        data = {key: value for key, value in asdict(self).items() if value is not None}
        for key in data.keys() & INSERTS:
            data[key] = {part: pieces for part, pieces in data[key].items() if pieces}
        found: dict[str, JSON] = json.loads(json.dumps(data, sort_keys=True))  # tuples to lists
        return found


def load_template_spec(path: str | Path) -> TemplateSpec:
    """A template from a .json or .toml file."""
    path = Path(path)
    where = f"template {path}"
    if path.suffix not in (".json", ".toml"):
        raise TemplateError(f"{where}: wanted a file that ends in .json or .toml")
    try:
        text = path.read_text("utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as problem:
        raise TemplateError(f"{where}: cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise TemplateError(f"{where}: not {path.suffix[1:].upper()}: {problem}") from problem
    return spec_from_json(data, where=where)


def spec_from_json(data: object, *, where: str = "template") -> TemplateSpec:
    """A template from a dict of the shape above; error messages start with `where`."""
    table = _table(data, TemplateSpec.__dataclass_fields__, where)
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise TemplateError(f"{where}: name is {name!r}, wanted a text")
    fold, trim = table.get("fold_system"), table.get("trim", False)
    if not isinstance(trim, bool) or not isinstance(fold, str | None):
        raise TemplateError(
            f"{where}: trim is {trim!r} and fold_system {fold!r}; wanted true or false, and a text"
        )
    roles = _table(table.get("roles"), ROLES, f"{where}, roles")
    inserts = {key: table[key] for key in INSERTS if key in table}
    spec = TemplateSpec(
        name=name,
        begin=_pieces(table.get("begin", []), f"{where}, begin"),
        roles={
            role: _surrounding(RoleSpec, one, f"{where}, roles.{role}")
            for role, one in roles.items()
        },
        fold_system=fold,
        trim=trim,
        **{key: _surrounding(Insert, one, f"{where}, {key}") for key, one in inserts.items()},
    )
    _check_whole(spec, where)
    return spec


def _check_whole(spec: TemplateSpec, where: str) -> None:
    missing = {"user", "assistant"} - spec.roles.keys()
    if missing:
        raise TemplateError(f"{where}: roles has no {' and no '.join(sorted(missing))}")
    if spec.fold_system is not None and "system" in spec.roles:
        raise TemplateError(f"{where}: has both roles.system and fold_system; wanted one of them")
    if spec.tools is not None and "system" not in spec.roles:
        raise TemplateError(
            f"{where}: tools are written in the system turn, but there is no roles.system"
        )
    openers = {
        next((p for p in s.before if isinstance(p, Marker)), None) for s in spec.roles.values()
    }
    for role, one in spec.roles.items():
        for piece in one.end:
            if piece in openers:
                raise TemplateError(
                    f"{where}, roles.{role}.end: {piece} opens turns, so a model trained on it "
                    "would not stop but begin the next turn; move it to 'after' or remove it"
                )
        for key, pieces in (("before", one.before), ("end", one.end)):
            if not any(isinstance(piece, Marker) for piece in pieces):
                raise TemplateError(
                    f"{where}, roles.{role}.{key}: has no marker, so text could imitate it; wanted "
                    'at least one {"marker": ...}'
                )


def _surrounding(kind: type[Surrounding], data: object, where: str) -> Surrounding:
    keys = list(kind.__dataclass_fields__)
    if where.endswith("reasoning"):
        keys.remove("between")  # nothing of a turn precedes its reasoning
    table = _table(data, keys, where)
    return kind(**{key: _pieces(value, f"{where}.{key}") for key, value in table.items()})


def _pieces(data: object, where: str) -> Fragments:
    if not isinstance(data, list | tuple):
        raise TemplateError(f"{where} is {data!r}, wanted a list of pieces")
    pieces: list[Marker | Text] = []
    for number, piece in enumerate(data):
        at = f"{where}[{number}]"
        table = _table(piece, ("marker", "text"), at)
        if len(table) != 1:
            raise TemplateError(f'{at} is {piece!r}, wanted {{"marker": ...}} or {{"text": ...}}')
        ((key, value),) = table.items()
        if not isinstance(value, str) or not value or not has_bytes(value):
            raise TemplateError(f"{at}.{key} is {value!r}, wanted a text")
        pieces.append(Marker(value) if key == "marker" else Text(value))
    return tuple(pieces)


def _table(data: object, keys: Iterable[str], where: str) -> Mapping[str, object]:
    """The data, checked to be an object with only these keys."""
    if not isinstance(data, Mapping):
        raise TemplateError(f"{where} is {data!r}, wanted an object")
    known = list(keys)
    for key in data:
        if key not in known:
            raise TemplateError(f"{where}: unknown key {key!r}; {choices(str(key), known)}")
    return data


KNOWN_TEMPLATES = ("four-marker", "chatml", "llama-3", "gemma")
"""Their names; each is a file in `templates/`."""


def known_template(name: str) -> TemplateSpec:
    """A known template by its name; otherwise OptionError with the nearest name."""
    if name in KNOWN_TEMPLATES:
        return load_template_spec(Path(__file__).parent / "templates" / f"{name}.json")
    raise OptionError(
        f"no template is called {name!r}; {choices(name, KNOWN_TEMPLATES)}; or pass a .json or "
        ".toml file"
    )
