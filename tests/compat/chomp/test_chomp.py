"""A config of chomp is read whole, and means what it means there."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.compat.chomp import (
    StreamConfig,
    build_train_iterator,
    config_dict,
    open_stream,
    read_config,
)
from shardmill.compat.chomp.stream import open_stream_tokenizer
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.streaming.rows import BinRules
from shardmill.loading.streaming.tokenizer import StreamTokenizer
from shardmill.tokenizers import TrainSpec, train_tokenizer

# Every section and every kind of key that a file of chomp has, in its own values.
COMPLETE = """
variables: {}
model:
  backend: dummy
  vocab_size: 256
  d_model: 128
  dropout: 0.0
  num_layers: 2
  chunk_size: 128
  pad_token_id: 0
  bos_token_id: 1
  eos_token_id: 2
  segment_masking: true
  param_dtype: float32
data:
  backend: local_text
  hf_dataset: owner/name
  hf_name: sample
  hf_split: train
  hf_eval_split: null
  text_key: text
  shuffle: true
  shuffle_buffer_size: 100
  seed: 0
  repeat: true
  max_retries: 3
  retry_delay_sec: 1.0
  state_update_interval: 2000
  local_text: |
    Hello, this is a document.
  packing_mode: bin
  packing_buffer_docs: 32
  packing_max_docs_per_bin: null
  packing_strict_segments: true
  packing_group_docs: 512
  mask_boundary_loss: true
  train_on_eos: true
  grain_prefetch: 0
  max_eval_samples: 1000
  recreate_eval_cache: false
  device_put: false
  tokenizer:
    kind: byte
    hf_name_or_path: owner/tokenizer
    hf_use_fast: true
    hf_trust_remote_code: false
    vocab_size_multiple: 128
    auto_set_special_tokens: true
    byte_offset: 0
    add_bos: false
    add_eos: false
    max_doc_tokens: null
train:
  seed: 0
  steps: 10
  batch_size: 2
  seq_len: 16
  grad_accum: 2
  jit: true
  deterministic: null
  allow_cpu: true
  log_every: 1
  eval_every: 0
  generate_input_len: null
optim:
  lr: 3.0e-4
  warmup_steps: 2
  adam: { b1: 0.9 }
checkpoint:
  enabled: true
  save_every: 5
logging:
  project: chomp
  wandb: { enabled: false, tags: [a] }
debug:
  nan_check: true
"""

UNUSED = """
    variables optim checkpoint logging debug model.backend model.d_model model.dropout
    model.num_layers model.chunk_size model.segment_masking model.param_dtype data.hf_dataset
    data.hf_name data.hf_split data.text_key data.max_retries data.retry_delay_sec
    data.packing_strict_segments data.packing_group_docs data.recreate_eval_cache data.device_put
    data.tokenizer.hf_name_or_path data.tokenizer.hf_use_fast data.tokenizer.hf_trust_remote_code
    train.seed train.steps train.jit train.allow_cpu train.log_every train.eval_every
"""

BYTE: dict[str, Any] = {
    "data": {"backend": "local_text", "local_text": ["a", "b"], "tokenizer": {"kind": "byte"}},
    "train": {"seq_len": 8, "batch_size": 2},
}


def byte_config(tokenizer: dict[str, Any], **model: int) -> StreamConfig:
    data = {**BYTE["data"], "tokenizer": {"kind": "byte", **tokenizer}}
    return read_config({**BYTE, "data": data, "model": model})


def opened(tokenizer: dict[str, Any], **model: int) -> StreamTokenizer:
    return open_stream_tokenizer(byte_config(tokenizer, **model))


def named(tokenizer: StreamTokenizer) -> tuple[int | None, int | None, int | None]:
    ids = tokenizer.ids
    return ids.pad_id, ids.bos_id, ids.eos_id


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_complete_file_is_read_and_what_is_not_used_is_named_once(tmp_path, caplog) -> None:
    pytest.importorskip("yaml")
    config = read_config(write(tmp_path / "run.yaml", COMPLETE))
    assert (config.train.seq_len, config.train.grad_accum, config.data.packing_mode) == (
        *(16, 2),
        "bin",
    )
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'run.yaml'}: ")
    listed = message.rpartition(": ")[2].split(", ")
    assert sorted(listed) == sorted(UNUSED.split())
    caplog.clear()
    with open_stream(config) as stream:
        batch = next(stream)
    assert batch.input_ids.shape == (2, 2, 16)
    assert not [message for message in caplog.messages if "train.steps" in message]
    assert open_stream_tokenizer(config).vocab_size == 256


def test_a_file_with_nothing_unused_says_nothing(caplog) -> None:
    read_config(BYTE)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("data", "pakcing_mode", "packing_mode"),
        ("data", "device_putt", None),
        ("data", "window_shuffle_tokens", None),
        ("data", "hf_eval_holdout_fraction", None),
        ("train", "grad_acum", "grad_accum"),
        ("train", "batchsize", "batch_size"),
        ("model", "vocab_sise", "vocab_size"),
        ("model", "eos_tokn_id", "eos_token_id"),
    ],
)
def test_a_misspelt_key_is_still_refused(section: str, key: str, meant: str | None) -> None:
    values = {**BYTE, section: {**BYTE.get(section, {}), key: 4}}
    with pytest.raises(OptionError, match=rf"config: {section}\.{key}: unknown key") as caught:
        read_config(values)
    if meant is not None:
        assert f"did you mean '{meant}'?" in str(caught.value)


@pytest.mark.parametrize("key", ["pakcing_mode", "add_eoss", "use_fast"])
def test_an_unknown_key_of_the_tokenizer_is_refused(key: str) -> None:
    data = {**BYTE["data"], "tokenizer": {"kind": "byte", key: 1}}
    with pytest.raises(OptionError, match=rf"data\.tokenizer\.{key}: unknown key"):
        read_config({**BYTE, "data": data})


@pytest.mark.parametrize(("section", "meant"), [("modle", "model"), ("dta", "data")])
def test_a_misspelt_section_is_refused(section: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"{section}: unknown key; did you mean '{meant}'"):
        read_config({**BYTE, section: {"vocab_size": 7}})


def test_an_override_of_what_is_not_used_is_refused() -> None:
    with pytest.raises(OptionError, match=r"train\.steps: unknown key"):
        read_config(BYTE, ["train.steps=5"])


def test_a_backend_without_its_data_still_says_what_the_other_keys_are_for() -> None:
    with pytest.raises(OptionError) as caught:
        read_config({**BYTE, "data": {"local_text": "a", "tokenizer": {"kind": "byte"}}})
    assert 'data.hf_dataset: missing; data.backend = "hf" needs it' in str(caught.value)
    assert 'data.local_text: for data.backend = "local_text"' in str(caught.value)


@pytest.mark.parametrize(
    ("said", "multiple", "size"),
    [(256, 128, 384), (259, 128, 384), (300, 128, 384), (385, 128, 512), (1001, 64, 1024)],
)
def test_the_vocabulary_of_the_model_is_rounded_up_and_never_too_small(
    said: int, multiple: int, size: int
) -> None:
    section = {"byte_offset": 3, "vocab_size_multiple": multiple}
    assert opened(section, vocab_size=said).vocab_size == size


def test_a_vocabulary_that_is_too_small_is_raised_with_a_warning(caplog) -> None:
    caplog.set_level(logging.INFO)
    assert opened({"byte_offset": 3}, vocab_size=256).vocab_size == 384
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "model.vocab_size" in warning.message
    assert [word for word in ("256", "259", "384") if word not in warning.message] == []


@pytest.mark.parametrize("offset", [3, 4, 100])
def test_bytes_have_pad_bos_and_eos_below_their_offset(offset: int) -> None:
    section = {"byte_offset": offset, "add_bos": True, "add_eos": True}
    assert named(opened(section)) == (0, 1, 2)
    config = byte_config(section)
    with open_stream(config) as stream:
        row = next(stream).input_ids.ravel()[:4].tolist()
    assert (row[0], row[2], row[3]) == (1, 2, 1)  # bos, a byte, eos, the next bos
    assert offset + 97 <= row[1] <= offset + 98


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_bytes_without_room_have_their_end_after_the_bytes(offset: int) -> None:
    end = 256 + offset
    assert named(opened({"byte_offset": offset, "add_eos": True})) == (end, None, end)
    both = opened({"byte_offset": offset, "add_eos": True, "add_bos": True})
    assert (both.ids.eos_id, both.ids.bos_id) == (end, end + 1)
    neither = opened({"byte_offset": offset, "add_eos": False}, vocab_size=256)
    assert named(neither) == (0, None, None)
    assert opened({"add_eos": False}).vocab_size == 256


def test_ids_that_the_config_gives_to_bytes_are_kept_and_never_given_twice() -> None:
    assert named(opened({"byte_offset": 3}, eos_token_id=0)) == (0, None, 0)
    assert named(opened({"byte_offset": 3, "add_bos": True}, pad_token_id=2)) == (2, 1, 259)
    off = {"byte_offset": 3, "auto_set_special_tokens": False, "add_eos": False}
    assert named(opened(off)) == (0, None, None)
    with pytest.raises(OptionError, match=r"add_eos is true, but there is no EOS id"):
        opened({**off, "add_eos": True})


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json whose files name bos and eos, and no pad."""
    base = tmp_path_factory.mktemp("hf")
    (base / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    spec = TrainSpec(vocab_size=280, model_type="byte-bpe")
    train_tokenizer(base / "model", files=[base / "words.txt"], spec=spec)
    folder = base / "named"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((base / "model/tokenizer.json").read_bytes())
    names = {"bos_token": "<|sys|>", "eos_token": "<|usr|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def hf_config(folder: Path, tokenizer: dict[str, Any], **model: int) -> StreamConfig:
    section = {"kind": "hf", "hf_name_or_path": str(folder), **tokenizer}
    return read_config({**BYTE, "data": {**BYTE["data"], "tokenizer": section}, "model": model})


def test_the_ids_of_the_model_are_updated_from_the_tokenizer(hf, caplog) -> None:
    base = open_stream_tokenizer(hf_config(hf, {}))
    bos, eos = base.ids.bos_id, base.ids.eos_id
    assert None not in (bos, eos)
    found = open_stream_tokenizer(hf_config(hf, {}, bos_token_id=279, eos_token_id=278))
    assert (found.ids.bos_id, found.ids.eos_id) == (bos, eos)
    (message,) = [text for text in caplog.messages if "auto_set_special_tokens" in text]
    assert f"model.bos_token_id {bos} (the config says 279)" in message
    assert f"model.eos_token_id {eos} (the config says 278)" in message


def test_without_auto_set_special_tokens_the_ids_of_the_config_hold(hf, caplog) -> None:
    eot = open_stream_tokenizer(hf_config(hf, {})).tokenizer.special_token_ids()["eot"]
    section = {"auto_set_special_tokens": False}
    found = open_stream_tokenizer(hf_config(hf, section, eos_token_id=eot, pad_token_id=7))
    assert named(found) == (7, None, eot)
    assert not [text for text in caplog.messages if "auto_set_special_tokens" in text]


def test_an_id_that_the_tokenizer_does_not_have_is_kept_from_the_config(hf) -> None:
    assert open_stream_tokenizer(hf_config(hf, {}, pad_token_id=7)).ids.pad_id == 7


def test_an_id_of_text_is_refused_only_where_it_is_used(hf) -> None:
    unused = {"auto_set_special_tokens": False, "add_eos": False}
    assert named(opened(unused, pad_token_id=0, bos_token_id=1, eos_token_id=2)) == (0, 1, 2)
    text = hf_config(hf, unused, bos_token_id=70, eos_token_id=71)
    assert (open_stream_tokenizer(text).ids.bos_id, open_stream_tokenizer(text).ids.eos_id) == (
        70,
        71,
    )
    for key, used in (("bos", {"add_bos": True}), ("eos", {"add_eos": True})):
        with pytest.raises(OptionError, match=f"model.{key}_token_id is 2, but the ids 0 to 255"):
            opened({**unused, **used}, **{f"{key}_token_id": 2})
    masked = read_config(
        {
            **BYTE,
            "data": {
                **BYTE["data"],
                "train_on_eos": False,
                "tokenizer": {"kind": "byte", **unused},
            },
            "model": {"eos_token_id": 2},
        }
    )
    with pytest.raises(OptionError, match=r"model.eos_token_id is 2, but the ids 0 to 255"):
        open_stream_tokenizer(masked)


def test_the_config_of_an_iterator_has_the_vocabulary_and_ids_that_hold(hf) -> None:
    pytest.importorskip("grain")
    config = hf_config(hf, {}, vocab_size=5, eos_token_id=278)
    with build_train_iterator(config) as batches:
        model, tokenizer = batches.config.model, batches.tokenizer
        assert model.vocab_size == tokenizer.vocab_size == 384
        assert (model.bos_token_id, model.eos_token_id, model.pad_token_id) == (
            *(tokenizer.ids.bos_id, tokenizer.ids.eos_id),
            tokenizer.ids.pad_id,
        )
        again = read_config(config_dict(batches.config))
    assert open_stream_tokenizer(again).fingerprint == tokenizer.fingerprint


def pieces(row: np.ndarray) -> list[int]:
    """Lengths of the documents of one row of segments."""
    return np.bincount(row[row > 0])[1:].tolist()


def test_bins_are_packed_first_fit_decreasing_unless_best_fit_is_chosen() -> None:
    # rows of 20: 14 and 11 open one each, 7 fits the second. 2 fits both: the first row is the
    # first fit, the second (18 of 20) the best.
    texts = ["x" * (length - 1) for length in (7, 14, 2, 11)]
    data = {**BYTE["data"], "local_text": texts, "packing_mode": "bin"}
    data |= {"shuffle": False, "repeat": False}
    found = {}
    for algorithm in (None, "first-fit", "best-fit"):
        chosen = {} if algorithm is None else {"packing_algorithm": algorithm}
        values = {"data": {**data, **chosen}, "train": {"seq_len": 19, "batch_size": 2}}
        with open_stream(values) as stream:
            found[algorithm] = sorted(pieces(row) for row in next(stream).segment_ids[0])
    assert found[None] == found["first-fit"] == [[7, 11], [14, 2]]
    assert found["best-fit"] == [[7, 2, 10], [14]]  # the last token of a row is a label alone
    assert BinRules().algorithm == "first-fit"


# What get_state() gave when best fit was the default, after two batches of OLD_CONFIG.
OLD_CONFIG: dict[str, Any] = {
    "data": {
        "backend": "local_text",
        "local_text": [f"word {number} " * (1 + number % 7) for number in range(40)],
        "packing_mode": "bin",
        "packing_buffer_docs": 16,
        "tokenizer": {"kind": "byte"},
    },
    "train": {"seq_len": 32, "batch_size": 2},
    "model": {"eos_token_id": 256},
}
OLD_STATE: dict[str, Any] = {
    "version": 1,
    "kind": "shardmill.stream",
    "num_streams": 1,
    "streams": {
        "0": '{"place":{"epoch":0,"unit":0,"cursor":null,"skip":0,"number":0,"tally":[0,0,0,0,0]},'
        '"document":0,"part":4,"counts":[4,122,10,4,0,0,40,0,0,0,0]}'
    },
    "totals": {
        "rows": 4,
        "tokens": 122,
        "padding": 10,
        "documents": 4,
        "truncated_documents": 0,
        "truncated_tokens": 0,
        "input_documents": 40,
        "input_elsewhere": 0,
        "input_empty": 0,
        "input_dropped": 0,
        "input_repaired": 0,
    },
    "data": {
        "purpose": "train",
        "dataset": "local_text b6cd1a9a0e44e49492f9ab5e76c328f8",
        "revision": "None",
        "dataset_sha256": "8ca77b1e82763d02f1325c5d109989665545330c85afd8e100bf2c7d1ea40d74",
        "tokenizer": "80ac03d1b8b6630eef56c7c1b16d431c500e5b2b7c619e0df113218be2160ef4",
        "seed": 0,
        "shuffle": True,
        "shuffle_buffer_size": 10000,
        "shuffle_buffer_bytes": 268435456,
        "repeat": True,
        "max_eval_samples": "None",
        "state_update_interval": 2000,
        "packing_mode": "bin",
        "seq_len": 32,
        "mask_boundary_loss": True,
        "train_on_eos": True,
        "packing_algorithm": "best-fit",
        "packing_buffer_docs": 16,
        "packing_buffer_tokens": 16777216,
        "packing_max_docs_per_bin": "None",
    },
    "seal": "f46d072639832293b6f510ba553469078d3ef92db2418b3a6c4fdc047a18ba18",
}
OLD_NEXT = ("word 18 " * 4, ("word 5 " * 5)[:32])


def test_a_state_of_the_old_packing_is_refused_by_name_and_resumes_when_it_is_named() -> None:
    state = OLD_STATE
    with open_stream(OLD_CONFIG) as stream, pytest.raises(StateMismatchError) as caught:
        stream.set_state(state)
    assert "packing_algorithm: the state has 'best-fit', this stream 'first-fit'" in str(
        caught.value
    )
    with open_stream(OLD_CONFIG, overrides=["data.packing_algorithm=best-fit"]) as stream:
        stream.set_state(state)
        rows = next(stream).input_ids[0]
    assert tuple(bytes(row.tolist()).decode() for row in rows) == OLD_NEXT
