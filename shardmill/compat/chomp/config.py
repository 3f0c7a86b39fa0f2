"""chomp's config: `data`, `train` and `model` of a training run that streams text.

The file may be the whole config of a run. Sections and keys that belong to the trainer are ignored
and named in one warning; a key that is nearly one of ours is refused as misspelt, and so is an
unknown key of `data`, since it may decide which batches come.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from shardmill.loading.config_reader import (
    Between,
    Section,
    Text,
    apply_overrides,
    config_fields,
    make_record,
    read_values,
    refuse,
    written_values,
)
from shardmill.records import JSON

_log = logging.getLogger(__name__)

Count = Annotated[int, Between(1, 2**63)]
Id = Annotated[int, Between(0, 2**31)]
Size = Annotated[int, Between(1, 2**31)]
Limit = Annotated[int, Between(0, 2**63), lambda value: value or None]  # 0: none
Paths = Annotated[tuple[Text, ...], "not empty"]
Documents = Annotated[tuple[str, ...], "not empty"]


@dataclass(frozen=True, kw_only=True, repr=False)
class TokenizerSection(Section):
    """`data.tokenizer`: text to ids, and which ids begin and end a document."""

    kind: Literal["hf", "byte", "sentencepiece"] = "hf"
    hf_name_or_path: Text | None = None  # a hub id or a folder
    hf_revision: Text | None = None
    path: Text | None = None  # a tokenizer.json, a .model, or the folder of one
    specials: Mapping[Text, Text] | None = None  # name to string; None: as the files say
    engine: Literal["auto", "reference", "fast"] = "auto"
    add_bos: bool = False
    add_eos: bool = True
    vocab_size_multiple: Size = 128
    auto_set_special_tokens: bool = True
    byte_offset: Id = 0
    max_doc_tokens: Limit | None = None
    snapshot: Text | None = None  # a folder that `save_tokenizer` wrote


@dataclass(frozen=True, kw_only=True, repr=False)
class DataSection(Section):
    """`data`: which documents, in which order, and how they become rows."""

    backend: Literal["hf", "local_text", "files"] = "hf"
    hf_dataset: Text | None = None
    hf_name: Text | None = None
    hf_split: Text = "train"
    hf_eval_split: Text | None = None
    hf_revision: Text | None = None
    text_key: Text | None = "text"  # None, and by default with files: the source chooses
    local_text: Documents | None = None
    local_eval_text: Documents | None = None
    files: Paths | None = None
    eval_files: Paths | None = None
    files_kind: Literal["text", "jsonl", "parquet"] | None = None
    on_bad: Literal["error", "skip"] = "error"
    shuffle: bool = True
    shuffle_buffer_size: Count = 10_000
    shuffle_buffer_bytes: Count = 256 * 2**20
    seed: Annotated[int, Between(0, 2**64)] = 0
    repeat: bool = True
    num_streams: Size | None = None
    state_update_interval: Count = 2000
    max_retries: Annotated[int, Between(0, 2**31)] = 5
    retry_delay_sec: Annotated[float, Between(0)] = 1.0
    packing_mode: Literal["sequential", "bin"] = "sequential"
    packing_algorithm: Literal["best-fit", "first-fit"] = "first-fit"
    packing_buffer_docs: Count = 4096
    packing_buffer_tokens: Count = 2**24
    packing_max_docs_per_bin: Size | None = None
    mask_boundary_loss: bool = True
    train_on_eos: bool = True
    grain_prefetch: Annotated[int, Between(0, 1025)] = 2
    max_eval_samples: Count | None = None
    tokenizer: TokenizerSection = TokenizerSection()


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainSection(Section):
    """`train`: the shape [grad_accum, batch_size, seq_len] of every batch."""

    seq_len: Size
    batch_size: Size
    grad_accum: Size = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelSection(Section):
    """`model`: what the model was made for. None: as the tokenizer says."""

    vocab_size: Size | None = None
    bos_token_id: Id | None = None
    eos_token_id: Id | None = None
    pad_token_id: Id | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class StreamConfig(Section):
    """Everything a stream is made from. Equal configs and equal data give equal batches."""

    data: DataSection
    train: TrainSection
    model: ModelSection = field(default_factory=ModelSection)


# The keys of `data` that only some backends use, and those of `data.tokenizer` that only some kinds
# of tokenizer use. A key that is not listed is used by all.
_BACKENDS = {
    "hf": (
        *("hf_dataset", "hf_name", "hf_split", "hf_eval_split", "hf_revision"),
        *("max_retries", "retry_delay_sec", "text_key"),
    ),
    "local_text": ("local_text", "local_eval_text"),
    "files": ("files", "eval_files", "files_kind", "on_bad", "text_key"),
}
_KINDS = {
    "hf": ("hf_name_or_path", "hf_revision", "path"),
    "sentencepiece": ("path",),
    "byte": ("byte_offset",),
}
_OURS = {"local_eval_text", "files", "eval_files", "files_kind", "on_bad"}
_OUR_TOKENIZER_KEYS = {"hf_revision", "path"}
"""Those that chomp does not have; its configs have all others, whatever the backend or kind is."""
NEEDED = {"hf": "hf_dataset", "local_text": "local_text", "files": "files"}
"""The key of `data` that a backend needs."""

TRAINER_SECTIONS = {"optim", "checkpoint", "logging", "debug", "variables", "derived"}
"""Sections of chomp that are never taken for a misspelt section of ours."""
TRAINER_DATA_KEYS = {
    *("device_put", "recreate_eval_cache"),
    *("packing_strict_segments", "packing_group_docs"),  # the model's attention; another mode's
}
"""Keys of chomp's `data` that change no batch."""
TRAINER_TOKENIZER_KEYS = {"hf_use_fast", "hf_trust_remote_code"}
_SIMILAR_SECTION, _SIMILAR_KEY = 0.8, 0.85  # above this, two names are taken for the same


def read_config(
    config: StreamConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()
) -> StreamConfig:
    """The config of a file or mapping, with overrides like `data.seed=7` on top of it."""
    file, values = read_values(config, StreamConfig)
    values, sources = apply_overrides(values, overrides, StreamConfig)
    values = _plain(values)  # a copy, from which keys are dropped
    ignored = _drop_trainer_keys(values)
    make_record(StreamConfig, values, file=file, sources=sources)  # also keys that go unused
    ignored += _drop_unused(values, sources)
    found = make_record(StreamConfig, values, file=file, sources=sources)
    refuse(_problems(found, values["data"]), file, sources)
    if ignored:
        _log.warning(
            "%s: not used, since it does not concern these data or this tokenizer: %s",
            *(file, ", ".join(ignored)),
        )
    return found


def config_dict(config: StreamConfig) -> dict[str, JSON]:
    """The effective config as JSON, with defaults: for checkpoints, and for `read_config`.

    Keys that the chosen backend or kind of tokenizer does not use are left out.
    """
    found: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    data = found["data"]
    _drop(data, _others(_BACKENDS, config.data.backend))
    _drop(data["tokenizer"], _others(_KINDS, config.data.tokenizer.kind))
    if config.data.backend == "files" and data["text_key"] is None:
        del data["text_key"]
    return found


def _problems(config: StreamConfig, written: Mapping[str, Any]) -> Iterator[str]:
    """What the keys say together; each problem begins with its key.

    `written` is the `data` table. A key that the chosen backend or kind of tokenizer ignores is
    refused when it was written: its writer believes that it does something.
    """
    data, needed = config.data, NEEDED[config.data.backend]
    if getattr(data, needed) is None:
        yield f'data.{needed}: missing; data.backend = "{data.backend}" needs it'
    yield from _unused(written, "data", _BACKENDS, "backend", data.backend)
    if data.files_kind not in (None, "jsonl") and "on_bad" in written:
        yield f'data.on_bad: for jsonl files; data.files_kind is "{data.files_kind}": leave it out'
    if data.files_kind == "text" and written.get("text_key"):
        yield 'data.text_key: text files have no fields (data.files_kind = "text"): leave it out'
    tokenizer, at = data.tokenizer, "data.tokenizer"
    yield from _unused(written.get("tokenizer", {}), at, _KINDS, "kind", tokenizer.kind)
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


def _others(users: Mapping[str, Sequence[str]], chosen: str) -> list[str]:
    """The keys that are not for the chosen backend or kind of tokenizer."""
    keys = dict.fromkeys(key for each in users.values() for key in each)
    return [key for key in keys if key not in users[chosen]]


def _unused(
    written: Mapping[str, Any], at: str, users: Mapping[str, Sequence[str]], key: str, chosen: str
) -> Iterator[str]:
    for name in _others(users, chosen):
        if written.get(name) is not None:
            wanted = " or ".join(f'"{user}"' for user, keys in users.items() if name in keys)
            yield f'{at}.{name}: for {at}.{key} = {wanted}, not "{chosen}": leave it out'


def _drop_trainer_keys(values: dict[str, Any]) -> list[str]:
    """Delete the keys of the trainer; returns their names.

    A key that is nearly one of ours stays, and so is refused as misspelt.
    """
    sections = {
        key
        for key in values
        if key in TRAINER_SECTIONS or not _is_similar(key, StreamConfig, _SIMILAR_SECTION)
    }
    ignored = _drop(values, sections)
    for name, section in (("model", ModelSection), ("train", TrainSection)):
        table = values.get(name)
        if isinstance(table, dict):
            foreign = {key for key in table if not _is_similar(key, section, _SIMILAR_KEY)}
            ignored += _drop(table, foreign, f"{name}.")
    data = values.get("data")
    if isinstance(data, dict):
        ignored += _drop(data, TRAINER_DATA_KEYS, "data.")
        if isinstance(data.get("tokenizer"), dict):
            ignored += _drop(data["tokenizer"], TRAINER_TOKENIZER_KEYS, "data.tokenizer.")
    return ignored


def _drop_unused(values: dict[str, Any], overrides: Collection[str]) -> list[str]:
    """Delete keys that every chomp config has but this backend does not use; returns their names.

    A key that an override sets stays, and is refused: it was meant for this run. All stay when the
    key that the backend needs is missing, so that the message names both.
    """
    data, unused = values["data"], []
    backend = data.get("backend", "hf")
    if data.get(NEEDED[backend]) is not None:
        others = {*_others(_BACKENDS, backend)} - _OURS
        unused += _drop(data, {key for key in others if f"data.{key}" not in overrides}, "data.")
    if backend == "files":
        data.setdefault("text_key", None)
    tokenizer, at = data.setdefault("tokenizer", {}), "data.tokenizer."
    others = {*_others(_KINDS, tokenizer.get("kind", "hf"))} - _OUR_TOKENIZER_KEYS
    return unused + _drop(tokenizer, {key for key in others if at + key not in overrides}, at)


def _drop(table: dict[str, Any], keys: Collection[str], at: str = "") -> list[str]:
    """Delete these keys; returns the full names of those that had a value."""
    dropped = [key for key in table if key in keys]
    return [f"{at}{key}" for key in dropped if table.pop(key) is not None]


def _is_similar(key: object, cls: type, cutoff: float) -> bool:
    """Whether it is a key of the section, or nearly one. What is not a string counts as one."""
    if not isinstance(key, str):
        return True
    word = key.strip().lower().replace("-", "_")
    known = [one.name for one in config_fields(cls)]
    return bool(difflib.get_close_matches(word, known, n=1, cutoff=cutoff))


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Any mapping as dicts, and sections as what was written in them."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Section) and is_dataclass(inner):
            inner = written_values(inner)
        found[key] = _plain(inner) if isinstance(inner, Mapping) else inner
    return found
