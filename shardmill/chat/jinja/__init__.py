"""Chat templates written in Jinja, as Hugging Face tokenizers carry them.

engine.py    runs one template; the one importer of jinja2
facts.py     what a template does, found once by trying it
words.py     what a template is given, and whether it wrote all of it
writing.py   everything it must write about one conversation
encode.py    those renderings as tokens
turns.py     turns and mask, proved on the conversation's own tokens
examples.py  many conversations at a time
template.py  the ChatTemplate made of these
"""

from __future__ import annotations

from shardmill.chat.jinja.template import JINJA_REASONS, JinjaTemplate, open_jinja_template

__all__ = ["JINJA_REASONS", "JinjaTemplate", "open_jinja_template"]
