"""Run one Jinja template of one tokenizer, exactly as transformers runs it.

Text, ids and assistant mask are those of `apply_chat_template`. Any error inside a template becomes
a `TemplateError` with its line, if Jinja knows it. The clock is never read. Transformers renders in
Jinja's immutable sandbox, so a template cannot reach files, processes or Python's internals, and a
single range has at most 100,000 items. Time and memory are not limited: nested loops or a long
string are noticed only when the template returns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from shardmill.errors import ShardmillError, TemplateError, TokenizerError, missing_extra
from shardmill.records import JSON, BoolArray, IntArray

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

_NOT_THE_TEMPLATE = (ShardmillError, ImportError, OSError)
"""Code inside the sandbox cannot raise these; everything else is the template's fault."""
_CLOCK = "strftime_now"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class JinjaTokenizer(Protocol):
    """What a tokenizer needs; those of transformers have it."""

    chat_template: Any
    all_special_tokens: list[str]
    all_special_ids: list[int]

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def __call__(self, text: list[str], **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class JinjaEngine:
    """The template `source` with its variables, run by `tokenizer`."""

    def __init__(
        self, tokenizer: JinjaTokenizer, source: str, variables: Mapping[str, JSON]
    ) -> None:
        try:
            from jinja2 import TemplateSyntaxError
        except ImportError as missing:
            raise missing_extra("jinja2", "hub") from missing
        self._syntax_error = TemplateSyntaxError
        self.tokenizer = tokenizer
        self.source = source
        self.has_blocks = _GENERATION.search(source) is not None
        self._variables = dict(variables)
        if _CLOCK in source:
            # Defined but not callable: a template that asks for the date fails visibly.
            self._variables.setdefault(_CLOCK, None)

    def text(self, messages: Messages, tools: Tools = None, *, prompt: bool = False) -> str:
        """What the template writes, followed by the generation prompt if `prompt`."""
        found = self._apply(messages, tools, add_generation_prompt=prompt, tokenize=False)
        if not isinstance(found, str):
            raise TokenizerError(
                f"apply_chat_template(tokenize=False) gave a {type(found).__name__}: wanted a str"
            )
        return found

    def text_or_none(
        self, messages: Messages, tools: Tools = None, *, prompt: bool = False
    ) -> str | None:
        """What the template writes; None if it refuses these messages."""
        try:
            return self.text(messages, tools, prompt=prompt)
        except TemplateError:
            return None

    def ids(self, texts: Sequence[str]) -> list[IntArray]:
        """The ids of each text with nothing added, as `apply_chat_template` encodes its output."""
        if not texts:
            return []
        found = self.tokenizer(
            list(texts), add_special_tokens=False, padding=False, truncation=False, verbose=False
        )
        return [np.asarray(ids, np.int64) for ids in found["input_ids"]]

    def encode(self, messages: Messages, tools: Tools = None) -> tuple[IntArray, BoolArray | None]:
        """The ids of a conversation in one call, and which of them are inside the template's
        generation blocks, if it has any."""
        if not self.has_blocks:
            found = self._apply(messages, tools, tokenize=True, return_dict=False)
            return np.asarray(found, np.int64), None
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
        except _NOT_THE_TEMPLATE:
            raise
        except Exception as problem:  # a template can raise anything that Python can
            line = self._line_of(problem)
            where = "" if line is None else f", line {line}"
            message = " ".join(str(problem).split())[:300] or "no message"
            message = f"the template raised {type(problem).__name__}{where}: {message}"
            if _CLOCK in self.source and "not callable" in str(problem):
                message += (
                    f"; it asks for today's date ({_CLOCK}), and equal input must give equal "
                    "tokens: fix the date with variables={'date_string': '26 Jul 2024'}, or "
                    "whichever variable the template looks at first"
                )
            raise TemplateError(message) from problem

    def _line_of(self, problem: Exception) -> int | None:
        """The line of the template, from 1: of the syntax error, or the innermost that ran."""
        if isinstance(problem, self._syntax_error):
            return problem.lineno
        found, trace = None, problem.__traceback__
        while trace is not None:
            # Jinja rewrites its frames so that their lines are those of the template.
            if trace.tb_frame.f_code.co_filename == "<template>":
                found = trace.tb_lineno
            trace = trace.tb_next
        return found
