"""The tokenizer of a cache: copied in once, then the only one its stores are built with."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import META_FILE, TOKENIZER_FILE, TRAINED_TOKENIZER
from niels_gpt.cache.meta import sha256_file, write_meta
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.tokenizer import SentencePieceTokenizer, load_tokenizer
from shardmill.errors import OptionError, StoreExistsError, TokenizerError
from shardmill.storage.atomic import atomic_write
from shardmill.store import read_manifest

log = logging.getLogger(__name__)


def install_tokenizer(
    cache_dir: Path,
    given: Path | None,
    *,
    overwrite: bool,
    rebuilt: Collection[Path] = (),
    num_threads: int = 1,
) -> SentencePieceTokenizer:
    """The tokenizer in `cache_dir/tokenizer`, after copying `given` there when there is one.

    Without either, the model at artifacts/tokenizer, where training puts it, is copied.
    `rebuilt` are the stores that this run replaces: no other store may use another tokenizer.
    In this process it encodes with `num_threads`.
    """
    target = cache_dir / "tokenizer" / TOKENIZER_FILE
    if given is None and not target.is_file():
        given = Path(TRAINED_TOKENIZER)
        if not given.is_file():
            raise OptionError(
                f"no tokenizer: --tokenizer was not given, and neither {target} nor {given} "
                f"exists. Name the spm.model to use, or train one:\n  {train_command()}"
            )
        log.info("tokenizer: %s (copied to %s)", given, target)
    tokenizer = load_tokenizer(target if given is None else given)
    model = tokenizer.model_path
    assert model is not None
    if target.is_file() and sha256_file(str(target)) != tokenizer.model_sha256 and not overwrite:
        raise StoreExistsError(
            f"{target} is another model than {model} (sha256 {sha256_file(str(target))[:12]}, not "
            f"{tokenizer.model_sha256[:12]}), and the cache was built with it: use another "
            "--cache-dir, or replace all of it with --overwrite"
        )
    _refuse_two_tokenizers(cache_dir, tokenizer.model_sha256, rebuilt)
    beside = _trained_meta(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as file:
        file.write(model.read_bytes())
    write_meta(
        str(target.parent / META_FILE),
        {
            **beside,
            "model_sha256": tokenizer.model_sha256,
            "tokenizer_sha256": tokenizer.model_sha256,
            "vocab_size": tokenizer.vocab_size,
            "special_token_ids": tokenizer.special_token_ids(),
        },
    )
    return load_tokenizer(target, num_threads=num_threads)


def _refuse_two_tokenizers(cache_dir: Path, sha256: str, rebuilt: Collection[Path]) -> None:
    stores = [*cache_dir.glob("pretrain/*/meta.json"), *cache_dir.glob("sft/*/meta.json")]
    for path in sorted(stores):
        if path.parent in rebuilt:
            continue
        manifest = read_manifest(path.parent)
        if manifest.built and manifest.tokenizer_sha256 != sha256:
            raise StoreExistsError(
                f"{path.parent} was built with another tokenizer and would stay beside the new "
                "stores: build every source again with --overwrite (no --only or --skip), or use "
                "another --cache-dir"
            )


def _trained_meta(model: Path) -> dict[str, Any]:
    """What the meta.json next to a model says about its training; {} if there is none."""
    path = model.parent / META_FILE
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not JSON ({error}); remove or repair it") from error
    same = isinstance(meta, dict) and meta.get("model_sha256") == sha256_file(str(model))
    return meta if same else {}


def train_command() -> str:
    """Trains a tokenizer with the recipe's special tokens, where build-all will find it."""
    words = ["shardmill", "tokenizer", "train", "texts/*.txt"]
    words += ["--out", str(Path(TRAINED_TOKENIZER).parent)]
    for name, text in SPECIAL_TOKENS.items():
        words += ["--special", f"{name}={text}"]
    return shlex.join(words)


__all__ = ["install_tokenizer", "train_command"]
