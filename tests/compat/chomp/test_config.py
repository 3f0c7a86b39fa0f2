"""The config of a stream: what is written is what is meant, or it is refused by its key."""

from __future__ import annotations

import copy
import json
import pickle
import re
import tomllib
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.compat.chomp import StreamConfig, config_dict, read_config
from shardmill.compat.chomp.config import (
    DataSection,
    ModelSection,
    TokenizerSection,
    TrainSection,
)
from shardmill.errors import OptionError

DOCS = Path(__file__).parents[3] / "docs/streaming-config.md"

SMALL: dict[str, Any] = {
    "data": {"backend": "local_text", "local_text": ["a", "b"], "tokenizer": {"kind": "byte"}},
    "train": {"seq_len": 8, "batch_size": 2},
}

FULL_TOML = """
[data]
backend = "hf"
hf_dataset = "owner/name"
hf_name = "small"
hf_split = "train"
hf_eval_split = "validation"
hf_revision = "abc"
text_key = "content"
shuffle = false
shuffle_buffer_size = 17
seed = 7
repeat = false
state_update_interval = 100
max_retries = 0
retry_delay_sec = 2
packing_mode = "bin"
packing_algorithm = "first-fit"
packing_buffer_docs = 5
packing_max_docs_per_bin = 3
mask_boundary_loss = false
train_on_eos = false
grain_prefetch = 0
max_eval_samples = 9

[data.tokenizer]
kind = "hf"
hf_name_or_path = "gpt2"
hf_revision = "main"
engine = "reference"
add_bos = true
add_eos = false
vocab_size_multiple = 64
auto_set_special_tokens = false
max_doc_tokens = 1000
specials = { eos = "<|endoftext|>" }

[train]
seq_len = 1024
batch_size = 4
grad_accum = 2

[model]
vocab_size = 50304
bos_token_id = 50256
eos_token_id = 50256
pad_token_id = 0
"""

DEFAULTS = {
    "data.backend": "hf",
    "data.hf_dataset": None,
    "data.hf_name": None,
    "data.hf_split": "train",
    "data.hf_eval_split": None,
    "data.hf_revision": None,
    "data.text_key": "text",
    "data.local_text": None,
    "data.local_eval_text": None,
    "data.files": None,
    "data.eval_files": None,
    "data.files_kind": None,
    "data.on_bad": "error",
    "data.shuffle": True,
    "data.shuffle_buffer_size": 10_000,
    "data.shuffle_buffer_bytes": 268_435_456,
    "data.seed": 0,
    "data.repeat": True,
    "data.num_streams": None,
    "data.state_update_interval": 2000,
    "data.max_retries": 5,
    "data.retry_delay_sec": 1.0,
    "data.packing_mode": "sequential",
    "data.packing_algorithm": "first-fit",
    "data.packing_buffer_docs": 4096,
    "data.packing_buffer_tokens": 16_777_216,
    "data.packing_max_docs_per_bin": None,
    "data.mask_boundary_loss": True,
    "data.train_on_eos": True,
    "data.grain_prefetch": 2,
    "data.max_eval_samples": None,
    "data.tokenizer.kind": "hf",
    "data.tokenizer.hf_name_or_path": None,
    "data.tokenizer.hf_revision": None,
    "data.tokenizer.path": None,
    "data.tokenizer.specials": None,
    "data.tokenizer.engine": "auto",
    "data.tokenizer.add_bos": False,
    "data.tokenizer.add_eos": True,
    "data.tokenizer.vocab_size_multiple": 128,
    "data.tokenizer.auto_set_special_tokens": True,
    "data.tokenizer.byte_offset": 0,
    "data.tokenizer.max_doc_tokens": None,
    "data.tokenizer.snapshot": None,
    "train.grad_accum": 1,
    "model.vocab_size": None,
    "model.bos_token_id": None,
    "model.eos_token_id": None,
    "model.pad_token_id": None,
}
REQUIRED = {"train.seq_len", "train.batch_size"}
SECTIONS = {
    "data": DataSection,
    "train": TrainSection,
    "model": ModelSection,
    "tokenizer": TokenizerSection,
}


def knobs(cls: type = StreamConfig, at: str = "") -> dict[str, Any]:
    """Every key with its path and its default; those without one are `...`."""
    found: dict[str, Any] = {}
    for one in fields(cls):
        section = SECTIONS.get(one.name)
        if section is not None:
            found |= knobs(section, f"{at}{one.name}.")
        else:
            found[at + one.name] = ... if one.default is MISSING else one.default
    return found


def changed(path: str, value: object, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """`base` (SMALL) with another value."""
    result = copy.deepcopy(SMALL if base is None else base)
    *tables, key = path.split(".")
    inner = result
    for table in tables:
        inner = inner.setdefault(table, {})
    inner[key] = value
    return result


def refusal(config: Any, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(OptionError) as caught:
        read_config(config, overrides)
    return str(caught.value)


def test_every_knob_has_its_name_and_its_default() -> None:
    assert knobs() == DEFAULTS | dict.fromkeys(REQUIRED, ...)


def test_the_page_lists_exactly_the_keys_with_their_defaults() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| (.{10,}) \|$", DOCS.read_text(), re.MULTILINE)
    listed = {name: default for name, default, _ in rows if name.split(".")[0] in SECTIONS}
    wanted = dict.fromkeys(REQUIRED, "required")
    for path, value in DEFAULTS.items():
        wanted[path] = "" if value is None else f"`{json.dumps(value)}`"
    assert listed == wanted


def test_toml_yaml_json_and_mappings_give_equal_configs(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    values = tomllib.loads(FULL_TOML)
    (tmp_path / "c.toml").write_text(FULL_TOML)
    (tmp_path / "c.json").write_text(json.dumps(values))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "c.yml").write_text(yaml.safe_dump(values, default_flow_style=True))
    config = read_config(values)
    for name in ("c.toml", "c.json", "c.yaml", "c.yml"):
        assert read_config(tmp_path / name) == config
        assert read_config(str(tmp_path / name)) == config
    assert config.data.retry_delay_sec == 2.0
    assert config.data.tokenizer.specials == {"eos": "<|endoftext|>"}
    assert (config.train.grad_accum, config.train.batch_size, config.train.seq_len) == (2, 4, 1024)
    assert config.model.vocab_size == 50304


@pytest.mark.parametrize(
    "values",
    [
        SMALL,
        tomllib.loads(FULL_TOML),
        changed("data", {"backend": "files", "files": "x/*.txt", "tokenizer": {"kind": "byte"}}),
        changed("data.tokenizer", {"kind": "byte", "byte_offset": 3, "specials": {"eos": "<e>"}}),
        changed("data.tokenizer", {"kind": "sentencepiece", "path": "a.model"}),
    ],
)
def test_what_is_effective_read_again_is_the_same_config(values: dict[str, Any]) -> None:
    config = read_config(values)
    found = config_dict(config)
    again = read_config(json.loads(json.dumps(found)))
    assert again == config
    assert config_dict(again) == found
    assert pickle.loads(pickle.dumps(config)) == config
    assert read_config(config) == config
    assert read_config(config, ["data.seed=3"]).data.seed == 3


def test_what_is_effective_holds_defaults_but_no_key_that_nobody_looks_at() -> None:
    found = config_dict(read_config(SMALL))
    assert found["model"] == dict.fromkeys(
        ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    )
    data = found["data"]
    assert isinstance(data, dict)
    assert data["local_text"] == ["a", "b"]
    assert data["shuffle_buffer_size"] == 10_000
    assert not {"hf_dataset", "hf_split", "files", "text_key", "max_retries"} & data.keys()


def test_a_config_is_frozen() -> None:
    config = read_config(SMALL)
    with pytest.raises(FrozenInstanceError):
        config.data.seed = 3  # type: ignore[misc]


def test_one_string_is_one_document_and_one_path() -> None:
    assert read_config(changed("data.local_text", "one")).data.local_text == ("one",)
    files = {"backend": "files", "files": Path("a.txt"), "tokenizer": {"kind": "byte"}}
    assert read_config(changed("data", files)).data.files == ("a.txt",)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("data.seed", "8", 'config: data.seed: found "8" (a string), wanted a whole number'),
        ("data.seed", True, "config: data.seed: found true (a boolean), wanted a whole number"),
        ("data.seed", 1.0, "config: data.seed: found 1.0 (a float), wanted a whole number"),
        ("data.seed", -1, "config: data.seed: found -1 (an integer), wanted at least 0"),
        (
            "data.seed",
            2**64,
            "config: data.seed: found 18446744073709551616 (an integer), wanted less than "
            "18,446,744,073,709,551,616",
        ),
        (
            "data.seed",
            2**200,
            "config: data.seed: found an integer of 201 bits, wanted less than "
            "18,446,744,073,709,551,616",
        ),
        (
            "data.shuffle",
            "true",
            'config: data.shuffle: found "true" (a string), wanted true or false',
        ),
        ("data.shuffle", 1, "config: data.shuffle: found 1 (an integer), wanted true or false"),
        (
            "data.shuffle_buffer_size",
            0,
            "config: data.shuffle_buffer_size: found 0 (an integer), wanted at least 1",
        ),
        (
            "data.retry_delay_sec",
            float("nan"),
            "config: data.retry_delay_sec: found nan (a float), wanted a finite number",
        ),
        (
            "data.retry_delay_sec",
            -0.5,
            "config: data.retry_delay_sec: found -0.5 (a float), wanted at least 0",
        ),
        (
            "data.backend",
            "s3",
            'config: data.backend: found "s3" (a string), wanted one of "hf", "local_text" or '
            '"files"',
        ),
        (
            "data.local_text",
            3,
            "config: data.local_text: found 3 (an integer), wanted a string or a list of strings",
        ),
        ("data.local_text", ["a", 3], "config: data.local_text[1]: found 3 (an integer), wanted a"),
        ("data.local_text", [], "config: data.local_text: found a list, wanted at least one"),
        ("data.local_text", None, "config: data.local_text: missing; data.backend = "),
        (
            "data.tokenizer.specials",
            {"eos": 3},
            "config: data.tokenizer.specials.eos: found 3 (an integer), wanted a string",
        ),
        (
            "data.tokenizer.specials",
            {3: "eos"},
            "config: data.tokenizer.specials[3]: found 3 (an integer), wanted a string",
        ),
        ("data.tokenizer", 3, "config: data.tokenizer: found 3 (an integer), wanted a table"),
        ("data.tokenizer", None, "config: data.tokenizer: found nothing, wanted a table"),
        ("data.hf_name", "", 'config: data.hf_name: found "" (a string), wanted a string that is'),
        ("data.hf_name", "a\x00", "wanted a string without NUL"),
        ("data.sead", 3, "config: data.sead: unknown key; did you mean 'seed'? Known here: "),
        (
            "data.tokenizer.add_eso",
            True,
            "config: data.tokenizer.add_eso: unknown key; did you mean 'add_eos'?",
        ),
        ("trian", {}, "config: trian: unknown key; did you mean 'train'? Known here: data, model"),
        ("train", {}, "config: train.batch_size: missing; it has no default"),
        ("train.seq_len", 0, "config: train.seq_len: found 0 (an integer), wanted at least 1"),
        ("model.eos_token_id", -1, "config: model.eos_token_id: found -1 (an integer), wanted at"),
        (
            "data.tokenizer.max_doc_tokens",
            -1,
            "config: data.tokenizer.max_doc_tokens: found -1 (an integer), wanted at least 0",
        ),
    ],
)
def test_a_value_that_will_not_do_is_refused_by_its_key(
    path: str, value: object, message: str
) -> None:
    assert message in refusal(changed(path, value))


WHOLE = [path for path, value in DEFAULTS.items() if type(value) is int] + sorted(REQUIRED)
OPTIONAL_WHOLE = [
    "data.num_streams",
    "data.packing_max_docs_per_bin",
    "data.max_eval_samples",
    "data.tokenizer.max_doc_tokens",
    "model.vocab_size",
    "model.bos_token_id",
    "model.eos_token_id",
    "model.pad_token_id",
]
FLAGS = [path for path, value in DEFAULTS.items() if type(value) is bool]
STRINGS = [
    path
    for path in DEFAULTS
    if path not in {*WHOLE, *OPTIONAL_WHOLE, *FLAGS, "data.retry_delay_sec"}
]


def test_no_value_is_made_of_another_kind() -> None:
    wrong: list[tuple[list[str], list[object]]] = [
        (WHOLE + OPTIONAL_WHOLE, ["8", True, 8.0, [8], -1]),
        (FLAGS, ["true", 1, "yes", None]),
        (STRINGS, [7, True, {1: 2}]),
        (["data", "train", "model"], [None, "x", []]),
    ]
    for paths, values in wrong:
        for path in paths:
            for value in values:
                assert f"config: {path}" in refusal(changed(path, value)), (path, value)


HF = {"backend": "hf", "hf_dataset": "a/b", "tokenizer": {"kind": "byte"}}
FILES = {"backend": "files", "files": ["a"], "tokenizer": {"kind": "byte"}}
TEXTS = {"backend": "local_text", "local_text": ["a"], "tokenizer": {"kind": "byte"}}


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        *((TEXTS, key, "x") for key in ("files", "eval_files")),
        (TEXTS, "on_bad", "error"),
        (TEXTS, "files_kind", "jsonl"),
        (FILES, "local_eval_text", "x"),
        *((HF, key, "x") for key in ("files", "eval_files", "local_eval_text")),
        (HF, "on_bad", "skip"),
    ],
)
def test_a_key_that_the_backend_does_not_look_at_is_refused_by_name(data, key, value) -> None:
    backend = data["backend"]
    message = refusal(changed("data", {**data, key: value}))
    assert message.startswith(f"config: data.{key}: for data.backend = ")
    assert message.endswith(f'not "{backend}": leave it out')


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        *((TEXTS, key, "train") for key in ("hf_dataset", "hf_name", "hf_split", "text_key")),
        *((TEXTS, key, "x") for key in ("hf_eval_split", "hf_revision")),
        (TEXTS, "max_retries", 5),
        (TEXTS, "retry_delay_sec", 1.0),
        *((FILES, key, "train") for key in ("hf_dataset", "hf_name", "hf_split", "local_text")),
        (FILES, "max_retries", 5),
        (HF, "local_text", "x"),
    ],
)
def test_a_key_that_every_chomp_config_has_is_named_when_the_backend_does_not_look_at_it(
    data, key, value, caplog
) -> None:
    plain = read_config(changed("data", data))
    assert read_config(changed("data", {**data, key: value})) == plain
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [f"data.{key}"]
    message = refusal(changed("data", data), (f"data.{key}={value}",))  # an override means it
    assert message.startswith(f"override 'data.{key}={value}': data.{key}: for data.backend = ")


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({}, "data.tokenizer.hf_name_or_path: missing; a hub id or a folder"),
        ({"kind": "sentencepiece"}, "data.tokenizer.path: missing; "),
        (
            {"kind": "byte", "path": "x"},
            'data.tokenizer.path: for data.tokenizer.kind = "hf" or "sentencepiece", not "byte"',
        ),
        ({"hf_name_or_path": "gpt2", "path": "x"}, "data.tokenizer.path: data.tokenizer.hf_name_"),
        ({"path": "x", "hf_revision": "main"}, "data.tokenizer.hf_revision: there is no hub id"),
    ],
)
def test_keys_of_the_tokenizer_that_do_not_go_together_are_refused(tokenizer, message) -> None:
    assert refusal(changed("data.tokenizer", tokenizer)).startswith(f"config: {message}")


def test_a_backend_without_its_data_says_which_key_is_missing() -> None:
    for backend, key in (("hf", "hf_dataset"), ("local_text", "local_text"), ("files", "files")):
        data = {"backend": backend, "tokenizer": {"kind": "byte"}}
        assert refusal(changed("data", data)) == (
            f'config: data.{key}: missing; data.backend = "{backend}" needs it'
        )


def test_several_problems_are_told_at_once() -> None:
    values = changed("data.seed", "x", changed("data.foo", 1, changed("train", {"seq_len": 0})))
    assert refusal(values).splitlines() == [
        "4 problems:",
        '  config: data.seed: found "x" (a string), wanted a whole number',
        *[line for line in refusal(values).splitlines() if "data.foo: unknown key" in line],
        "  config: train.seq_len: found 0 (an integer), wanted at least 1",
        "  config: train.batch_size: missing; it has no default",
    ]
    crossed = changed("data.files", "x", changed("data.tokenizer.path", "y"))
    assert refusal(crossed).startswith("2 problems:\n  config: data.files: for ")


def test_no_limit_of_tokens_is_none_or_zero() -> None:
    none = read_config(changed("data.tokenizer.max_doc_tokens", 0))
    assert none.data.tokenizer.max_doc_tokens is None
    assert none == read_config(changed("data.tokenizer.max_doc_tokens", None)) == read_config(SMALL)


def test_the_field_of_files_is_chosen_by_the_source_unless_it_is_named() -> None:
    assert read_config(changed("data", HF)).data.text_key == "text"
    assert read_config(changed("data", FILES)).data.text_key is None
    assert read_config(changed("data", {**FILES, "text_key": "text"})).data.text_key == "text"
    assert read_config(changed("data", {**HF, "text_key": None})).data.text_key is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[data", "not TOML: "),
        ("a.json", "{", "not JSON: "),
        ("a.json", '{"data": {"seed": 1, "seed": 2}}', "the key 'seed' is written twice"),
        ("a.json", "[" * 100_000, "not JSON: "),
        ("a.json", "3", "found int, wanted tables"),
        ("a.yaml", "data: {seed: 1\n", "not YAML: "),
        ("a.yaml", "data: {seed: 1, seed: 2}\n", "line 1: the key 'seed' is written twice"),
        ("a.yaml", "", "found nothing, wanted tables"),
        ("a.yaml", "data: !!python/object/apply:os.system [ls]", "not YAML: "),
        ("a.yaml", "data: &a {x: *a}\n", "line 1: an alias that refers to itself"),
        ("a.yaml", "a: 1\n---\nb: 2\n", "not YAML: "),
        ("a.yaml", "? [1, 2]\n: 3\n", "line 1: a key that is not a string"),
        ("a.yaml", "[" * 3000, "not YAML: "),
        ("a.yaml", "1: 2\n", "wanted keys that are strings"),
        ("a.ini", "", "wanted a config that ends in .toml, .json, .yaml, .yml"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, name, text, message) -> None:
    pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    found = refusal(tmp_path / name)
    assert str(tmp_path / name) in found
    assert message in found


def test_aliases_that_would_fill_the_memory_are_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)
    ]  # 10**30 values
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    assert "more than 1,000,000 values with aliases expanded" in refusal(tmp_path / "bomb.yaml")
    merged = ["a0: &a0 {k: v}"]
    merged += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 30)]
    (tmp_path / "merge.yaml").write_text("\n".join(merged))
    assert "more than 1,000,000 values with aliases expanded" in refusal(tmp_path / "merge.yaml")


def test_anchors_and_merges_of_yaml_are_read(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "c.yaml").write_text(
        "data:\n  backend: local_text\n  local_text: &texts [a, b]\n  local_eval_text: *texts\n"
        "  tokenizer: {kind: byte}\ntrain: {<<: {seq_len: 8, batch_size: 1}, batch_size: 2}\n"
    )
    config = read_config(tmp_path / "c.yaml")
    assert config == read_config(changed("data.local_eval_text", ["a", "b"]))


def test_what_is_no_config_is_refused() -> None:
    assert "config is a int; wanted a StreamConfig, a mapping or the path" in refusal(3)
    assert "cannot be read as a config" in refusal("missing.toml")
    assert "one string; wanted a list of them" in refusal(SMALL, "data.seed=3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["data.seed=7"], "data.seed", 7),
        (["data.seed = 1_000"], "data.seed", 1000),
        (["data.seed=7", "data.seed=8"], "data.seed", 8),
        (["data.shuffle=false"], "data.shuffle", False),
        (["data.packing_mode=bin"], "data.packing_mode", "bin"),
        (['data.packing_mode="bin"'], "data.packing_mode", "bin"),
        (['data.local_text=["a","b"]'], "data.local_text", ("a", "b")),
        (["data.local_text=one = two # three"], "data.local_text", ("one = two # three",)),
        (["data.local_text=7"], "data.local_text", ("7",)),
        (["model.eos_token_id=256"], "model.eos_token_id", 256),
        (["model.eos_token_id=3", "model.eos_token_id=null"], "model.eos_token_id", None),
        (["data.tokenizer.specials.eos=<e>"], "data.tokenizer.specials", {"eos": "<e>"}),
        (['data.tokenizer.specials={ a = "b" }'], "data.tokenizer.specials", {"a": "b"}),
        (['data.tokenizer={ kind = "byte" }'], "data.tokenizer.kind", "byte"),
        (["data.tokenizer.max_doc_tokens=0"], "data.tokenizer.max_doc_tokens", None),
    ],
)
def test_an_override_sets_one_key(words: list[str], path: str, value: object) -> None:
    before = copy.deepcopy(SMALL)
    found: Any = read_config(SMALL, words)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert before == SMALL


def test_a_revision_of_digits_stays_a_string() -> None:
    config = read_config(changed("data", HF), ["data.hf_revision=1234567"])
    assert config.data.hf_revision == "1234567"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.seed", "override 'data.seed': found no '='; wanted KEY=VALUE: data.seed=7"),
        ("data.sead=3", "override 'data.sead=3': data.sead: unknown key; did you mean 'seed'?"),
        ("sead=3", "override 'sead=3': sead: unknown key; known here: data, model, train"),
        ("=3", "override '=3': : unknown key; "),
        ("data.seed.x=3", "override 'data.seed.x=3': data.seed is not a table, so it has no 'x'"),
        ("data.seed=x", "override 'data.seed=x': 'x' is not a TOML value: wanted a number, true"),
        ("data.seed=", "override 'data.seed=': '' is not a TOML value"),
        ("data.shuffle=True", "override 'data.shuffle=True': 'True' is not a TOML value"),
        ("data.seed=1\nx=2", "is not a TOML value"),
        ("data.seed=-1", "override 'data.seed=-1': data.seed: found -1 (an integer), wanted at"),
        ('data.local_text=["a"', "is not a TOML value"),
        ('data.packing_mode="bin', "is not a TOML value"),
        ("data.hf_name=x", "override 'data.hf_name=x': data.hf_name: for data.backend = \"hf\""),
        (
            "data.tokenizer.specials.a.b=x",
            "data.tokenizer.specials is not a table, so it has",
        ),
    ],
)
def test_an_override_that_will_not_do_is_refused_in_its_own_words(word, message) -> None:
    assert message in refusal(SMALL, (word,))


def test_an_override_cannot_enter_what_is_no_table() -> None:
    assert refusal(changed("data", 3), ("data.seed=1",)) == (
        "override 'data.seed=1': 'data' is int in the config, wanted a table"
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**64 - 1), st.booleans(), st.floats(0, 1e9), st.integers(1, 2**31 - 1))
def test_overrides_and_values_in_the_config_are_the_same(seed, shuffle, delay, seq_len) -> None:
    values = changed("data", {**HF, "seed": seed, "shuffle": shuffle, "retry_delay_sec": delay})
    values["train"]["seq_len"] = seq_len
    words = [f"data.seed={seed}", f"data.shuffle={str(shuffle).lower()}"]
    words += [f"data.retry_delay_sec={delay!r}", f"train.seq_len={seq_len}"]
    assert read_config(changed("data", HF), words) == read_config(values)


@settings(deadline=None, max_examples=150)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_a_string_in_an_override_is_just_what_was_written(text: str) -> None:
    quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert read_config(SMALL, [f"data.local_text={quoted}"]).data.local_text == (text,)
    word = text.strip()
    if word and not word.startswith(('"', "'", "[")) and "\x00" not in word and word != "null":
        config = read_config(changed("data", HF), [f"data.hf_name={word}"])
        assert config.data.hf_name == word


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(sorted(knobs())), st.text(max_size=12))
def test_an_override_is_taken_or_refused_with_an_error_of_ours(key: str, text: str) -> None:
    try:
        config = read_config(SMALL, [f"{key}={text}"])
    except OptionError as error:
        said = str(error)
    else:
        said = "override"
        assert read_config(config_dict(config)) == config
    assert "override" in said
