"""How a loader's processes work: nothing of it changes which samples come.

In: an object or a mapping, as training configs have it.  Out: one checked record.
Not here: the loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch

from shardmill.arguments import whole_number
from shardmill.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Worker processes of a loader. With none of them the other numbers are not used."""

    num_workers: int = 0  # reading is quick: begin with none
    pin_memory: bool = False  # without an accelerator there is nothing to pin for
    prefetch_factor: int = 2  # batches that each worker reads ahead
    persistent_workers: bool = True  # workers stay from epoch to epoch
    multiprocessing_context: str | None = None  # "fork", "spawn", "forkserver"; None: torch's

    def options(self) -> dict[str, Any]:
        """Arguments for `torch.utils.data.DataLoader`."""
        told: dict[str, Any] = {"pin_memory": self.pin_memory and has_accelerator()}
        if self.num_workers:
            told |= {
                "num_workers": self.num_workers,
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
                "multiprocessing_context": self.multiprocessing_context,
            }
        return told


def read_config(config: object) -> LoaderConfig:
    """The loader's part of `config`; what is missing there is as `LoaderConfig` has it."""
    if config is None or isinstance(config, LoaderConfig):
        return config or LoaderConfig()
    names = [field.name for field in fields(LoaderConfig)]
    if isinstance(config, Mapping):
        given = {name: config[name] for name in names if name in config}
        _refuse_misspelt([str(key) for key in config], names)
    else:
        given = {name: getattr(config, name) for name in names if hasattr(config, name)}
        if not given:
            raise OptionError(
                f"config={config!r:.100}: wanted an object or mapping with one of {names}"
            )
    return _checked(given)


def _checked(given: dict[str, Any]) -> LoaderConfig:
    least = {"num_workers": 0, "prefetch_factor": 1}
    for name, value in given.items():
        if name in least and (name, value) != ("prefetch_factor", None):
            given[name] = whole_number(value, name, least=least[name])
        elif name in ("pin_memory", "persistent_workers") and not isinstance(value, bool):
            raise OptionError(f"{name}={value!r}: wanted True or False")
    if given.get("prefetch_factor", 2) is None:  # torch's word for its default
        del given["prefetch_factor"]
    return LoaderConfig(**given)


def _refuse_misspelt(keys: list[str], names: list[str]) -> None:
    """Other keys of a training config are not ours to judge, but a slip of the pen is."""
    for key in keys:
        near = get_close_matches(key, names, n=1, cutoff=0.8)
        if near and key not in names:
            raise OptionError(f"config has {key!r}; did you mean {near[0]!r}?")


def has_accelerator() -> bool:
    if hasattr(torch, "accelerator"):  # torch 2.6 and later
        return torch.accelerator.is_available()
    return torch.cuda.is_available()
