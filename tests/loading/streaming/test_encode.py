"""From blocks to ids: BOS, EOS, cuts, slices, ids that make no sense, threads that end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import islice

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import StateMismatchError, TokenizerError, TokenRangeError
from shardmill.loading.state import ReadCounts, StreamCursor
from shardmill.loading.streaming import documents as documents_module
from shardmill.loading.streaming.documents import (
    Block,
    DocumentStream,
    StreamOrder,
    encode_blocks,
    encoded_ahead,
    frame,
)
from shardmill.records import Ragged
from shardmill.sources import BatchLimits, MemorySource
from shardmill.threads import read_ahead
from shardmill.tokenizers import (
    ByteTokenizer,
    TrainSpec,
    choose_encoder,
    open_tokenizer,
    train_tokenizer,
)
from tests.helpers import wait_for
from tests.loading.streaming.encoded import framing
from tests.loading.streaming.units import UnitsSource

BYTES = ByteTokenizer(byte_offset=3)
WORDS = ["a", "bc", "def", "", "\u00e9\u4e2d", "x" * 40]


def block_of(texts, *, number=0, slice_from=0):
    array = pa.array(["?"] * slice_from + list(texts), pa.large_string()).slice(slice_from)
    end = StreamCursor(number=number + len(texts), read=ReadCounts(documents=number + len(texts)))
    return Block(start=StreamCursor(number=number), texts=array, end=end)


def joined(encoded):
    return [ids.tolist() for one in encoded for ids in one.ids]


def framed_slowly(ids, rules):
    """The rule of one document, id by id."""
    if not ids:
        return [], 0
    kept = ids if rules.max_doc_tokens is None else ids[: rules.max_doc_tokens]
    bos = [] if rules.bos_id is None else [rules.bos_id]
    whole = len(kept) == len(ids) and rules.eos_id is not None
    return bos + kept + ([rules.eos_id] if whole else []), len(ids) - len(kept)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    documents=st.lists(
        st.lists(st.integers(0, 999), max_size=9) | st.integers(0, 700).map(lambda n: [5] * n),
        max_size=8,
    ),
    dtype=st.sampled_from(["uint16", "int32", "uint32", "int64"]),
    bos_id=st.none() | st.just(7),
    eos_id=st.none() | st.just(8),
    most=st.none() | st.integers(1, 12),
)
def test_documents_are_framed_as_the_rules_say(documents, dtype, bos_id, eos_id, most):
    rules = framing(bos_id=bos_id, eos_id=eos_id, max_doc_tokens=most)
    found, cut = frame(Ragged.from_sequences(documents, dtype), rules.ids)
    wanted = [framed_slowly(ids, rules.ids) for ids in documents]
    assert [ids.tolist() for ids in found] == [ids for ids, _ in wanted]
    assert cut.tolist() == [count for _, count in wanted]
    assert found.values.dtype == np.int32
    assert cut.dtype == np.int64


def test_a_cut_document_has_no_end():
    rules = framing(bos_id=1, eos_id=2, max_doc_tokens=2)
    ids, cut = frame(Ragged.from_sequences([[4, 5], [6, 7, 8], []]), rules.ids)
    assert [one.tolist() for one in ids] == [[1, 4, 5, 2], [1, 6, 7], []]
    assert cut.tolist() == [0, 1, 0]


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.lists(st.lists(st.sampled_from(WORDS), max_size=9), min_size=1, max_size=4),
    skip=st.integers(0, 9),
    num_bytes=st.integers(1, 50),
    slice_from=st.integers(0, 3),
)
def test_slices_and_skips_never_change_the_documents(blocks, skip, num_bytes, slice_from):
    skip = min(skip, len(blocks[0]))
    made = [
        block_of(texts, number=100 * n, slice_from=slice_from) for n, texts in enumerate(blocks)
    ]
    rules = framing(eos_id=2)
    before = documents_module.SLICE
    documents_module.SLICE = BatchLimits(num_bytes=num_bytes, num_documents=3)
    try:
        encoded = list(encode_blocks(iter(made), BYTES, rules, skip=skip))
    finally:
        documents_module.SLICE = before
    texts = blocks[0][skip:] + [text for block in blocks[1:] for text in block]
    assert joined(encoded) == [BYTES.encode(text) + [2] * bool(text) for text in texts]
    firsts = {}
    for one in encoded:
        assert one.first == firsts.get(one.block.number, skip if one.block.number == 0 else 0)
        firsts[one.block.number] = one.first + len(one.ids)
        assert one.read == ReadCounts(
            documents=one.block.number + len(blocks[one.block.number // 100])
        )
    assert firsts == {100 * n: len(texts) for n, texts in enumerate(blocks)}


def test_a_slice_holds_about_two_megabytes():
    block = block_of(["x" * 500_000] * 9 + ["y" * 5_000_000, "z"])
    sizes = [len(one.ids) for one in encode_blocks(iter([block]), BYTES, framing())]
    assert sizes == [4, 4, 1, 1, 1]


def test_skipped_documents_are_not_encoded():
    class Watching:
        seen = 0

        def encode_batch(self, texts):
            self.seen += len(texts)
            return BYTES.encode_batch(texts)

    watching = Watching()
    blocks = [block_of(["a", "b", "c"]), block_of(["d"], number=3)]
    list(encode_blocks(iter(blocks), watching, framing(), skip=2))
    assert watching.seen == 2


def test_an_empty_block_passes():
    (one,) = encode_blocks(iter([block_of([])]), BYTES, framing(eos_id=2))
    assert (len(one.ids), one.first, one.ids.values.dtype) == (0, 0, np.int32)
    (all_done,) = encode_blocks(iter([block_of(["a", "b"])]), BYTES, framing(), skip=2)
    assert (len(all_done.ids), all_done.first) == (0, 2)


class Fixed:
    """An encoder that gives the same ids whatever the texts are."""

    def __init__(self, documents, dtype="int64"):
        self.ids = Ragged.from_sequences(documents, dtype)

    def encode_batch(self, texts):
        return self.ids


@pytest.mark.parametrize(("documents", "found"), [([[1], [2, -1]], -1), ([[1], [2, 300]], 300)])
def test_an_id_outside_the_vocabulary_is_refused_with_its_document(documents, found):
    rules = framing(vocab_size=300)
    blocks = iter([block_of(["a", "b", "c"])])
    with pytest.raises(TokenRangeError, match=f"epoch 0.*document 2 of the block: id {found} at 1"):
        list(encode_blocks(blocks, Fixed(documents), rules, skip=1))


def test_an_id_that_int32_cannot_hold_is_refused():
    blocks = iter([block_of(["a"])])
    with pytest.raises(TokenRangeError, match=r"id 2,147,483,648 at 0, wanted 0 to 2,147,483,647"):
        list(encode_blocks(blocks, Fixed([[2**31]], "uint32"), framing()))


def test_an_encoder_that_loses_a_text_is_refused():
    blocks = iter([block_of(["a", "b"])])
    with pytest.raises(TokenizerError, match="gave 1 sequences for 2 texts"):
        list(encode_blocks(blocks, Fixed([[1]]), framing()))


def test_a_skip_beyond_the_block_is_refused():
    with pytest.raises(StateMismatchError, match="3 documents of the block are done, but it holds"):
        list(encode_blocks(iter([block_of(["a", "b"])]), BYTES, framing(), skip=3))


@pytest.mark.parametrize("engine", ["reference", pytest.param("auto", marks=pytest.mark.slow)])
def test_every_encoder_takes_slices_of_blocks(tmp_path, engine):
    texts = [f"the {n} quick brown foxes jump over {n * n} lazy dogs \u00e9" for n in range(400)]
    spec = TrainSpec(vocab_size=400, model_type="byte-bpe")
    tokenizer = open_tokenizer(train_tokenizer(tmp_path, texts=texts, spec=spec).model)
    encoder = choose_encoder(tokenizer, engine=engine, check="full", corpus=texts[:50])
    block = block_of(texts, slice_from=5)
    rules = framing(eos_id=3, vocab_size=tokenizer.vocab_size)
    found = joined(encode_blocks(iter([block]), encoder, rules, skip=33))
    assert found == [[*tokenizer.encode(text), 3] for text in texts[33:]]


def test_documents_ahead_are_those_of_the_plain_generators():
    source = MemorySource([f"text {n}" for n in range(500)])
    order, rules = StreamOrder(shuffle=True, buffer_documents=60), framing(eos_id=2)
    documents = DocumentStream(source, order)
    wanted = list(encode_blocks(documents.blocks(), BYTES, rules))
    found = list(encoded_ahead(documents, BYTES, rules))
    assert len(wanted) > 5
    assert joined(found) == joined(wanted)
    assert [(one.block, one.first, one.read) for one in found] == [
        (one.block, one.first, one.read) for one in wanted
    ]
    third = next(one for one in wanted if one.block.number == 120)
    rest = encoded_ahead(documents, BYTES, rules, start=third.block, skip=7)
    assert joined(rest) == joined(wanted)[127:]


def num_threads():
    return threading.active_count()


def test_closing_ends_all_threads_at_once():
    before = num_threads()
    source = MemorySource([f"text {n}" for n in range(500)])
    order = StreamOrder(shuffle=True, repeat=True, buffer_documents=10)
    for taken in range(6):
        encoded = encoded_ahead(DocumentStream(source, order), BYTES, framing())
        assert num_threads() == before
        began = time.monotonic()
        with closing(encoded):
            assert len(list(islice(encoded, taken))) == taken
        assert time.monotonic() - began < 1
        assert num_threads() == before


def test_errors_of_the_source_and_of_the_encoder_come_out_in_their_place():
    def texts():
        yield from ["a", "b"]
        raise OSError("the line is dead")

    source = MemorySource(texts, limits=BatchLimits(num_documents=1))
    encoded = encoded_ahead(DocumentStream(source, StreamOrder()), BYTES, framing())
    assert joined([next(encoded)]) == [[100]]
    with pytest.raises(OSError, match="the line is dead"):
        list(encoded)
    source = MemorySource(["a", "b"], limits=BatchLimits(num_documents=1))
    rules = framing(vocab_size=101)
    encoded = encoded_ahead(DocumentStream(source, StreamOrder()), BYTES, rules)
    assert joined([next(encoded)]) == [[100]]
    with pytest.raises(TokenRangeError, match="id 101 at 0"):
        next(encoded)


@pytest.mark.slow
def test_closing_does_not_wait_for_a_source_in_a_long_pause():
    began_to_wait, pause, waited = threading.Event(), threading.Event(), threading.Event()

    def texts():
        yield from ["a", "b"]
        began_to_wait.set()
        pause.wait(600)
        waited.set()
        yield "c"

    before = num_threads()
    source = MemorySource(texts, limits=BatchLimits(num_documents=1))
    encoded = encoded_ahead(DocumentStream(source, StreamOrder()), BYTES, framing())
    next(encoded)
    assert began_to_wait.wait(600)
    encoded.close()
    assert not waited.is_set()
    pause.set()  # the pause ends: so do the threads
    wait_for(lambda: num_threads() == before)


def test_closing_gives_up_an_unfinished_block_after_the_batch_being_read():
    read = []

    def texts():
        yield "x" * 100  # a whole block; the next one takes five seconds
        for number in range(100):
            read.append(number)
            time.sleep(0.05)
            yield "x"

    before = num_threads()
    source = MemorySource(texts, limits=BatchLimits(num_documents=1))
    order = StreamOrder(shuffle=True, buffer_bytes=100)
    encoded = encoded_ahead(DocumentStream(source, order), BYTES, framing())
    assert len(next(encoded).ids) == 1
    wait_for(lambda: len(read) >= 3)
    encoded.close()
    assert num_threads() == before
    assert 3 <= len(read) < 30


def test_one_block_is_read_ahead_and_no_more():
    source = UnitsSource([[str(n) for n in range(100)]], batch_rows=1)
    made = []

    def counted():
        for block in DocumentStream(source, StreamOrder()).blocks():
            made.append(block)
            yield block

    with closing(read_ahead(counted(), depth=1)) as blocks:
        next(blocks)
        wait_for(lambda: len(made) >= 2)
        time.sleep(0.05)
        assert len(made) == 2


@pytest.mark.slow
def test_a_program_may_end_with_an_open_stream():
    code = """
from shardmill.sources import MemorySource
from shardmill.loading.streaming.documents import DocumentStream
from shardmill.loading.streaming.documents import encoded_ahead
from shardmill.loading.streaming.documents import StreamOrder
from shardmill.tokenizers import ByteTokenizer
from tests.loading.streaming.encoded import framing
source = MemorySource(["text"] * 5000)
order = StreamOrder(shuffle=True, repeat=True, buffer_documents=1000)
encoded = encoded_ahead(DocumentStream(source, order), ByteTokenizer(), framing())
print(len(next(encoded).ids))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1000\n", "")
