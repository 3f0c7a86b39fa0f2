"""Where shards go in the address range: on small numbers, and as a property."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.store.readers.files import pieces
from shardmill.store.readers.mapped import plan_layout


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_shards_of_whole_pages_are_one_segment():
    layout = plan_layout(ints(4, 8, 3), 2, page=8, huge_page=1024)
    assert layout.edges.tolist() == [0, 4, 12, 15]
    assert layout.addresses.tolist() == [0, 8, 24]
    assert layout.num_bytes == 32
    assert layout.segment_edges.tolist() == [0, 15]
    assert layout.segment_shifts.tolist() == [0]


def test_a_gap_begins_a_segment():
    layout = plan_layout(ints(4, 3, 4, 2, 5), 2, page=8, huge_page=1024)
    assert layout.addresses.tolist() == [0, 8, 16, 24, 32]
    assert layout.segment_edges.tolist() == [0, 7, 13, 18]
    assert layout.segment_shifts.tolist() == [0, 1, 3]  # token 13 is item 16


def test_after_a_large_shard_that_ends_a_segment_the_next_begins_on_a_huge_page():
    layout = plan_layout(ints(17, 16, 16), 2, page=8, huge_page=32)
    assert layout.addresses.tolist() == [0, 64, 96]
    assert layout.segment_edges.tolist() == [0, 17, 49]


def test_no_shards_need_no_addresses():
    layout = plan_layout(ints(), 2, page=8, huge_page=32)
    assert layout.edges.tolist() == [0]
    assert layout.num_bytes == 0


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 40) | st.sampled_from([4, 8, 16]), min_size=1),
    width=st.sampled_from([2, 4]),
)
def test_shards_never_overlap_and_every_token_has_one_address(sizes, width):
    counts = ints(*sizes)
    layout = plan_layout(counts, width, page=8, huge_page=32)
    assert (layout.addresses % 8 == 0).all()
    ends = layout.addresses + counts * width
    assert (ends[:-1] <= layout.addresses[1:]).all()
    assert ends[-1] <= layout.num_bytes
    for shard, (first, last) in enumerate(zip(layout.edges, layout.edges[1:], strict=False)):
        found = [
            (token + layout.segment_shifts[segment]) * width
            for segment, begin, end in pieces(layout.segment_edges, int(first), int(last))
            for token in range(begin, end)
        ]
        assert found == [int(layout.addresses[shard]) + width * at for at in range(counts[shard])]


def test_pieces_are_cut_at_the_edges():
    edges = ints(0, 3, 4, 9)
    assert list(pieces(edges, 1, 8)) == [(0, 1, 3), (1, 3, 4), (2, 4, 8)]
    assert list(pieces(edges, 3, 4)) == [(1, 3, 4)]
