"""Open any kind of tokenizer by name: a file or folder on disk first, then a hub id.

To add a kind, write a module with `open_file(path, *, specials)` and add a line to `FILE_KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import cast

from shardmill.errors import OptionError, TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.tokenizers.byte import ByteTokenizer

# The ending of a tokenizer's file -> the module that opens it, imported on first use.
FILE_KINDS = {
    ".json": "shardmill.tokenizers.huggingface",
    ".model": "shardmill.tokenizers.sentencepiece",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def open_tokenizer(
    spec: str | Path,
    *,
    specials: Mapping[str, str] | None = None,
    revision: str | None = None,
) -> Tokenizer:
    """Open a tokenizer by name.

    `specials` maps names to literal strings, e.g. {"eot": "<|endoftext|>"}, and replaces the names
    in the model's own files. `revision` is for hub ids.
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
    if isinstance(spec, Path) or path.suffix in FILE_KINDS or not _HUB_ID.fullmatch(name):
        raise TokenizerError(
            f"{name!r}: no such file or folder; wanted 'byte', 'byte:<offset>', a .model file, a "
            "tokenizer.json, a folder with one of them, or a hub id like 'owner/name'"
        )
    from shardmill.tokenizers.huggingface import open_pretrained

    return open_pretrained(name, specials=specials, revision=revision)


def _open_file(path: Path, specials: Mapping[str, str] | None) -> Tokenizer:
    if path.suffix not in FILE_KINDS:
        raise TokenizerError(f"{path}: wanted a .model file (SentencePiece) or a tokenizer.json")
    kind = import_module(FILE_KINDS[path.suffix])
    return cast(Tokenizer, kind.open_file(path, specials=specials))


def _open_folder(
    folder: Path, specials: Mapping[str, str] | None, revision: str | None
) -> Tokenizer:
    if revision is not None:
        raise OptionError(f"{{revision}} is for hub ids; {folder} is a folder", revision=revision)
    config = folder / "tokenizer.json"
    if config.is_file():
        return _open_file(config, specials)
    models = sorted(
        path for path in folder.iterdir() if path.suffix in FILE_KINDS and path.suffix != ".json"
    )
    if len(models) == 1 and not (folder / "tokenizer_config.json").is_file():
        return _open_file(models[0], specials)
    if not any(folder.glob("*.json")):
        raise TokenizerError(
            f"{folder}: found {len(models)} .model files and no tokenizer.json; wanted one of "
            "them; name the file itself"
        )
    from shardmill.tokenizers.huggingface import open_pretrained

    return open_pretrained(str(folder), specials=specials, revision=None)
