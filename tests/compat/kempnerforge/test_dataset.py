"""MemoryMappedDataset: every sample equals slicing the files, or there is a clear error."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler

from shardmill.compat.kempnerforge import MemoryMappedDataset, Samples, collate
from shardmill.errors import OptionError, StoreError

EOS = 3


def write(folder: Path, arrays: list[np.ndarray], suffix: str = ".npy") -> Path:
    for number, array in enumerate(arrays):
        path = folder / f"shard_{number:05d}{suffix}"
        np.save(path, array) if suffix == ".npy" else array.tofile(path)
    return folder


@pytest.fixture
def counting(tmp_path) -> Path:
    """Three files: tokens 0..9, 10..21, 22..24."""
    return write(tmp_path, [np.arange(a, b, dtype="<u2") for a, b in [(0, 10), (10, 22), (22, 25)]])


def plain_samples(arrays: list[np.ndarray], seq_len: int, packed: bool) -> list[dict[str, list]]:
    """The prescribed samples, token by token."""
    samples = []
    for array in arrays:
        for number in range(len(array) // seq_len):
            tokens = array[number * seq_len : (number + 1) * seq_len].tolist()
            sample = {"input_ids": tokens[:-1], "labels": tokens[1:]}
            if packed:
                documents = [tokens[:place].count(EOS) for place in range(seq_len)]
                sample["doc_ids"] = documents[:-1]
                for place in range(seq_len - 1):
                    if documents[place] != documents[place + 1]:
                        sample["labels"][place] = -100
            samples.append(sample)
    return samples


def plain(sample: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in sample.items()}


def test_files_are_cut_one_by_one_and_rests_are_unused(counting):
    data = MemoryMappedDataset(str(counting), 4)
    assert len(data) == 5  # 10 // 4 + 12 // 4 + 3 // 4
    assert [plain(data[index]) for index in range(5)] == [
        {"input_ids": [0, 1, 2], "labels": [1, 2, 3]},
        {"input_ids": [4, 5, 6], "labels": [5, 6, 7]},
        {"input_ids": [10, 11, 12], "labels": [11, 12, 13]},
        {"input_ids": [14, 15, 16], "labels": [15, 16, 17]},
        {"input_ids": [18, 19, 20], "labels": [19, 20, 21]},
    ]
    assert data[0]["input_ids"].dtype == data[0]["labels"].dtype == torch.int64


def test_the_end_token_is_a_target_and_what_follows_it_is_not(tmp_path):
    write(tmp_path, [np.array([5, 6, EOS, 7, EOS, EOS, 8, 9], "<u2")])
    data = MemoryMappedDataset(tmp_path, 8, pack_sequences=True, eos_token_id=EOS)
    assert plain(data[0]) == {
        "input_ids": [5, 6, EOS, 7, EOS, EOS, 8],
        "labels": [6, EOS, -100, EOS, -100, -100, 9],
        "doc_ids": [0, 0, 0, 1, 1, 2, 3],
    }
    assert {tensor.dtype for tensor in data[0].values()} == {torch.int64}


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    seq_len=st.integers(2, 20),
    dtype=st.sampled_from(["<u2", "<u4"]),
    suffix=st.sampled_from([".npy", ".bin"]),
    packed=st.booleans(),
    data=st.data(),
)
def test_every_sample_alone_and_in_a_batch_equals_slicing(
    sizes, seq_len, dtype, suffix, packed, data
):
    rng = np.random.default_rng(sum(sizes))
    arrays = [rng.integers(0, 6, size).astype(dtype) for size in sizes]
    wanted = plain_samples(arrays, seq_len, packed)
    indices = data.draw(
        st.lists(st.integers(0, len(wanted) - 1), max_size=9) if wanted else st.just([])
    )
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), arrays, suffix)
        eos = EOS if packed else None
        found = MemoryMappedDataset(place, seq_len, f"*{suffix}", packed, eos, dtype)
        assert len(found) == len(wanted)
        assert [plain(found[index]) for index in range(len(found))] == wanted
        together = found.__getitems__(indices)
        assert [plain(sample) for sample in together] == [wanted[index] for index in indices]
        if indices:
            assert plain(collate(together)) == plain(collate([found[i] for i in indices]))


def test_indices_outside_are_index_errors_at_both_ends(counting):
    data = MemoryMappedDataset(counting, 4)
    for index in (5, -1, 2**62, -(2**62)):
        with pytest.raises(IndexError, match=f"sample {index:,} of 5"):
            data[index]
        with pytest.raises(IndexError, match="of 5"):
            data.__getitems__([0, index])
    assert len(list(data)) == 5
    assert plain(data[np.int64(1)]) == plain(data[torch.tensor(1)]) == plain(data[1])
    for index in (True, 1.0, "1", slice(2), None):
        with pytest.raises(OptionError, match="index"):
            data[index]
    with pytest.raises(OptionError, match="integers"):
        data.__getitems__([0.5])


def test_arguments_that_make_no_sense_are_refused(counting, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    for seq_len in (0, 1, -3, 2.5, True):
        with pytest.raises(OptionError, match="seq_len"):
            MemoryMappedDataset(counting, seq_len)
    with pytest.raises(ValueError, match="eos_token_id"):
        MemoryMappedDataset(counting, 4, pack_sequences=True)
    with pytest.raises(OptionError, match="eos_token_id=128,001 cannot occur in uint16"):
        MemoryMappedDataset(counting, 4, pack_sequences=True, eos_token_id=128_001)
    with pytest.raises(OptionError, match="eos_token_id=-1"):
        MemoryMappedDataset(counting, 4, pack_sequences=True, eos_token_id=-1)
    with pytest.raises(FileNotFoundError, match="No files"):
        MemoryMappedDataset(empty, 4)
    with pytest.raises(OptionError, match="dtype"):
        MemoryMappedDataset(counting, 4, dtype="float32")


def test_an_end_token_that_never_comes_is_warned_about(counting, caplog):
    MemoryMappedDataset(counting, 4, pack_sequences=True, eos_token_id=60_000)
    assert "eos_token_id=60000 is not among the first 25 tokens" in caplog.text
    caplog.clear()
    MemoryMappedDataset(counting, 4, pack_sequences=True, eos_token_id=24)
    assert caplog.text == ""


def test_files_all_too_short_give_no_sample_and_a_warning(counting, caplog):
    data = MemoryMappedDataset(counting, 13)
    assert len(data) == 0
    assert "no file holds 13 tokens" in caplog.text
    with pytest.raises(IndexError, match="sample 0 of 0"):
        data[0]


def test_the_state_is_the_epoch_and_is_refused_by_other_data(counting):
    data = MemoryMappedDataset(counting, 4)
    data._epoch = 5
    assert data.state_dict() == {"epoch": 5, "total_samples": 5}
    again = MemoryMappedDataset(counting, 4)
    again.load_state_dict(data.state_dict())
    assert again.state_dict() == {"epoch": 5, "total_samples": 5}
    for state in ({"epoch": 1}, {}, {"epoch": 1, "total_samples": 5, "x": 0}, None):
        with pytest.raises(OptionError, match="wanted the keys"):
            again.load_state_dict(state)
    with pytest.raises(OptionError, match=r"total_samples=6, but .* has 5"):
        again.load_state_dict({"epoch": 1, "total_samples": 6})
    with pytest.raises(OptionError, match="epoch=-1"):
        again.load_state_dict({"epoch": -1, "total_samples": 5})
    assert again.state_dict()["epoch"] == 5


def maps_of(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_closing_lets_go_and_may_be_repeated(counting):
    with MemoryMappedDataset(counting, 4) as data:
        data.batch([0, 4])
        assert maps_of(counting) == 3  # all were looked at for the fingerprint
    assert maps_of(counting) == 0
    data.close()
    assert len(data) == 5
    with pytest.raises(StoreError, match="closed"):
        data[0]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_failed_opening_leaves_nothing_mapped(counting):
    np.save(counting / "z.npy", np.zeros((2, 2), np.uint16))
    with pytest.raises(StoreError, match=r"z\.npy"):
        MemoryMappedDataset(counting, 4)
    assert maps_of(counting) == 0


def test_a_failure_after_the_files_were_found_closes_them(counting):
    half_made = MemoryMappedDataset.__new__(MemoryMappedDataset)
    with pytest.raises(OptionError, match="eos_token_id"):
        half_made.__init__(counting, 4, pack_sequences=True)
    assert repr(half_made._space) == "TokenSpace(25 uint16 tokens in 3 shards, mapped, closed)"
    half_made.close()


def test_samples_share_one_memory_and_are_made_on_demand(counting):
    data = MemoryMappedDataset(counting, 4)
    samples = data.__getitems__([4, 0])
    assert isinstance(samples, Samples)
    assert len(samples) == 2
    batch = collate(samples)
    assert batch is samples.batch
    assert samples[1]["labels"].data_ptr() == batch["labels"][1].data_ptr()
    assert [plain(sample) for sample in samples[:1]] == [plain(data[4])]
    assert all(tensor.is_contiguous() for tensor in batch.values())
    batch["input_ids"][:] = 0
    assert plain(data[4]) == {"input_ids": [18, 19, 20], "labels": [19, 20, 21]}


def test_the_dtype_rule_is_said(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50_000, 400).astype("<u2")
    write(tmp_path, [ids], ".bin")
    data = MemoryMappedDataset(tmp_path, 4, "*.bin")
    assert data.dtype_rule == (
        "contents: no metadata; of the two, only uint16 fits the bytes of shard_00000.bin"
    )
    assert len(data) == 100
    assert MemoryMappedDataset(tmp_path, 4, "*.bin", dtype=np.uint16).dtype_rule == (
        "argument: the argument says 'uint16'"
    )


def test_the_fingerprint_follows_the_files(counting):
    before = MemoryMappedDataset(counting, 4).fingerprint
    assert MemoryMappedDataset(counting, 8).fingerprint == before
    np.save(counting / "z.npy", np.zeros(4, np.uint16))
    assert MemoryMappedDataset(counting, 4).fingerprint != before


# loaders and processes


@pytest.mark.parametrize("collate_fn", [None, collate])
@pytest.mark.parametrize("packed", [False, True])
def test_a_loader_without_workers_gives_every_sample_once(counting, collate_fn, packed):
    data = MemoryMappedDataset(counting, 4, pack_sequences=packed, eos_token_id=14)
    batches = list(DataLoader(data, batch_size=2, collate_fn=collate_fn))
    rows = [[row.tolist() for row in batch["input_ids"]] for batch in batches]
    assert rows == [[[0, 1, 2], [4, 5, 6]], [[10, 11, 12], [14, 15, 16]], [[18, 19, 20]]]
    assert set(batches[0]) == {"input_ids", "labels"} | ({"doc_ids"} if packed else set())
    assert batches[1]["labels"].tolist() == [[11, 12, 13], [-100 if packed else 15, 16, 17]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "collate_fn"), [("fork", None), ("fork", collate), ("spawn", collate)]
)
def test_workers_give_what_one_process_gives(tmp_path, method, collate_fn):
    rng = np.random.default_rng(0)
    write(tmp_path, [rng.integers(0, 9, 3000).astype("<u2") for _ in range(3)])
    data = MemoryMappedDataset(tmp_path, 65, pack_sequences=True, eos_token_id=EOS)
    data[0]  # mapped before the workers begin

    def batches(num_workers: int) -> list[dict[str, list]]:
        loader = DataLoader(
            data,
            batch_size=8,
            sampler=RandomSampler(data, generator=torch.Generator().manual_seed(1)),
            num_workers=num_workers,
            collate_fn=collate_fn,
            multiprocessing_context=method if num_workers else None,
        )
        return [plain(batch) for batch in loader]

    alone = batches(0)
    assert sum(len(batch["labels"]) for batch in alone) == 138
    assert batches(2) == alone


def test_it_pickles_by_path(counting):
    data = MemoryMappedDataset(counting, 4)
    assert len(pickle.dumps(data)) < 4000
    again = pickle.loads(pickle.dumps(data))
    assert [plain(sample) for sample in again] == [plain(sample) for sample in data]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert plain(pool.apply(data.__getitem__, (2,))) == plain(data[2])
