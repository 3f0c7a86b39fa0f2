"""The records that pass between packages, and the shift from tokens to labels."""

from __future__ import annotations

import numpy as np
import pytest

from shardmill.records import IGNORE_INDEX, Batch, next_token_pairs, write_next_token_pairs

IDS = np.array([1, 4, 9, 2, 5, 9], np.uint16)
TRAINED = np.array([0, 0, 0, 0, 1, 1], np.bool_)


def test_labels_are_the_next_tokens_where_those_are_trained() -> None:
    inputs, labels = next_token_pairs(IDS, TRAINED)
    assert inputs.tolist() == [1, 4, 9, 2, 5]
    assert labels.tolist() == [-100, -100, -100, 5, 9]
    assert next_token_pairs(IDS)[1].tolist() == [4, 9, 2, 5, 9]
    assert next_token_pairs(IDS, TRAINED, ignore_index=-7)[1].tolist() == [-7, -7, -7, 5, 9]


def test_inputs_and_labels_have_the_dtype_that_was_asked_for_and_memory_of_their_own() -> None:
    for dtype in (np.int64, np.int32):
        ids = np.tile(IDS, (2, 3, 1))
        inputs, labels = next_token_pairs(ids, np.tile(TRAINED, (2, 3, 1)), dtype=dtype)
        assert inputs.shape == labels.shape == (2, 3, 5)
        assert inputs.dtype == labels.dtype == dtype
        assert inputs.flags.c_contiguous
        assert labels.flags.c_contiguous
        assert not np.shares_memory(inputs, labels)
        assert not np.shares_memory(inputs, ids)


def test_an_unsigned_label_cannot_be_ignored_silently() -> None:
    with pytest.raises(OverflowError):
        next_token_pairs(IDS, TRAINED, dtype=np.uint16)


def test_pairs_are_written_into_chosen_rows() -> None:
    inputs, labels = np.zeros((2, 3, 5), np.int64)
    rows = np.array([2, 0])
    write_next_token_pairs(np.tile(IDS, (2, 1)), np.tile(TRAINED, (2, 1)), inputs, labels, rows)
    assert inputs[1].tolist() == labels[1].tolist() == [0] * 5
    for row in (0, 2):
        assert inputs[row].tolist() == [1, 4, 9, 2, 5]
        assert labels[row].tolist() == [*[IGNORE_INDEX] * 3, 5, 9]


def test_the_length_of_a_batch_is_its_rows() -> None:
    flat = np.zeros((4, 8), np.int64)
    assert len(Batch(input_ids=flat, labels=flat)) == 4
    assert len(Batch(input_ids=flat.reshape(2, 2, 8), labels=flat.reshape(2, 2, 8))) == 4
