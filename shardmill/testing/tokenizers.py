"""Guarantees of tokenizers as tests, and texts to try them on.

Only the Tokenizer protocol is needed. `round_trips(text)` (does the tokenizer promise that a text
comes back?) and `unknown_id` are used when present.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from shardmill.errors import missing_extra
from shardmill.protocols import Tokenizer
from shardmill.records import Ragged
from shardmill.tokenizers.battery import short_texts

try:
    from hypothesis import strategies
except ImportError as missing:
    raise missing_extra("hypothesis", "dev") from missing

__all__ = [
    "assert_batch_is_one_by_one",
    "assert_round_trip",
    "assert_text_is_never_structure",
    "assert_tokenizer_laws",
    "nasty_texts",
]


def assert_tokenizer_laws(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """All guarantees on these texts: batch, range, text is never structure, round trip."""
    assert re.fullmatch(r"[0-9a-f]{64}", tokenizer.fingerprint), "fingerprint is sha256 hex"
    ids = assert_batch_is_one_by_one(tokenizer, texts)
    if len(ids.values):
        assert int(ids.values.min()) >= 0, "an id is negative"
        assert int(ids.values.max()) < tokenizer.vocab_size, "an id is not below vocab_size"
    assert_text_is_never_structure(tokenizer, texts)
    assert_round_trip(tokenizer, texts)


def assert_batch_is_one_by_one(tokenizer: Tokenizer, texts: Sequence[str]) -> Ragged:
    """A batch, as a list or in Arrow, gives what its texts give alone, in order."""
    alone = [tokenizer.encode(text) for text in texts]
    listed = tokenizer.encode_batch(list(texts))
    arrow = tokenizer.encode_batch(pa.array(["x", *texts, "y"], pa.large_string())[1:-1])
    for batch, kind in ((listed, "list"), (arrow, "Arrow")):
        assert len(batch) == len(texts), f"{kind}: one sequence per text"
        assert batch.offsets.dtype == np.int64, f"{kind}: offsets are int64"
        assert batch.offsets[0] == 0, f"{kind}: offsets start at 0"
        assert batch.offsets[-1] == len(batch.values), f"{kind}: offsets end at the last id"
        assert (np.diff(batch.offsets) >= 0).all(), f"{kind}: offsets never decrease"
        for text, right, found in zip(texts, alone, batch, strict=True):
            assert found.tolist() == right, f"{kind}: {text!r} gives other ids in a batch"
    return listed


def assert_text_is_never_structure(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """No text becomes a special id, not even one that contains every special string."""
    structure = set(tokenizer.special_token_ids().values())
    structure -= {getattr(tokenizer, "unknown_id", None)}
    literals = [tokenizer.decode([number]) for number in sorted(structure)]
    crafted = [
        part
        for text in texts
        for literal in literals
        for part in (literal, text + literal, literal + text, f"{text} {literal} {text}")
    ]
    for text, ids in zip(
        [*texts, *crafted], tokenizer.encode_batch([*texts, *crafted]), strict=True
    ):
        found = structure & set(ids.tolist())
        assert not found, f"{text!r} became the special ids {found}"


def assert_round_trip(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """A text that is promised to come back does; specials beside it decode to their strings."""
    promises = getattr(tokenizer, "round_trips", None)
    if promises is None:
        return
    specials = sorted(set(tokenizer.special_token_ids().values()))
    literals = [tokenizer.decode([number]) for number in specials]
    for text in [*texts, " ".join(literals)]:
        if not promises(text):
            continue
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text, f"{text!r} does not come back"
        for number, literal in zip(specials, literals, strict=True):
            shown = tokenizer.decode([number, *ids, number])
            assert shown == f"{literal}{text}{literal}", f"{text!r} between specials is {shown!r}"


def nasty_texts(specials: Sequence[str] = ()) -> strategies.SearchStrategy[str]:
    """Text of any code point, mixed with what tokenizers trip over and with special strings."""
    any_text = strategies.text(strategies.characters(exclude_categories=["Cs"]), max_size=20)
    known = strategies.sampled_from([*short_texts(), *specials, *specials, *specials])
    pieces = [text[start:stop] for text in specials for start, stop in ((0, -1), (1, None), (0, 3))]
    parts = strategies.one_of(any_text, known, strategies.sampled_from([*pieces, " ", "\n"]))
    return strategies.lists(parts, max_size=6).map("".join)
