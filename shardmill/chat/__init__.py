"""Conversation to ids, and which of them are trained.

contract.py   what every template promises
roles.py      who speaks, under which names
check.py      is this a conversation? if not, the reason code
tools.py      tool calls and definitions as text
spec.py       a template as data;  templates.py the known ones
bind.py       a template meets a tokenizer
template.py   conversations -> ids, mask, turns; by places.py, turns.py, assemble.py
policy.py     which turns are trained
mask.py       ids that come without turns -> which of them the assistant said
fit/          examples -> rows of one length
jinja/        templates written as text, by whoever can render them
proof/        is a template's mask right? a certificate, or the smallest conversation that shows not
"""

from __future__ import annotations

from shardmill.chat.fit import (
    FIT_REASONS,
    FIT_SENTENCES,
    Fit,
    FitCounts,
    FittedRows,
    collate_rows,
    fit_rows,
)
from shardmill.chat.jinja import JINJA_REASONS, JinjaTemplate, open_jinja_template
from shardmill.chat.messages import (
    REASONS,
    CheckedMessage,
    check_messages,
    reason_to_drop,
    special_in_text,
)
from shardmill.chat.policy import (
    ROLE_NAMES,
    ChatTemplate,
    Rendered,
    TrainOn,
    TrainPolicy,
    assistant_mask,
    normal_role,
    trained_turns,
)
from shardmill.chat.proof import Certificate, prove_mask
from shardmill.chat.template_spec import (
    KNOWN_TEMPLATES,
    Insert,
    Marker,
    RoleSpec,
    TemplateSpec,
    Text,
    known_template,
    load_template_spec,
    spec_from_json,
)
from shardmill.chat.token_template import TokenTemplate, bind_template
from shardmill.errors import MaskProofError

__all__ = [
    "KNOWN_TEMPLATES",
    "REASONS",
    "ROLE_NAMES",
    "Certificate",
    "ChatTemplate",
    "CheckedMessage",
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
    "TrainOn",
    "TrainPolicy",
    "assistant_mask",
    "bind_template",
    "check_messages",
    "fit_rows",
    "known_template",
    "load_template_spec",
    "normal_role",
    "open_jinja_template",
    "prove_mask",
    "reason_to_drop",
    "spec_from_json",
    "special_in_text",
    "trained_turns",
    "FIT_REASONS",
    "FIT_SENTENCES",
    "FitCounts",
    "collate_rows",
    "JINJA_REASONS",
]
