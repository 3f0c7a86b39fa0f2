"""The tokenizer of a stream: its ids are found or refused by name, and it can be kept."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.compat.chomp import StreamConfig, read_config
from shardmill.compat.chomp.stream import open_documents, open_stream_tokenizer
from shardmill.errors import OptionError, TokenizerError
from shardmill.loading.streaming.tokenizer import (
    SNAPSHOT,
    StreamTokenizer,
    load_tokenizer,
    save_tokenizer,
)
from shardmill.sources import MemorySource
from shardmill.tokenizers import TrainSpec, train_tokenizer
from tests.helpers import folder_digest

WORDS = "the quick brown fox jumps over the lazy dog and then it sleeps.\n"


def config_of(tokenizer: dict[str, Any], model: dict[str, Any] | None = None) -> StreamConfig:
    data = {"backend": "local_text", "local_text": ["a"], "tokenizer": tokenizer}
    return read_config(
        {"data": data, "train": {"seq_len": 8, "batch_size": 1}, "model": model or {}}
    )


def opened(tokenizer: dict[str, Any], **model: int) -> StreamTokenizer:
    return open_stream_tokenizer(config_of(tokenizer, model))


def refusal(tokenizer: dict[str, Any], **model: int) -> str:
    with pytest.raises(OptionError) as caught:
        opened(tokenizer, **model)
    return str(caught.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model type to the folder of a model: 320 ids, specials sys, usr, asst and eot."""
    base = tmp_path_factory.mktemp("trained")
    (base / "words.txt").write_text(
        "".join(WORDS.replace("e", letter) for letter in "abcdefghijklmnop") * 40
    )
    for model_type in ("unigram", "byte-bpe"):
        spec = TrainSpec(vocab_size=320, model_type=model_type)
        train_tokenizer(base / model_type, files=[base / "words.txt"], spec=spec)
    return {model_type: base / model_type for model_type in ("unigram", "byte-bpe")}


def hf_folder(trained: dict[str, Path], folder: Path, names: dict[str, str]) -> Path:
    """A tokenizer.json alone, with these names beside it."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes((trained["byte-bpe"] / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def test_bytes_with_an_end_beyond_them() -> None:
    found = opened({"kind": "byte"}, eos_token_id=256)
    assert (found.ids.bos_id, found.ids.eos_id, found.ids.pad_id, found.vocab_size) == (
        None,
        256,
        256,
        384,
    )
    assert found.encoder().encode_batch(["hi"]).values.tolist() == [104, 105]


def test_bytes_behind_their_specials() -> None:
    byte = {"kind": "byte", "byte_offset": 3, "add_bos": True, "vocab_size_multiple": 1}
    found = opened(byte, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    assert (found.ids.bos_id, found.ids.eos_id, found.ids.pad_id, found.vocab_size) == (
        0,
        1,
        2,
        259,
    )
    assert found.encoder().encode_batch(["hi"]).values.tolist() == [107, 108]
    named = opened({**byte, "specials": {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}})
    assert (named.ids.bos_id, named.ids.eos_id, named.ids.pad_id) == (0, 1, 2)
    assert named.fingerprint == found.fingerprint


@pytest.mark.parametrize("name", ["bos", "eos"])
@pytest.mark.parametrize(("number", "refused"), [(2, False), (3, True), (258, True), (259, False)])
def test_no_special_id_of_a_byte_tokenizer_is_a_byte(name: str, number: int, refused: bool) -> None:
    byte = {"kind": "byte", "byte_offset": 3, "add_eos": False, f"add_{name}": True}
    if not refused:
        ids = opened(byte, **{f"{name}_token_id": number}).ids
        assert getattr(ids, f"{name}_id") == number
        return
    assert refusal(byte, **{f"{name}_token_id": number}) == (
        f"model.{name}_token_id is {number}, but the ids 3 to 258 are bytes of text, which would "
        "be taken for it; choose one from 259 on, or raise data.tokenizer.byte_offset to "
        f"{number + 1} or more to keep it"
    )


def test_an_end_that_is_wanted_and_has_no_id_is_refused_with_the_keys_to_set() -> None:
    byte = {"kind": "byte", "add_eos": False, "auto_set_special_tokens": False}
    for name in ("bos", "eos"):
        message = refusal({**byte, f"add_{name}": True})
        assert message.startswith(f"data.tokenizer.add_{name} is true, but there is no ")
        assert f"set model.{name}_token_id" in message
        assert f"set data.tokenizer.add_{name} = false" in message


@pytest.mark.parametrize(
    ("multiple", "size"), [(1, 320), (7, 322), (64, 320), (128, 384), (1000, 1000)]
)
def test_the_vocabulary_is_rounded_up(trained, multiple: int, size: int) -> None:
    section = {"path": str(trained["byte-bpe"]), "vocab_size_multiple": multiple}
    assert opened(section).vocab_size == size


def test_the_end_of_text_serves_as_the_end_and_as_padding_announced(trained, caplog) -> None:
    caplog.set_level(logging.INFO)
    found = opened({"path": str(trained["byte-bpe"])})
    eot = found.tokenizer.special_token_ids()["eot"]
    assert (found.ids.bos_id, found.ids.eos_id, found.ids.pad_id) == (None, eot, eot)
    assert f"no special token is called eos; using eot ({eot})" in caplog.messages
    assert any(
        message.startswith(f"no special token is called pad; padding is filled with eos ({eot})")
        for message in caplog.messages
    )


def test_names_in_the_files_of_a_tokenizer_are_its_ids(trained, tmp_path) -> None:
    names = {"bos_token": "<|sys|>", "eos_token": "<|usr|>", "pad_token": "<|asst|>"}
    folder = hf_folder(trained, tmp_path / "named", names)
    ids = opened({"path": str(trained["byte-bpe"])}).tokenizer.special_token_ids()
    found = opened({"hf_name_or_path": str(folder), "add_bos": True})
    assert (found.ids.bos_id, found.ids.eos_id, found.ids.pad_id) == (
        ids["sys"],
        ids["usr"],
        ids["asst"],
    )
    said = opened({"path": str(folder)}, eos_token_id=ids["eot"])
    assert (said.ids.bos_id, said.ids.eos_id, said.ids.pad_id) == (
        ids["sys"],
        ids["usr"],
        ids["asst"],
    )
    alone = opened({"path": str(folder), "auto_set_special_tokens": False, "add_eos": False})
    assert (alone.ids.bos_id, alone.ids.eos_id, alone.ids.pad_id) == (None, None, 0)


def test_text_is_never_the_end_of_a_document(trained) -> None:
    section = {"path": str(trained["byte-bpe"])}
    base = opened(section).tokenizer
    letter = base.encode("q")[0]
    message = refusal(section, eos_token_id=letter)
    assert message.startswith(
        f"model.eos_token_id is {letter}, which is 'q' and not a special token"
    )
    assert 'data.tokenizer.specials = { eos = "..." }' in message
    begin = {**section, "add_bos": True}
    assert refusal(begin, bos_token_id=letter).startswith("model.bos_token_id is ")
    assert opened(section, pad_token_id=letter).ids.pad_id == letter
    literal = base.decode([opened(section).ids.eos_id or 0])
    assert opened(section).ids.eos_id not in base.encode(f"x{literal}y")


def test_an_id_beyond_the_vocabulary_is_refused(trained) -> None:
    section = {"path": str(trained["byte-bpe"])}
    assert opened(section, eos_token_id=383).ids.eos_id == 383
    assert "(384 with those the model has beyond them); wanted less" in refusal(
        section, eos_token_id=384
    )
    assert opened(section, eos_token_id=384, vocab_size=400).vocab_size == 512


def test_a_kind_that_is_another_is_refused(trained) -> None:
    pytest.importorskip("sentencepiece")
    (model,) = trained["unigram"].glob("*.model")
    assert opened({"kind": "sentencepiece", "path": str(model)}).vocab_size == 384
    assert 'set data.tokenizer.kind = "sentencepiece"' in refusal({"path": str(model)})
    wrong = {"kind": "sentencepiece", "path": str(trained["byte-bpe"])}
    assert 'set data.tokenizer.kind = "hf"' in refusal(wrong)


CHANGES: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({}, {"eos_token_id": 257}),
    ({}, {"bos_token_id": 257}),
    ({}, {"pad_token_id": 257}),
    ({"add_eos": False}, {}),
    ({"add_bos": True}, {"bos_token_id": 258}),
    ({"max_doc_tokens": 5}, {}),
    ({"byte_offset": 1}, {"eos_token_id": 0}),
]


def test_the_fingerprint_is_of_all_that_changes_documents_and_of_nothing_else() -> None:
    base = {"kind": "byte"}
    found = {opened(base, eos_token_id=256).fingerprint}
    for section, model in CHANGES:
        found.add(opened({**base, **section}, **{"eos_token_id": 256, **model}).fingerprint)
    assert len(found) == 1 + len(CHANGES)
    same: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"max_doc_tokens": 0}, {}),
        ({"engine": "reference"}, {}),
        ({"vocab_size_multiple": 1}, {}),
        ({}, {"vocab_size": 1000}),
    ]
    for section, model in same:
        assert opened({**base, **section}, eos_token_id=256, **model).fingerprint in found


def test_the_engine_is_the_one_that_was_asked_for(trained) -> None:
    path = str(trained["byte-bpe"])
    for engine in ("reference", "auto"):
        found = opened({"path": path, "engine": engine}).encoder(size_hint=1)
        assert found.produced_by["engine"] == "tokenizers"
    with pytest.raises(TokenizerError, match="no fast engine for ByteTokenizer"):
        opened({"kind": "byte", "engine": "fast"}, eos_token_id=256).encoder()


def sections(trained: dict[str, Path]) -> dict[str, tuple[dict[str, Any], dict[str, int]]]:
    (model,) = trained["unigram"].glob("*.model")
    specials = {"eos": "<e>", "bos": "<b>", "other": "<o>"}
    return {
        "byte": ({"kind": "byte", "byte_offset": 4, "specials": specials}, {}),
        "byte, ids": ({"kind": "byte", "max_doc_tokens": 9}, {"eos_token_id": 300}),
        "hf": ({"path": str(trained["byte-bpe"])}, {"pad_token_id": 5}),
        "hf, named": ({"path": str(trained["byte-bpe"]), "specials": {"eos": "<|usr|>"}}, {}),
        "sentencepiece": ({"kind": "sentencepiece", "path": str(model), "add_eos": False}, {}),
    }


@pytest.mark.parametrize("name", ["byte", "byte, ids", "hf", "hf, named", "sentencepiece"])
def test_a_snapshot_opens_to_the_same_tokenizer(trained, tmp_path, name: str) -> None:
    section, model = sections(trained)[name]
    saved = opened(section, **model)
    digest = save_tokenizer(saved, tmp_path / "kept")
    again = load_tokenizer(tmp_path / "kept")
    assert again.fingerprint == saved.fingerprint
    assert (again.ids, again.vocab_size) == (saved.ids, saved.vocab_size)
    assert again.tokenizer.special_token_ids() == saved.tokenizer.special_token_ids()
    assert len(digest) == 64
    texts = [WORDS, "<e><|usr|></s>", "caf\u00e9"]
    left, right = saved.encoder(size_hint=1), again.encoder(size_hint=1)
    assert np.array_equal(left.encode_batch(texts).values, right.encode_batch(texts).values)
    before = folder_digest(tmp_path / "kept")
    assert save_tokenizer(saved, tmp_path / "kept") == digest
    assert save_tokenizer(again, tmp_path / "kept") == digest
    assert folder_digest(tmp_path / "kept") == before
    assert not [path for path in (tmp_path / "kept").iterdir() if path.name.endswith(".tmp")]


def test_a_snapshot_is_used_in_place_of_the_files(trained, tmp_path, caplog) -> None:
    folder = hf_folder(trained, tmp_path / "gone", {"eos_token": "<|usr|>"})
    saved = opened({"path": str(folder)})
    save_tokenizer(saved, tmp_path / "kept")
    kept = str(tmp_path / "kept")
    assert opened({"path": str(folder), "snapshot": kept}).fingerprint == saved.fingerprint
    (folder / "tokenizer.json").unlink()
    assert opened({"snapshot": kept}).fingerprint == saved.fingerprint
    assert not caplog.messages
    other = opened({"snapshot": kept, "add_eos": False})
    assert other.tokenizer.fingerprint == saved.tokenizer.fingerprint
    assert "the config says" in caplog.messages[0]


def test_a_snapshot_of_another_tokenizer_is_refused(trained, tmp_path) -> None:
    kept = str(tmp_path / "kept")
    save_tokenizer(opened({"kind": "byte", "byte_offset": 4}, eos_token_id=0), kept)
    message = refusal({"kind": "byte", "byte_offset": 5, "snapshot": kept}, eos_token_id=0)
    assert "ByteTokenizer(byte_offset=4, vocab_size=260) with the fingerprint" in message
    assert "name ByteTokenizer(byte_offset=5, vocab_size=261)" in message
    assert 'holds a tokenizer of the kind "byte", but data.tokenizer.kind is "hf"' in refusal(
        {"snapshot": kept}
    )
    save_tokenizer(opened({"path": str(trained["byte-bpe"])}), tmp_path / "hf")
    wrong = {"snapshot": str(tmp_path / "hf"), "specials": {"eot": "<|usr|>"}}
    assert "the special 'eot' is '<|eot|>' there" in refusal(wrong)


def test_a_snapshot_is_never_replaced(tmp_path) -> None:
    first = opened({"kind": "byte"}, eos_token_id=256)
    save_tokenizer(first, tmp_path)
    before = folder_digest(tmp_path)
    with pytest.raises(TokenizerError, match="different in fingerprint, eos_id, pad_id; a snapsho"):
        save_tokenizer(opened({"kind": "byte"}, eos_token_id=257), tmp_path)
    assert folder_digest(tmp_path) == before


def test_a_file_of_someone_else_is_never_replaced(trained, tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="a file of another tokenizer is there"):
        save_tokenizer(opened({"path": str(trained["byte-bpe"])}), tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / SNAPSHOT).exists()


def changed_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def doubled_special(path: Path) -> None:
    specials = json.loads(path.read_text())["specials"]
    changed_json(path, specials=[*specials, specials[0]])


def fifo_at(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_a_snapshot_that_was_changed_is_refused(trained, tmp_path) -> None:
    saved = opened({"path": str(trained["byte-bpe"])})
    problems: list[tuple[str, Any]] = [
        ("its fingerprint", lambda f: changed_json(f / SNAPSHOT, eos_id=1)),
        ("its fingerprint", lambda f: changed_json(f / SNAPSHOT, add_eos=False)),
        ("not a snapshot of this version", lambda f: changed_json(f / SNAPSHOT, version=2)),
        ("not a snapshot of this version.*`more`", lambda f: changed_json(f / SNAPSHOT, more=1)),
        ("says vocab_size 1, but its ids need", lambda f: changed_json(f / SNAPSHOT, vocab_size=1)),
        ("says vocab_size -1", lambda f: changed_json(f / SNAPSHOT, vocab_size=-1)),
        ("each name once", lambda f: doubled_special(f / SNAPSHOT)),
        ("not a plain file", lambda f: fifo_at(f / SNAPSHOT)),
        ("names the files", lambda f: changed_json(f / SNAPSHOT, files={"../x": "0"})),
        ("saved with 0000", lambda f: changed_json(f / SNAPSHOT, tokenizer_fingerprint="0" * 64)),
        ("not a snapshot of this version", lambda f: (f / SNAPSHOT).write_text("")),
        ("cannot be read", lambda f: (f / SNAPSHOT).unlink()),
        ("tokenizer.json cannot be read", lambda f: (f / "tokenizer.json").unlink()),
        ("it was changed or damaged", lambda f: (f / "tokenizer.json").write_text("{}")),
    ]
    for number, (message, damage) in enumerate(problems):
        folder = tmp_path / str(number)
        save_tokenizer(saved, folder)
        damage(folder)
        with pytest.raises(TokenizerError, match=message):
            load_tokenizer(folder)


def test_a_tokenizer_without_files_cannot_be_kept(trained, tmp_path) -> None:
    class Own:
        vocab_size = 3
        fingerprint = "own"

        def encode(self, text: str) -> list[int]:
            return [1]

        def special_token_ids(self) -> dict[str, int]:
            return {}

    found = replace(opened({"kind": "byte"}, eos_token_id=256), tokenizer=Own())  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match="has no file that could be kept"):
        save_tokenizer(found, tmp_path)


def texts_of(source: Any) -> list[str]:
    return [text.as_py() for batch in source.batches() for text in batch.texts]


def source_config(tmp_path: Path, **data: object) -> StreamConfig:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "other": "eins"}\n{"other": "zwei"}\n')
    (tmp_path / "b.txt").write_text("three")
    return read_config(
        {
            "data": {"tokenizer": {"kind": "byte"}, **data},
            "train": {"seq_len": 8, "batch_size": 1},
        }
    )


def test_texts_of_the_config_are_named_by_their_contents(tmp_path, caplog) -> None:
    names = set()
    for texts in (["a", "bc"], ["ab", "c"], ["abc"], "abc", ["a", "b", "c"]):
        source = open_documents(source_config(tmp_path, backend="local_text", local_text=texts))
        assert isinstance(source, MemorySource)
        assert texts_of(source) == ([texts] if isinstance(texts, str) else texts)
        names.add(json.dumps(source.describe()))
    assert len(names) == 4  # "abc" and ["abc"] are the same
    config = source_config(tmp_path, backend="local_text", local_text="a", local_eval_text="b")
    assert texts_of(open_documents(config, "eval")) == ["b"]
    assert not caplog.messages


def test_files_of_the_config_are_opened_by_their_kind(tmp_path) -> None:
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    config = source_config(tmp_path, backend="files", files=files, state_update_interval=1)
    assert texts_of(open_documents(config)) == ["one", "three"]
    assert len(list(open_documents(config).batches())) == 3
    named = source_config(tmp_path, backend="files", files=files[0], text_key="other")
    assert texts_of(open_documents(named)) == ["eins", "zwei"]
    with pytest.raises(OptionError, match="field does not apply to this kind of input"):
        open_documents(source_config(tmp_path, backend="files", files=files, text_key="other"))


def test_bad_rows_stop_the_run_or_are_dropped(tmp_path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{\n')
    bad = str(tmp_path / "bad.jsonl")
    skipping = source_config(tmp_path, backend="files", files=bad, on_bad="skip")
    assert texts_of(open_documents(skipping)) == ["one"]
    with pytest.raises(ValueError, match=r"bad\.jsonl"):
        texts_of(open_documents(source_config(tmp_path, backend="files", files=bad)))


def test_evaluation_on_the_training_data_is_announced(tmp_path, caplog) -> None:
    files = str(tmp_path / "b.txt")
    config = source_config(tmp_path, backend="files", files=files)
    assert texts_of(open_documents(config, "eval")) == ["three"]
    assert caplog.messages == [
        "evaluation reads the training data, since data.eval_files is not set: its loss says "
        "nothing about text that was never seen"
    ]
    other = source_config(
        tmp_path, backend="files", files=files, eval_files=str(tmp_path / "a.jsonl")
    )
    assert texts_of(open_documents(other, "eval")) == ["one"]
