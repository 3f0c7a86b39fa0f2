"""Other loaders, each in a file of its own, each optional.

A file has `prepare(corpus, place)`, which writes the peer's own format into the folder `place`, and
`epoch`, `random` or `documents`: `(corpus, place)` -> {name of a contender: its batches}. Iterating
over batches is one shuffled epoch of tuples that begin with inputs and labels: int64, contiguous,
(32, 1024), as ours are.
Every peer gets its best settings: no worker processes (they made each one slower), and whatever it
has to read from local disk without copying or checking first.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a loader is and what has to be installed for it."""

    name: str
    file: str  # in this folder
    package: str  # what pip calls it

    def load(self) -> ModuleType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels for GPUs that are not installed
            return importlib.import_module(f"peers.{self.file}")

    def is_installed(self) -> bool:
        """By the name that pip knows: a script in this folder may be named like a module."""
        try:
            self.version()
        except PackageNotFoundError:
            return False
        return True

    def version(self) -> str:
        return version(self.package)


PEERS = (
    Peer("memmap by hand", "plain", "torch"),
    Peer("datatrove", "datatrove", "datatrove"),
    Peer("Hugging Face datasets", "hugging_face", "datasets"),
    Peer("LitData", "litdata", "litdata"),
    Peer("MosaicML Streaming", "mosaic", "mosaicml-streaming"),
    Peer("Megatron Core", "megatron", "megatron-core"),
    Peer("OLMo-core", "olmo", "ai2-olmo-core"),
)
