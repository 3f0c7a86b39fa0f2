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

What the templates of some families need besides:

    "default_system": "...",    written before a conversation without a system turn; no turn, so
                                never trained, unless tools make it one
    "join": true,               what is inside a turn is encoded as one text between markers, as a
                                rendered template is; otherwise every text by itself. With it:
    "roles": {..., "tool": {..., "content": {"before": [...], "after": [...], "between": [...]},
                            "json": true}},
                                around the words of a role, and words as a JSON string; tool results
                                in a run share a turn if there is a `between`. Where a turn of the
                                assistant starts with its words, content.before is in the opening
    "no_reasoning": [...],      ends the opening of an assistant's turn without reasoning
    "preamble": {"before": [...], "after": [...]},   around the words of a turn with calls
    "call_end": [...],          the end of a turn with calls, instead of roles.assistant.end
    "tools_end": [...],         the end of a system turn with tools, instead of roles.system.end
    "tools_separator": ", ",    between tools, instead of a newline
    "tools_first": true,        tools, then `between`, then the words of the system turn
    "argument": {"before": [...], "after": [...]},   around each argument of a call, by itself
    "shared_ends": true         the end of an answer may be the marker that opens another role: a
                                turn of that role right after it is written without its own

`{"value": "name"}` and `{"value": "id"}` stand for the name of the function and the id of the call:
in tool_call.before, where a name leaves only the arguments for the text of the call; and in
roles.tool.content.before, of the call that is answered. `{"value": "key"}` in argument.before
stands for the name of the argument.

A turn without a marker at one side is accepted where its neighbours always have one: all turns but
the assistant's may lack an end if every turn opens with a marker, the assistant's may lack an
opening if every other turn has both, and a system turn without an opening comes first.

The known templates are such files in `templates/`. docs/chats.md lists them, and where they differ
from the models' own.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

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


@dataclass(frozen=True, slots=True)
class Value:
    """A part of a tool call: the "name" of its function, its "id", or the "key" of an argument."""

    value: str


Piece: TypeAlias = Marker | Text | Value
Fragments: TypeAlias = tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Insert:
    """What surrounds reasoning, a call or tools inside a turn; trained with the turn."""

    between: Fragments = ()  # before `before`, if something of the turn precedes it
    before: Fragments = ()
    after: Fragments = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """What surrounds the words of one role's turns."""

    before: Fragments = ()  # opens the turn; never trained
    end: Fragments = ()  # trained with a trained turn, if the policy trains ends
    after: Fragments = ()  # never trained
    content: Insert | None = None  # around the words; trained with them
    json: bool = False  # the words are written as a JSON string


INSERTS = ("reasoning", "tool_call", "tools")
"""The fields of a spec that are an `Insert` with pieces of their own."""


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
    default_system: str | None = None  # the system turn of a conversation that has none
    join: bool = False  # encode the texts inside a turn as one
    no_reasoning: Fragments = ()  # after the assistant's `before` if there is no reasoning
    call_end: Fragments = ()  # instead of roles.assistant.end after calls
    preamble: Insert | None = None  # around the assistant's words before calls
    tools_end: Fragments = ()  # instead of roles.system.end after tools
    tools_separator: str = "\n"
    tools_first: bool = False  # tools before the words
    argument: Insert | None = None  # around each argument of a call
    shared_ends: bool = False  # an end may open the next turn

    def to_json(self) -> dict[str, JSON]:
        """`spec_from_json` gives an equal spec back. What is as it is without its key has none,
        apart from the oldest keys, so that a template keeps its sha256."""
        data = {key: value for key, value in asdict(self).items() if value is not None}
        for key in data.keys() & {*INSERTS, *_FRAMES}:
            data[key] = {part: pieces for part, pieces in data[key].items() if pieces}
        for key in (*_NEEDS_JOIN, "join"):
            if not data.get(key):
                data.pop(key, None)
        if data["tools_separator"] == "\n":
            del data["tools_separator"]
        for role in data["roles"].values():
            around = role.pop("content")
            if around is not None:
                role["content"] = {part: pieces for part, pieces in around.items() if pieces}
            if not role["json"]:
                del role["json"]
        found: dict[str, JSON] = json.loads(json.dumps(data, sort_keys=True))  # tuples to lists
        return found


_SWITCHES = ("trim", "join", "tools_first", "shared_ends")
_FRAMES = ("preamble", "argument")
_TEXTS = ("fold_system", "default_system", "tools_separator")
_NEEDS_JOIN = (
    *("no_reasoning", "call_end", "tools_end", "tools_first", "shared_ends"),
    *_FRAMES,
)


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
    for key in _SWITCHES:
        _check_bool(table, key, where)
    for key in _TEXTS:
        text = table.get(key)
        if not isinstance(text, str | None) or not has_bytes(text or ""):
            raise TemplateError(f"{where}: {key} is {text!r}, wanted a text")
    roles = _table(table.get("roles"), ROLES, f"{where}, roles")
    pieces: dict[str, Any] = {
        key: _pieces(table[key], f"{where}, {key}")
        for key in ("begin", "no_reasoning", "call_end", "tools_end")
        if key in table
    }
    inserts: dict[str, Any] = {
        key: _insert(table[key], f"{where}, {key}", key)
        for key in (*INSERTS, *_FRAMES)
        if key in table
    }
    plain: dict[str, Any] = {
        key: table[key] for key in (*_TEXTS, *_SWITCHES) if table.get(key) is not None
    }
    spec = TemplateSpec(
        name=name,
        roles={role: _role(one, f"{where}, roles.{role}") for role, one in roles.items()},
        **pieces,
        **inserts,
        **plain,
    )
    _check_whole(spec, where)
    _check_join(spec, where)
    return spec


def _check_whole(spec: TemplateSpec, where: str) -> None:
    missing = {"user", "assistant"} - spec.roles.keys()
    if missing:
        raise TemplateError(f"{where}: roles has no {' and no '.join(sorted(missing))}")
    if spec.fold_system is not None and "system" in spec.roles:
        raise TemplateError(f"{where}: has both roles.system and fold_system; wanted one of them")
    for key in ("tools", "default_system"):
        if getattr(spec, key) is not None and "system" not in spec.roles:
            raise TemplateError(
                f"{where}: {key} is written in the system turn, but there is no roles.system"
            )
    openers = {
        next((p for p in s.before if isinstance(p, Marker)), None) for s in spec.roles.values()
    }
    assistant = spec.roles["assistant"].before[:1]
    opens = {role: _has_marker(one.before) for role, one in spec.roles.items()}
    ends = {role: _has_marker(one.end) for role, one in spec.roles.items()}
    for role, one in spec.roles.items():
        for piece in (*one.end, *spec.call_end, *spec.tools_end):
            if piece in openers and not (spec.shared_ends and piece not in assistant):
                raise TemplateError(
                    f"{where}, roles.{role}.end: {piece} opens turns, so a model trained on it "
                    "would not stop but begin the next turn; move it to 'after' or remove it"
                )
        others = [other for other in spec.roles if other != role]
        if role == "assistant":
            may_lack_opening = all(opens[other] and ends[other] for other in others)
        else:
            may_lack_opening = system_must_be_first(spec) and _has_marker(spec.begin)
            may_lack_opening &= role == "system"
        may_lack_end = role != "assistant" and all(opens[o] for o in spec.roles if o != "system")
        for key, pieces, may_lack in (
            ("before", one.before, may_lack_opening),
            ("end", one.end, may_lack_end),
        ):
            if not _has_marker(pieces) and not may_lack:
                raise TemplateError(
                    f"{where}, roles.{role}.{key}: has no marker, so text could imitate it; wanted "
                    'at least one {"marker": ...}'
                )
    for key in ("call_end", "tools_end"):
        pieces = getattr(spec, key)
        if pieces and not _has_marker(pieces):
            raise TemplateError(
                f"{where}, {key}: has no marker, so text could imitate it; wanted at least one "
                '{"marker": ...}'
            )


def _has_marker(pieces: Fragments) -> bool:
    return any(isinstance(piece, Marker) for piece in pieces)


def system_must_be_first(spec: TemplateSpec) -> bool:
    """Whether nothing but its position tells a system turn from another."""
    return "system" in spec.roles and not _has_marker(spec.roles["system"].before)


def _check_join(spec: TemplateSpec, where: str) -> None:
    """Errors for keys that need another, and for what only some of them may hold."""
    of_roles = [
        f"roles.{role}.{key}"
        for role, one in spec.roles.items()
        for key in ("content", "json")
        if getattr(one, key)
    ]
    for key in (*of_roles, *(key for key in _NEEDS_JOIN if getattr(spec, key))):
        if not spec.join:
            raise TemplateError(f'{where}: {key} needs "join": true')
    for role, one in spec.roles.items():
        if one.content and one.content.between and role != "tool":
            raise TemplateError(
                f"{where}, roles.{role}.content.between: only tool results can share a turn"
            )
    answer = spec.roles["assistant"]
    if answer.json or (answer.content and answer.content.after):
        raise TemplateError(
            f"{where}, roles.assistant: what it says is trained as it is, so wanted no `json`, and "
            "no content.after: what follows the words is roles.assistant.end"
        )
    for key, needed in (
        *(("call_end", "tool_call"), ("preamble", "tool_call"), ("argument", "tool_call")),
        *(("tools_end", "tools"), ("tools_first", "tools")),
    ):
        if getattr(spec, key) and getattr(spec, needed) is None:
            raise TemplateError(f"{where}: {key} needs {needed}")
    values = [p for p in spec.tool_call.before if isinstance(p, Value)] if spec.tool_call else []
    if values and not spec.join:
        raise TemplateError(f'{where}, tool_call.before: a {{"value": ...}} needs "join": true')
    if spec.argument and Value("name") not in values:
        raise TemplateError(f'{where}: argument needs {{"value": "name"}} in tool_call.before')


def _check_bool(table: Mapping[str, object], key: str, where: str) -> None:
    if not isinstance(table.get(key, False), bool):
        raise TemplateError(f"{where}: {key} is {table[key]!r}, wanted true or false")


def _role(data: object, where: str) -> RoleSpec:
    table = _table(data, RoleSpec.__dataclass_fields__, where)
    _check_bool(table, "json", where)
    parts: dict[str, Any] = {
        key: _pieces(table[key], f"{where}.{key}")
        for key in ("before", "end", "after")
        if key in table
    }
    if "content" in table:
        parts["content"] = _insert(table["content"], f"{where}.content", where.split(".")[-1])
    return RoleSpec(**parts, json=bool(table.get("json")))


def _insert(data: object, where: str, name: str) -> Insert:
    """`name`: of the key, or of the role whose content it is."""
    keys = list(Insert.__dataclass_fields__)
    if name in ("reasoning", *_FRAMES):
        keys.remove("between")
    table = _table(data, keys, where)
    values = {"tool_call": ("name", "id"), "tool": ("name", "id"), "argument": ("key",)}
    return Insert(
        **{
            key: _pieces(pieces, f"{where}.{key}", values.get(name, ()) if key == "before" else ())
            for key, pieces in table.items()
        }
    )


def _pieces(data: object, where: str, values: tuple[str, ...] = ()) -> Fragments:
    """The pieces of a list; `values`: those of a call that may be among them."""
    if not isinstance(data, list | tuple):
        raise TemplateError(f"{where} is {data!r}, wanted a list of pieces")
    kinds: dict[str, type[Piece]] = {"marker": Marker, "text": Text}
    kinds |= {"value": Value} if values else {}
    pieces: list[Piece] = []
    for number, piece in enumerate(data):
        at = f"{where}[{number}]"
        table = _table(piece, kinds, at)
        if len(table) != 1:
            raise TemplateError(f'{at} is {piece!r}, wanted {{"marker": ...}} or {{"text": ...}}')
        ((key, text),) = table.items()
        if not isinstance(text, str) or not text or not has_bytes(text):
            raise TemplateError(f"{at}.{key} is {text!r}, wanted a text")
        if key == "value" and text not in values:
            wanted = " or ".join(map(repr, values))
            raise TemplateError(f"{at}.value is {text!r}, wanted {wanted}")
        pieces.append(kinds[key](text))
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


KNOWN_TEMPLATES = (
    "four-marker",
    "chatml",
    "llama-3",
    "gemma",
    "qwen2.5",
    "qwen3",
    "qwen3-instruct",
    "mistral",
    "mistral-v3",
    "phi-3",
    "phi-4",
    "smollm3",
    "glm-4.5",
    "deepseek-r1",
    "gpt-oss",
)
"""Their names; each is a file in `templates/`."""


def known_template(name: str) -> TemplateSpec:
    """A known template by its name; otherwise OptionError with the nearest name."""
    if name in KNOWN_TEMPLATES:
        return load_template_spec(Path(__file__).parent / "templates" / f"{name}.json")
    raise OptionError(
        f"no template is called {name!r}; {choices(name, KNOWN_TEMPLATES)}; or pass a .json or "
        ".toml file"
    )
