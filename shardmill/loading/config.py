"""The `[data]` table of a training config: which tokens a run reads, and in which order.

`read_config` reads and checks it, `open_stream` opens the sources and the order that it names, and
`config_toml` and `config_flags` write it. Other tables of the file are ignored.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from shardmill.arguments import nearest, whole_number
from shardmill.errors import OptionError
from shardmill.loading.config_reader import (
    Between,
    Section,
    Text,
    apply_overrides,
    make_record,
    read_values,
    refuse,
    written_values,
)
from shardmill.loading.fim import FimOptions, FimTokens, find_tokens
from shardmill.loading.order import SampleStream, Shuffle
from shardmill.loading.packed_rows import PackSource, checked_plan
from shardmill.loading.rows import TokenSource
from shardmill.sampling.mixture import whole_shares
from shardmill.store import Store
from shardmill.store.readers import open_token_folder
from shardmill.store.readers.token_space import ReaderName, find_split, is_store
from shardmill.tokenizers import open_tokenizer
from shardmill.tokenizers.base import usual_id

EVERY_FILE = "*.npy"
_MARKS = ("prefix", "suffix", "middle", "end")
Dtype = Literal["uint16", "uint32"]
Weights = Mapping[str, Annotated[float, Between(0)]]
Share = Annotated[float, Between(0, most=1)]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DatasetConfig(Section):
    """One source of a mixture. None: as the `[data]` table says."""

    name: Text
    path: Text
    weight: Annotated[float, Between(0)] = 1.0
    file_pattern: Text | None = None
    dtype: Dtype | None = None
    split: Text | None = None
    plan: Text | None = None  # of a chat store: rows of this pack plan instead of windows
    fim_rate: Share | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PhaseConfig(Section):
    """What changes at `start_step`."""

    start_step: Annotated[int, Between(0)]
    dataset_weights: Weights = field(default_factory=dict)  # empty: the weights stay
    lr_scale: Annotated[float, Between(above=0)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DataConfig(Section):
    """The whole table. Relative paths are relative to the working folder."""

    dataset_path: Text | None = None  # a store, a split of one, or a folder of token files
    file_pattern: Text = EVERY_FILE  # of folders that are not stores
    dtype: Dtype | None = None  # of .bin files that nothing else describes
    split: Text | None = None  # of stores; None: the one that the path names, else "train"
    plan: Text | None = None  # of dataset_path, a chat store: rows of this pack plan
    pack_sequences: bool = False  # keep documents apart, in every loader of its stream
    tokenizer_path: Text | None = None
    datasets: tuple[DatasetConfig, ...] = ()  # a mixture, instead of dataset_path
    mix_temperature: Annotated[float, Between(above=0)] = 1.0
    phases: tuple[PhaseConfig, ...] = ()
    anneal_start_step: Annotated[int, Between(0)] = 0  # 0: no annealing
    anneal_weights: Weights = field(default_factory=dict)
    seed: Annotated[int, Between(0, 2**64)] = 0
    shuffle: Shuffle = "global"
    fim_rate: Share = 0.0  # of the rows whose documents are rearranged to fill in the middle
    fim_spm_rate: Share = 0.5
    fim_seed: Annotated[int, Between(0, 2**64)] | None = None  # None: that of the order
    fim_tokens: Mapping[str, Annotated[int, Between(0)]] = field(default_factory=dict)
    # prefix, suffix, middle, perhaps end; empty: found by their usual names
    reader: ReaderName = "auto"  # how token files are read; the tokens are the same
    num_workers: Annotated[int, Between(0)] = 0
    pin_memory: bool = False
    prefetch_factor: Annotated[int, Between(1)] = 2
    file: str = field(default="config", compare=False)  # where it was read, for messages

    @property
    def sources(self) -> tuple[DatasetConfig, ...]:
        """The datasets. For dataset_path: one without a name, which its folder then gives."""
        if self.dataset_path is not None:
            return (DatasetConfig(name="", path=self.dataset_path, plan=self.plan),)
        return self.datasets

    @property
    def fim_rates(self) -> dict[int, float]:
        """The share of each source, by its number, that is not 0."""
        rates = [self.fim_rate if one.fim_rate is None else one.fim_rate for one in self.sources]
        return {number: rate for number, rate in enumerate(rates) if rate}

    def lr_scale(self, step: int) -> float:
        """The factor on the learning rate at this step. Annealing does not change it."""
        step = whole_number(step, "step", least=0)
        begun = [phase.lr_scale for phase in self.phases if phase.start_step <= step]
        return begun[-1] if begun else 1.0

    def weight_phases(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """(first step, weights in the order of the datasets), beginning with step 0.

        Empty for a single dataset_path. Phases that keep the weights are left out.
        """
        if not self.datasets:
            return ()
        steps = {0: {dataset.name: dataset.weight for dataset in self.datasets}}
        steps |= {p.start_step: dict(p.dataset_weights) for p in self.phases if p.dataset_weights}
        if self.anneal_start_step:
            steps[self.anneal_start_step] = dict(self.anneal_weights)
        names = [dataset.name for dataset in self.datasets]
        return tuple((step, tuple(w[name] for name in names)) for step, w in sorted(steps.items()))


# reading


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataFile:
    """A config file: only `data` is read."""

    data: DataConfig


def read_config(
    config: DataConfig | Mapping[str, Any] | str | Path | None = None,
    overrides: Sequence[str] = (),
) -> DataConfig:
    """The `data` table of a file or mapping, with `data.seed=7` or `--data.seed=7` on top.

    Without a config the overrides say everything. An empty string counts as not set.
    """
    file, values = read_values({"data": {}} if config is None else config, DataConfig)
    if isinstance(config, DataConfig):
        file, values = config.file, {"data": values}
    if "data" not in values:
        near = [name for name in values if nearest(str(name), ["data"])]
        guess = f"; is [{near[0]}] meant for it?" if near else ""
        found = ", ".join(sorted(map(str, values))) or "nothing"
        raise OptionError(f"{file}: no [data] table; found {found}{guess}")
    values, sources = apply_overrides({"data": values["data"]}, overrides, _DataFile)
    data = _without_empty(values["data"])
    if isinstance(data, Mapping) and {"backend", "tokenizer"} & data.keys():
        raise OptionError(
            f"{file}: this [data] table describes a stream from text (data.backend, "
            "data.tokenizer): run it with `shardmill stream` or shardmill.compat.chomp"
        )
    found_config = make_record(_DataFile, {"data": data}, file=file, sources=sources).data
    refuse(_problems(found_config), file, sources)
    return replace(found_config, file=file)


def _without_empty(value: Any) -> Any:
    """A table without keys that hold an empty string, at every level."""
    if isinstance(value, Mapping):
        return {key: _without_empty(inner) for key, inner in value.items() if inner != ""}
    return [_without_empty(inner) for inner in value] if isinstance(value, list) else value


def _problems(config: DataConfig) -> Iterator[str]:
    """What makes no sense together. Every problem begins with its key."""
    either = "wanted one of them: dataset_path for a single source, datasets for a mixture"
    if config.dataset_path is not None and config.datasets:
        yield f"data.dataset_path and data.datasets are both set; {either}"
    if config.dataset_path is None and not config.datasets:
        yield f"neither data.dataset_path nor data.datasets is set; {either}"
    if config.plan is not None and config.datasets:
        yield "data.plan: for data.dataset_path; in a mixture each of data.datasets names its plan"
    first: dict[str, int] = {}
    for number, dataset in enumerate(config.datasets):
        if first.setdefault(dataset.name, number) != number:
            yield (
                f"data.datasets[{number}].name: {dataset.name!r} is the name of "
                f"data.datasets[{first[dataset.name]}] too; wanted each name once"
            )
    starts = [phase.start_step for phase in config.phases]
    for number in range(1, len(starts)):
        if starts[number] <= starts[number - 1]:
            yield (
                f"data.phases[{number}].start_step: found {starts[number]:,}, wanted more than "
                f"{starts[number - 1]:,}, where data.phases[{number - 1}] starts; put the phases "
                "in order, each step once"
            )
    start, last = config.anneal_start_step, starts[-1] if starts else -1
    if bool(start) != bool(config.anneal_weights):
        given, missing = ("anneal_start_step", "anneal_weights")[:: 1 if start else -1]
        yield f"data.{given} is set, but data.{missing} is not; wanted both or none"
    elif start and start <= last:
        problem = "starts there too" if start == last else f"starts later, at {last:,}"
        yield (
            f"data.anneal_start_step: found {start:,}, but data.phases[{len(starts) - 1}] "
            f"{problem}; annealing is the last phase: wanted more than {last:,}"
        )
    marks = config.fim_tokens.keys()
    if marks and not {"prefix", "suffix", "middle"} <= marks <= {*_MARKS}:
        yield (
            f"data.fim_tokens: found {', '.join(sorted(marks))}; wanted the ids of prefix, suffix "
            "and middle, and of the end of a document (end) where the data do not name it"
        )
    folders = _plain_folders(config)
    if config.pack_sequences and config.tokenizer_path is None and folders:
        yield (
            "data.pack_sequences is true, but data.tokenizer_path is not set, and "
            f"{folders[0]!r} is not a shardmill store: its documents end at the end-of-document "
            "id of its tokenizer. Set data.tokenizer_path to the tokenizer that made the tokens "
            "(a .model file, a tokenizer.json, a folder with one, or a hub id), or set "
            "data.pack_sequences = false"
        )
    if config.datasets:
        weights = {dataset.name: dataset.weight for dataset in config.datasets}
        yield from _weight_problems(config, "data.datasets", weights)
    for number, phase in enumerate(config.phases):
        if phase.dataset_weights:
            key = f"data.phases[{number}].dataset_weights"
            yield from _weight_problems(config, key, phase.dataset_weights)
    if config.anneal_start_step and config.anneal_weights:
        yield from _weight_problems(config, "data.anneal_weights", config.anneal_weights)


def _weight_problems(config: DataConfig, key: str, weights: Mapping[str, float]) -> Iterator[str]:
    names = list(dict.fromkeys(dataset.name for dataset in config.datasets))
    known = ", ".join(map(repr, names)) or "none: data.dataset_path is a single source"
    unknown = [name for name in weights if name not in names]
    for name in unknown:
        near = nearest(name, names)
        guess = f"; did you mean {near!r}?" if near else ""
        yield f"{key}.{name}: a weight for an unknown dataset; data.datasets has {known}{guess}"
    missing = [name for name in names if name not in weights]
    if missing:
        yield (
            f"{key}: no weight for {', '.join(map(repr, missing))}; wanted one for each of {known} "
            "(0 leaves a dataset out)"
        )
    if not unknown and not missing:
        try:
            whole_shares([weights[n] for n in names], names, temperature=config.mix_temperature)
        except OptionError as error:
            yield f"{key}: {error}"


def _plain_folders(config: DataConfig) -> list[str]:
    """The sources that are not stores, as written. A path that does not exist is one."""
    return [one.path for one in config.sources if not is_store(one.path)]


# opening


def open_stream(
    config: DataConfig, *, seq_len: int, global_batch_size: int, seed: int | None = None
) -> SampleStream:
    """Open the config's sources in their order. `seed` replaces the config's.

    `global_batch_size` is the number of samples of one step over all ranks. It decides at which
    sample a phase begins, so a state saved under another global batch size is refused.
    """
    batch = whole_number(global_batch_size, "global_batch_size")
    changes = config.weight_phases()
    folders = _plain_folders(config)
    wants_eos = config.pack_sequences or (config.fim_rates and config.tokenizer_path)
    eos = eos_token_id(config) if folders and wants_eos else None
    with ExitStack() as undo:
        sources: list[TokenSource | PackSource] = []
        for entry in config.sources:
            sources.append(_open_source(config, entry, seq_len, eos))
            undo.callback(sources[-1].close)
        stream = SampleStream(
            sources,
            weights=changes[0][1] if changes else None,
            seed=config.seed if seed is None else seed,
            shuffle=config.shuffle,
            temperature=config.mix_temperature,
            phases=[(step * batch, weights) for step, weights in changes[1:]],
            fim=_fim_options(config, [source.name for source in sources]),
        )
        undo.pop_all()
    stream.documents = config.pack_sequences
    return stream


def _fim_options(config: DataConfig, names: Sequence[str]) -> FimOptions:
    """Tokens that the config does not give are those of its tokenizer, where a source is a folder,
    else those that the stores name."""
    tokens = FimTokens(**config.fim_tokens) if config.fim_tokens else None
    path = config.tokenizer_path
    if config.fim_rates and tokens is None and path is not None and _plain_folders(config):
        tokens = find_tokens(open_tokenizer(path).special_token_ids(), path)
    return FimOptions(
        rate={names[number]: rate for number, rate in config.fim_rates.items()},
        spm_rate=config.fim_spm_rate,
        seed=config.fim_seed,
        tokens=tokens,
    )


def meant_split(path: str | Path, split: str | None) -> tuple[Store, str] | None:
    """The store and the split that `path` and `split` mean; None: there is no store.

    Without `split`: the one that the path names, else "train", else the only one.
    """
    if split is not None:
        return find_split(path, split)
    try:
        return find_split(path, "train")
    except OptionError:
        return find_split(path)


def eos_token_id(config: DataConfig) -> int:
    """The id that ends a document, from the tokenizer at `tokenizer_path`."""
    at = f"{config.file}: data.tokenizer_path"
    if config.tokenizer_path is None:
        raise OptionError(f"{at}: missing; wanted the tokenizer that made the tokens")
    named = open_tokenizer(config.tokenizer_path).special_token_ids()
    found = usual_id("eos", named)
    if found is None:
        raise OptionError(
            f"{at} = {config.tokenizer_path!r}: this tokenizer has no end-of-document token (its "
            f"special tokens: {', '.join(sorted(named)) or 'none'}), so document ends are unknown; "
            "name another tokenizer, or set data.pack_sequences = false"
        )
    return found


def _open_source(
    config: DataConfig, entry: DatasetConfig, seq_len: int, eos: int | None
) -> TokenSource | PackSource:
    """The table's file pattern and dtype are for plain folders; a store has its own."""
    name, plan = entry.name or None, entry.plan
    found = meant_split(entry.path, None if plan else entry.split or config.split)
    if plan is not None:
        if found is None:
            raise OptionError(
                f"{config.file}: plan = {plan!r}, but {entry.path} is not a store, so it has no "
                "plans"
            )
        source = PackSource(found[0].folder, plan, name=name, reader=config.reader)
        at = f"{config.file}: plan {plan!r} of {entry.path}"
        return checked_plan(source, seq_len, entry.split or config.split, at)
    if found is not None:
        store, own_split = found
        if entry.file_pattern not in (None, EVERY_FILE):
            raise OptionError(
                f"{config.file}: file_pattern = {entry.file_pattern!r}, but {store.folder} is a "
                "store and is read whole, as its manifest lists it; leave out the pattern"
            )
        if entry.dtype not in (None, store.dtype):
            raise OptionError(
                f"{config.file}: dtype = {entry.dtype!r}, but the tokens of {store.folder} are "
                f"{store.dtype}; leave it out"
            )
        return TokenSource(
            entry.path, seq_len=seq_len, split=own_split, name=name, reader=config.reader
        )
    split = entry.split or (config.split if config.dataset_path else None)
    if split is not None:
        raise OptionError(
            f"{config.file}: split = {split!r}, but {entry.path} is not a store, so it has no "
            "splits"
        )
    pattern = entry.file_pattern or config.file_pattern
    folder = open_token_folder(entry.path, pattern, dtype=entry.dtype or config.dtype)
    return TokenSource(folder, seq_len=seq_len, name=name, eos_token_id=eos, reader=config.reader)


# writing


def config_toml(config: DataConfig) -> str:
    """The `[data]` table with what differs from the defaults. `read_config` reads it back."""
    lines, tables = ["[data]"], []
    for key, value in written_values(config).items():
        if isinstance(value, tuple):
            for record in value:
                inner = written_values(record).items()
                tables += ["", f"[[data.{key}]]", *(f"{k} = {_toml(v)}" for k, v in inner)]
        else:
            lines.append(f"{key} = {_toml(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def config_flags(config: DataConfig) -> list[str]:
    """One `--data.key=value` for each key, quoted for a shell. Only for a single source."""
    if config.datasets or config.phases:
        raise OptionError("datasets and phases are tables: write the config as TOML")
    flags = []
    for key, value in written_values(config).items():
        is_bare = isinstance(value, str) and value == value.strip() and value != "null"
        is_bare = is_bare and not value.startswith(('"', "'"))
        flags.append(_shell_word(f"--data.{key}={value if is_bare else _toml(value)}"))
    return flags


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise OptionError(f"{value!r}: TOML is UTF-8, which cannot hold this name; rename it")
        return f'"{"".join(map(_toml_character, value))}"'
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_toml(name)} = {_toml(number)}" for name, number in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return repr(value)


def _toml_character(character: str) -> str:
    if character in ('"', "\\"):
        return f"\\{character}"
    if character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 2**16 else f"\\U{ord(character):08x}"


def _shell_word(word: str) -> str:
    """One word for a shell. Control characters are written as $'\\x1b', for bash and zsh."""
    if word.isprintable():
        return shlex.quote(word)
    plain = (
        chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}"
        for byte in word.encode("utf-8", "surrogateescape")
    )
    escapes = {"\\": "\\\\", "'": "\\'"}
    return "$'" + "".join(escapes.get(part, part) for part in plain) + "'"
