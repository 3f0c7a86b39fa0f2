"""What the keys of a config say together.

In: a config whose values are all of the right kind.  Out: one sentence for each problem, which
begins with the key.
Promise: a key that the chosen backend or kind of tokenizer would not look at is refused when it was
written: its writer believes that it does something. (Keys of chomp that belong to another backend
are named and left out before; see read.)
Not here: what only the tokenizer itself can tell (tokenizers), values of one key (models).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from shardmill.streaming.config.models import DataSection, StreamConfig, TokenizerSection

BACKENDS_OF: Mapping[str, tuple[str, ...]] = {
    "hf_dataset": ("hf",),
    "hf_name": ("hf",),
    "hf_split": ("hf",),
    "hf_eval_split": ("hf",),
    "hf_revision": ("hf",),
    "max_retries": ("hf",),
    "retry_delay_sec": ("hf",),
    "text_key": ("hf", "files"),
    "local_text": ("local_text",),
    "local_eval_text": ("local_text",),
    "files": ("files",),
    "eval_files": ("files",),
    "files_kind": ("files",),
    "on_bad": ("files",),
}
"""Which backends look at a key of `data`; keys that are not here: all."""

KINDS_OF: Mapping[str, tuple[str, ...]] = {
    "hf_name_or_path": ("hf",),
    "hf_revision": ("hf",),
    "path": ("hf", "sentencepiece"),
    "byte_offset": ("byte",),
    "snapshot": ("hf", "sentencepiece", "byte"),
}
"""Which kinds look at a key of `data.tokenizer`; keys that are not here: all."""

NEEDED = {"hf": "hf_dataset", "local_text": "local_text", "files": "files"}
"""The key of `data` that a backend cannot do without."""


def problems_of(config: StreamConfig) -> list[str]:
    """Every problem, in the order of the sections; an empty list when all is well."""
    return [*_data_problems(config.data), *_tokenizer_problems(config.data.tokenizer)]


def unused_keys(config: StreamConfig) -> set[str]:
    """Keys with their path that this config does not look at, and an unset `text_key` of files."""
    data, tokenizer = config.data, config.data.tokenizer
    found = {f"data.{key}" for key, of in BACKENDS_OF.items() if data.backend not in of}
    found |= {f"data.tokenizer.{key}" for key, of in KINDS_OF.items() if tokenizer.kind not in of}
    if data.text_field != data.text_key:
        found.add("data.text_key")
    return found


def _data_problems(data: DataSection) -> Iterator[str]:
    needed = NEEDED[data.backend]
    if getattr(data, needed) is None:
        yield f'data.{needed}: missing; data.backend = "{data.backend}" needs it'
    yield from _refused(data, "data", BACKENDS_OF, "backend", data.backend)
    if data.files_kind not in (None, "jsonl") and "on_bad" in data.model_fields_set:
        yield f'data.on_bad: for jsonl files; data.files_kind is "{data.files_kind}": leave it away'
    if data.files_kind == "text" and "text_key" in data.model_fields_set and data.text_key:
        yield 'data.text_key: text files have no fields (data.files_kind = "text"): leave it away'


def _tokenizer_problems(tokenizer: TokenizerSection) -> Iterator[str]:
    at = "data.tokenizer"
    yield from _refused(tokenizer, at, KINDS_OF, "kind", tokenizer.kind)
    named = [key for key in ("hf_name_or_path", "path") if getattr(tokenizer, key) is not None]
    if tokenizer.kind == "hf" and len(named) == 2:
        yield f"{at}.path: {at}.hf_name_or_path names a tokenizer too; name one of them"
    if tokenizer.kind == "hf" and not named and tokenizer.snapshot is None:
        yield (
            f"{at}.hf_name_or_path: missing; a hub id or a folder, or a tokenizer.json as "
            f'{at}.path, or {at}.kind = "byte"'
        )
    if tokenizer.kind == "sentencepiece" and not named and tokenizer.snapshot is None:
        yield f'{at}.path: missing; {at}.kind = "sentencepiece" needs a .model file'
    if tokenizer.hf_revision is not None and tokenizer.hf_name_or_path is None:
        yield f"{at}.hf_revision: there is no hub id in {at}.hf_name_or_path that it belongs to"


def _refused(
    section: BaseModel, at: str, meant_for: Mapping[str, tuple[str, ...]], chooser: str, chosen: str
) -> Iterator[str]:
    for key, choices in meant_for.items():
        written = key in section.model_fields_set and getattr(section, key) is not None
        if written and chosen not in choices:
            wanted = " or ".join(f'"{choice}"' for choice in choices)
            yield f'{at}.{key}: for {at}.{chooser} = {wanted}, not "{chosen}": leave it away'
