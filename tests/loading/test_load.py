"""The front door: stores, mixtures, plans and configs, with the ranks of torchrun."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.building.api import build, pack
from shardmill.errors import OptionError, StateMismatchError, StoreError
from shardmill.loading import Loader, PackSource, SampleStream, TokenSource, load
from shardmill.loading.api import rank_and_world
from shardmill.records import Batch
from shardmill.store import open_store
from tests.loading.stores import write_all, write_small

LENGTH = 16


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`wiki`, `web` and `code` of documents, and `chat` of conversations with plans."""
    folder = tmp_path_factory.mktemp("load")
    write_all(folder)
    chats = [
        {"messages": [{"role": r, "content": "hi " * (n % 7 + 1)} for r in ("user", "assistant")]}
        for n in range(40)
    ]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    special = {name: f"<|{name}|>" for name in ("sys", "usr", "asst", "eot")}
    build(path, folder / "chat", tokenizer="byte:4", template="four-marker", special=special)
    pack(folder / "chat", seq_len=64)
    return folder


def rows(loader: Any, steps: int = 5) -> list[tuple[list[Any], list[Any]]]:
    found = [(one.input_ids.tolist(), one.labels.tolist()) for one in islice(loader, steps)]
    loader.close()
    return found


def native(sources: list[Any], **options: Any) -> Loader:
    return Loader(SampleStream(sources, **options), batch_size=2)


def test_one_store_by_path_by_name_of_its_split_or_opened(stores: Path) -> None:
    wanted = rows(native([TokenSource(stores / "wiki", seq_len=LENGTH)]))
    forms = [stores / "wiki", str(stores / "wiki"), stores / "wiki" / "train"]
    opened = [open_store(stores / "wiki"), TokenSource(stores / "wiki", seq_len=LENGTH)]
    for store in (*forms, *opened, [stores / "wiki"]):
        assert rows(load(store, seq_len=LENGTH, batch_size=2)) == wanted


def test_a_dict_is_a_mixture_by_weight_and_a_list_one_by_size(stores: Path) -> None:
    names = ["wiki", "web", "code"]
    sources = [TokenSource(stores / name, seq_len=LENGTH) for name in names]
    weights = [3, 1, 0.5]
    mixed = {str(stores / name): weight for name, weight in zip(names, weights, strict=True)}
    found = rows(load(mixed, seq_len=LENGTH, batch_size=2, seed=7))
    assert found == rows(native(sources, weights=weights, seed=7))
    listed = [stores / name for name in names]
    assert rows(load(listed, seq_len=LENGTH, batch_size=2)) == rows(native(sources))


def test_the_example_of_the_front_door(stores: Path) -> None:
    """Documents and packed conversations together, resumed on another number of ranks."""
    mixture = {stores / "wiki": 3, stores / "chat": 1}
    loader = load(mixture, seq_len=64, batch_size=8, seed=1)
    batches = iter(loader)
    first = next(batches)
    assert isinstance(first, Batch)
    assert first.input_ids.shape == first.labels.shape == (8, 64)
    state = json.dumps(loader.state_dict())
    assert len(state) < 1000
    wanted = next(batches).input_ids
    parts = []
    for rank in range(2):
        again = load(mixture, seq_len=64, batch_size=4, seed=1, rank=rank, world=2)
        again.load_state_dict(json.loads(state))
        parts.append(next(iter(again)).input_ids)
    np.testing.assert_array_equal(np.concatenate(parts), wanted)
    other = load(mixture, seq_len=64, batch_size=8, seed=2)
    with pytest.raises(StateMismatchError, match="seed"):
        other.load_state_dict(json.loads(state))


def test_a_chat_store_is_read_through_its_plan_of_that_length(stores: Path, tmp_path: Path) -> None:
    chat = stores / "chat"
    wanted = rows(native([PackSource(chat, "train-64")]))
    for store in (chat, open_store(chat), f"{chat}@train-64", f"{chat}@64"):
        assert rows(load(store, seq_len=64, batch_size=2)) == wanted
    with pytest.raises(OptionError, match=r"shardmill\.pack\(.*seq_len=32\)"):
        load(chat, seq_len=32, batch_size=2)
    with pytest.raises(OptionError, match="this plan is of split 'train' with seq_len=64; wanted"):
        load(f"{chat}@train-64", seq_len=32, batch_size=2)
    with pytest.raises(StoreError, match="no plan 'nope'"):
        load(f"{chat}@nope", seq_len=64, batch_size=2)
    pack(chat, seq_len=64, name="other")
    try:
        with pytest.raises(OptionError, match=r"2 plans have seq_len=64; say which .*@train-other"):
            load(chat, seq_len=64, batch_size=2)
    finally:
        (chat / "packs" / "train-other.plan").unlink()
    small = write_small(tmp_path / "a@b", 200, 1).folder
    assert load(small, seq_len=LENGTH, batch_size=1).stream.names == ("a@b",)


def test_a_config_is_a_file_or_a_mapping_and_decides_what_it_names(
    stores: Path, tmp_path: Path
) -> None:
    data = {"dataset_path": str(stores / "web"), "seed": 5}
    file = tmp_path / "train.toml"
    file.write_text(f'[data]\ndataset_path = "{stores / "web"}"\nseed = 5\n')
    wanted = rows(load(stores / "web", seq_len=LENGTH, batch_size=2, seed=5))
    for config in ({"data": data}, file, str(file)):
        assert rows(load(config, seq_len=LENGTH, batch_size=2)) == wanted
    other = load({"data": data}, seq_len=LENGTH, batch_size=2, seed=6)
    assert other.stream.seed == 6
    with pytest.raises(OptionError, match=r"split='val': .* decides this; set data.split there"):
        load(file, seq_len=LENGTH, batch_size=2, split="val")


def test_tensors_share_the_order_and_the_state(stores: Path) -> None:
    pytest.importorskip("torch")
    plain = load(stores / "wiki", seq_len=LENGTH, batch_size=2, documents=True)
    loader = load(stores / "wiki", seq_len=LENGTH, batch_size=2, documents=True, to="torch")
    for batch, wanted in zip(islice(loader, 3), plain, strict=False):
        assert batch["input_ids"].tolist() == wanted.input_ids.tolist()
        assert batch["doc_ids"].tolist() == wanted.doc_ids.tolist()
    assert loader.state_dict()["samples"] == 6
    with pytest.raises(OptionError, match="to='jax': wanted: numpy, torch"):
        load(stores / "wiki", seq_len=LENGTH, batch_size=2, to="jax")


def test_ranks_come_from_torchrun_unless_both_are_given(
    stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rank_and_world() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert rank_and_world() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(OptionError, match=r"RANK='', WORLD_SIZE='4' in the environment"):
        rank_and_world()
    monkeypatch.setenv("RANK", "3")
    assert rank_and_world() == (3, 4)
    assert rank_and_world(0, 1) == (0, 1)
    batch = next(iter(load(stores / "web", seq_len=LENGTH, batch_size=2)))
    assert batch.samples == range(6, 8)
    with pytest.raises(OptionError, match="rank=0 and world=None: wanted both"):
        rank_and_world(0)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(OptionError, match="rank"):
        load(stores / "web", seq_len=LENGTH, batch_size=2)


def test_two_folders_of_one_name_are_refused(stores: Path, tmp_path: Path) -> None:
    other = write_small(tmp_path / "wiki", 300, 5).folder
    with pytest.raises(OptionError, match="are both named 'wiki'"):
        load([stores / "wiki", other], seq_len=LENGTH, batch_size=2)


def test_a_loader_that_cannot_be_made_leaves_nothing_open(stores: Path) -> None:
    source = TokenSource(stores / "wiki", seq_len=LENGTH)
    closed = []
    source.close = lambda: closed.append(True)  # type: ignore[method-assign]
    with pytest.raises(OptionError, match="num_samples"):
        load(source, seq_len=LENGTH, batch_size=2, num_samples=-1)
    assert closed
