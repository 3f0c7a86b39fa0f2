"""Masks keep attention inside documents: against a mask built one pair at a time."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from shardmill.errors import OptionError
from shardmill.trainers.torch import document_mask, flex_block_mask


def slow_mask(doc_ids: torch.Tensor) -> torch.Tensor:
    rows, seq_len = doc_ids.shape
    mask = torch.zeros(rows, 1, seq_len, seq_len, dtype=torch.bool)
    for row in range(rows):
        for query in range(seq_len):
            for key in range(query + 1):
                mask[row, 0, query, key] = bool(doc_ids[row, query] == doc_ids[row, key])
    return mask


def rows_of_documents(max_seq_len: int) -> st.SearchStrategy[torch.Tensor]:
    """doc_ids that go up by 0 or 1, sometimes more: consecutive ends leave numbers out."""

    def rows(shape: tuple[int, int]) -> st.SearchStrategy[torch.Tensor]:
        steps = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=shape[1], max_size=shape[1])
        return st.lists(steps, min_size=shape[0], max_size=shape[0]).map(
            lambda rows: torch.tensor(rows).cumsum(1)
        )

    return st.tuples(st.integers(1, 3), st.integers(1, max_seq_len)).flatmap(rows)


@settings(deadline=None, max_examples=60)
@given(doc_ids=rows_of_documents(14))
def test_the_dense_mask_is_causal_and_stays_in_the_document(doc_ids):
    mask = document_mask(doc_ids)
    assert mask.dtype == torch.bool
    assert mask.equal(slow_mask(doc_ids))


def test_a_small_mask_by_hand():
    assert document_mask(torch.tensor([[0, 0, 1]])).int().tolist() == [
        [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]
    ]


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(doc_ids=rows_of_documents(40), block_size=st.sampled_from([8, 16]))
def test_the_block_mask_allows_exactly_what_the_dense_one_does(doc_ids, block_size):
    block = flex_block_mask(doc_ids, block_size=block_size)
    rows, seq_len = doc_ids.shape
    places = torch.arange(seq_len)
    allowed = torch.stack(
        [
            block.mask_mod(torch.tensor(r), torch.tensor(0), places[:, None], places[None])
            for r in range(rows)
        ]
    )
    assert allowed.unsqueeze(1).equal(slow_mask(doc_ids))
    num_blocks = -(-seq_len // block_size)
    padded = torch.zeros(
        rows, 1, num_blocks * block_size, num_blocks * block_size, dtype=torch.bool
    )
    padded[:, :, :seq_len, :seq_len] = slow_mask(doc_ids)
    tiles = padded.unflatten(2, (num_blocks, block_size)).unflatten(4, (num_blocks, block_size))
    assert block.to_dense().bool().equal(tiles.any(dim=(3, 5)))


def test_attention_is_the_same_with_both_and_as_document_by_document():
    generator = torch.Generator().manual_seed(0)
    doc_ids = torch.tensor([[0] * 50 + [1] * 78 + [2] * 128, [0] * 200 + [1] * 56])
    query, key, value = (torch.randn(2, 2, 256, 16, generator=generator) for _ in range(3))
    dense = scaled_dot_product_attention(query, key, value, attn_mask=document_mask(doc_ids))
    with warnings.catch_warnings():  # it says that it is slow when it is not compiled
        warnings.simplefilter("ignore")
        flex = flex_attention(query, key, value, block_mask=flex_block_mask(doc_ids))
    assert isinstance(flex, torch.Tensor)
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)
    alone = scaled_dot_product_attention(
        query[:1, :, 50:128], key[:1, :, 50:128], value[:1, :, 50:128], is_causal=True
    )
    torch.testing.assert_close(dense[:1, :, 50:128], alone, atol=1e-5, rtol=1e-5)


def test_doc_ids_of_another_shape_are_refused():
    for doc_ids in (torch.zeros(4, dtype=torch.int64), torch.zeros(1, 4), torch.zeros(2, 0).long()):
        for mask in (document_mask, flex_block_mask):
            with pytest.raises(OptionError, match="doc_ids of shape"):
                mask(doc_ids)
