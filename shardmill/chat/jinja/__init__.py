"""Chat templates written in Jinja, as Hugging Face tokenizers carry them.

renderings.py  runs a template as transformers does; all that it must write about a conversation
sandbox.py     runs the template of a stranger within a budget
compiling.py   makes its code ask the sandbox before it does anything
library.py     the filters, tests, functions and methods that it can use
template.py    the ChatTemplate: turns and mask, proved on the conversation's own tokens
"""
