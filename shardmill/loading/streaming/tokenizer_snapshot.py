"""The tokenizer of a run, kept beside it.

In: a `StreamTokenizer`, a folder.  Out: the model's file and `tokenizer_snapshot.json`.
Promise: what was saved opens offline, to the same fingerprint, or it is refused; the JSON is
written last, atomically, and holds the hash of the model's file. Nothing is unpickled, no code is
run, and no file that is not of this snapshot is overwritten.

A tokenizer with all that makes documents out of texts: ids, rules, and one hash over them.

In: a tokenizer, ids and rules that were checked.  Out: a `StreamTokenizer`.
Promise: equal fingerprints, equal ids for every text and equal padding.
Not here: where the ids come from (tokenizers), files (snapshot).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from shardmill.errors import TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.storage.atomic import atomic_write
from shardmill.tokenizers import ByteTokenizer, ChosenEncoder, EngineChoice, choose_encoder
from shardmill.tokenizers.texts import fingerprint_of, sha256_hex


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentIds:
    """What stands round and behind the text of documents."""

    bos_id: int | None
    eos_id: int | None
    pad_id: int
    add_bos: bool
    add_eos: bool
    max_doc_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTokenizer:
    """Made by `open_stream_tokenizer` and `load_tokenizer`."""

    tokenizer: Tokenizer
    fingerprint: str  # of the tokenizer, the ids and the rules
    vocab_size: int  # of the model: all ids lie below it
    ids: DocumentIds
    engine: EngineChoice = "auto"  # changes speed, never ids

    @property
    def bos_id(self) -> int | None:
        """Whether documents begin with it is said by `ids.add_bos`."""
        return self.ids.bos_id

    @property
    def eos_id(self) -> int | None:
        """Whether documents end with it is said by `ids.add_eos`."""
        return self.ids.eos_id

    @property
    def pad_id(self) -> int:
        return self.ids.pad_id

    def encoder(self, *, corpus: Sequence[str] = (), size_hint: int | None = None) -> ChosenEncoder:
        """The fastest engine that is proved to give the tokenizer's ids, also on `corpus`.

        With `size_hint` (bytes of text) the proof is left out where it would not pay.
        """
        return choose_encoder(
            self.tokenizer, engine=self.engine, corpus=corpus, size_hint=size_hint
        )


def make_stream_tokenizer(
    tokenizer: Tokenizer, ids: DocumentIds, *, vocab_size: int, engine: EngineChoice = "auto"
) -> StreamTokenizer:
    """With its fingerprint; the size of the model's vocabulary and the engine are not in it."""
    return StreamTokenizer(
        tokenizer=tokenizer,
        fingerprint=fingerprint_of({"tokenizer": tokenizer.fingerprint, **asdict(ids)}),
        vocab_size=vocab_size,
        ids=ids,
        engine=engine,
    )


SNAPSHOT = "tokenizer_snapshot.json"
MODEL_FILES = {"hf": "tokenizer.json", "sentencepiece": "tokenizer.model"}

Kind = Literal["hf", "byte", "sentencepiece"]


class _Kept(BaseModel):
    """What `tokenizer_snapshot.json` says."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    format: Literal["shardmill tokenizer snapshot"] = "shardmill tokenizer snapshot"
    version: Literal[1] = 1
    kind: Kind
    byte_offset: int | None
    specials: list[tuple[str, str]]  # name and literal string, in the order of their ids
    files: dict[str, str]  # name to sha256
    tokenizer_fingerprint: str
    fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    add_bos: bool
    add_eos: bool
    max_doc_tokens: int | None


def save_tokenizer(tokenizer: StreamTokenizer, folder: str | Path) -> str:
    """Write the snapshot, or find it there already; gives the hash of all of it."""
    folder = Path(folder)
    kept, model = _facts(tokenizer)
    text = kept.model_dump_json(indent=2).encode() + b"\n"
    _open(kept, model, str(folder))  # what cannot be read back is not written
    place = folder / SNAPSHOT
    if place.is_file():
        if place.read_bytes() != text:
            raise TokenizerError(
                f"{place}: the snapshot of another tokenizer, {_difference(place, kept)}; a "
                "snapshot is never replaced: choose another folder"
            )
        load_tokenizer(folder)
        return sha256_hex(text)
    folder.mkdir(parents=True, exist_ok=True)
    for name in kept.files:
        _write_once(folder / name, model)
    with atomic_write(place) as file:
        file.write(text)
    return sha256_hex(text)


def load_tokenizer(folder: str | Path) -> StreamTokenizer:
    """The tokenizer that was saved here, after its hashes were checked. Engine: "auto"."""
    kept = _read_kept(Path(folder))
    model = b""
    for name, wanted in kept.files.items():
        try:
            model = _read_plain(Path(folder) / name)
        except OSError as error:
            raise TokenizerError(
                f"{folder}: {name} cannot be read: {error.strerror}; restore the snapshot"
            ) from error
        if sha256_hex(model) != wanted:
            raise TokenizerError(
                f"{folder}: {name} has sha256 {sha256_hex(model)}, but {SNAPSHOT} says {wanted}: "
                "it was changed or damaged; restore the snapshot"
            )
    return _open(kept, model, str(folder))


def kind_of(tokenizer: Tokenizer) -> Kind:
    """The `data.tokenizer.kind` that opens it."""
    if isinstance(tokenizer, ByteTokenizer):
        return "byte"
    return "sentencepiece" if hasattr(tokenizer, "model_path") else "hf"


def special_strings(tokenizer: Tokenizer) -> dict[str, str]:
    """Names of the specials and their literal strings, in the order of their ids."""
    named = sorted(tokenizer.special_token_ids().items(), key=lambda item: item[1])
    return {name: tokenizer.decode([number]) for name, number in named}


def _facts(tokenizer: StreamTokenizer) -> tuple[_Kept, bytes]:
    base, kind = tokenizer.tokenizer, kind_of(tokenizer.tokenizer)
    model: bytes | None = getattr(base, "model_bytes", None)
    if kind != "byte" and model is None:
        raise TokenizerError(
            f"{base!r} has no file that could be kept; open the tokenizer from its files"
        )
    files = {} if model is None else {MODEL_FILES[kind]: sha256_hex(model)}
    ids = tokenizer.ids
    kept = _Kept(
        kind=kind,
        byte_offset=base.byte_offset if isinstance(base, ByteTokenizer) else None,
        specials=list(special_strings(base).items()),
        files=files,
        tokenizer_fingerprint=base.fingerprint,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        bos_id=ids.bos_id,
        eos_id=ids.eos_id,
        pad_id=ids.pad_id,
        add_bos=ids.add_bos,
        add_eos=ids.add_eos,
        max_doc_tokens=ids.max_doc_tokens,
    )
    return kept, model or b""


def _open(kept: _Kept, model: bytes, where: str) -> StreamTokenizer:
    base = _open_base(kept, model)
    if base.fingerprint != kept.tokenizer_fingerprint:
        raise TokenizerError(
            f"{where}: the tokenizer opens with the fingerprint {base.fingerprint[:16]}, but was "
            f"saved with {kept.tokenizer_fingerprint[:16]}: another version of its library gives "
            "other ids (SentencePiece models name theirs); install the version of that run"
        )
    ids = DocumentIds(
        bos_id=kept.bos_id,
        eos_id=kept.eos_id,
        pad_id=kept.pad_id,
        add_bos=kept.add_bos,
        add_eos=kept.add_eos,
        max_doc_tokens=kept.max_doc_tokens,
    )
    given = (kept.bos_id, kept.eos_id, kept.pad_id, base.vocab_size - 1)
    needed = max(number for number in given if number is not None) + 1
    if not needed <= kept.vocab_size < 2**31:
        raise TokenizerError(
            f"{where}: {SNAPSHOT} says vocab_size {kept.vocab_size:,}, but its ids need "
            f"{needed:,}; it was changed or damaged: restore the snapshot"
        )
    opened = make_stream_tokenizer(base, ids, vocab_size=kept.vocab_size)
    if opened.fingerprint != kept.fingerprint:
        raise TokenizerError(
            f"{where}: {SNAPSHOT} holds ids or rules that do not match its fingerprint; it was "
            "changed or damaged: restore the snapshot"
        )
    return opened


def _open_base(kept: _Kept, model: bytes) -> Tokenizer:
    specials = dict(kept.specials)
    if kept.kind == "byte":
        return ByteTokenizer(byte_offset=kept.byte_offset or 0, specials=specials)
    if kept.kind == "hf":
        from shardmill.tokenizers.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(model, names=specials)
    from shardmill.tokenizers.sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer(model, specials=specials)


def _read_kept(folder: Path) -> _Kept:
    place = folder / SNAPSHOT
    try:
        kept = _Kept.model_validate_json(_read_plain(place))
    except OSError as error:
        raise TokenizerError(
            f"{place}: cannot be read: {error.strerror}; wanted a folder that save_tokenizer wrote"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "it"
        raise TokenizerError(
            f"{place}: not a snapshot of this version: {key}: {first['msg']}; restore it"
        ) from error
    wanted = [MODEL_FILES[kept.kind]] if kept.kind in MODEL_FILES else []
    if list(kept.files) != wanted:
        raise TokenizerError(f"{place}: names the files {list(kept.files)}, wanted {wanted}")
    if len(dict(kept.specials)) < len(kept.specials):
        raise TokenizerError(f"{place}: names a special token twice; restore the snapshot")
    return kept


def _read_plain(path: Path) -> bytes:
    """A plain file; anything else might never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a plain file")
    return path.read_bytes()


def _difference(place: Path, kept: _Kept) -> str:
    try:
        there = json.loads(place.read_bytes())
    except ValueError:
        return "which cannot be read"
    mine = json.loads(kept.model_dump_json())
    keys = [key for key in mine if not isinstance(there, dict) or there.get(key) != mine[key]]
    return f"different in {', '.join(keys) or 'form'}"


def _write_once(path: Path, data: bytes) -> None:
    if path.is_file():
        if path.read_bytes() == data:
            return
        raise TokenizerError(
            f"{path}: a file of another tokenizer is there, without a snapshot; choose a folder of "
            "its own"
        )
    with atomic_write(path) as file:
        file.write(data)
