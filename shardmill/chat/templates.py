"""Known templates, as data of the shape in spec.py.

four-marker  one token opens each role, one ends every message; no place for tools
chatml       <|im_start|>role ... <|im_end|>; tools, calls and results as JSON in tags, <think>
llama-3      header tokens; contents are trimmed, as the model's own template does
gemma        system is folded into the first user turn; the assistant is called model; trimmed

A model's newer template may say more (a date, a default system text): these say what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.arguments import nearest
from shardmill.chat.spec import TemplateSpec, spec_from_json
from shardmill.errors import OptionError
from shardmill.records import JSON


def _turn(before: list[JSON], end: str, after: str = "") -> JSON:
    behind: list[JSON] = [{"text": after}] if after else []
    return {"before": before, "end": [{"marker": end}], "after": behind}


def _chatml(opening: str) -> JSON:
    return _turn([{"marker": "<|im_start|>"}, {"text": opening}], "<|im_end|>", "\n")


def _llama(header: str) -> JSON:
    opening: list[JSON] = [
        {"marker": "<|start_header_id|>"},
        {"text": header},
        {"marker": "<|end_header_id|>"},
        {"text": "\n\n"},
    ]
    return _turn(opening, "<|eot_id|>")


def _gemma(name: str) -> JSON:
    return _turn([{"marker": "<start_of_turn>"}, {"text": f"{name}\n"}], "<end_of_turn>", "\n")


_TOOL_INTRO = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOL_OUTRO = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

_DATA: tuple[dict[str, JSON], ...] = (
    {
        "name": "four-marker",
        "roles": {
            "system": _turn([{"marker": "sys"}], "eot"),
            "user": _turn([{"marker": "usr"}], "eot"),
            "assistant": _turn([{"marker": "asst"}], "eot"),
        },
    },
    {
        "name": "chatml",
        "roles": {
            "system": _chatml("system\n"),
            "user": _chatml("user\n"),
            "assistant": _chatml("assistant\n"),
            "tool": {
                "before": [{"marker": "<|im_start|>"}, {"text": "tool\n<tool_response>\n"}],
                "end": [{"text": "\n</tool_response>"}, {"marker": "<|im_end|>"}],
                "after": [{"text": "\n"}],
            },
        },
        "reasoning": {"before": [{"text": "<think>\n"}], "after": [{"text": "\n</think>\n\n"}]},
        "tool_call": {
            "before": [{"text": "<tool_call>\n"}],
            "after": [{"text": "\n</tool_call>"}],
            "between": [{"text": "\n"}],
        },
        "tools": {
            "before": [{"text": _TOOL_INTRO}],
            "after": [{"text": _TOOL_OUTRO}],
            "between": [{"text": "\n\n"}],
        },
    },
    {
        "name": "llama-3",
        "begin": [{"marker": "<|begin_of_text|>"}],
        "trim": True,
        "roles": {
            "system": _llama("system"),
            "user": _llama("user"),
            "assistant": _llama("assistant"),
        },
    },
    {
        "name": "gemma",
        "begin": [{"marker": "<bos>"}],
        "trim": True,
        "fold_system": "\n\n",
        "roles": {"user": _gemma("user"), "assistant": _gemma("model")},
    },
)

KNOWN_TEMPLATES: Mapping[str, TemplateSpec] = {
    str(data["name"]): spec_from_json(data, where=f"template {data['name']}") for data in _DATA
}
"""Name to template."""


def known_template(name: str) -> TemplateSpec:
    """A known template by its name; OptionError with the nearest names otherwise."""
    if name in KNOWN_TEMPLATES:
        return KNOWN_TEMPLATES[name]
    near = nearest(name, KNOWN_TEMPLATES)
    hint = f"; did you mean {near!r}?" if near else ""
    raise OptionError(
        f"no template is called {name!r}{hint} (known: {', '.join(KNOWN_TEMPLATES)}; or give a "
        ".json or .toml file)"
    )
