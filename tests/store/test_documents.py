"""Documents inside windows: borders, positions, pieces and labels, against a slow loop."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import DamagedStoreError, OptionError
from shardmill.records import TokenFile
from shardmill.store.readers import DocumentWindows, TokenSpace
from shardmill.store.readers.documents import Borders, borders_after, cut_segments, find_borders


def space_of(folder: Path, num_tokens: int) -> TokenSpace:
    """The tokens 0, 1, 2, ... in shards of seven."""
    files = []
    for start in range(0, num_tokens, 7):
        part = np.arange(start, min(start + 7, num_tokens), dtype="<u2")
        path = folder / f"{start}.bin"
        part.tofile(path)
        files.append(TokenFile(path=path, num_tokens=len(part), dtype="uint16"))
    return TokenSpace(files)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def plain_window(owner: list[int], start: int, seq_len: int) -> dict[str, list[int]]:
    """One window token by token; `owner[t]` is the number of the document token `t` is in."""
    inputs = owner[start : start + seq_len]
    rows: dict[str, list[int]] = {"doc_ids": [], "position_ids": [], "true": [], "labels": []}
    for column, document in enumerate(inputs):
        fresh = column > 0 and document != inputs[column - 1]
        rows["doc_ids"].append((rows["doc_ids"][-1] + fresh) if column else 0)
        rows["position_ids"].append(0 if fresh or not column else rows["position_ids"][-1] + 1)
        token = start + column
        rows["true"].append(token - owner.index(document))
        rows["labels"].append(token + 1 if owner[token + 1] == document else -100)
    return rows


def pieces_of(doc_rows: list[list[int]]) -> list[int]:
    edges, at = [0], 0
    for row in doc_rows:
        for column in range(len(row)):
            at += 1
            if column + 1 == len(row) or row[column + 1] != row[column]:
                edges.append(at)
    return edges


def test_the_picture_at_the_head_of_the_module(tmp_path):
    windows = DocumentWindows(space_of(tmp_path, 6), ints(0, 2, 5))
    batch = windows.gather([0], seq_len=5)
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.labels.tolist() == [[1, -100, 3, 4, -100]]
    assert batch.segments.doc_ids.tolist() == [[0, 0, 1, 1, 1]]
    assert batch.segments.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert batch.segments.cu_seqlens.tolist() == [0, 2, 5]
    assert batch.segments.cu_seqlens.dtype == np.int32
    assert batch.segments.max_seqlen == 3


def test_a_window_in_the_middle_of_a_document_counts_from_zero_by_default(tmp_path):
    windows = DocumentWindows(space_of(tmp_path, 12), ints(0, 2, 8))
    restarted = windows.gather([4, 0], seq_len=6).segments.position_ids
    assert restarted.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3]]
    true = windows.gather([4, 0], seq_len=6, true_positions=True).segments.position_ids
    assert true.tolist() == [[2, 3, 4, 5, 0, 1], [0, 1, 0, 1, 2, 3]]


def test_documents_without_tokens_leave_no_trace(tmp_path):
    windows = DocumentWindows(space_of(tmp_path, 6), ints(0, 0, 3, 3, 3, 6, 6))
    batch = windows.gather([0], seq_len=5)
    assert batch.segments.doc_ids.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.labels.tolist() == [[1, 2, -100, 4, 5]]


def test_labels_across_documents_can_be_kept(tmp_path):
    windows = DocumentWindows(space_of(tmp_path, 6), ints(0, 2, 5))
    assert windows.gather([0], seq_len=5, mask_borders=False).labels.tolist() == [[1, 2, 3, 4, 5]]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_output_equals_a_loop_over_the_tokens(data):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12), "documents")
    num_tokens = sum(lengths)
    seq_len = data.draw(st.integers(1, max(1, num_tokens - 1)), "seq_len")
    last = num_tokens - seq_len - 1
    rows = st.lists(st.integers(0, last), max_size=6) if last >= 0 else st.just([])
    starts = data.draw(rows, "starts")
    owner = [number for number, length in enumerate(lengths) for _ in range(length)]
    document_starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    wanted = [plain_window(owner, start, seq_len) for start in starts]
    with tempfile.TemporaryDirectory() as folder:
        windows = DocumentWindows(space_of(Path(folder), num_tokens), document_starts)
        batch = windows.gather(starts, seq_len=seq_len)
        true = windows.gather(starts, seq_len=seq_len, true_positions=True)
    segments = batch.segments
    assert batch.input_ids.tolist() == [list(range(s, s + seq_len)) for s in starts]
    assert batch.labels.tolist() == [row["labels"] for row in wanted]
    assert segments.doc_ids.tolist() == [row["doc_ids"] for row in wanted]
    assert segments.position_ids.tolist() == [row["position_ids"] for row in wanted]
    assert true.segments.position_ids.tolist() == [row["true"] for row in wanted]
    edges = pieces_of([row["doc_ids"] for row in wanted])
    assert segments.cu_seqlens.tolist() == edges
    assert segments.max_seqlen == max(np.diff(edges), default=0)
    for array in (batch.input_ids, batch.labels, segments.doc_ids, segments.position_ids):
        assert (array.dtype, array.shape) == (np.int64, (len(starts), seq_len))


@settings(deadline=None, max_examples=100)
@given(
    ids=st.integers(0, 4).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=n)
    )
)
def test_an_end_token_closes_its_own_document(ids):
    array = np.array(ids, np.uint16).reshape(-1, 6)
    borders = borders_after(array, 3)
    wanted = [
        row * 6 + column
        for row, tokens in enumerate(ids)
        for column in range(1, 6)
        if tokens[column - 1] == 3
    ]
    assert borders.positions.tolist() == wanted


def test_an_index_out_of_order_is_refused(tmp_path):
    with pytest.raises(DamagedStoreError, match=r"0\.\.3 are not in ascending order"):
        DocumentWindows(space_of(tmp_path, 10), ints(0, 7, 3, 9))


def test_a_window_that_meets_starts_out_of_order_is_refused():
    for starts in (ints(0, 9, 3, 5, 30), ints(0, 3, 40, 5, 30), ints(0, 25, 3, 27, 12, 30)):
        with pytest.raises(DamagedStoreError, match="not in ascending order"):
            find_borders(starts, ints(0, 2, 4), 26)


def test_document_starts_that_cannot_be_are_refused(tmp_path):
    space = space_of(tmp_path, 10)
    for starts, words in [
        (ints(), "empty"),
        (ints(1, 5), "the first at 0"),
        (ints(0, 11), "within 0..10"),
        (np.array([0, 5], np.int32), "int64"),
        (np.zeros((1, 1), np.int64), "1-d array of int64"),
        ([0, 5], "list"),
    ]:
        with pytest.raises(OptionError, match=words):
            DocumentWindows(space, starts)


def test_a_batch_too_large_for_int32_is_refused_before_memory_is_asked_for():
    with pytest.raises(OptionError, match="int32"):
        cut_segments(Borders(2**20, 2**11 + 1, ints()))


def test_windows_outside_the_space_are_index_errors(tmp_path):
    windows = DocumentWindows(space_of(tmp_path, 10), ints(0, 4))
    for start in (-1, 6, 2**62):
        with pytest.raises(IndexError):
            windows.gather([start], seq_len=4)
