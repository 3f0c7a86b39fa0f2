"""Packed rows train exactly what the unpacked sequences train."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import (
    DamagedStoreError,
    OptionError,
    StoreError,
    StoreExistsError,
    TokenRangeError,
)
from shardmill.formats.packed import (
    ChatStoreSpool,
    PackedOptions,
    SequenceSpoolReader,
    materialize_bin_arrays,
    open_packed,
    pack_from_spool,
    verify_memmap_shard,
)
from shardmill.formats.packed import spool as materialize_module
from shardmill.packing import BinAssignment, best_fit_decreasing
from shardmill.testing.stores import build_small_chat_store, make_examples
from tests.formats.packed import (
    aligned_slowly,
    assert_holds_bins,
    assert_trains_the_same_labels,
    plain,
    token_sequences,
    write_spool,
)
from tests.helpers import folder_digest

ALGORITHMS = ["best-fit", "first-fit", "first-fit-shuffle", "concatenate"]
SIX = [
    ([1, 2, 3], [0, 1, 1]),
    ([4, 5], [0, 1]),
    ([6], [1]),
    ([], []),
    ([7, 8, 9, 10], [0, 0, 1, 0]),
]


def seed_of(algorithm: str) -> int | None:
    return 7 if algorithm == "first-fit-shuffle" else None


class Lists:
    """A spool of lists."""

    def __init__(self, sequences) -> None:
        self.sequences = sequences

    def read_sequence(self, index: int):
        ids, mask = self.sequences[index]
        return np.array(ids, np.int64), np.array(mask, np.uint8)


@settings(deadline=None, max_examples=80)
@given(sequences=token_sequences(), alignment=st.sampled_from(["label", "roll_right"]))
def test_a_bin_equals_the_slow_reference(sequences, alignment) -> None:
    size = sum(len(ids) for ids, _ in sequences) + 3
    ids, mask = np.full(size, 99, np.int32), np.full(size, 1, np.uint8)
    assignment = BinAssignment.from_bins([list(range(len(sequences)))])
    length, starts = materialize_bin_arrays(
        Lists(sequences), assignment, 0, size, ids, mask, loss_mask_alignment=alignment
    )
    assert starts.dtype == np.uint32
    found = (ids[:length].tolist(), mask[:length].tolist(), starts.tolist())
    assert found == aligned_slowly(sequences, alignment)
    assert not ids[length:].any()
    assert not mask[length:].any()


def test_the_two_alignments_by_hand() -> None:
    ids, mask = np.zeros(8, np.int32), np.zeros(8, np.uint8)
    assignment = BinAssignment.from_bins([[0, 1]])
    spool = Lists([([11, 12, 13], [0, 1, 1]), ([14, 15], [1, 1])])
    found = materialize_bin_arrays(spool, assignment, 0, 8, ids, mask)
    assert (found[0], found[1].tolist()) == (5, [0, 3])
    assert ids.tolist() == [11, 12, 13, 14, 15, 0, 0, 0]
    assert mask.tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    materialize_bin_arrays(spool, assignment, 0, 8, ids, mask, loss_mask_alignment="roll_right")
    assert mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def test_scratch_arrays_that_cannot_hold_a_bin_are_refused() -> None:
    ids, mask = np.zeros(4, np.int32), np.zeros(4, np.uint8)
    spool = Lists([([1, 2, 3], [0, 1, 1]), ([4, 5], [1, 1])])
    with pytest.raises(OptionError, match=r"scratch_loss_mask of shape \(3,\), wanted \(4,\)"):
        materialize_bin_arrays(spool, BinAssignment.from_bins([[0], [1]]), 0, 4, ids, mask[:3])
    with pytest.raises(TokenRangeError, match="70,000 does not fit uint16"):
        materialize_bin_arrays(
            Lists([([70_000], [1])]), BinAssignment.from_bins([[0]]), 0, 4, ids.astype("u2"), mask
        )


@settings(deadline=None, max_examples=25)
@given(
    sequences=token_sequences(max_sequences=20),
    algorithm=st.sampled_from(ALGORITHMS),
    align_to=st.sampled_from([1, 1, 3]),
    max_per_row=st.sampled_from([None, None, 2]),
    block=st.sampled_from([1, 20, 2**20]),
)
def test_packed_rows_train_the_labels_of_the_unpacked_sequences(
    sequences, algorithm, align_to, max_per_row, block
) -> None:
    with tempfile.TemporaryDirectory() as top, pytest.MonkeyPatch.context() as patch:
        patch.setattr(materialize_module, "_BLOCK", block)
        receipt = pack_from_spool(
            write_spool(Path(top) / "spool", sequences),
            Path(top),
            shard_id="shard",
            pack_size=12,
            options=PackedOptions(
                algorithm=algorithm,
                seed=seed_of(algorithm),
                align_to=align_to,
                max_per_row=max_per_row,
            ),
        )
        shard = open_packed(receipt["output_path"])
        assert verify_memmap_shard(Path(top) / "shard") == []
        if align_to == 1:
            assert_trains_the_same_labels(shard, sequences)
        else:
            padded = [
                (ids + [0] * (-len(ids) % align_to), mask + [0] * (-len(ids) % align_to))
                for ids, mask in sequences
            ]
            assert_trains_the_same_labels(shard, padded)
        bins = [plain(shard.read_bin(number)) for number in range(len(shard))]
        assert receipt["num_bins"] == len(bins)
        assert receipt["num_sequences"] == len(sequences)
        assert receipt["tokens"] == sum(len(ids) for ids, _ in sequences)
        assert receipt["trained_labels"] == sum(sum(mask[1:]) for _, mask in sequences)
        assert receipt["untrained_bins"] == sum(not any(mask) for _, mask, _ in bins)
        assert all(start % align_to == 0 for _, _, starts in bins for start in starts)
        assert all(len(starts) <= (max_per_row or 99) for _, _, starts in bins)
        assert json.loads(json.dumps(receipt)) == receipt


@settings(deadline=None, max_examples=25)
@given(
    sequences=token_sequences(max_sequences=20), alignment=st.sampled_from(["label", "roll_right"])
)
def test_many_bins_at_once_equal_bins_one_by_one(sequences, alignment) -> None:
    with tempfile.TemporaryDirectory() as top, pytest.MonkeyPatch.context() as patch:
        patch.setattr(materialize_module, "_BLOCK", 40)
        spool = SequenceSpoolReader(write_spool(Path(top) / "spool", sequences))
        options = PackedOptions(loss_mask_alignment=alignment)
        pack_from_spool(spool, top, shard_id="shard", pack_size=10, options=options)
        shard = open_packed(Path(top) / "shard")
        assert shard.loss_mask_alignment == alignment
        assert verify_memmap_shard(Path(top) / "shard") == []  # padding of zeros
        plan = best_fit_decreasing(spool.lengths(), 10)
        for number in range(len(shard)):
            members = plan.pieces.example[plan.rows.bin_indices(number)].tolist()
            wanted = aligned_slowly([sequences[member] for member in members], alignment)
            assert plain(shard.read_bin(number)) == wanted


@settings(deadline=None, max_examples=25)
@given(sequences=token_sequences(max_tokens=30, max_sequences=8))
def test_split_keeps_every_token_and_counts_the_labels_it_loses(sequences) -> None:
    with tempfile.TemporaryDirectory() as top:
        spool = write_spool(Path(top) / "spool", sequences)
        options = PackedOptions(long="split")
        receipt = pack_from_spool(spool, top, shard_id="shard", pack_size=7, options=options)
        pieces = [
            (ids[at : at + 7], mask[at : at + 7])
            for ids, mask in sequences
            for at in range(0, len(ids), 7)
        ]
        assert_trains_the_same_labels(open_packed(Path(top) / "shard"), pieces)
        trained = sum(sum(mask[1:]) for _, mask in sequences)
        assert receipt["split_labels_lost"] == trained - receipt["trained_labels"]
        assert receipt["split"] == sum(len(ids) > 7 for ids, _ in sequences)


@pytest.mark.parametrize(
    ("long", "wanted", "counts"),
    [
        (
            "truncate",
            [([1, 2, 3, 4], [0, 1, 0, 1]), ([9], [1])],
            {"truncated": 1, "truncated_tokens": 2},
        ),
        ("drop", [([9], [1])], {"dropped": 1, "dropped_tokens": 6}),
    ],
)
def test_what_is_cut_is_counted(tmp_path, long, wanted, counts) -> None:
    spool = write_spool(tmp_path / "spool", [([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 1, 1]), ([9], [1])])
    options = PackedOptions(long=long)
    receipt = pack_from_spool(spool, tmp_path, shard_id="shard", pack_size=4, options=options)
    assert_trains_the_same_labels(open_packed(tmp_path / "shard"), wanted)
    assert {name: receipt[name] for name in counts} == counts


def test_a_long_sequence_is_an_error_unless_asked_otherwise(tmp_path) -> None:
    spool = write_spool(tmp_path / "spool", SIX)
    with pytest.raises(OptionError, match="example 4: 4 tokens, but a row holds 3"):
        pack_from_spool(spool, tmp_path, shard_id="shard", pack_size=3)
    assert [path.name for path in tmp_path.iterdir()] == ["spool"]


def test_rows_that_train_nothing_are_reported(tmp_path, caplog) -> None:
    spool = write_spool(tmp_path / "spool", [([1, 2, 3], [1, 0, 0]), ([4, 5, 6], [0, 1, 0])])
    receipt = pack_from_spool(spool, tmp_path, shard_id="shard", pack_size=3)
    assert receipt["untrained_bins"] == 1
    assert "1 of 2 bins train no token" in caplog.text


@pytest.mark.parametrize("storage", ["memmap_v1", "parquet", "legacy_npy_pickle"])
@pytest.mark.parametrize("alignment", ["label", "roll_right"])
def test_every_storage_holds_the_same_bins(tmp_path, storage, alignment) -> None:
    spool = write_spool(tmp_path / "spool", SIX)
    receipt = pack_from_spool(
        spool,
        tmp_path / "out",
        shard_id="shard_000000",
        pack_size=6,
        options=PackedOptions(
            algorithm="concatenate", packed_storage=storage, loss_mask_alignment=alignment
        ),
    )
    assert receipt["format"] == storage
    shard = open_packed(receipt["output_path"])
    wanted = [aligned_slowly(SIX[:3], alignment), aligned_slowly(SIX[4:], alignment)]
    assert [plain(shard.read_bin(number)) for number in range(len(shard))] == wanted
    assert shard.pack_size == 6
    assert shard.loss_mask_alignment == alignment
    shard.close()
    with pytest.raises(StoreExistsError):
        pack_from_spool(
            spool,
            tmp_path / "out",
            shard_id="shard_000000",
            pack_size=6,
            options=PackedOptions(packed_storage=storage),
        )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_spool_same_bytes(tmp_path, algorithm) -> None:
    spool = write_spool(tmp_path / "spool", SIX)
    digests = set()
    for name in ("one", "two"):
        pack_from_spool(
            spool,
            tmp_path / name,
            shard_id="shard",
            pack_size=6,
            options=PackedOptions(algorithm=algorithm, seed=seed_of(algorithm)),
        )
        digests.add(folder_digest(tmp_path / name))
    assert len(digests) == 1


def test_a_chat_store_is_packed_without_a_spool(tmp_path) -> None:
    said = [(1, [(5, False), (6, False)]), (2, [(7, True), (8, True)])]
    build_small_chat_store(tmp_path / "chats", {"train": make_examples([([1], said), ([], said)])})
    with ChatStoreSpool(tmp_path / "chats", "train") as spool:
        options = PackedOptions(dtype=np.uint16)
        pack_from_spool(spool, tmp_path, shard_id="shard", pack_size=9, options=options)
    found = plain(open_packed(tmp_path / "shard").read_bin(0))
    assert found == ([1, 5, 6, 7, 8, 5, 6, 7, 8], [0, 0, 1, 1, 0, 0, 1, 1, 0], [0, 5])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "magic"}, "algorithm='magic': wanted one of best-fit"),
        ({"algorithm": "first-fit-shuffle"}, "'first-fit-shuffle' needs a seed"),
        ({"seed": 1}, "'best-fit' takes no seed"),
        ({"packed_storage": "zip"}, "packed_storage='zip'"),
        ({"shard_id": "../a"}, "wanted 1 to 200 letters"),
        ({"shard_id": ""}, "wanted 1 to 200 letters"),
        ({"loss_mask_alignment": "x"}, "loss_mask_alignment='x'"),
        ({"dtype": "float32"}, "dtype=float32"),
        ({"pack_size": 0}, "pack_size=0"),
        ({"pack_size": 7, "align_to": 2}, "not a multiple of align_to=2"),
        ({"long": "cut"}, "long='cut'"),
    ],
)
def test_options_that_make_no_sense_leave_nothing(tmp_path, options, words) -> None:
    spool = write_spool(tmp_path / "spool", SIX)
    given = {"shard_id": "shard", "pack_size": 8} | options
    first = {name: given.pop(name) for name in ("shard_id", "pack_size")}
    with pytest.raises(OptionError, match=words):
        pack_from_spool(spool, tmp_path, **first, options=PackedOptions(**given))
    assert [path.name for path in tmp_path.iterdir()] == ["spool"]


def test_ids_that_do_not_fit_leave_nothing(tmp_path) -> None:
    spool = write_spool(tmp_path / "spool", [([70_000], [1])])
    options = PackedOptions(dtype=np.uint16)
    with pytest.raises(TokenRangeError, match="70,000 does not fit uint16"):
        pack_from_spool(spool, tmp_path, shard_id="shard", pack_size=8, options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["spool"]


def test_an_empty_spool_gives_an_empty_shard(tmp_path) -> None:
    receipt = pack_from_spool(write_spool(tmp_path / "s", []), tmp_path, shard_id="a", pack_size=4)
    assert (receipt["num_bins"], receipt["utilisation"]) == (0, 1.0)
    assert len(open_packed(tmp_path / "a")) == 0


def test_a_shard_in_memory_holds_large_ids(tmp_path) -> None:
    bins = [
        {"input_ids": ids, "loss_mask": [0] * len(ids), "seq_start_id": [0]}
        for ids in ([1, 2], [2**31, 3], [4])
    ]
    np.save(tmp_path / "a.npy", bins, allow_pickle=True)
    shard = open_packed(tmp_path / "a.npy")
    assert_holds_bins(shard, [([1, 2], [0, 0], [0]), ([2**31, 3], [0, 0], [0]), ([4], [0], [0])])
    assert shard.pack_size == 2
    shard = open_packed(tmp_path / "a.npy", pack_size=1)
    with pytest.raises(DamagedStoreError, match="npy, bin 0: 2 tokens, wanted 1 to pack_size=1"):
        shard.read_bin(0)


def test_boundaries_cover_the_bin(tmp_path) -> None:
    spool = write_spool(tmp_path / "spool", SIX)
    pack_from_spool(spool, tmp_path, shard_id="a", pack_size=10)
    lengths = [
        stop - start
        for start, stop in pairwise(open_packed(tmp_path / "a").read_bin(0).seq_boundaries)
    ]
    assert sorted(lengths) == [1, 2, 3, 4]


@pytest.mark.parametrize("shard_id", ["", "../x", "a/b", ".x", "a\0b", "a\nb", "x" * 300, 5])
@pytest.mark.parametrize("storage", ["memmap_v1", "parquet", "legacy_npy_pickle"])
def test_only_a_plain_name_is_a_shard_id(tmp_path, shard_id, storage) -> None:
    spool = write_spool(tmp_path / "spool", SIX)
    options = PackedOptions(packed_storage=storage)
    with pytest.raises(OptionError, match="shard_id"):
        pack_from_spool(spool, tmp_path, shard_id=shard_id, pack_size=6, options=options)


def test_a_path_that_the_system_refuses_is_an_error_of_ours(tmp_path) -> None:
    with pytest.raises(StoreError, match="cannot be read: File name too long"):
        SequenceSpoolReader(tmp_path / ("x" * 300))


@pytest.mark.parametrize("name", ["p.parquet", "p.npy", "folder/manifest.json"])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path, name) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(StoreError, match="not a plain file"):
        open_packed(path if path.parent == tmp_path else path.parent)
