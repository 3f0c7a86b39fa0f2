"""Whether a text is a document of a store: it is encoded again and compared.

In: a store, its tokenizer, texts.  Out: yes or no.
Promise: yes means that every stored id of the document is the one that the build made of this
text, its end token with it; a document that a token limit cut may be a beginning of it.
"""

from __future__ import annotations

import numpy as np

from shardmill.errors import OptionError
from shardmill.mapped import TokenSpace, open_tokens
from shardmill.protocols import Texts, Tokenizer
from shardmill.records import BoolArray, IntArray
from shardmill.shards import Manifest, Store
from shardmill.tokenizer import model_sha256_of

NO_TOKENS = "no_tokens"
"""The reason for which a build drops a text that gives none."""


class Proof:
    """The documents of a store, and the tokenizer that made them."""

    def __init__(self, store: Store, tokenizer: Tokenizer) -> None:
        check_tokenizer(store, tokenizer)
        self.store, self.tokenizer = store, tokenizer
        specials = store.manifest.special_token_ids
        self._end = [specials["eot"]] if store.manifest.append_eot else []
        self._spaces: dict[str, TokenSpace] = {}
        self.has_void = bool(store.manifest.ledger.documents.dropped.get(NO_TOKENS))

    def stored(self, split: str, document: int) -> IntArray:
        """The ids of a document."""
        if split not in self._spaces:
            self._spaces[split] = open_tokens(self.store, split)
        start, stop = span_of(self.store, split, document)
        return self._spaces[split].read(start, stop)

    def holds(self, split: str, document: int, text: str, *, cut: bool) -> bool:
        """Whether this text is the document; with `cut`, whether it begins with it."""
        stored = self.stored(split, document)
        made = np.array([*self.tokenizer.encode(text), *self._end], np.int64)
        return np.array_equal(stored, made[: len(stored)] if cut else made)

    def filled(self, texts: Texts) -> BoolArray:
        """Which of these texts have a token, so that a build makes a document of them."""
        if not self.has_void:
            return np.ones(len(texts), np.bool_)
        filled: BoolArray = self.tokenizer.encode_batch(texts).lengths > 0
        return filled

    def close(self) -> None:
        for space in self._spaces.values():
            space.close()


def span_of(store: Store, split: str, document: int) -> tuple[int, int]:
    """The tokens of a document, half-open."""
    total = store.num_documents(split)
    if not 0 <= document < total:
        raise OptionError(f"document {document:,}: split {split!r} has {total:,}")
    starts = store.document_starts(split)
    stop = int(starts[document + 1]) if document + 1 < total else store.num_tokens(split)
    return int(starts[document]), stop


def made_by(manifest: Manifest, tokenizer: Tokenizer) -> bool:
    """Whether this tokenizer made the ids of the store."""
    known = {manifest.tokenizer_fingerprint, manifest.tokenizer_sha256} - {None}
    return bool(known & {tokenizer.fingerprint, model_sha256_of(tokenizer)})


def check_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    """Refuse any other than that of the store."""
    manifest = store.manifest
    if not made_by(manifest, tokenizer):
        raise OptionError(
            f"{tokenizer!r} is not the tokenizer of this store (fingerprint "
            f"{tokenizer.fingerprint[:16]}, the store's is "
            f"{(manifest.tokenizer_fingerprint or 'unknown')[:16]}): take the one that the store "
            "was built with"
        )
