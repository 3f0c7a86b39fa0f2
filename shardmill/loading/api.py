"""The front door of the online half: `shardmill.load`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

from shardmill.arguments import choices, whole_number
from shardmill.errors import OptionError
from shardmill.loading.config import DataConfig, open_stream, read_config
from shardmill.loading.fim import Fim
from shardmill.loading.loader import Loader
from shardmill.loading.order import SampleStream, Shuffle
from shardmill.loading.packed_rows import PackSource, checked_plan
from shardmill.loading.preferences import PreferenceLoader, PreferenceSource
from shardmill.loading.rows import RowSource, TokenSource, TokenStore
from shardmill.store import Store, StoredPlan, plans_of
from shardmill.store.readers.token_space import find_split

if TYPE_CHECKING:
    from shardmill.loading.streaming import TextStream

OneStore: TypeAlias = str | Path | Store | TokenStore | RowSource
Stores: TypeAlias = OneStore | Mapping[Any, Any] | Sequence[OneStore] | DataConfig


def _as_numpy(batches: Loader[Any] | TextStream) -> Loader[Any] | TextStream:
    return batches


def _as_torch(batches: Loader[Any] | TextStream) -> Any:
    from shardmill.trainers.torch import StreamingDataset, TokenLoader

    return TokenLoader(batches) if isinstance(batches, Loader) else StreamingDataset(batches)


FORMS: dict[str, Callable[[Loader[Any] | TextStream], Any]] = {
    "numpy": _as_numpy,
    "torch": _as_torch,
}
"""What `to` of `load` and `stream` may name. A trainer adds a line."""


def load(
    stores: Stores,
    *,
    seq_len: SupportsIndex,
    batch_size: SupportsIndex,
    seed: int | None = None,
    rank: SupportsIndex | None = None,
    world: SupportsIndex | None = None,
    to: str = "numpy",
    split: str | None = None,
    shuffle: Shuffle | None = None,
    documents: bool | None = None,
    num_samples: SupportsIndex | None = None,
    fim: Fim = None,
) -> Loader | Any:
    """Training batches from stores: an endless `Loader`, or one that ends after `num_samples`.

    `stores` is a store (its folder, or opened), a list of stores (mixed by size), a dict of stores
    and weights, or a config: the path of a TOML file, or a mapping with a `data` table. A store of
    conversations is read through its pack plan of this `seq_len`; "stores/chat@NAME" names one of
    several. A folder of token files works like a store. A store of preferences gives pairs or
    labelled answers (`PreferenceBatch`), and `batch_size` counts those.

    `seq_len`: inputs per row. `batch_size`: rows of this rank. `seed`: None is 0, or the config's.
    `rank` and `world` are those of torchrun (RANK and WORLD_SIZE) unless both are given. `to`:
    "numpy" for `Batch`es, "torch" for dicts of tensors. `split`: None is "train". `shuffle`: see
    `SampleStream`; None is "global". `documents`: see `Loader`. `fim`: the share of rows in which
    documents are rearranged to fill in the middle, or one for each store by its name, or
    `FimOptions` (docs/loading.md).
    """
    form = chosen_form(to)
    own_rank, own_world = rank_and_world(rank, world)
    rows, length = whole_number(batch_size, "batch_size"), whole_number(seq_len, "seq_len")
    config = _config(stores)
    if config is None:
        order = {"seed": seed or 0, "shuffle": shuffle or "global", "fim": fim}
        found = _open_stores(stores, length, split or "train", order)
    else:
        for name, key, value in (
            ("split", "split", split),
            ("shuffle", "shuffle", shuffle),
            ("fim", "fim_rate", fim),
        ):
            if value is not None:
                raise OptionError(
                    f"{{{name}}}: {config.file} decides this; set data.{key} there",
                    **{name: value},
                )
        found = open_stream(config, seq_len=length, global_batch_size=rows * own_world, seed=seed)
    with ExitStack() as undo:
        undo.callback(found.close)
        shape: dict[str, Any] = {"batch_size": rows, "rank": own_rank, "world": own_world}
        loader: Loader[Any]
        if found.kind == "rows":
            loader = Loader(found, num_samples=num_samples, documents=documents, **shape)
        elif documents:
            raise OptionError("{documents}: preferences are one to a row", documents=True)
        else:
            loader = PreferenceLoader(found, num_samples=num_samples, **shape)
        batches = form(loader)
        undo.pop_all()
    return batches


def chosen_form(to: str) -> Callable[[Loader[Any] | TextStream], Any]:
    if to not in FORMS:
        raise OptionError("{to}: " + choices(str(to), FORMS, verb="wanted"), to=to)
    return FORMS[to]


def rank_and_world(
    rank: SupportsIndex | None = None, world: SupportsIndex | None = None
) -> tuple[int, int]:
    """As given, else as torchrun says in RANK and WORLD_SIZE, else one rank."""
    if (rank is None) != (world is None):
        raise OptionError(
            "{rank} and {world}: wanted both, or neither to take them from RANK and WORLD_SIZE",
            rank=rank,
            world=world,
        )
    if rank is not None and world is not None:
        return whole_number(rank, "rank", least=0), whole_number(world, "world")
    names = ("RANK", "WORLD_SIZE")
    given = [os.environ.get(name, "").strip() for name in names]
    if not any(given):
        return 0, 1
    if given == ["", "1"]:
        return 0, 1
    if not all(text.isascii() and text.isdigit() for text in given):
        found = ", ".join(f"{name}={text!r}" for name, text in zip(names, given, strict=True))
        raise OptionError(
            f"{found} in the environment: wanted two whole numbers, as torchrun sets them; or pass "
            "{rank} and {world}",
            rank=...,
            world=...,
        )
    return int(given[0]), int(given[1])


def _config(stores: Stores) -> DataConfig | None:
    """The config, if `stores` is one."""
    if isinstance(stores, DataConfig):
        return stores
    if isinstance(stores, Mapping) and isinstance(stores.get("data"), Mapping):
        return read_config(stores)
    if isinstance(stores, str | Path) and str(stores).endswith(".toml"):
        return read_config(stores)
    return None


def _open_stores(stores: Any, seq_len: int, split: str, order: Mapping[str, Any]) -> SampleStream:
    weights: list[float] | None = None
    if isinstance(stores, Mapping):
        stores, weights = list(stores), list(stores.values())
    elif isinstance(stores, str | Path) or not isinstance(stores, Sequence):
        stores = [stores]
    with ExitStack() as undo:
        sources: list[RowSource] = []
        for one in stores:
            sources.append(_open(one, seq_len, split))
            undo.callback(sources[-1].close)
        _check_names(sources)
        stream = SampleStream(sources, weights=weights, **order)
        undo.pop_all()
    return stream


def _open(store: Any, seq_len: int, split: str) -> RowSource:
    if isinstance(store, RowSource):
        return store
    if isinstance(store, Store):
        store = store.folder
    if not isinstance(store, str | Path):
        return TokenSource(store, seq_len=seq_len, split=split)
    folder, _, plan = str(store).rpartition("@")
    if folder and plan and not Path(store).exists():
        return checked_plan(PackSource(folder, plan), seq_len, split, str(store))
    found = find_split(store, split)
    if found is None or not found[0].is_chat:
        return TokenSource(store, seq_len=seq_len, split=split)
    if found[0].preference is not None:
        return PreferenceSource(found[0], seq_len=seq_len, split=split)
    return PackSource(found[0].folder, _plan_of(found[0], split, seq_len))


def _plan_of(store: Store, split: str, seq_len: int) -> Path:
    """The only plan of this split and length."""
    plans = [plan for _, plan in plans_of(store) if isinstance(plan, StoredPlan)]
    fitting = [p for p in plans if (p.facts.split, p.facts.options.seq_len) == (split, seq_len)]
    if len(fitting) == 1:
        return fitting[0].path
    if not fitting:
        raise OptionError(
            f"{store.folder}: conversations are read through a pack plan, and split {split!r} has "
            f"none with {{seq_len}}; make one: shardmill.pack({str(store.folder)!r}, "
            f"seq_len={seq_len}), or `shardmill pack {store.folder} --seq-len {seq_len}`",
            seq_len=seq_len,
        )
    names = ", ".join(f"{store.folder}@{plan.path.stem}" for plan in fitting)
    raise OptionError(
        f"{store.folder}: {len(fitting)} plans have {{seq_len}}; say which one to read: {names}",
        seq_len=seq_len,
    )


def _check_names(sources: Sequence[RowSource]) -> None:
    """A name is part of the order, so the folders need different ones."""
    first: dict[str, Path] = {}
    for one in sources:
        if one.name in first:
            raise OptionError(
                f"{first[one.name]} and {one.path} are both named {one.name!r}, and a name decides "
                f"the order of its rows; rename a folder, or open both as "
                f"shardmill.TokenSource(folder, seq_len=..., name=...)"
            )
        first[one.name] = one.path
