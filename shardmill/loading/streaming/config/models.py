"""The settings of a stream, as records that cannot be wrong in kind.

In: values as TOML, YAML, JSON or Python have them.  Out: frozen models with every default.
Promise: a key nobody knows is refused; "8" is no number, true is no number, 8.0 is no whole number;
what is returned makes sense as a whole (checks).
Not here: files and overrides (read), the wording of refusals (messages). A model that is called
directly raises pydantic's own error, which is a ValueError; `read_config` raises OptionError.

What the keys of a config say together.

In: a config whose values are all of the right kind.  Out: one sentence for each problem, which
begins with the key.
Promise: a key that the chosen backend or kind of tokenizer would not look at is refused when it was
written: its writer believes that it does something. (Keys of chomp that belong to another backend
are named and left out before; see read.)
Not here: what only the tokenizer itself can tell (tokenizers), values of one key (models).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from shardmill.urls import scrub

if TYPE_CHECKING:
    from pydantic import BaseModel


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


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _as_texts(value: Any) -> Any:
    if isinstance(value, str | os.PathLike):
        return (_as_text(value),)
    return tuple(map(_as_text, value)) if isinstance(value, list | tuple) else value


def _or_none(value: int) -> int | None:
    return value or None


Count = Annotated[int, Field(ge=1, lt=2**63)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Size = Annotated[int, Field(ge=1, lt=2**31)]
Word = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$"), BeforeValidator(_as_text)]
Words = Annotated[tuple[Word, ...], Field(min_length=1), BeforeValidator(_as_texts)]
Texts = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_as_texts)]
Limit = Annotated[int, Field(ge=0, lt=2**63), AfterValidator(_or_none)]  # 0: none


class Section(BaseModel):
    """What all tables have in common."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Files may lie at URLs with secrets, which no repr shows."""
        for name, value in super().__repr_args__():
            if isinstance(value, str):
                yield name, scrub(value)
            elif isinstance(value, tuple):
                yield name, tuple(scrub(one) if isinstance(one, str) else one for one in value)
            else:
                yield name, value


class TokenizerSection(Section):
    """`data.tokenizer`: text to ids, and what stands before and behind a document."""

    kind: Literal["hf", "byte", "sentencepiece"] = "hf"
    hf_name_or_path: Word | None = None  # a hub id or a folder
    hf_revision: Word | None = None
    path: Word | None = None  # a tokenizer.json, a .model, or the folder of one
    specials: dict[Word, Word] | None = None  # name to literal string; None: as the files say
    engine: Literal["auto", "reference", "fast"] = "auto"
    add_bos: bool = False
    add_eos: bool = True
    vocab_size_multiple: Size = 128
    auto_set_special_tokens: bool = True
    byte_offset: Id = 0
    max_doc_tokens: Limit | None = None
    snapshot: Word | None = None  # a folder that `save_tokenizer` wrote


class DataSection(Section):
    """`data`: which documents, in which order, and how they become rows."""

    backend: Literal["hf", "local_text", "files"] = "hf"
    hf_dataset: Word | None = None
    hf_name: Word | None = None
    hf_split: Word = "train"
    hf_eval_split: Word | None = None
    hf_revision: Word | None = None
    text_key: Word | None = "text"
    local_text: Texts | None = None
    local_eval_text: Texts | None = None
    files: Words | None = None
    eval_files: Words | None = None
    files_kind: Literal["text", "jsonl", "parquet"] | None = None
    on_bad: Literal["error", "skip"] = "error"
    shuffle: bool = True
    shuffle_buffer_size: Count = 10_000
    shuffle_buffer_bytes: Count = 256 * 2**20
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    repeat: bool = True
    num_streams: Size | None = None
    state_update_interval: Count = 2000
    max_retries: Annotated[int, Field(ge=0, lt=2**31)] = 5
    retry_delay_sec: Annotated[float, Field(ge=0)] = 1.0
    packing_mode: Literal["sequential", "bin"] = "sequential"
    packing_algorithm: Literal["best-fit", "first-fit"] = "first-fit"
    packing_buffer_docs: Count = 4096
    packing_buffer_tokens: Count = 2**24
    packing_max_docs_per_bin: Size | None = None
    mask_boundary_loss: bool = True
    train_on_eos: bool = True
    grain_prefetch: Annotated[int, Field(ge=0, le=1024)] = 2
    max_eval_samples: Count | None = None
    tokenizer: TokenizerSection = TokenizerSection()

    @property
    def text_field(self) -> str | None:
        """The field that holds the text; None: the source chooses, as for files by default."""
        by_default = self.backend == "files" and "text_key" not in self.model_fields_set
        return None if by_default else self.text_key


class TrainSection(Section):
    """`train`: the shape [grad_accum, batch_size, seq_len] of every batch."""

    seq_len: Size
    batch_size: Size
    grad_accum: Size = 1


class ModelSection(Section):
    """`model`: what the model was made for; None: as the tokenizer says."""

    vocab_size: Size | None = None
    bos_token_id: Id | None = None
    eos_token_id: Id | None = None
    pad_token_id: Id | None = None


class StreamValues(Section):
    """All sections, each value of the right kind; whether they go together is not looked at."""

    data: DataSection
    train: TrainSection
    model: ModelSection = ModelSection()


class StreamConfig(StreamValues):
    """Everything a stream is made from. Equal configs and equal data, equal batches."""

    @model_validator(mode="after")
    def _makes_sense(self) -> StreamConfig:
        problems = problems_of(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self
