"""One Jinja template of one tokenizer, as transformers runs it. The one importer of jinja2.

In: messages and tools.  Out: the text the template writes, its ids, its assistant mask.
Promise: text, ids and mask are the tokenizer's own (`apply_chat_template`); whatever goes wrong
inside a template is a `TemplateError` that names its line where Jinja knows it; the clock is never
read.
Not here: what the text means. Transformers renders in Jinja's immutable sandbox, so a template
cannot reach files, processes or Python's insides, and a single range is at most 100,000 long. Time
and memory are not bounded: nested loops or a long string are only seen when the template returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from shardmill.errors import ShardmillError, TemplateError, TokenizerError, missing_extra
from shardmill.records import JSON, BoolArray, IntArray

try:
    from jinja2 import TemplateSyntaxError
except ImportError as missing:
    raise missing_extra("jinja2", "hub") from missing

_OUTSIDE = (ShardmillError, ImportError, OSError)
"""What no code inside the sandbox raises; everything else is taken for the template's doing."""
_FILE = "<template>"  # what Jinja calls a template in tracebacks
_MOST_SAID = 300

_CLOCK = "strftime_now"


class JinjaTokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers have it."""

    chat_template: Any
    all_special_tokens: list[str]
    all_special_ids: list[int]

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def __call__(self, text: list[str], **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


class JinjaEngine:
    """The template `source` with its variables, run by `tokenizer`."""

    def __init__(
        self, tokenizer: JinjaTokenizer, source: str, variables: Mapping[str, JSON]
    ) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self._variables = dict(variables)
        if _CLOCK in source:
            # Defined, but nothing one can call: a template that asks for the date fails, loudly.
            self._variables.setdefault(_CLOCK, None)

    def text(self, messages: Messages, tools: Tools = None, *, prompt: bool = False) -> str:
        """What the template writes, with the generation prompt behind it if asked."""
        found = self._apply(messages, tools, add_generation_prompt=prompt, tokenize=False)
        if not isinstance(found, str):
            raise TokenizerError(
                f"apply_chat_template(tokenize=False) gave a {type(found).__name__}: wanted a str"
            )
        return found

    def ids(self, texts: Sequence[str]) -> list[IntArray]:
        """The ids of each text, nothing added: as `apply_chat_template` encodes what it wrote."""
        if not texts:
            return []
        found = self.tokenizer(
            list(texts), add_special_tokens=False, padding=False, truncation=False, verbose=False
        )
        return [np.asarray(ids, np.int64) for ids in found["input_ids"]]

    def whole(self, messages: Messages, tools: Tools = None) -> IntArray:
        """The ids of a conversation in one call."""
        found = self._apply(messages, tools, tokenize=True, return_dict=False)
        return np.asarray(found, np.int64)

    def generated(self, messages: Messages, tools: Tools = None) -> tuple[IntArray, BoolArray]:
        """Ids, and which of them the template's generation blocks hold, in one call."""
        found = self._apply(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = found.get("assistant_masks")
        ids = np.asarray(found["input_ids"], np.int64)
        if mask is None or np.shape(mask) != ids.shape:
            raise TokenizerError(
                f"{type(self.tokenizer).__name__} gives no assistant mask: generation blocks need "
                "a fast tokenizer of transformers; remove the blocks, or use such a tokenizer"
            )
        return ids, np.asarray(mask, np.bool_)

    def _apply(self, messages: Messages, tools: Tools, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=self.source,
                **options,
                **self._variables,
            )
        except _OUTSIDE:
            raise
        except Exception as problem:  # a template can raise whatever Python can
            raise TemplateError(self._told(problem)) from problem

    def _told(self, problem: Exception) -> str:
        line = _line_of(problem)
        said = " ".join(str(problem).split())[:_MOST_SAID] or "no message"
        where = "" if line is None else f", line {line}"
        told = f"the template raised {type(problem).__name__}{where}: {said}"
        if _CLOCK in self.source and "not callable" in str(problem):
            told += (
                f"; it asks for today's date ({_CLOCK}), and equal input must give equal tokens: "
                "fix the date with variables={'date_string': '26 Jul 2024'}, or whatever variable "
                "the template looks at first"
            )
        return told


def _line_of(problem: Exception) -> int | None:
    """The line of the template, from 1: where it cannot be read, or the innermost that ran."""
    if isinstance(problem, TemplateSyntaxError):
        return problem.lineno
    found, trace = None, problem.__traceback__
    while trace is not None:
        # Jinja rewrites its frames, so that their lines are those of the template.
        if trace.tb_frame.f_code.co_filename == _FILE:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found
