"""Chat templates written in Jinja, as Hugging Face tokenizers carry them.

engine.py      runs one template, as transformers does
renderings.py  what it does, found once by trying it; everything it must write about a conversation
template.py    the ChatTemplate: turns and mask, proved on the conversation's own tokens
"""

from __future__ import annotations

from shardmill.chat.jinja.template import JinjaTemplate, open_jinja_template

__all__ = ["JinjaTemplate", "open_jinja_template"]
