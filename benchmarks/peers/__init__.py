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
from importlib.util import find_spec
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a loader is and what has to be installed for it."""

    name: str
    file: str  # in this folder
    imports: str  # the module that must be there
    package: str  # what pip calls it

    def load(self) -> ModuleType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels for GPUs that are not installed
            return importlib.import_module(f"peers.{self.file}")

    def is_installed(self) -> bool:
        return find_spec(self.imports.partition(".")[0]) is not None

    def version(self) -> str:
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown"


PEERS = (
    Peer("memmap by hand", "plain", "torch", "torch"),
    Peer("datatrove", "datatrove", "datatrove", "datatrove"),
    Peer("Hugging Face datasets", "hugging_face", "datasets", "datasets"),
    Peer("LitData", "litdata", "litdata", "litdata"),
    Peer("MosaicML Streaming", "mosaic", "streaming", "mosaicml-streaming"),
    Peer("Megatron Core", "megatron", "megatron", "megatron-core"),
    Peer("OLMo-core", "olmo", "olmo_core", "ai2-olmo-core"),
)
