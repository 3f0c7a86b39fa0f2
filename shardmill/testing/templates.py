"""Guarantees of a chat template as tests, and conversations that are hard to render.

A template that passes trains what the assistant says and its end and nothing else, on the battery
of `prove_mask` and on the conversations that you pass; each of those is kept whole or dropped, the
same alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardmill.chat import Certificate, ChatTemplate, TrainPolicy, prove_mask
from shardmill.errors import missing_extra
from shardmill.protocols import Tokenizer
from shardmill.records import Conversation
from shardmill.testing.stores import assert_same_examples, slice_examples
from shardmill.testing.tokenizers import nasty_texts

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise missing_extra("hypothesis", "dev") from missing

__all__ = ["assert_renders_exactly", "assert_template_laws", "conversations"]


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
