"""A tokenizer with all that makes documents out of texts: ids, rules, and one hash over them.

In: a tokenizer, ids and rules that were checked.  Out: a `StreamTokenizer`.
Promise: equal fingerprints, equal ids for every text and equal padding.
Not here: where the ids come from (tokenizers), files (snapshot).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shardmill.protocols import Tokenizer
from shardmill.tokenizer import ChosenEncoder, EngineChoice, choose_encoder
from shardmill.tokenizer.identity import fingerprint_of


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
