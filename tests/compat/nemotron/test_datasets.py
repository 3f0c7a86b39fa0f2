"""Packed datasets and their collate: O(1) items, every process its own maps, labels that stay in
their sequence."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardmill.building import build_plan
from shardmill.compat.nemotron import (
    GPTSFTPackedDataset,
    GPTSFTPackedMemmapDataset,
    GPTSFTPackedMultiShardDataset,
    PackedDataset,
    collate_packed,
    create_sft_dataset,
)
from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.formats.packed import MemmapShardWriter, PackedOptions, pack_from_spool
from shardmill.sampling import Permutation
from shardmill.store import PlanOptions
from shardmill.testing.stores import build_small_chat_store
from tests.formats.packed import packed_bins, write_spool
from tests.packs import FIVE

BINS = [
    ([1, 2, 3, 4, 5], [1, 0, 1, 1, 0], [0, 2]),
    ([6, 7], [1, 0], [0]),
    ([8], [0], [0]),
    ([9, 10, 11], [0, 1, 0], [0]),
]


def write(folder: Path, bins, *, dtype=np.int32, pack_size: int = 8, **options) -> Path:
    total = sum(len(starts) for _, _, starts in bins)
    with MemmapShardWriter(folder, len(bins), pack_size, total, dtype, **options) as writer:
        for number, (ids, mask, starts) in enumerate(bins):
            writer.write_bin(number, ids, mask, starts)
        writer.finalize()
    return folder


def as_lists(item) -> tuple[list[int], list[int], list[int]]:
    return item["input_ids"].tolist(), item["loss_mask"].tolist(), item["seq_boundaries"]


def wanted(number: int, *, zero: bool = False):
    ids, mask, starts = BINS[number]
    return ids, [0] * len(mask) if zero else mask, [*starts, len(ids)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32, np.int64])
def test_items_are_the_bins_in_fresh_memory(tmp_path, dtype) -> None:
    dataset = GPTSFTPackedMemmapDataset(write(tmp_path / "a", BINS, dtype=dtype))
    assert len(dataset) == 4
    assert [as_lists(dataset[number]) for number in range(4)] == [wanted(n) for n in range(4)]
    item = dataset[0]
    assert (item["input_ids"].dtype, item["loss_mask"].dtype) == (np.int32, np.uint8)
    item["input_ids"][:] = 0
    item["loss_mask"][:] = 0
    assert as_lists(dataset[0]) == wanted(0)
    assert repr(dataset) == "GPTSFTPackedMemmapDataset('a', samples=4)"


def test_a_negative_index_is_a_padding_sample(tmp_path) -> None:
    dataset = GPTSFTPackedMemmapDataset(write(tmp_path / "a", BINS))
    assert as_lists(dataset[-1]) == wanted(3, zero=True)
    assert as_lists(dataset[-4]) == wanted(0, zero=True)
    for index in (4, -5):
        with pytest.raises(IndexError, match=f"sample {index} of 4"):
            dataset[index]


def test_padding_is_told_before_and_after_the_mapping(tmp_path) -> None:
    write(tmp_path / "a", BINS)
    dataset = GPTSFTPackedMemmapDataset(tmp_path / "a", samples_mapping=[3, 0, -4])
    assert len(dataset) == 3
    assert as_lists(dataset[0]) == wanted(3)
    assert as_lists(dataset[1]) == wanted(0)
    assert as_lists(dataset[2]) == wanted(0, zero=True)
    assert as_lists(dataset[-3]) == wanted(3, zero=True)


def test_max_num_samples_goes_through_every_bin_once_an_epoch(tmp_path) -> None:
    write(tmp_path / "a", BINS)
    dataset = GPTSFTPackedMemmapDataset(tmp_path / "a", max_num_samples=10, seed=3)
    assert len(dataset) == 10
    firsts = [int(dataset[number]["input_ids"][0]) for number in range(10)]
    assert sorted(firsts[:4]) == sorted(firsts[4:8]) == [1, 6, 8, 9]
    assert len(set(firsts[8:])) == 2
    again = GPTSFTPackedMemmapDataset(tmp_path / "a", max_num_samples=10, seed=3)
    assert [int(again[n]["input_ids"][0]) for n in reversed(range(10))] == firsts[::-1]
    orders = {
        tuple(
            int(
                GPTSFTPackedMemmapDataset(tmp_path / "a", max_num_samples=4, seed=s)[n][
                    "input_ids"
                ][0]
            )
            for n in range(4)
        )
        for s in range(6)
    }
    assert len(orders) > 1


def test_several_shards_are_one_dataset(tmp_path) -> None:
    folders = [write(tmp_path / "a", BINS[:1]), write(tmp_path / "b", BINS[1:], dtype=np.uint16)]
    dataset = GPTSFTPackedMultiShardDataset(folders, max_num_samples=8)
    plain = GPTSFTPackedMultiShardDataset([str(folder) for folder in folders])
    assert (len(dataset), len(plain)) == (8, 4)
    assert [as_lists(plain[number]) for number in range(4)] == [wanted(n) for n in range(4)]
    assert as_lists(plain[-1]) == wanted(3, zero=True)
    firsts = [int(dataset[number]["input_ids"][0]) for number in range(8)]
    assert sorted(firsts[:4]) == sorted(firsts[4:]) == [1, 6, 8, 9]


def test_shards_of_two_alignments_are_not_mixed(tmp_path, caplog) -> None:
    folders = [
        write(tmp_path / "a", BINS),
        write(tmp_path / "b", BINS, loss_mask_alignment="roll_right"),
    ]
    with pytest.raises(OptionError, match=r"aligned \['label', 'roll_right'\]"):
        GPTSFTPackedMultiShardDataset(folders)
    GPTSFTPackedMemmapDataset(folders[0])
    assert caplog.text == ""
    GPTSFTPackedMemmapDataset(folders[1])
    assert "rolled right over the whole bin" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"add_bos": True, "prompt": 1}, "add_bos, prompt: no option of packed datasets"),
        ({"samples_mapping": [4]}, "names bin 4 of 4"),
        ({"samples_mapping": [-5]}, "names bin -5 of 4"),
        ({"samples_mapping": [0.5]}, "wanted one bin number"),
        ({"samples_mapping": []}, "wanted one bin number"),
        ({"max_num_samples": 0}, "max_num_samples=0"),
        ({"seed": -1}, "seed=-1"),
        ({"pad_to_max_length": True}, "say to which length"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, words) -> None:
    write(tmp_path / "a", BINS)
    with pytest.raises(OptionError, match=words):
        GPTSFTPackedMemmapDataset(tmp_path / "a", **options)
    with pytest.raises(OptionError, match=words):
        create_sft_dataset(tmp_path / "a", **options)


def test_no_shards_and_no_path_are_refused(tmp_path) -> None:
    for nothing in ([], str(tmp_path)):
        with pytest.raises(OptionError, match="wanted a list of at least one shard"):
            GPTSFTPackedMultiShardDataset(nothing)
    with pytest.raises(StoreNotFoundError):
        GPTSFTPackedMemmapDataset(tmp_path)
    with pytest.raises(StoreNotFoundError, match="nothing is here"):
        create_sft_dataset(tmp_path / "nothing")
    with pytest.raises(StoreError, match="no packed shard"):
        create_sft_dataset(tmp_path)


def test_the_factory_knows_every_format(tmp_path) -> None:
    sequences = [([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1])]
    spool = write_spool(tmp_path / "spool", sequences)
    found = []
    for storage in ("memmap_v1", "parquet", "legacy_npy_pickle"):
        receipt = pack_from_spool(
            *(spool, tmp_path / storage),
            shard_id="s",
            pack_size=5,
            options=PackedOptions(packed_storage=storage),
        )
        dataset = create_sft_dataset(receipt["output_path"])
        assert isinstance(dataset, PackedDataset)
        assert as_lists(dataset[0]) == ([1, 2, 3, 4, 5], [1, 1, 0, 1, 0], [0, 3, 5])
        copy = pickle.loads(pickle.dumps(dataset))
        assert as_lists(copy[0]) == as_lists(dataset[0])
        found.append(type(dataset).__name__)
        dataset.close()
    assert found == ["GPTSFTPackedMemmapDataset", "PackedDataset", "GPTSFTPackedDataset"]
    whole = create_sft_dataset(tmp_path / "memmap_v1")
    assert type(whole).__name__ == "GPTSFTPackedMultiShardDataset"
    assert len(whole) == 1


def test_a_pickled_dataset_carries_no_tokens_and_refuses_another_shard(tmp_path) -> None:
    bins = [([7] * 4096, [1] * 4096, [0])] * 4
    write(tmp_path / "a", bins, pack_size=4096)
    dataset = GPTSFTPackedMemmapDataset(tmp_path / "a")
    dataset[0]
    data = pickle.dumps(dataset)
    assert len(data) < 4000
    copy = pickle.loads(data)
    assert copy._shards[0]._maps == {}
    assert copy[3]["input_ids"].tolist() == [7] * 4096
    shutil.rmtree(tmp_path / "a")
    write(tmp_path / "a", [([8], [1], [0])] * 4)
    with pytest.raises(DamagedStoreError, match="was written again"):
        pickle.loads(data)[0]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_either_kind_read_every_sample(tmp_path, method) -> None:
    bins = [([n, n + 1, n + 2], [0, 1, 0], [0]) for n in range(40)]
    dataset = GPTSFTPackedMemmapDataset(write(tmp_path / "a", bins))
    dataset[0]  # maps are open in the parent, too
    loader = DataLoader(
        dataset,
        batch_size=5,
        num_workers=2,
        multiprocessing_context=method,
        collate_fn=collate_packed,
    )
    firsts = [int(row[0]) for batch in loader for row in batch["tokens"]]
    assert firsts == list(range(40))


def megatron_slowly(items, length: int, pad: int) -> dict[str, list]:
    """A batch as Megatron's packed collate gives it, one token at a time."""
    batch: dict[str, list] = {
        name: [] for name in ("tokens", "labels", "loss_mask", "position_ids")
    }
    edges = []
    for ids, mask, bounds in items:
        rows = {name: [] for name in batch}
        cu = [0]
        for start, stop in pairwise(bounds):
            for at in range(start, stop - 1):
                rows["tokens"].append(ids[at])
                rows["labels"].append(ids[at + 1])
                rows["loss_mask"].append(mask[at])
                rows["position_ids"].append(at - start)
            cu.append(cu[-1] + stop - start - 1)
        if cu[-1] != length:
            cu.append(length)
        edges.append(cu)
        for name, values in rows.items():
            fill = pad if name in ("tokens", "labels") else 0
            batch[name].append(values + [fill] * (length - len(values)))
    width = max(len(cu) for cu in edges) + 1
    batch["cu_seqlens"] = [cu + [-1] * (width - len(cu)) for cu in edges]
    batch["cu_seqlens_argmin"] = [[len(cu)] for cu in edges]
    batch["max_seqlen"] = [[max(b - a for a, b in pairwise(cu))] for cu in edges]
    return batch


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(bins=packed_bins(pack_size=12, max_bins=5).filter(len), more=st.integers(0, 5))
def test_the_batch_is_megatrons(bins, more) -> None:
    items = [(ids, mask, [*starts, len(ids)]) for ids, mask, starts in bins]
    longest = max(len(ids) - len(starts) for ids, _, starts in bins)
    length = max(longest + more, 1)
    batch = collate_packed(
        [
            {"input_ids": np.array(i), "loss_mask": np.array(m), "seq_boundaries": b}
            for i, m, b in items
        ],
        pad_to=length,
        pad_id=77,
    )
    slow = megatron_slowly(items, length, 77)
    assert {name: batch[name].tolist() for name in slow} == slow
    assert batch["token_count"].tolist() == [len(i) - len(b) + 1 for i, _, b in items]
    assert batch["attention_mask"].tolist() == [1] * len(items)
    assert [batch[n].dtype for n in ("tokens", "labels", "loss_mask", "position_ids")] == [
        torch.int64
    ] * 4
    assert batch["cu_seqlens"].dtype == torch.int32
    assert torch.equal(batch["cu_seqlens"].argmin(dim=1, keepdim=True), batch["cu_seqlens_argmin"])


def check_row(row: dict[str, list[int]], item, *, pad: int, keep_last: bool) -> None:
    """What Megatron relies on, of one row: found with `cu_seqlens` alone, as its kernels do."""
    ids, mask, bounds = item
    length = len(row["tokens"])
    edges = row["cu_seqlens"][: row["cu_seqlens_argmin"][0]]
    assert set(row["cu_seqlens"][len(edges) :]) == {-1}
    assert edges[0] == 0
    assert edges == sorted(edges)
    assert edges[-1] == length, "kernels expect nothing after the last sequence"
    found = [
        {name: row[name][start:stop] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        for start, stop in pairwise(edges)
    ]
    for part, (start, stop) in zip(found, pairwise(bounds), strict=False):
        after = [*ids[start + 1 : stop], pad]  # the next token of the same sequence, or none
        size = stop - start if keep_last else stop - start - 1
        assert part["tokens"] == ids[start : start + size]
        assert part["labels"] == after[:size]
        assert part["position_ids"] == list(range(size))
        assert part["loss_mask"] == [*mask[start : stop - 1], 0][:size]
    for part in found[len(bounds) - 1 :]:
        assert len(found) == len(bounds), "padding is one sequence, the last"
        assert set(part["tokens"]) == set(part["labels"]) == {pad}
        assert set(part["loss_mask"]) == set(part["position_ids"]) == {0}


@settings(deadline=None, max_examples=150)
@given(
    bins=packed_bins(pack_size=12, max_bins=5).filter(len),
    keep_last=st.booleans(),
    step=st.integers(1, 5),
    all_trained=st.booleans(),
)
def test_every_label_lies_in_its_sequence_and_cu_seqlens_cover_the_row(
    bins, keep_last, step, all_trained
) -> None:
    """`all_trained`: a mask that would train the last place of a sequence has no such effect."""
    items = [
        (ids, [1] * len(ids) if all_trained else mask, [*starts, len(ids)])
        for ids, mask, starts in bins
    ]
    batch = collate_packed(
        [{"input_ids": i, "loss_mask": m, "seq_boundaries": b} for i, m, b in items],
        multiple_of=step,
        pad_id=2**15 + 1,
        keep_last=keep_last,
    )
    assert batch["tokens"].shape[1] % step == 0
    for number, item in enumerate(items):
        row = {name: values[number].tolist() for name, values in batch.items()}
        check_row(row, item, pad=2**15 + 1, keep_last=keep_last)
    if all_trained:
        wanted = sum(len(ids) - len(starts) for ids, _, starts in bins)
        assert int(batch["loss_mask"].sum()) == wanted


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("ranks", [1, 2])
def test_megatrons_rotary_embedding_sees_our_positions(tmp_path, ranks: int) -> None:
    """Its kernels know positions from `cu_seqlens`: they must be those of `position_ids`, on every
    rank of context parallelism, which needs sequences that are multiples of twice the ranks."""
    pytest.importorskip("megatron.core.models.common.embeddings.rope_utils", reason="megatron-core")
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    rng = np.random.default_rng(0)
    sequences = [([*range(1, n)], [1] * (n - 1)) for n in rng.integers(2, 30, 40).tolist()]
    align = 2 * ranks if ranks > 1 else 1
    spool = write_spool(tmp_path / "spool", sequences)
    options = PackedOptions(align_to=align)
    pack_from_spool(spool, tmp_path, shard_id="a", pack_size=64, options=options)
    dataset = create_sft_dataset(tmp_path / "a")
    batch = collate_packed(
        [dataset[n] for n in range(len(dataset))], multiple_of=align, keep_last=ranks > 1
    )
    length = batch["tokens"].shape[1]
    angles = torch.arange(length + 1.0)[:, None, None, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    for number in range(len(dataset)):
        row = {name: values[number] for name, values in batch.items()}
        edges = row["cu_seqlens"][: int(row["cu_seqlens_argmin"])]
        for rank in range(ranks):
            mine = places_of(edges.tolist(), rank, ranks)
            group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
            values = torch.randn(len(mine), 1, 4)
            found = _apply_rotary_pos_emb_thd(values, edges, angles, cp_group=group)
            angle = angles[row["position_ids"][mine]][:, 0]
            turned = torch.cat((-values[..., 2:], values[..., :2]), -1)
            wanted = values * angle.cos() + turned * angle.sin()
            used = mine < int(row["token_count"])  # positions of padding are 0
            assert used.sum() > 0
            assert torch.allclose(found[used], wanted[used], atol=1e-6)


def places_of(edges: list[int], rank: int, ranks: int) -> torch.Tensor:
    """Where the tokens of one rank lie: of every sequence the piece `rank` and its mirror."""
    found = []
    for start, stop in pairwise(edges):
        if ranks == 1:
            found += range(start, stop)
            continue
        piece, rest = divmod(stop - start, 2 * ranks)
        assert rest == 0, "a sequence that cannot be divided between the ranks"
        for part in (rank, 2 * ranks - 1 - rank):
            found += range(start + part * piece, start + (part + 1) * piece)
    return torch.tensor(found)


def test_a_batch_by_hand() -> None:
    items = [
        {"input_ids": ids, "loss_mask": mask, "seq_boundaries": [*starts, len(ids)]}
        for ids, mask, starts in BINS[:2]
    ]
    batch = collate_packed(items, multiple_of=4, pad_id=9)
    assert batch["tokens"].tolist() == [[1, 3, 4, 9], [6, 9, 9, 9]]
    assert batch["labels"].tolist() == [[2, 4, 5, 9], [7, 9, 9, 9]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert batch["cu_seqlens"].tolist() == [[0, 1, 3, 4, -1], [0, 1, 4, -1, -1]]
    assert batch["cu_seqlens_argmin"].tolist() == [[4], [3]]
    assert batch["max_seqlen"].tolist() == [[2], [3]]


def test_kept_last_tokens_are_inputs_without_a_label() -> None:
    items = [{"input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 1, 1], "seq_boundaries": [0, 2, 4]}]
    batch = collate_packed(items, pad_to=4, keep_last=True, pad_id=9)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[2, 9, 4, 9]]
    assert batch["loss_mask"].tolist() == [[1, 0, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1]]
    assert batch["cu_seqlens"].tolist() == [[0, 2, 4, -1]]


@pytest.mark.parametrize(
    ("items", "options", "words"),
    [
        ([], {}, "an empty batch"),
        ([([1, 2], [0, 0], [0, 1])], {}, "item 0: seq_boundaries"),
        ([([1, 2], [0, 0], [1, 2])], {}, "item 0: seq_boundaries"),
        ([([1, 2], [0, 0], [0, 2, 2])], {}, "item 0: seq_boundaries"),
        ([([1, 2], [0], [0, 2])], {}, "a mask of 1 for 2 tokens"),
        ([([1, 2, 3], [0, 0, 0], [0, 3])], {"pad_to": 1}, "pad_to=1, but a row has 2 tokens"),
    ],
)
def test_what_cannot_be_a_batch_is_refused(items, options, words) -> None:
    made = [{"input_ids": i, "loss_mask": m, "seq_boundaries": b} for i, m, b in items]
    with pytest.raises(OptionError, match=words):
        collate_packed(made, **options)


def test_collate_fn_pads_as_the_dataset_says(tmp_path) -> None:
    write(tmp_path / "a", BINS)
    tokenizer = SimpleNamespace(eos_id=2)
    dataset = GPTSFTPackedMemmapDataset(tmp_path / "a", tokenizer, pad_seq_length_to_mult=6)
    assert dataset.collate_fn([dataset[0]])["tokens"].tolist() == [[1, 3, 4, 2, 2, 2]]
    fixed = GPTSFTPackedMemmapDataset(
        tmp_path / "a", tokenizer, pad_to_max_length=True, max_seq_length=5
    )
    assert fixed.collate_fn([fixed[-4]])["tokens"].tolist() == [[1, 3, 4, 2, 2]]
    assert fixed.collate_fn([fixed[-4]])["loss_mask"].tolist() == [[0, 0, 0, 0, 0]]


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_packed_batch_trains_the_labels_of_the_unpacked_examples(data) -> None:
    token = st.tuples(st.integers(0, 99), st.integers(0, 1))
    sequences = data.draw(
        st.lists(st.lists(token, min_size=1, max_size=9), min_size=1, max_size=12)
    )
    with tempfile.TemporaryDirectory() as top:
        pairs = [([i for i, _ in one], [m for _, m in one]) for one in sequences]
        spool = write_spool(Path(top) / "spool", pairs)
        pack_from_spool(spool, top, shard_id="a", pack_size=11)
        dataset = create_sft_dataset(Path(top) / "a")
        batch = collate_packed([dataset[number] for number in range(len(dataset))])
        trained = batch["loss_mask"].bool()
        found = zip(
            batch["tokens"][trained].tolist(), batch["labels"][trained].tolist(), strict=True
        )
        expected = [
            (ids[at - 1], ids[at]) for ids, mask in pairs for at in range(1, len(ids)) if mask[at]
        ]
        assert sorted(found) == sorted(expected)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    build_small_chat_store(tmp_path / "s", {"train": FIVE})
    return build_plan(tmp_path / "s", options=PlanOptions(seq_len=6, long="split")).path


def test_the_plan_of_a_store_is_a_dataset(plan: Path) -> None:
    dataset = create_sft_dataset(plan)
    assert (type(dataset), len(dataset), dataset.pack_size) == (PackedDataset, 3, 7)
    assert as_lists(dataset[1]) == ([1, 10, 11, 12, 13, 1, 10], [0, 0, 1, 1, 0, 1, 0], [0, 5, 7])
    assert as_lists(dataset[-2]) == ([1, 10, 11, 12, 13, 1, 10], [0] * 7, [0, 5, 7])
    batch = collate_packed([dataset[number] for number in range(3)], multiple_of=1)
    weighs = batch["loss_mask"].bool()
    assert batch["labels"][weighs].tolist() == [19, 20, 21, 12, 13, 10, 11, 12]


@pytest.mark.slow
def test_workers_read_a_plan_each_through_its_own_maps(plan: Path) -> None:
    dataset = create_sft_dataset(plan, max_num_samples=7, seed=3)
    wanted = [as_lists(dataset[number]) for number in range(7)]
    loader = DataLoader(
        *(dataset, 1), num_workers=2, collate_fn=as_first, multiprocessing_context="spawn"
    )
    assert [as_lists(item) for item in loader] == wanted


def as_first(batch):
    return batch[0]


def test_a_plan_made_again_under_a_dataset_is_refused(plan: Path) -> None:
    data = pickle.dumps(create_sft_dataset(plan))
    assert as_lists(pickle.loads(data)[2])[0] == [1, 10, 11, 12]
    store = plan.parent.parent
    build_plan(store, options=PlanOptions(seq_len=12), name="6-split", overwrite=True)
    with pytest.raises(DamagedStoreError, match="was written again"):
        pickle.loads(data)[0]


def test_a_folder_with_a_spool_in_it_says_what_to_do(tmp_path) -> None:
    spool = write_spool(tmp_path / "spool", [([1, 2], [0, 1])])
    for path in (tmp_path, tmp_path / "spool"):
        with pytest.raises(StoreError, match=r"spool: a spool, .*pack it with pack_from_spool"):
            create_sft_dataset(path)
    pack_from_spool(spool, tmp_path / "packed", shard_id="a", pack_size=4)
    assert len(create_sft_dataset(tmp_path / "packed")) == 1


def test_the_pack_size_of_foreign_parquet_can_be_said_to_a_dataset(tmp_path) -> None:
    columns = {"input_ids": [[7, 8]], "loss_mask": [[1, 0]], "seq_start_id": [[0]]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    dataset = create_sft_dataset(tmp_path / "a.parquet", pack_size=4)
    assert dataset.pack_size == 4
    assert dataset[0]["input_ids"].tolist() == [7, 8]
    assert pickle.loads(pickle.dumps(dataset)).pack_size == 4


def test_a_sequence_of_one_token_is_an_empty_span_as_in_megatron() -> None:
    """It has no input, yet it is counted: its edge appears twice, with no token between."""
    items = [{"input_ids": [1, 2, 3, 4], "loss_mask": [1, 0, 0, 0], "seq_boundaries": [0, 2, 3, 4]}]
    batch = collate_packed(items, pad_to=3)
    assert batch["tokens"].tolist() == [[1, 0, 0]]
    assert batch["cu_seqlens"].tolist() == [[0, 1, 1, 1, 3, -1]]
    assert batch["max_seqlen"].tolist() == [[2]]


def test_a_memmap_dataset_tells_its_folder_and_its_manifest(tmp_path) -> None:
    write(tmp_path / "a", BINS)
    dataset = GPTSFTPackedMemmapDataset(str(tmp_path / "a"), tokenizer=None)
    assert dataset.shard_dir == str(tmp_path / "a")
    assert dataset.manifest == json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert (dataset.manifest["num_bins"], dataset.manifest["pack_size"]) == (4, 8)
    copy = pickle.loads(pickle.dumps(dataset))
    assert (copy.shard_dir, copy.manifest) == (dataset.shard_dir, dataset.manifest)


def test_a_dataset_of_several_shards_tells_them_and_where_they_begin(tmp_path) -> None:
    folders = [str(write(tmp_path / "a", BINS[:1])), str(write(tmp_path / "b", BINS[1:]))]
    tokenizer = SimpleNamespace(eos_id=2)
    dataset = GPTSFTPackedMultiShardDataset(folders, tokenizer, max_seq_length=9)
    assert dataset.shard_offsets.tolist() == [0, 1, 4]
    assert [type(shard) for shard in dataset.shards] == [GPTSFTPackedMemmapDataset] * 2
    assert [shard.shard_dir for shard in dataset.shards] == folders
    assert [len(shard) for shard in dataset.shards] == [1, 3]
    assert all(shard.tokenizer is tokenizer for shard in dataset.shards)
    for index in range(4):
        shard = int(np.searchsorted(dataset.shard_offsets[1:], index, side="right"))
        local = index - int(dataset.shard_offsets[shard])
        assert as_lists(dataset.shards[shard][local]) == as_lists(dataset[index])
    copy = pickle.loads(pickle.dumps(dataset))
    assert as_lists(copy.shards[1][0]) == as_lists(dataset[1])
    assert dataset.shards is dataset.shards  # opened once


def test_a_legacy_file_is_read_by_the_dataset_the_plan_names(tmp_path) -> None:
    bins = [
        {"input_ids": ids, "loss_mask": mask, "seq_start_id": starts} for ids, mask, starts in BINS
    ]
    np.save(tmp_path / "a.npy", bins, allow_pickle=True)
    write(tmp_path / "m", BINS)
    for dataset in (
        GPTSFTPackedDataset(str(tmp_path / "a.npy"), None),
        create_sft_dataset(tmp_path / "a.npy", None),
    ):
        assert type(dataset) is GPTSFTPackedDataset
        assert dataset.file_path == str(tmp_path / "a.npy")
        assert [as_lists(dataset[number]) for number in range(4)] == [wanted(n) for n in range(4)]
        assert dataset[0]["input_ids"].dtype == np.int32
        assert as_lists(dataset[-1]) == wanted(3, zero=True)
    with pytest.raises(StoreError, match=r"m: no legacy \.npy file; create_sft_dataset opens"):
        GPTSFTPackedDataset(tmp_path / "m")


def test_an_id_that_int32_does_not_hold_is_never_wrapped(tmp_path) -> None:
    large = [([1, 2**31], [1, 0], [0]), ([3, 4], [1, 0], [0])]
    dataset = GPTSFTPackedMemmapDataset(write(tmp_path / "a", large, dtype=np.uint32))
    assert dataset[0]["input_ids"].tolist() == [1, 2**31]
    assert dataset[0]["input_ids"].dtype == np.int64
    assert dataset[1]["input_ids"].dtype == np.int32
    batch = next(iter(DataLoader(dataset, batch_size=2)))
    assert batch["input_ids"].tolist() == [[1, 2**31], [3, 4]]


def test_the_items_of_every_format_are_int32(tmp_path, plan: Path) -> None:
    spool = write_spool(tmp_path / "spool", [([1, 2, 3], [0, 1, 1])], np.int64)
    paths = [plan]
    for storage in ("memmap_v1", "parquet", "legacy_npy_pickle"):
        form = PackedOptions(packed_storage=storage)
        options = {"shard_id": "s", "pack_size": 5, "options": form}
        paths.append(Path(pack_from_spool(spool, tmp_path / storage, **options)["output_path"]))
    for path in paths:
        assert create_sft_dataset(path)[0]["input_ids"].dtype == np.int32, path


@pytest.mark.parametrize(
    "open_dataset",
    [
        create_sft_dataset,
        GPTSFTPackedDataset,
        GPTSFTPackedMemmapDataset,
        lambda path: GPTSFTPackedMultiShardDataset([path]),
        lambda path: PackedDataset([path]),
    ],
)
@pytest.mark.parametrize("url", ["s3://b/x", "memory://x.npy", Path("hf://a/b")])
def test_a_url_is_refused_with_what_to_do(open_dataset, url) -> None:
    scheme = str(url).partition(":")[0]
    with pytest.raises(OptionError, match=rf"found a URL \({scheme}://.*shardmill.remote.pull"):
        open_dataset(url)


class Switching(GPTSFTPackedMemmapDataset):
    """As if other threads asked for samples of other epochs while this one works: the order that
    is kept changes after some looks at it."""

    kept: tuple[int, Permutation] | None = None
    rng = random.Random(0)

    @property
    def _order(self) -> tuple[int, Permutation] | None:
        found = self.kept
        if self.rng.random() < 0.3:
            epoch = self.rng.randrange(10)
            self.kept = epoch, Permutation(4, self.seed, "packed", "epoch", epoch)
        return found

    @_order.setter
    def _order(self, order: tuple[int, Permutation] | None) -> None:
        self.kept = order


def test_a_sample_is_the_same_whatever_other_threads_ask_for(tmp_path) -> None:
    write(tmp_path / "a", BINS)
    alone = GPTSFTPackedMemmapDataset(tmp_path / "a", max_num_samples=40, seed=1)
    among_others = Switching(tmp_path / "a", max_num_samples=40, seed=1)
    for number in range(40):
        assert as_lists(among_others[number]) == as_lists(alone[number])
