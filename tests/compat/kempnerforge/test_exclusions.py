"""Map-style datasets never give what is excluded, and no other sample changes its number."""

from __future__ import annotations

import json
import logging
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from shardmill.building import build_plan
from shardmill.compat.kempnerforge import (
    DistributedSampler,
    MemoryMappedDataset,
    MixtureDataset,
    StatefulDataLoader,
)
from shardmill.compat.nemotron import PackedDataset
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading import PackSource
from shardmill.records import Ragged
from shardmill.store import PlanOptions, exclude_documents, exclude_spans
from shardmill.store.exclusions import remove_exclusion
from shardmill.testing.stores import build_small_chat_store, build_small_store
from tests.packs import FIVE


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """100 documents of 6 tokens; each id says its place."""
    documents = Ragged.from_lengths(np.arange(600), [6] * 100)
    build_small_store(tmp_path / "s", {"train": documents}, shard_bytes=100)
    return tmp_path / "s"


@pytest.mark.parametrize("packed", [False, True])
def test_a_sample_with_an_excluded_token_has_a_stand_in(store: Path, packed: bool) -> None:
    before = MemoryMappedDataset(store, 9, pack_sequences=packed)
    exclude_documents(store, [3, 50], reason="takedown")  # tokens 18..24 and 300..306
    after = MemoryMappedDataset(store, 9, pack_sequences=packed)
    assert (len(after), after.fingerprint) == (66, before.fingerprint)
    old, new = (data.batch(range(66)) for data in (before, after))
    rows = (old["input_ids"] != new["input_ids"]).any(dim=1).nonzero()[:, 0].tolist()
    assert rows == [2, 33]
    allowed = old["input_ids"][[n for n in range(66) if n not in rows]].tolist()
    for row in rows:
        chosen = allowed.index(new["input_ids"][row].tolist())
        same = [n for n in range(66) if n not in rows][chosen]
        assert all(new[name][row].tolist() == old[name][same].tolist() for name in old)
        assert after[row]["input_ids"].tolist() == new["input_ids"][row].tolist()
    again = pickle.loads(pickle.dumps(after))
    assert again.batch(range(66))["input_ids"].tolist() == new["input_ids"].tolist()


def test_stand_ins_are_the_same_wherever_the_store_lies(store: Path, tmp_path: Path) -> None:
    exclude_spans(store, [(100, 300)], reason="test")
    here = MemoryMappedDataset(store, 9).batch(range(66))["input_ids"].tolist()
    store.rename(tmp_path / "elsewhere")
    there = MemoryMappedDataset(tmp_path / "elsewhere" / "train", 9)
    assert there.batch(range(66))["input_ids"].tolist() == here


def test_a_dataset_of_which_nothing_is_left_says_so(store: Path) -> None:
    exclude_spans(store, [(0, 600)], reason="test")
    with pytest.raises(OptionError, match="all of its 66 samples have an excluded token"):
        MemoryMappedDataset(store, 9).batch([0])


def test_rows_of_a_plan_have_stand_ins(tmp_path: Path) -> None:
    build_small_chat_store(tmp_path / "s", {"train": FIVE})
    plan = build_plan(tmp_path / "s", options=PlanOptions(seq_len=6, long="split"))
    before = PackedDataset([plan.path])
    exclude_documents(tmp_path / "s", [1], reason="takedown")
    source = PackSource(tmp_path / "s", plan.path, pad_id=0)
    assert source.excluded is not None
    (hit,) = np.flatnonzero(source.excluded.hits(np.arange(len(source)))).tolist()
    after = pickle.loads(pickle.dumps(PackedDataset([plan.path])))
    kept = [n for n in range(len(before)) if n != hit]
    for number in kept:
        assert after[number]["input_ids"].tolist() == before[number]["input_ids"].tolist()
    others = [before[number]["input_ids"].tolist() for number in kept]
    assert after[hit]["input_ids"].tolist() in others
    assert after[hit - len(after)]["loss_mask"].sum() == 0  # padding stays padding


def test_states_go_on_under_other_exclusions_with_one_warning(store: Path, caplog) -> None:
    def opened() -> StatefulDataLoader:
        data = MixtureDataset([MemoryMappedDataset(store, 9)], ["s"])
        sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=4)
        return StatefulDataLoader(data, 5, sampler)

    plain = opened()
    list(islice(plain, 3))
    before = json.loads(json.dumps(plain.state_dict()))
    assert "exclusions" not in before
    exclude_documents(store, [3], reason="takedown")
    going_on = opened()
    with caplog.at_level(logging.WARNING):
        going_on.load_state_dict(before)
    assert len(caplog.messages) == 1
    assert "StatefulDataLoader: the exclusions changed" in caplog.messages[0]
    assert "from none to" in caplog.messages[0]
    pairs = list(zip(plain, going_on, strict=True))
    differ = [(a["input_ids"] != b["input_ids"]).any(dim=1).sum().item() for a, b in pairs]
    assert sum(differ) <= 1
    under = json.loads(json.dumps(opened().state_dict()))
    assert (under["exclusions"]["tokens"], len(json.dumps(under)) < 1024) == (6, True)
    caplog.clear()
    opened().load_state_dict(under)
    assert caplog.messages == []
    remove_exclusion(store, 1)
    opened().load_state_dict(under)
    assert "(6 tokens) to none" in caplog.messages[0]
    with pytest.raises(StateMismatchError, match="exclusions: the state has"):
        opened().load_state_dict({**under, "exclusions": 3})
