"""The comparison that ends every conversion finds every difference."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import DamagedStoreError, OptionError
from shardmill.formats.convert import PACKED, ConvertOptions, convert
from shardmill.formats.packed import formats as convert_module
from shardmill.formats.packed.formats import check_bins, open_packed
from shardmill.formats.packed.records import PackedBin
from shardmill.formats.stores import check_documents
from shardmill.records import Ragged
from shardmill.testing.stores import documents
from tests.formats.test_unpickle import BIN, packed_bins, read, save


def cut(ragged: Ragged, places: list[int]) -> list[Ragged]:
    edges = sorted({0, len(ragged), *(place % (len(ragged) + 1) for place in places)})
    return [ragged.slice(start, stop) for start, stop in pairwise(edges)]


places = st.lists(st.integers(0, 20), max_size=4)


@settings(max_examples=100, deadline=None)
@given(data=documents(), one=places, other=places)
def test_equal_documents_are_equal_however_they_are_batched(data, one, other):
    parity = check_documents(cut(data, one), cut(data, other), "a and b")
    assert (parity.num_units, parity.num_tokens) == (len(data), len(data.values))
    assert parity.to_json() == {
        "equal": True,
        "documents": len(data),
        "tokens": len(data.values),
    }


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(left=documents(max_tokens=4), right=documents(max_tokens=4), one=places, other=places)
def test_unequal_documents_are_never_taken_for_equal(left, right, one, other):
    if left == right:
        return
    with pytest.raises(DamagedStoreError, match="a and b: not the same data"):
        check_documents(cut(left, one), cut(right, other), "a and b")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ([[1, 2], [4]], "token ids differ at 2"),
        ([[1], [2, 3]], "lengths of documents differ at 0"),
        ([[1, 2], [3], []], "one has more documents"),
        ([[1, 2]], "one has more documents"),
    ],
)
def test_the_first_difference_is_named(other, what):
    one = [Ragged.from_sequences([[1, 2], [3]])]
    with pytest.raises(DamagedStoreError, match=what):
        check_documents(one, [Ragged.from_sequences(other)], "x")


def packed(**changes) -> PackedBin:
    fields = {name: np.array(values) for name, values in (BIN | changes).items()}
    return PackedBin(
        input_ids=fields["input_ids"],
        loss_mask=fields["loss_mask"].astype(np.uint8),
        seq_starts=fields["seq_start_id"],
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"input_ids": [1, 300, 70001]}, "bin 1: input_ids differ at 2"),
        ({"loss_mask": [0, 0, 0]}, "bin 1: loss_mask differ at 1"),
        ({"seq_start_id": [0]}, "bin 1: seq_starts differ at 1"),
    ],
)
def test_a_difference_in_a_bin_is_named(changes, what):
    with pytest.raises(DamagedStoreError, match=what):
        check_bins([packed(), packed()], [packed(), packed(**changes)], "x")


def test_a_missing_bin_is_a_difference():
    for one, other in ((1, 2), (2, 1)):
        with pytest.raises(DamagedStoreError, match="one has 1 bins, the other more"):
            check_bins([packed()] * one, [packed()] * other, "x")


ENDING = {"legacy": ".npy", "memmap": "", "parquet": ".parquet"}


@settings(max_examples=20, deadline=None)
@given(bins=packed_bins(), way=st.permutations(PACKED))
def test_packed_shards_go_round_all_formats_unchanged(tmp_path_factory, bins, way):
    folder = tmp_path_factory.mktemp("round")
    path = save(folder / "given.npy", bins)
    first = ConvertOptions(pack_size=1000, loss_mask_alignment="roll_right")
    hops = [name for name in way if name != "legacy"] + ["legacy"]
    before = "legacy"
    for number, name in enumerate(hops):
        target = folder / f"{number}{ENDING[name]}"
        options = first if number == 0 else None
        receipt = convert(path, target, from_format=before, to_format=name, options=options)
        assert receipt["parity"]["bins"] == len(bins)
        path, before = target, name
        shard = open_packed(path, loss_mask_alignment="roll_right")
        assert shard.loss_mask_alignment == "roll_right"
    assert read(path) == bins


def test_a_pair_that_is_not_offered_says_what_is(tmp_path):
    with pytest.raises(OptionError, match="'store' to 'legacy': not offered; there is megatron to"):
        convert(tmp_path, tmp_path / "x", from_format="store", to_format="legacy")


@pytest.mark.parametrize("target", PACKED)
def test_a_packed_shard_that_differs_is_never_published(tmp_path, monkeypatch, target):
    source = "parquet" if target == "memmap" else "memmap"
    save(tmp_path / "old.npy", [BIN])
    said = ConvertOptions(pack_size=8, loss_mask_alignment="label")
    first = {"from_format": "legacy", "to_format": source, "options": said}
    convert(tmp_path / "old.npy", tmp_path / "here", **first)
    new = tmp_path / "new.npy"

    def differs(*arguments: object) -> None:
        assert not new.exists()
        raise DamagedStoreError("bin 0 differs")

    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "check_bins", differs)
        with pytest.raises(DamagedStoreError, match="bin 0 differs"):
            convert(tmp_path / "here", new, from_format=source, to_format=target)
    assert sorted(tmp_path.iterdir()) == before
    receipt = convert(tmp_path / "here", new, from_format=source, to_format=target)
    assert receipt["parity"] == {"equal": True, "bins": 1, "tokens": 3}
