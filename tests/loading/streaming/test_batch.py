"""Inputs, labels and masks of a batch, against a loop over every token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError
from shardmill.loading.streaming.stream import BatchShape, LossRules, make_batch

EOS = 2


@st.composite
def some_rows(draw):
    """(A, tokens, segments): rows of documents with padding after them, EOS anywhere."""
    grad_accum, batch_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    width = draw(st.integers(2, 12))
    tokens, segments = [], []
    for _ in range(grad_accum * batch_size):
        lengths = draw(st.lists(st.integers(1, 5), max_size=5))
        numbers = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
        segments.append((numbers + [0] * width)[:width])
        tokens.append(draw(st.lists(st.integers(0, 4), min_size=width, max_size=width)))
    return grad_accum, np.array(tokens, np.int32), np.array(segments, np.int32)


def label_of(tokens, segments, at, *, mask_boundary_loss, train_on_eos) -> int:
    if segments[at + 1] == 0:
        return -100
    if mask_boundary_loss and segments[at + 1] != segments[at]:
        return -100
    if not train_on_eos and tokens[at + 1] == EOS:
        return -100
    return int(tokens[at + 1])


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(rows=some_rows(), mask_boundary_loss=st.booleans(), train_on_eos=st.booleans())
def test_batches_equal_a_loop_over_every_token(rows, mask_boundary_loss, train_on_eos) -> None:
    grad_accum, tokens, segments = rows
    flags = {"mask_boundary_loss": mask_boundary_loss, "train_on_eos": train_on_eos}
    batch_size, seq_len = len(tokens) // grad_accum, tokens.shape[1] - 1
    shape = BatchShape(grad_accum=grad_accum, batch_size=batch_size, seq_len=seq_len)
    batch = make_batch(tokens, segments, shape, LossRules(eos_id=EOS, **flags))
    for array in batch.arrays().values():
        assert array.shape == (grad_accum, batch_size, seq_len)
    for a in range(grad_accum):
        for b in range(batch_size):
            ids, numbers = tokens[a * batch_size + b], segments[a * batch_size + b]
            labels = [label_of(ids, numbers, at, **flags) for at in range(seq_len)]
            assert batch.input_ids[a, b].tolist() == ids[:seq_len].tolist()
            assert batch.labels[a, b].tolist() == labels
            assert batch.segment_ids[a, b].tolist() == numbers[:seq_len].tolist()
            assert batch.attention_mask[a, b].tolist() == [n > 0 for n in numbers[:seq_len]]


def test_one_row_as_written_by_hand() -> None:
    tokens = np.array([[5, 6, 2, 7, 2, 0, 0]], np.int32)
    segments = np.array([[1, 1, 1, 2, 2, 0, 0]], np.int32)
    shape = BatchShape(grad_accum=1, batch_size=1, seq_len=6)
    batch = make_batch(tokens, segments, shape, LossRules())
    assert batch.input_ids.tolist() == [[[5, 6, 2, 7, 2, 0]]]
    assert batch.labels.tolist() == [[[6, 2, -100, 2, -100, -100]]]
    assert batch.segment_ids.tolist() == [[[1, 1, 1, 2, 2, 0]]]
    assert batch.attention_mask.tolist() == [[[True, True, True, True, True, False]]]
    open_borders = LossRules(mask_boundary_loss=False, train_on_eos=False, eos_id=2)
    batch = make_batch(tokens, segments, shape, open_borders)
    assert batch.labels.tolist() == [[[6, -100, 7, -100, -100, -100]]]
    flat = make_batch(tokens, segments, BatchShape(batch_size=1, seq_len=6), open_borders)
    assert flat.labels.tolist() == [[6, -100, 7, -100, -100, -100]]


def test_arrays_are_fresh_contiguous_writeable_and_of_their_dtype() -> None:
    tokens = np.arange(24, dtype=np.int32).reshape(4, 6)
    segments = np.ones((4, 6), np.int32)
    tokens.flags.writeable = segments.flags.writeable = False
    batch = make_batch(
        tokens, segments, BatchShape(grad_accum=2, batch_size=2, seq_len=5), LossRules()
    )
    dtypes = [array.dtype for array in batch.arrays().values()]
    assert dtypes == [np.int32, np.int32, np.bool_, np.int32]
    for array in batch.arrays().values():
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert not np.shares_memory(array, tokens)
        assert not np.shares_memory(array, segments)
    assert not np.shares_memory(batch.input_ids, batch.labels)


def test_not_training_on_the_end_needs_its_id() -> None:
    with pytest.raises(OptionError, match="train_on_eos=False needs the id of EOS"):
        LossRules(train_on_eos=False)
