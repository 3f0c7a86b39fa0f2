"""Chat templates written in Jinja, as Hugging Face tokenizers carry them.

engine.py      runs one template, as transformers does
facts.py       what a template does, found once by trying it
renderings.py  everything it must write about one conversation
template.py    the ChatTemplate: turns and mask, proved on the conversation's own tokens
"""

from __future__ import annotations

from shardmill.chat.jinja.template import JINJA_REASONS, JinjaTemplate, open_jinja_template

__all__ = ["JINJA_REASONS", "JinjaTemplate", "open_jinja_template"]
