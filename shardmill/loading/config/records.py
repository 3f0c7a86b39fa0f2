"""The `[data]` table of a training config, as records.

In: nothing; these are records.  Out: the same values, weights and learning rates by step.
Promise: what `read` made of a file makes sense as a whole (checks).
Not here: files, samples: steps become samples where a stream is opened (open).

Whether the sources, weights, phases and packing of a config go together.

In: a `DataConfig` whose values have the right kinds.  Out: nothing, or an OptionError.
Promise: one origin of data; names once each; weights for exactly the datasets there are, which the
mixture will take; phases in rising order, the annealing behind them all; a tokenizer for packing,
unless every source is a store, whose index says where documents begin.
Not here: types and unknown keys (table); whether the data can be read (open).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardmill.arguments import nearest, whole_number
from shardmill.errors import OptionError
from shardmill.loading.order import Shuffle
from shardmill.loading.rows import EVERY_FILE
from shardmill.sampling.shares import whole_shares
from shardmill.store.readers.token_space import ReaderName, is_store


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


def check_mixture(config: DataConfig) -> None:
    """Refuse what makes no sense, with the file and the key."""
    _check_origin(config)
    _check_names(config)
    _check_order(config)
    _check_anneal(config)
    _check_packing(config)
    if config.datasets:
        first = {dataset.name: dataset.weight for dataset in config.datasets}
        _check_weights(config, "data.datasets", first)
    for number, phase in enumerate(config.phases):
        if phase.dataset_weights:
            key = f"data.phases[{number}].dataset_weights"
            _check_weights(config, key, phase.dataset_weights)
    if config.anneal_start_step:
        _check_weights(config, "data.anneal_weights", config.anneal_weights)


def _check_origin(config: DataConfig) -> None:
    if config.dataset_path is not None and config.datasets:
        raise OptionError(
            f"{config.file}: data.dataset_path and data.datasets are both set; wanted one of them: "
            f"dataset_path for a single source, datasets for a mixture"
        )
    if config.plan is not None and config.datasets:
        raise OptionError(
            f"{config.file}: data.plan is for data.dataset_path; in a mixture each of "
            f"data.datasets names its own plan"
        )
    if config.dataset_path is None and not config.datasets:
        raise OptionError(
            f"{config.file}: neither data.dataset_path nor data.datasets is set; wanted one of "
            f"them: dataset_path for a single source, datasets for a mixture"
        )


def plain_folders(config: DataConfig) -> list[str]:
    """The sources that are no store, as they are written; a path that is not there is one."""
    return [one.path for one in config.sources if not is_store(one.path)]


def _check_packing(config: DataConfig) -> None:
    if not config.pack_sequences or config.tokenizer_path is not None:
        return
    folders = plain_folders(config)
    if folders:
        raise OptionError(
            f"{config.file}: data.pack_sequences is true, but data.tokenizer_path is not set, and "
            f"{folders[0]!r} is not a shardmill store: its documents are told apart by the "
            f"end-of-document id of its tokenizer. Set data.tokenizer_path to the tokenizer that "
            f"made the tokens (a .model file, a tokenizer.json, a folder with one, or a hub id), "
            f"or set data.pack_sequences = false"
        )


def _check_names(config: DataConfig) -> None:
    first: dict[str, int] = {}
    for number, dataset in enumerate(config.datasets):
        if dataset.name in first:
            raise OptionError(
                f"{config.file}: data.datasets[{number}].name: {dataset.name!r} is the name of "
                f"data.datasets[{first[dataset.name]}] too; wanted each name once"
            )
        first[dataset.name] = number


def _check_order(config: DataConfig) -> None:
    starts = [phase.start_step for phase in config.phases]
    for number in range(1, len(starts)):
        if starts[number] <= starts[number - 1]:
            raise OptionError(
                f"{config.file}: data.phases[{number}].start_step: found {starts[number]:,}, "
                f"wanted more than {starts[number - 1]:,}, where data.phases[{number - 1}] starts; "
                f"put the phases in order, each step once"
            )


def _check_anneal(config: DataConfig) -> None:
    start = config.anneal_start_step
    if bool(start) != bool(config.anneal_weights):
        said, missing = ("anneal_start_step", "anneal_weights")[:: 1 if start else -1]
        raise OptionError(
            f"{config.file}: data.{said} is set, but data.{missing} is not; wanted both or none"
        )
    last = config.phases[-1].start_step if config.phases else -1
    if start and start <= last:
        problem = "starts there too" if start == last else f"starts later, at {last:,}"
        raise OptionError(
            f"{config.file}: data.anneal_start_step: found {start:,}, but "
            f"data.phases[{len(config.phases) - 1}] {problem}; annealing is the last phase: "
            f"wanted more than {last:,}"
        )


def _check_weights(config: DataConfig, key: str, weights: Mapping[str, float]) -> None:
    names = [dataset.name for dataset in config.datasets]
    known = ", ".join(map(repr, names)) or "none: data.dataset_path is a single source"
    for name in weights:
        if name not in names:
            near = nearest(name, names)
            guess = f"; did you mean {near!r}?" if near else ""
            raise OptionError(
                f"{config.file}: {key}.{name}: a weight for an unknown dataset; data.datasets has "
                f"{known}{guess}"
            )
    missing = [name for name in names if name not in weights]
    if missing:
        raise OptionError(
            f"{config.file}: {key}: no weight for {', '.join(map(repr, missing))}; wanted one for "
            f"each of {known} (0 leaves a dataset out)"
        )
    try:
        whole_shares([weights[n] for n in names], names, temperature=config.mix_temperature)
    except OptionError as error:
        raise OptionError(f"{config.file}: {key}: {error}") from error
