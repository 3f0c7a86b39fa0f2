"""The `[data]` table of a training config, as records.

In: nothing; these are records.  Out: the same values, weights and learning rates by step.
Promise: what `read` made of a file makes sense as a whole (checks).
Not here: files, samples: steps become samples where a stream is opened (open).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardmill.arguments import whole_number
from shardmill.loading.sources import EVERY_FILE
from shardmill.loading.stream import Shuffle
from shardmill.mapped.space import ReaderName


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """One source of a mixture. None: as the `[data]` table says."""

    name: str
    path: str
    weight: float = 1.0
    file_pattern: str | None = None
    dtype: str | None = None
    split: str | None = None
    plan: str | None = None  # of a chat store: rows of this pack plan, in place of windows


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseConfig:
    """What holds from `start_step` on."""

    start_step: int
    dataset_weights: Mapping[str, float] = field(default_factory=dict)  # empty: they stay
    lr_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The whole table. Paths are as written: relative ones are relative to the working folder."""

    dataset_path: str | None = None  # a store, a split of one, or a folder of token files
    file_pattern: str = EVERY_FILE  # of folders that are no store
    dtype: str | None = None  # of .bin files that nothing describes: "uint16" or "uint32"
    split: str | None = None  # of stores; None: the one that the path names, else "train"
    plan: str | None = None  # of dataset_path, a chat store: rows of this pack plan
    pack_sequences: bool = False  # keep documents apart, in every loader of its stream
    tokenizer_path: str | None = None
    datasets: tuple[DatasetConfig, ...] = ()  # a mixture, in place of dataset_path
    mix_temperature: float = 1.0
    phases: tuple[PhaseConfig, ...] = ()
    anneal_start_step: int = 0  # 0: none
    anneal_weights: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    shuffle: Shuffle = "global"
    reader: ReaderName = "auto"  # how token files are read: "mapped", "pread", or by file system
    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int = 2
    file: str = field(default="config", compare=False)  # where it was read, for messages

    @property
    def sources(self) -> tuple[DatasetConfig, ...]:
        """The datasets; for dataset_path one without a name, which its folder then gives."""
        if self.dataset_path is not None:
            return (DatasetConfig(name="", path=self.dataset_path, plan=self.plan),)
        return self.datasets

    def lr_scale(self, step: int) -> float:
        """What to multiply the learning rate by at this step; annealing leaves it as it is."""
        step = whole_number(step, "step", least=0)
        begun = [phase.lr_scale for phase in self.phases if phase.start_step <= step]
        return begun[-1] if begun else 1.0

    def weight_phases(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """(first step, weights of the datasets in their order), the first one from step 0 on.

        Empty for a single dataset_path. Phases that leave the weights alone are not in it.
        """
        if not self.datasets:
            return ()
        steps = {0: {dataset.name: dataset.weight for dataset in self.datasets}}
        steps |= {p.start_step: dict(p.dataset_weights) for p in self.phases if p.dataset_weights}
        if self.anneal_start_step:
            steps[self.anneal_start_step] = dict(self.anneal_weights)
        names = [dataset.name for dataset in self.datasets]
        return tuple((step, tuple(w[name] for name in names)) for step, w in sorted(steps.items()))
