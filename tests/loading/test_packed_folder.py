"""`pack_sequences` on a folder of token files: the tokenizer's end token keeps documents apart."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.errors import OptionError, StateMismatchError, TokenizerError
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.loading.config import eos_token_id, open_stream, read_config
from shardmill.records import Ragged
from shardmill.testing.stores import build_small_store
from shardmill.tokenizers import TrainSpec, open_tokenizer, train_tokenizer

SEQ_LEN = 16


def packed_by_the_letter(window: np.ndarray, eos: int) -> tuple[list[int], list[int]]:
    """The document of each input and the label of each, one token at a time: a running number that
    goes up after every end token; labels of another document than their input are -100."""
    numbers, running = [], 0
    for token in window.tolist():
        numbers.append(running)
        running += token == eos
    labels = [
        token if mine == other else -100
        for token, mine, other in zip(window[1:].tolist(), numbers[:-1], numbers[1:], strict=True)
    ]
    return numbers[:-1], labels


def write_tokens(folder: Path, eos: int, *, kind: str = "npy", seed: int = 0) -> np.ndarray:
    """Three files; documents of 1 to 30 tokens, some empty, each ended by `eos`."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(10, 250, 2000).astype(np.uint16)
    ids[ids == eos] = 9
    ids[np.cumsum(rng.integers(1, 30, 120)) % 2000] = eos
    folder.mkdir(parents=True)
    for number, part in enumerate(np.array_split(ids, 3)):
        if kind == "npy":
            np.save(folder / f"shard_{number:05d}.npy", part)
        else:
            part.tofile(folder / f"shard_{number:05d}.bin")
    return ids


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    """Kind to (path, the id that ends a document)."""
    base = tmp_path_factory.mktemp("tokenizers")
    (base / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    found = {}
    for model_type in ("unigram", "byte-bpe"):
        spec = TrainSpec(vocab_size=288, model_type=model_type)
        train_tokenizer(base / model_type, files=[base / "words.txt"], spec=spec)
    (model,) = (base / "unigram").glob("*.model")
    found["sentencepiece"] = (str(model), open_tokenizer(model).special_token_ids()["eot"])
    file = base / "byte-bpe/tokenizer.json"
    named = open_tokenizer(file).special_token_ids()
    found["tokenizer.json"] = (str(file), named["eot"])
    folder = base / "hf"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(file.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|usr|>"}))
    found["folder"] = (str(folder), named["usr"])
    return found


def assert_packed(stream: SampleStream, folder_tokens: dict[str, tuple[np.ndarray, int]]) -> None:
    """Every row of some batches is what the arithmetic of the specification gives."""
    with Loader(stream, batch_size=7) as loader:
        batches = iter(loader)
        for _ in range(6):
            batch = next(batches)
            assert batch.doc_ids is not None
            for row, (source, item) in enumerate(zip(batch.source, batch.item, strict=True)):
                name = stream.names[source]
                if name not in folder_tokens:
                    continue
                tokens, eos = folder_tokens[name]
                window = tokens[item * SEQ_LEN : item * SEQ_LEN + SEQ_LEN + 1].astype(np.int64)
                doc_ids, labels = packed_by_the_letter(window, eos)
                assert batch.input_ids[row].tolist() == window[:-1].tolist()
                assert batch.doc_ids[row].tolist() == doc_ids
                assert batch.labels[row].tolist() == labels


@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizer.json", "folder"])
@pytest.mark.parametrize("files", ["npy", "bin"])
def test_the_end_token_is_looked_up_and_keeps_documents_apart(
    tokenizers, tmp_path, kind: str, files: str
) -> None:
    path, eos = tokenizers[kind]
    tokens = write_tokens(tmp_path / "tokens", eos, kind=files)
    (tmp_path / "train.toml").write_text(
        f'[data]\ndataset_path = "{tmp_path / "tokens"}"\nfile_pattern = "*.{files}"\n'
        f'pack_sequences = true\ntokenizer_path = "{path}"\n'
        + ('dtype = "uint16"\n' if files == "bin" else "")
    )
    config = read_config(tmp_path / "train.toml")
    assert eos_token_id(config) == eos
    stream = open_stream(config, seq_len=SEQ_LEN, global_batch_size=7)
    assert (tokens[: SEQ_LEN * 42] == eos).sum() > 5
    assert_packed(stream, {"tokens": (tokens, eos)})
    assert_packed(pickle.loads(pickle.dumps(stream)), {"tokens": (tokens, eos)})
    stream.close()


def test_a_mixture_packs_its_folders_by_the_end_token_and_its_stores_by_their_index(
    tokenizers, tmp_path
) -> None:
    path, eos = tokenizers["sentencepiece"]
    one = write_tokens(tmp_path / "one", eos)
    two = write_tokens(tmp_path / "two", eos, seed=1)
    whole = Ragged.from_lengths(np.full(4000, eos, np.int64), [2000, 2000])  # eos is text in it
    build_small_store(tmp_path / "store", {"train": whole})
    names = ("one", "two", "store")
    table: dict[str, Any] = {
        "pack_sequences": True,
        "tokenizer_path": path,
        "datasets": [{"name": name, "path": str(tmp_path / name)} for name in names],
    }
    stream = open_stream(read_config({"data": table}), seq_len=SEQ_LEN, global_batch_size=7)
    assert_packed(stream, {"one": (one, eos), "two": (two, eos)})
    with Loader(stream, batch_size=30, documents=True) as loader:
        batch = next(iter(loader))
    assert batch.doc_ids is not None
    assert batch.doc_ids[batch.source == 2].max(initial=0) <= 1  # one border in 4,000 tokens
    stream.close()


def test_a_packed_folder_resumes_exactly(tokenizers, tmp_path) -> None:
    path, eos = tokenizers["sentencepiece"]
    write_tokens(tmp_path / "tokens", eos)
    table = {"dataset_path": str(tmp_path / "tokens"), "tokenizer_path": path}
    config = read_config({"data": {**table, "pack_sequences": True}})

    def opened() -> Loader:
        stream = open_stream(config, seq_len=SEQ_LEN, global_batch_size=4)
        return Loader(stream, batch_size=4, documents=True)

    with opened() as loader:
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        wanted = next(batches)
    with opened() as again:
        again.load_state_dict(state)
        found = next(iter(again))
    for name in ("input_ids", "labels", "doc_ids", "position_ids", "cu_seqlens"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name))


@pytest.mark.parametrize("said", [{}, {"tokenizer_path": ""}])
@pytest.mark.parametrize("kind", ["folder", "missing", "mixture"])
def test_packing_a_folder_without_a_tokenizer_is_refused_when_the_config_is_read(
    tmp_path, kind: str, said: dict[str, str]
) -> None:
    write_tokens(tmp_path / "tokens", 2)
    build_small_store(tmp_path / "store", {"train": Ragged.from_lengths(np.arange(9), [4, 5])})
    place = str(tmp_path / ("nowhere" if kind == "missing" else "tokens"))
    table: dict[str, Any] = {"dataset_path": place, "pack_sequences": True, **said}
    if kind == "mixture":
        del table["dataset_path"]
        table["datasets"] = [
            {"name": "store", "path": str(tmp_path / "store")},
            {"name": "tokens", "path": place},
        ]
    with pytest.raises(OptionError) as caught:
        read_config({"data": table})
    message = str(caught.value)
    assert message.startswith("config: data.pack_sequences is true, but data.tokenizer_path")
    assert place in message
    assert "eos_token_id" not in message  # a Python keyword, no key of a config


def test_a_store_is_packed_without_a_tokenizer(tmp_path) -> None:
    build_small_store(tmp_path / "store", {"train": Ragged.from_lengths(np.arange(90), [40, 50])})
    for path in ("store", "store/train"):
        config = read_config(
            {"data": {"dataset_path": str(tmp_path / path), "pack_sequences": True}}
        )
        stream = open_stream(config, seq_len=SEQ_LEN, global_batch_size=1)
        with Loader(stream, batch_size=5, documents=True) as loader:
            batch = next(iter(loader))
        assert batch.doc_ids is not None
        assert batch.doc_ids.max() == 1
        stream.close()


def test_a_tokenizer_without_an_end_is_refused_with_its_specials(tmp_path) -> None:
    write_tokens(tmp_path / "tokens", 2)
    table = {"dataset_path": str(tmp_path / "tokens"), "pack_sequences": True}
    config = read_config({"data": {**table, "tokenizer_path": "byte:3"}})
    with pytest.raises(OptionError) as caught:
        open_stream(config, seq_len=SEQ_LEN, global_batch_size=1)
    assert str(caught.value).startswith(
        "config: data.tokenizer_path = 'byte:3': this tokenizer has no end-of-document token"
    )
    lost = read_config({"data": {**table, "tokenizer_path": str(tmp_path / "no.model")}})
    with pytest.raises(TokenizerError, match=r"no\.model"):
        open_stream(lost, seq_len=SEQ_LEN, global_batch_size=1)


def test_the_tokenizer_is_opened_only_to_pack_a_folder(tmp_path) -> None:
    write_tokens(tmp_path / "tokens", 2)
    table = {"dataset_path": str(tmp_path / "tokens"), "tokenizer_path": str(tmp_path / "no.model")}
    open_stream(read_config({"data": table}), seq_len=SEQ_LEN, global_batch_size=1).close()
    build_small_store(tmp_path / "store", {"train": Ragged.from_lengths(np.arange(90), [40, 50])})
    packed = {**table, "dataset_path": str(tmp_path / "store"), "pack_sequences": True}
    open_stream(read_config({"data": packed}), seq_len=SEQ_LEN, global_batch_size=1).close()


def test_an_end_that_does_not_occur_is_announced_and_one_that_cannot_is_refused(
    tmp_path, caplog
) -> None:
    write_tokens(tmp_path / "tokens", 2)
    TokenSource(tmp_path / "tokens", seq_len=SEQ_LEN, eos_token_id=2).close()
    assert not caplog.messages
    TokenSource(tmp_path / "tokens", seq_len=SEQ_LEN, eos_token_id=999).close()
    assert "eos_token_id=999 is not among the first 2,000 tokens" in caplog.messages[0]
    with pytest.raises(OptionError, match="eos_token_id=70,000 cannot occur in uint16 tokens"):
        TokenSource(tmp_path / "tokens", seq_len=SEQ_LEN, eos_token_id=70_000)


def test_in_python_a_folder_needs_eos_token_id_and_a_store_refuses_it(tmp_path) -> None:
    tokens = write_tokens(tmp_path / "tokens", 2)
    build_small_store(tmp_path / "store", {"train": Ragged.from_lengths(np.arange(90), [40, 50])})
    source = TokenSource(tmp_path / "tokens", seq_len=SEQ_LEN, eos_token_id=2)
    stream = SampleStream([source])
    stream.documents = True
    assert_packed(pickle.loads(pickle.dumps(stream)), {"tokens": (tokens, 2)})
    plain = SampleStream([TokenSource(tmp_path / "tokens", seq_len=SEQ_LEN)])
    with pytest.raises(
        OptionError, match=r"documents=True.*TokenSource\(.*eos_token_id="
    ) as caught:
        Loader(plain, batch_size=1, documents=True)
    assert "data." not in str(caught.value)  # a key of a config, no Python keyword
    with pytest.raises(OptionError, match=r"eos_token_id=2, but .* is a store"):
        TokenSource(tmp_path / "store", seq_len=SEQ_LEN, eos_token_id=2)


def test_a_state_resumes_whatever_ends_documents_and_other_tokens_are_refused(tmp_path) -> None:
    """Which labels count is not in a state, as with `documents`; which tokens come is."""
    write_tokens(tmp_path / "a/tokens", 2)
    write_tokens(tmp_path / "b/tokens", 2, seed=5)

    def loader(folder: Path, **more: int) -> Loader:
        source = TokenSource(folder, seq_len=SEQ_LEN, **more)  # type: ignore[arg-type]
        return Loader(SampleStream([source]), batch_size=2)

    with loader(tmp_path / "a/tokens") as plain:
        next(iter(plain))
        state = plain.state_dict()
    loader(tmp_path / "a/tokens", eos_token_id=2).load_state_dict(state)
    with pytest.raises(StateMismatchError):
        loader(tmp_path / "b/tokens", eos_token_id=2).load_state_dict(state)


def test_show_finds_the_labels_of_a_packed_folder_again(tokenizers, tmp_path) -> None:
    path, eos = tokenizers["sentencepiece"]
    write_tokens(tmp_path / "tokens", eos)
    (tmp_path / "train.toml").write_text(
        f'[data]\ndataset_path = "{tmp_path / "tokens"}"\n'
        f'pack_sequences = true\ntokenizer_path = "{path}"\n'
    )
    stream = open_stream(read_config(tmp_path / "train.toml"), seq_len=SEQ_LEN, global_batch_size=8)
    with Loader(stream, batch_size=8, documents=True) as loader:
        labels = next(iter(loader)).labels.tolist()
    stream.close()
    shape = ["--step", "0", "--batch-size", "8", "--seq-len", str(SEQ_LEN)]
    command = [sys.executable, "-m", "shardmill", "show", "--json", *shape]
    done = subprocess.run(
        [*command, "--config", str(tmp_path / "train.toml"), "--rank", "0", "--world", "1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [row["labels"] for row in json.loads(done.stdout)["rows"]] == labels
    assert any(-100 in row for row in labels)
