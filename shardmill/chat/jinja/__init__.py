"""Chat templates written in Jinja, as Hugging Face tokenizers carry them.

renderings.py  runs a template as transformers does; all that it must write about a conversation
template.py    the ChatTemplate: turns and mask, proved on the conversation's own tokens
"""

from __future__ import annotations

from shardmill.chat.jinja.template import JinjaTemplate, open_jinja_template

__all__ = ["JinjaTemplate", "open_jinja_template"]
