"""One name for every kind of tokenizer.

In: "byte", "byte:3", a `.model` file, a tokenizer.json, a folder, a hub id.  Out: a Tokenizer.
Promise: what is on disk wins over the hub; what cannot be opened is an error that says what was
looked for.
Not here: engines; see choose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from shardmill.errors import OptionError, TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.tokenizers.byte import ByteTokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def open_tokenizer(
    spec: str | Path,
    *,
    specials: Mapping[str, str] | None = None,
    revision: str | None = None,
) -> Tokenizer:
    """Open a tokenizer by name.

    `specials` maps names to literal strings, e.g. {"eot": "<|endoftext|>"}, in place of the names
    the model's own files give. `revision` is for hub ids.
    """
    path = Path(spec)
    if path.is_dir():
        return _open_folder(path, specials, revision)
    if path.is_file():
        return _open_file(path, specials)
    name = str(spec)
    byte = re.fullmatch(r"byte(?::(\d+))?", name)
    if byte:
        return ByteTokenizer(byte_offset=int(byte[1] or 0), specials=specials)
    if isinstance(spec, Path) or path.suffix in (".model", ".json") or not _HUB_ID.fullmatch(name):
        raise TokenizerError(
            f"{name!r}: no such file or folder; wanted 'byte', 'byte:<offset>', a .model file, a "
            "tokenizer.json, a folder with one of them, or a hub id like 'owner/name'"
        )
    from shardmill.tokenizers.huggingface import open_pretrained

    return open_pretrained(name, specials=specials, revision=revision)


def _open_file(path: Path, specials: Mapping[str, str] | None) -> Tokenizer:
    if path.suffix == ".json":
        from shardmill.tokenizers.huggingface import open_file

        return open_file(path, specials=specials)
    if path.suffix == ".model":
        from shardmill.tokenizers.sentencepiece import SentencePieceTokenizer

        return SentencePieceTokenizer(path, specials=specials)
    raise TokenizerError(f"{path}: wanted a .model file (SentencePiece) or a tokenizer.json")


def _open_folder(
    folder: Path, specials: Mapping[str, str] | None, revision: str | None
) -> Tokenizer:
    if revision is not None:
        raise OptionError(f"revision={revision!r} is for hub ids; {folder} is a folder")
    config = folder / "tokenizer.json"
    if config.is_file():
        return _open_file(config, specials)
    models = sorted(folder.glob("*.model"))
    if len(models) == 1 and not (folder / "tokenizer_config.json").is_file():
        return _open_file(models[0], specials)
    if not any(folder.glob("*.json")):
        raise TokenizerError(
            f"{folder}: found {len(models)} .model files and no tokenizer.json; wanted one of "
            "them; name the file itself"
        )
    from shardmill.tokenizers.huggingface import open_pretrained

    return open_pretrained(str(folder), specials=specials, revision=None)
