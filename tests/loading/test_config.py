"""The `[data]` table: every value is used as written, or refused by its key."""

from __future__ import annotations

import re
import subprocess
import tempfile
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError
from shardmill.loading.config import (
    DataConfig,
    DatasetConfig,
    PhaseConfig,
    config_flags,
    config_toml,
    open_stream,
    read_config,
)
from shardmill.records import Ragged
from shardmill.testing.stores import build_small_store

TWO = """
[data]
mix_temperature = 2.0
num_workers = 3
pin_memory = true
prefetch_factor = 4
tokenizer_path = "gpt2"
pack_sequences = true
anneal_start_step = 900
anneal_weights = { web = 0, "my code" = 1 }
seed = 1234
shuffle = "block"
split = "val"

[[data.datasets]]
name = "web"
path = "a"
weight = 0.75

[[data.datasets]]
name = "my code"
path = "b"
weight = 0.25
file_pattern = "*.bin"
dtype = "uint32"

[[data.phases]]
start_step = 100
dataset_weights = { web = 0.5, "my code" = 0.5 }
lr_scale = 0.5

[[data.phases]]
start_step = 400
lr_scale = 0.1

[model]
dim = 64
"""


def read(tmp_path: Path, text: str) -> DataConfig:
    path = tmp_path / "train.toml"
    path.write_text(text)
    return read_config(path)


def refusal(text: str) -> str:
    with tempfile.TemporaryDirectory() as place, pytest.raises(OptionError) as caught:
        read(Path(place), text)
    return str(caught.value).replace(f"{place}/", "")


def test_every_key_is_read_as_written(tmp_path):
    assert read(tmp_path, TWO) == DataConfig(
        datasets=(
            DatasetConfig(name="web", path="a", weight=0.75),
            DatasetConfig(
                name="my code", path="b", weight=0.25, file_pattern="*.bin", dtype="uint32"
            ),
        ),
        mix_temperature=2.0,
        phases=(
            PhaseConfig(start_step=100, dataset_weights={"web": 0.5, "my code": 0.5}, lr_scale=0.5),
            PhaseConfig(start_step=400, dataset_weights={}, lr_scale=0.1),
        ),
        anneal_start_step=900,
        anneal_weights={"web": 0, "my code": 1},
        num_workers=3,
        pin_memory=True,
        prefetch_factor=4,
        tokenizer_path="gpt2",
        pack_sequences=True,
        seed=1234,
        shuffle="block",
        split="val",
    )


def test_the_example_of_the_reference_is_read_with_its_empty_string(tmp_path):
    config = read(
        tmp_path,
        '[data]\ndataset_path = "/path/to/tokens"\nfile_pattern = "*.npy"\n'
        'pack_sequences = false\ntokenizer_path = ""\ndatasets = []\nanneal_start_step = 0\n',
    )
    assert config == DataConfig(dataset_path="/path/to/tokens")
    assert (config.tokenizer_path, config.weight_phases(), config.shuffle) == (None, (), "global")


def test_the_scale_of_the_learning_rate_follows_the_phases_and_stays_when_annealing(tmp_path):
    config = read(tmp_path, TWO)
    steps = [0, 99, 100, 399, 400, 899, 900, 10**9]
    assert [config.lr_scale(step) for step in steps] == [1, 1, 0.5, 0.5, 0.1, 0.1, 0.1, 0.1]
    with pytest.raises(OptionError, match="step=-1"):
        config.lr_scale(-1)


def test_weights_change_where_phases_name_them_and_last_where_annealing_starts(tmp_path):
    config = read(tmp_path, TWO)
    assert config.weight_phases() == ((0, (0.75, 0.25)), (100, (0.5, 0.5)), (900, (0, 1)))


def test_a_phase_from_step_0_on_takes_the_place_of_the_first_weights():
    data = {
        "datasets": [{"name": "a", "path": "a"}, {"name": "b", "path": "b"}],
        "phases": [{"start_step": 0, "dataset_weights": {"a": 3, "b": 1}, "lr_scale": 0.25}],
    }
    config = read_config({"data": data})
    assert config.weight_phases() == ((0, (3, 1)),)
    assert config.lr_scale(0) == 0.25


PAIR = '{name = "a", path = "a", weight = 1}, {name = "b", path = "b", weight = 1}'
MIX = f"datasets = [{PAIR}]\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        # unknown keys, at every level, with the nearest
        ('dataset_pth = "x"', "data.dataset_pth: unknown key; did you mean 'dataset_path'?"),
        ('dataset_path = "x"\nsede = 1', "data.sede: unknown key; did you mean 'seed'?"),
        (
            'datasets = [{name = "a", path = "a", wieght = 1}]',
            "data.datasets[0].wieght: unknown key; did you mean 'weight'?",
        ),
        (
            MIX + "phases = [{start_step = 1}, {start = 2}]",
            "data.phases[1].start: unknown key; did you mean 'start_step'?",
        ),
        ('dataset_path = "x"\nfile = "y"', "data.file: unknown key"),
        # kinds
        ("dataset_path = 3", "data.dataset_path: found 3 (an integer), wanted a string"),
        ('dataset_path = "x"\nseed = true', "data.seed: found true (a boolean), wanted a whole"),
        ('dataset_path = "x"\nseed = "1"', 'data.seed: found "1" (a string), wanted a whole'),
        ('dataset_path = "x"\nseed = 1.0', "data.seed: found 1.0 (a float), wanted a whole"),
        ('dataset_path = "x"\nseed = -1', "data.seed: found -1 (an integer), wanted at least 0"),
        (
            'dataset_path = "x"\nseed = 18446744073709551616',
            "data.seed: found 18446744073709551616 (an integer), wanted less than 18,446,744",
        ),
        ('dataset_path = "x"\npack_sequences = 1', "data.pack_sequences: found 1 (an integer)"),
        ('dataset_path = "x"\npin_memory = "true"', 'data.pin_memory: found "true" (a string)'),
        ('dataset_path = "x"\nprefetch_factor = 0', "found 0 (an integer), wanted at least 1"),
        ('dataset_path = "x"\nnum_workers = 1979-05-27', "(date), wanted a whole number"),
        (
            'dataset_path = "x"\nshuffle = "blok"',
            'data.shuffle: found "blok" (a string), wanted one',
        ),
        ('dataset_path = "x"\ndtype = "int32"', 'wanted one of "uint16" or "uint32"'),
        ('dataset_path = "x\\u0000"', "wanted a string without NUL"),
        ('datasets = "a"', 'data.datasets: found "a" (a string), wanted a list of tables'),
        ("datasets = [1]", "data.datasets[0]: found 1 (an integer), wanted a table"),
        ('datasets = [{name = "a"}]', "data.datasets[0].path: missing"),
        ('datasets = [{path = "a", name = ""}]', "data.datasets[0].name: missing"),
        ('dataset_path = "x"\nphases = [{lr_scale = 1}]', "data.phases[0].start_step: missing"),
        (
            'dataset_path = "x"\nphases = [{start_step = 1}, {start_step = true}]',
            "data.phases[1].start_step: found true (a boolean), wanted a whole number",
        ),
        ('dataset_path = "x"\nphases = [{start_step = 1, lr_scale = nan}]', "lr_scale: found nan"),
        ('dataset_path = "x"\nphases = [{start_step = 1, lr_scale = 0}]', "wanted more than 0"),
        ('dataset_path = "x"\nmix_temperature = 0', "data.mix_temperature: found 0 (an integer)"),
        ('dataset_path = "x"\nmix_temperature = inf', "data.mix_temperature: found inf (a float)"),
        (
            f'dataset_path = "x"\nmix_temperature = 1{"0" * 400}',
            "data.mix_temperature: found an integer of",
        ),
        # weights
        ('datasets = [{name="a", path="a", weight=-1}]', "data.datasets[0].weight: found -1"),
        ('datasets = [{name="a", path="a", weight=nan}]', "data.datasets[0].weight: found nan"),
        ('datasets = [{name="a", path="a", weight=true}]', "data.datasets[0].weight: found true"),
        ('datasets = [{name="a", path="a", weight=0}]', "data.datasets: weights sum to 0"),
        (
            MIX + "phases = [{start_step = 1, dataset_weights = {a = 0, b = 0}}]",
            "data.phases[0].dataset_weights: weights sum to 0",
        ),
        (
            MIX + "phases = [{start_step = 1, dataset_weights = {a = 1, b = 0.5, c = 1}}]",
            "data.phases[0].dataset_weights.c: a weight for an unknown dataset; "
            "data.datasets has 'a', 'b'",
        ),
        (
            MIX + "phases = [{start_step = 1, dataset_weights = {a = 1}}]",
            "data.phases[0].dataset_weights: no weight for 'b'",
        ),
        (
            MIX + 'phases = [{start_step = 1, dataset_weights = {a = 1, b = "1"}}]',
            'data.phases[0].dataset_weights.b: found "1" (a string), wanted a number',
        ),
        (
            MIX + "phases = [{start_step = 1, dataset_weights = [1, 2]}]",
            "data.phases[0].dataset_weights: found a list, wanted a table",
        ),
        (
            'dataset_path = "x"\nphases = [{start_step = 1, dataset_weights = {x = 1}}]',
            "data.phases[0].dataset_weights.x: a weight for an unknown dataset; data.datasets has "
            "none: data.dataset_path is a single source",
        ),
        (
            'datasets = [{name="a", path="a", weight=1}, {name="b", path="b", weight=1e-9}]',
            "data.datasets: source 'b': a share of 1e-09, wanted at least 1 in 2**20",
        ),
        # together
        ('dataset_path = "x"\n' + MIX, "data.dataset_path and data.datasets are both set"),
        ("seed = 1", "neither data.dataset_path nor data.datasets is set"),
        ('dataset_path = ""', "neither data.dataset_path nor data.datasets is set"),
        (
            'datasets = [{name="a", path="a"}, {name="b", path="b"}, {name="a", path="c"}]',
            "data.datasets[2].name: 'a' is the name of data.datasets[0] too",
        ),
        (
            MIX + "phases = [{start_step = 5}, {start_step = 5}]",
            "data.phases[1].start_step: found 5, wanted more than 5, where data.phases[0] starts",
        ),
        (
            MIX + "phases = [{start_step = 5}, {start_step = 4}]",
            "data.phases[1].start_step: found 4, wanted more than 5",
        ),
        (MIX + "anneal_start_step = 5", "data.anneal_start_step is set, but data.anneal_weights"),
        (
            MIX + "anneal_weights = {a = 1, b = 0}",
            "data.anneal_weights is set, but data.anneal_start_step",
        ),
        (
            MIX + "anneal_start_step = 5\nanneal_weights = {a = 1, b = 0}\n"
            "phases = [{start_step = 2}, {start_step = 5}]",
            "data.anneal_start_step: found 5, but data.phases[1] starts there too",
        ),
        (
            MIX + "anneal_start_step = 5\nanneal_weights = {a = 1, b = 0}\n"
            "phases = [{start_step = 6}]",
            "data.anneal_start_step: found 5, but data.phases[0] starts later, at 6",
        ),
        (
            'dataset_path = "a"\nreader = "pred"',
            'data.reader: found "pred" (a string), wanted one of "auto", "mapped" or "pread"; '
            'did you mean "pread"?',
        ),
        (
            MIX + "anneal_start_step = 5\nanneal_weights = {a = 1, x = 0}",
            "data.anneal_weights.x: a weight for an unknown dataset",
        ),
    ],
)
def test_a_refusal_names_the_file_the_key_what_was_found_and_what_was_wanted(data, words):
    message = refusal(f"[data]\n{data}\n")
    lines = message.splitlines()[1:] if "problems:\n" in message else [message]
    assert all(line.strip().startswith("train.toml: ") for line in lines)
    assert words in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[dta]\n", "train.toml: no [data] table; found dta"),
        ("", "train.toml: no [data] table; found nothing"),
        ("data = 3", "train.toml: data: found 3 (an integer), wanted a table"),
        ("[data\n", "train.toml: not TOML: "),
        ("[data]\nseed = 1\nseed = 2\n", "train.toml: not TOML: "),
        ("data = " + "[" * 5000, "train.toml: not TOML: "),
    ],
)
def test_a_file_that_is_no_config_is_refused(text, words):
    assert words in refusal(text)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b'[data]\ndataset_path = "\xff"\n')
    for name in ("no.toml", "latin.toml", "."):
        with pytest.raises(OptionError, match="cannot be read as a config"):
            read_config(tmp_path / name)


# written and read again

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1)
WEIGHTS = st.integers(1, 100) | st.floats(0.1, 100)  # all heated shares are above 2**-20
MAYBE = st.none() | NAMES


@st.composite
def configs(draw: st.DrawFn, *, tables: bool = True) -> DataConfig:
    """`tables`: with datasets and phases, which no flag holds."""
    names = draw(st.lists(NAMES, unique=True, max_size=4)) if tables else []
    dtype = st.sampled_from([None, "uint16", "uint32"])
    weights = st.fixed_dictionaries(dict.fromkeys(names, WEIGHTS))
    starts = sorted(draw(st.sets(st.integers(0, 10**6), max_size=4))) if tables else []
    phases = tuple(
        PhaseConfig(
            start_step=start,
            dataset_weights=draw(st.just({}) | weights),
            lr_scale=draw(st.floats(1e-6, 10)),
        )
        for start in starts
    )
    anneals = bool(names) and draw(st.booleans())
    packs = draw(st.booleans())
    return DataConfig(
        dataset_path=None if names else draw(NAMES),
        file_pattern=draw(NAMES),
        dtype=draw(dtype),
        split=draw(MAYBE),
        pack_sequences=packs,
        tokenizer_path=draw(NAMES if packs else MAYBE),
        datasets=tuple(
            DatasetConfig(
                name=name,
                path=draw(NAMES),
                weight=draw(WEIGHTS),
                file_pattern=draw(MAYBE),
                dtype=draw(dtype),
                split=draw(MAYBE),
            )
            for name in names
        ),
        mix_temperature=draw(st.floats(0.8, 10)),
        phases=phases,
        anneal_start_step=max([0, *starts]) + draw(st.integers(1, 9)) if anneals else 0,
        anneal_weights=draw(weights) if anneals else {},
        seed=draw(st.integers(0, 2**64 - 1)),
        shuffle=draw(st.sampled_from(["global", "block", "none"])),
        reader=draw(st.sampled_from(["auto", "mapped", "pread"])),
        num_workers=draw(st.integers(0, 64)),
        pin_memory=draw(st.booleans()),
        prefetch_factor=draw(st.integers(1, 64)),
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(configs())
def test_what_is_written_is_read_again(config):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "data.toml"
        path.write_text(config_toml(config), encoding="utf-8")
        assert read_config(path) == config


def test_only_what_is_not_the_default_is_written():
    config = DataConfig(dataset_path="a b/'c'", file_pattern="*.bin", seed=3)
    toml = '[data]\ndataset_path = "a b/\'c\'"\nfile_pattern = "*.bin"\nseed = 3\n'
    assert config_toml(config) == toml
    assert config_flags(config) == [
        "'--data.dataset_path=a b/'\"'\"'c'\"'\"''",
        "'--data.file_pattern=*.bin'",
        "--data.seed=3",
    ]


def test_what_cannot_be_seen_is_escaped_in_toml_and_flags():
    name = "a\x1b[31m\u200b\U000e0001\x7f'\\"
    config = DataConfig(dataset_path=name)
    assert config_toml(config) == (
        '[data]\ndataset_path = "a\\u001b[31m\\u200b\\U000e0001\\u007f\'\\\\"\n'
    )
    (flag,) = config_flags(config)
    assert flag.isprintable()
    said = subprocess.run(["bash", "-c", f"printf %s {flag}"], capture_output=True, check=True)
    assert said.stdout.decode() == f"--data.dataset_path={name}"


def test_a_name_that_toml_cannot_hold_is_refused():
    with pytest.raises(OptionError, match="cannot hold this name"):
        config_toml(DataConfig(dataset_path="a\udcff"))


def test_a_mixture_has_no_flags():
    with pytest.raises(OptionError, match="write the config as TOML"):
        config_flags(DataConfig(datasets=(DatasetConfig(name="a", path="a"),)))


# flags


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--data.dataset_path=a b"], DataConfig(dataset_path="a b")),
        (
            ["--data.dataset_path=7", "--data.seed=7", "--data.pin_memory=true"],
            DataConfig(dataset_path="7", seed=7, pin_memory=True),
        ),
        (["--data.dataset_path=a", "--data.dataset_path=b"], DataConfig(dataset_path="b")),
        (
            ["--data.dataset_path=a", "--data.mix_temperature=2", "--data.dtype=uint16"],
            DataConfig(dataset_path="a", mix_temperature=2, dtype="uint16"),
        ),
        (["--data.dataset_path=a=b", "--data.file_pattern="], DataConfig(dataset_path="a=b")),
    ],
)
def test_flags_say_what_a_table_says(flags, wanted):
    assert read_config(overrides=flags) == wanted


def test_flags_win_over_the_file(tmp_path):
    (tmp_path / "train.toml").write_text('[data]\ndataset_path = "a"\nseed = 1\nsplit = "val"\n')
    found = read_config(tmp_path / "train.toml", overrides=["--data.seed=2"])
    assert found == DataConfig(dataset_path="a", seed=2, split="val")


@settings(deadline=None, max_examples=25)
@given(configs(tables=False))
def test_flags_that_are_written_are_read_again(config):
    said = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {' '.join(config_flags(config))}"],
        capture_output=True,
        check=True,
    )
    assert read_config(overrides=said.stdout.decode().split("\0")[:-1]) == config


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--data.sede=1"],
            "override '--data.sede=1': data.sede: unknown key; did you mean 'seed'?",
        ),
        (["--data.seed=x"], "override '--data.seed=x': 'x' is not a TOML value"),
        (
            ["--data.seed=1.5"],
            "override '--data.seed=1.5': data.seed: found 1.5 (a float), wanted a whole",
        ),
        (["--data.seed"], "override '--data.seed': found no '='; wanted KEY=VALUE"),
        (["--seed=1"], "override '--seed=1': seed: unknown key; known here: data"),
        (["--data.seed=1"], "neither data.dataset_path nor data.datasets is set"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused_in_its_own_words(flags, words):
    with pytest.raises(OptionError) as caught:
        read_config(overrides=flags)
    assert words in str(caught.value)


# opened


def tokens(count: int, first: int = 0) -> Ragged:
    return Ragged.from_sequences([range(first, first + count)])


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """A store of two splits, a folder of .npy files and one of .bin files that say nothing."""
    monkeypatch.chdir(tmp_path)
    build_small_store(tmp_path / "store", {"val": tokens(41, 9000), "train": tokens(81)})
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy" / "a.npy", np.arange(1000, 1061, dtype="<u2"))
    (tmp_path / "bin").mkdir()
    np.arange(2000, 2021, dtype="<u4").tofile(tmp_path / "bin" / "a.bin")
    return tmp_path


@pytest.mark.parametrize(
    ("table", "sizes"),
    [
        ({"dataset_path": "store"}, {"store": 8}),
        ({"dataset_path": "store/val"}, {"store": 4}),
        ({"dataset_path": "store", "split": "val"}, {"store": 4}),
        ({"dataset_path": "store", "file_pattern": "*.bin"}, {"store": 8}),
        ({"dataset_path": "npy"}, {"npy": 6}),
        ({"dataset_path": "bin", "file_pattern": "*.bin", "dtype": "uint32"}, {"bin": 2}),
    ],
)
def test_a_single_source_is_opened_as_the_table_says(data, table, sizes):
    stream = open_stream(read_config({"data": table}), seq_len=10, global_batch_size=4)
    assert {source.name: len(source) for source in stream.sources} == sizes
    assert (stream.seed, stream.shuffle) == (0, "global")


@pytest.mark.parametrize("path", ["store", "npy"])
@pytest.mark.parametrize("reader", ["mapped", "pread"])
def test_the_table_says_how_files_are_read(data, path, reader):
    table = {"dataset_path": path, "reader": reader}
    stream = open_stream(read_config({"data": table}), seq_len=10, global_batch_size=4)
    assert [source.reader for source in stream.sources] == [reader]


def test_a_phase_begins_at_the_sample_of_its_step(data):
    table = {
        "datasets": [
            {"name": "s", "path": "store", "weight": 3},
            {"name": "v", "path": "store/val", "weight": 1},
            {"name": "n", "path": "npy", "weight": 0},
            {"name": "b", "path": "bin", "weight": 0, "file_pattern": "*.bin", "dtype": "uint32"},
        ],
        "phases": [
            {"start_step": 2, "lr_scale": 0.5},
            {"start_step": 3, "dataset_weights": {"s": 0, "v": 0, "n": 1, "b": 1}},
        ],
        "anneal_start_step": 5,
        "anneal_weights": {"s": 0, "v": 0, "n": 0, "b": 7},
        "shuffle": "none",
        "seed": 5,
    }
    stream = open_stream(read_config({"data": table}), seq_len=10, global_batch_size=8)
    # steps 0-2 are samples 0..24, steps 3-4 samples 24..40
    assert stream.counts(24).tolist() == [18, 6, 0, 0]
    assert stream.counts(40).tolist() == [18, 6, 8, 8]
    assert stream.counts(1040).tolist() == [18, 6, 8, 1008]
    assert stream.take([23]).source[0] < 2 <= stream.take([24]).source[0]
    assert stream.take(np.arange(40, 50)).source.tolist() == [3] * 10
    assert (stream.seed, stream.shuffle) == (5, "none")
    assert (
        open_stream(read_config({"data": table}), seq_len=10, global_batch_size=8, seed=6).seed == 6
    )


def test_the_temperature_of_the_table_heats_the_weights(data):
    table = {
        "datasets": [
            {"name": "s", "path": "store", "weight": 16},
            {"name": "n", "path": "npy", "weight": 1},
        ],
        "mix_temperature": 2,
    }
    stream = open_stream(read_config({"data": table}), seq_len=10, global_batch_size=1)
    assert stream.counts(100).tolist() == [80, 20]  # 4 : 1


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"dataset_path": "npy", "split": "train"}, "npy is not a store, so it has no splits"),
        ({"dataset_path": "store", "split": "test"}, "none is 'test'"),
        ({"dataset_path": "nowhere"}, "nowhere is not a folder"),
        (
            {"datasets": [{"name": "s", "path": "store", "file_pattern": "*.bin"}]},
            "leave out the pattern",
        ),
    ],
)
def test_a_source_that_is_not_as_the_table_says_is_refused(data, table, words):
    with pytest.raises((OptionError, FileNotFoundError), match=words):
        open_stream(read_config({"data": table}), seq_len=10, global_batch_size=1)


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "4"])
def test_a_global_batch_is_a_whole_number_of_samples(data, number):
    with pytest.raises(OptionError, match="global_batch_size"):
        open_stream(
            read_config({"data": {"dataset_path": "npy"}}), seq_len=10, global_batch_size=number
        )


# the document

DOCUMENT = (Path(__file__).parents[2] / "docs" / "config.md").read_text()


def test_the_tables_that_the_document_shows_are_accepted():
    blocks = re.findall(r"^```toml\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    found = [read_config(tomllib.loads(block)) for block in blocks]
    assert [len(config.datasets) for config in found] == [3, 0]
    assert found[0].weight_phases() == (
        (0, (0.7, 0.3, 0)),
        (50_000, (0.5, 0.3, 0.2)),
        (90_000, (0.2, 0.2, 0.6)),
    )


@pytest.mark.parametrize(
    ("title", "record"),
    [
        ("`[data]`", DataConfig),
        ("`[[data.datasets]]`", DatasetConfig),
        ("`[[data.phases]]`", PhaseConfig),
    ],
)
def test_the_document_tells_every_key_and_its_default(title, record):
    section = DOCUMENT.split(f"## Keys of {title}\n")[1].split("\n## ")[0]
    listed = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            keys, default = [cell.strip() for cell in line.split(" |")[:2]]
            value = tomllib.loads(f"x = {default.strip('|` ')}")["x"] if "`" in default else None
            listed |= dict.fromkeys(re.findall(r"`(\w+)`", keys), value)
    known = {
        entry.name: None if entry.default is MISSING else entry.default
        for entry in fields(record)
        if entry.compare
    }
    known |= {key: [] for key in ("datasets", "phases") if key in known}
    assert listed == known
