"""Chat: from conversations to token ids and a loss mask.

policy.py          checked messages or a reason, trained turns, and what a template promises
template_spec.py   a template as data; the known ones are in templates/
layout.py          conversations to turns: which texts are encoded, and what surrounds them
token_template.py  a template bound to a tokenizer: conversations to ids and mask
jinja/             templates written in Jinja
proof/             proof of a template's loss mask: a certificate, or a smallest counterexample
fit.py             examples to rows of one length
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.chat.fit import Fit, FittedRows, fit_rows
from shardmill.chat.policy import (
    REASONS,
    TRAIN_ON,
    ChatTemplate,
    Rendered,
    TrainPolicy,
    assistant_mask,
)
from shardmill.chat.proof.prove import Certificate, prove_mask
from shardmill.chat.template_spec import (
    KNOWN_TEMPLATES,
    Insert,
    Marker,
    RoleSpec,
    TemplateSpec,
    Text,
    Value,
    known_template,
    load_template_spec,
    spec_from_json,
)
from shardmill.chat.token_template import TokenTemplate, bind_template, with_encoder
from shardmill.errors import MaskProofError
from shardmill.lazy import lazy_getattr

if TYPE_CHECKING:
    from shardmill.chat.jinja.template import JinjaTemplate, open_jinja_template

__getattr__ = lazy_getattr(  # needs jinja2
    __name__, {"shardmill.chat.jinja.template": ["JinjaTemplate", "open_jinja_template"]}
)

__all__ = [
    "KNOWN_TEMPLATES",
    "REASONS",
    "TRAIN_ON",
    "Certificate",
    "ChatTemplate",
    "Fit",
    "FittedRows",
    "Insert",
    "JinjaTemplate",
    "Marker",
    "MaskProofError",
    "Rendered",
    "RoleSpec",
    "TemplateSpec",
    "Text",
    "TokenTemplate",
    "TrainPolicy",
    "Value",
    "assistant_mask",
    "bind_template",
    "fit_rows",
    "known_template",
    "load_template_spec",
    "open_jinja_template",
    "prove_mask",
    "spec_from_json",
    "with_encoder",
]
