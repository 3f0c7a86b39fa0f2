"""Guarantees of tokenizers and chat templates as tests, with texts and chats to try them on.

A template that passes trains what the assistant says and its end and nothing else, on the battery
of `prove_mask` and on the conversations that you pass; each of those is kept whole or dropped, the
same alone and in a batch.

A tokenizer needs the protocol only. `round_trips(text)` (does it promise that a text comes back?)
and `unknown_id` are used when present.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from shardmill.chat import Certificate, ChatTemplate, TrainPolicy, prove_mask
from shardmill.errors import missing_extra
from shardmill.protocols import Tokenizer
from shardmill.records import Conversation, Ragged
from shardmill.testing.stores import assert_same_examples, slice_examples
from shardmill.tokenizers.battery import short_texts

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise missing_extra("hypothesis", "dev") from missing


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


def nasty_texts(specials: Sequence[str] = ()) -> st.SearchStrategy[str]:
    """Text of any code point, mixed with what tokenizers trip over and with special strings."""
    any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    known = st.sampled_from([*short_texts(), *specials, *specials, *specials])
    pieces = [text[start:stop] for text in specials for start, stop in ((0, -1), (1, None), (0, 3))]
    parts = st.one_of(any_text, known, st.sampled_from([*pieces, " ", "\n"]))
    return st.lists(parts, max_size=6).map("".join)


def conversations(specials: Sequence[str] = ()) -> st.SearchStrategy[list[Conversation]]:
    """Chats of one to three exchanges, some with a system message; texts may be empty, nasty, or
    one of these special strings."""
    words = nasty_texts(specials)
    exchange = st.tuples(words, words).map(
        lambda said: [
            {"role": "user", "content": said[0]},
            {"role": "assistant", "content": said[1]},
        ]
    )
    system: st.SearchStrategy[list[dict[str, str]]] = st.just([]) | words.map(
        lambda text: [{"role": "system", "content": text}]
    )
    chats = st.tuples(system, st.lists(exchange, min_size=1, max_size=3)).map(
        lambda parts: [*parts[0], *(message for pair in parts[1] for message in pair)]
    )
    return st.lists(chats, max_size=6).map(
        lambda found: [
            Conversation(messages=messages, id=f"chat {number}")
            for number, messages in enumerate(found)
        ]
    )


def assert_template_laws(
    template: ChatTemplate, tokenizer: Tokenizer, chats: Sequence[Conversation] = ()
) -> Certificate:
    """Guarantees 4, 8 and 9: the mask is proved (`MaskProofError` shows the smallest conversation
    that is trained wrongly), and these conversations are rendered exactly."""
    certificate = prove_mask(template, tokenizer)
    assert_renders_exactly(template, chats)
    return certificate


def assert_renders_exactly(template: ChatTemplate, chats: Sequence[Conversation]) -> None:
    """Every conversation is kept or dropped with an id and a reason; a kept one trains a token and
    is the same alone as among others."""
    policy = TrainPolicy()
    found = template.render(chats, policy)
    kept = found.kept.tolist()
    assert len(found.examples.ids) == len(kept), "one example for each kept conversation"
    assert kept == sorted(set(kept)), f"kept out of order: {kept}"
    lost = [chat.id for number, chat in enumerate(chats) if number not in set(kept)]
    assert [drop.id for drop in found.drops] == lost, f"dropped {found.drops}, not kept {lost}"
    assert all(drop.reason for drop in found.drops), f"a drop without a reason: {found.drops}"
    edges = found.examples.ids.offsets
    for at, number in enumerate(kept):
        where = f"conversation {chats[number].id!r}"
        mask = found.examples.mask[edges[at] : edges[at + 1]]
        assert np.count_nonzero(mask), f"{where} trains nothing"
        alone = template.render([chats[number]], policy)
        assert alone.kept.tolist() == [0], f"{where} is dropped alone, and kept among others"
        assert_same_examples(slice_examples(found.examples, at, at + 1), alone.examples)
