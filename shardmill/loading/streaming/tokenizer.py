"""The tokenizer of a stream with the ids that frame documents, and a snapshot of it in a folder.

Equal fingerprints mean equal ids for every text and equal padding. A snapshot is the model's file
and `tokenizer_snapshot.json`, which is written last and holds the hash of the model's file. It
opens offline to the same fingerprint, or it is refused. Opening runs no code.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import msgspec

from shardmill.errors import TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.storage.atomic import atomic_write
from shardmill.tokenizers import ByteTokenizer, ChosenEncoder, EngineChoice, choose_encoder
from shardmill.tokenizers.base import fingerprint_of, sha256_hex

SNAPSHOT = "tokenizer_snapshot.json"
MODEL_FILES = {"hf": "tokenizer.json", "sentencepiece": "tokenizer.model"}

Kind = Literal["hf", "byte", "sentencepiece"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentIds:
    """How the ids of a text become a document, and the id of padding."""

    bos_id: int | None
    eos_id: int | None
    pad_id: int
    add_bos: bool  # before each document
    add_eos: bool  # after each document that was not cut
    max_doc_tokens: int | None  # ids of the text, without BOS and EOS


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTokenizer:
    """A tokenizer and the ids around its documents."""

    tokenizer: Tokenizer
    vocab_size: int  # of the model: all ids are below it
    ids: DocumentIds
    engine: EngineChoice = "auto"  # changes speed, never ids

    @property
    def fingerprint(self) -> str:
        """Of the tokenizer and the ids: `vocab_size` and `engine` change neither."""
        return fingerprint_of({"tokenizer": self.tokenizer.fingerprint, **asdict(self.ids)})

    def encoder(self, *, corpus: Sequence[str] = (), size_hint: int | None = None) -> ChosenEncoder:
        """The fastest engine that is proved to give the tokenizer's ids, also on `corpus`.

        With `size_hint` (bytes of text) the proof is skipped where it would not pay.
        """
        return choose_encoder(
            self.tokenizer, engine=self.engine, corpus=corpus, size_hint=size_hint
        )


def kind_of(tokenizer: Tokenizer) -> Kind:
    if isinstance(tokenizer, ByteTokenizer):
        return "byte"
    return "sentencepiece" if hasattr(tokenizer, "model_path") else "hf"


def special_strings(tokenizer: Tokenizer) -> dict[str, str]:
    """Names of the special tokens and their strings, in the order of their ids."""
    named = sorted(tokenizer.special_token_ids().items(), key=lambda item: item[1])
    return {name: tokenizer.decode([number]) for name, number in named}


# snapshots


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `tokenizer_snapshot.json` holds."""

    format: Literal["shardmill tokenizer snapshot"]
    version: Literal[1]
    kind: Kind
    byte_offset: int | None
    specials: tuple[tuple[str, str], ...]  # name and string, in the order of their ids
    files: Mapping[str, str]  # name to sha256
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
    """Write the snapshot, or check that it is there already; returns the hash of all of it."""
    folder = Path(folder)
    snapshot, model = _snapshot_of(tokenizer)
    values = msgspec.structs.asdict(snapshot)
    text = json.dumps(values, indent=2, ensure_ascii=False).encode() + b"\n"
    _open(snapshot, model, str(folder))  # what cannot be read back is not written
    path = folder / SNAPSHOT
    if path.is_file():
        if path.read_bytes() != text:
            raise TokenizerError(
                f"{path}: the snapshot of another tokenizer, {_difference(path, text)}; a "
                "snapshot is never replaced: choose another folder"
            )
        load_tokenizer(folder)
        return sha256_hex(text)
    folder.mkdir(parents=True, exist_ok=True)
    for name in snapshot.files:
        _write_once(folder / name, model)
    with atomic_write(path) as file:
        file.write(text)
    return sha256_hex(text)


def load_tokenizer(folder: str | Path) -> StreamTokenizer:
    """The tokenizer that was saved here, after its hashes were checked. Engine: "auto"."""
    snapshot = _read_snapshot(Path(folder) / SNAPSHOT)
    model = b""
    for name, wanted in snapshot.files.items():
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
    return _open(snapshot, model, str(folder))


def _snapshot_of(tokenizer: StreamTokenizer) -> tuple[_Snapshot, bytes]:
    base, kind = tokenizer.tokenizer, kind_of(tokenizer.tokenizer)
    model: bytes | None = getattr(base, "model_bytes", None)
    if kind != "byte" and model is None:
        raise TokenizerError(
            f"{base!r} has no file that could be kept; open the tokenizer from its files"
        )
    snapshot = _Snapshot(
        format="shardmill tokenizer snapshot",
        version=1,
        kind=kind,
        byte_offset=base.byte_offset if isinstance(base, ByteTokenizer) else None,
        specials=tuple(special_strings(base).items()),
        files={} if model is None else {MODEL_FILES[kind]: sha256_hex(model)},
        tokenizer_fingerprint=base.fingerprint,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        **asdict(tokenizer.ids),
    )
    return snapshot, model or b""


def _open(snapshot: _Snapshot, model: bytes, where: str) -> StreamTokenizer:
    base = _open_base(snapshot, model)
    if base.fingerprint != snapshot.tokenizer_fingerprint:
        raise TokenizerError(
            f"{where}: the tokenizer opens with the fingerprint {base.fingerprint[:16]}, but was "
            f"saved with {snapshot.tokenizer_fingerprint[:16]}: another version of its library "
            "gives other ids (SentencePiece models name theirs); install the version of that run"
        )
    ids = DocumentIds(**{one.name: getattr(snapshot, one.name) for one in fields(DocumentIds)})
    used = (ids.bos_id, ids.eos_id, ids.pad_id, base.vocab_size - 1)
    needed = max(number for number in used if number is not None) + 1
    if not needed <= snapshot.vocab_size < 2**31:
        raise TokenizerError(
            f"{where}: {SNAPSHOT} says vocab_size {snapshot.vocab_size:,}, but its ids need "
            f"{needed:,}; it was changed or damaged: restore the snapshot"
        )
    opened = StreamTokenizer(tokenizer=base, ids=ids, vocab_size=snapshot.vocab_size)
    if opened.fingerprint != snapshot.fingerprint:
        raise TokenizerError(
            f"{where}: {SNAPSHOT} holds ids or rules that do not match its fingerprint; it was "
            "changed or damaged: restore the snapshot"
        )
    return opened


def _open_base(snapshot: _Snapshot, model: bytes) -> Tokenizer:
    specials = dict(snapshot.specials)
    if snapshot.kind == "byte":
        return ByteTokenizer(byte_offset=snapshot.byte_offset or 0, specials=specials)
    if snapshot.kind == "hf":
        from shardmill.tokenizers.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(model, names=specials)
    from shardmill.tokenizers.sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer(model, specials=specials)


def _read_snapshot(path: Path) -> _Snapshot:
    try:
        snapshot = msgspec.json.decode(_read_plain(path), type=_Snapshot)
    except OSError as error:
        raise TokenizerError(
            f"{path}: cannot be read: {error.strerror}; wanted a folder that save_tokenizer wrote"
        ) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{path}: not a snapshot of this version: {error}; restore it"
        ) from error
    wanted = [MODEL_FILES[snapshot.kind]] if snapshot.kind in MODEL_FILES else []
    if list(snapshot.files) != wanted:
        raise TokenizerError(f"{path}: names the files {list(snapshot.files)}, wanted {wanted}")
    if len(dict(snapshot.specials)) < len(snapshot.specials):
        raise TokenizerError(f"{path}: specials do not have each name once; restore it")
    return snapshot


def _read_plain(path: Path) -> bytes:
    """A plain file; reading a pipe or a device might never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a plain file")
    return path.read_bytes()


def _difference(path: Path, text: bytes) -> str:
    try:
        there = json.loads(path.read_bytes())
    except ValueError:
        return "which cannot be read"
    own = json.loads(text)
    keys = [key for key in own if not isinstance(there, dict) or there.get(key) != own[key]]
    return f"different in {', '.join(keys) or 'form'}"


def _write_once(path: Path, data: bytes) -> None:
    if path.is_file():
        if path.read_bytes() == data:
            return
        raise TokenizerError(
            f"{path}: a file of another tokenizer is there, without a snapshot; choose another "
            "folder"
        )
    with atomic_write(path) as file:
        file.write(data)
