"""Chat templates written in Jinja, as Hugging Face tokenizers carry them.

sandbox.py, library.py, compiling.py  run a template as transformers does, within a budget
values.py    values that record what a template does with the texts of a conversation
engine.py    one template with its tokenizer, on those values and as transformers runs it
layout.py    where turns and trained tokens are in what was written
forms.py     the same compiled: how all conversations of one shape are written
template.py  the ChatTemplate
"""
