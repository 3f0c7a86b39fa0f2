"""A fast engine is used only after proof, and a later difference is found."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import EngineMismatchError, OptionError, TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.records import Ragged
from shardmill.testing.tokenizers import nasty_texts
from shardmill.tokenizers import choose_encoder, engines
from shardmill.tokenizers.base import parts_of
from shardmill.tokenizers.battery import (
    WHITESPACE,
    battery_sha256,
    battery_texts,
    short_texts,
)
from shardmill.tokenizers.engines import Candidates, fast_candidates
from shardmill.tokenizers.huggingface import HuggingFaceTokenizer

CORPUS = ["The first document.\n", "and a second one " * 50, "\u7d20\u65e9\u3044\u72d0 third"]
SPECIALS = ["<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>"]


class Liar:
    """A fast engine that gives the reference's ids, but for texts that hold `trigger`."""

    name = "liar"
    version = "1.0"

    def __init__(self, honest: Tokenizer, trigger: str) -> None:
        self.honest, self.trigger = honest, trigger
        self.calls = 0

    def encode_batch(self, texts: Any) -> Ragged:
        self.calls += 1
        listed = texts.to_pylist() if isinstance(texts, pa.Array) else list(texts)
        ids = [self.honest.encode(text) for text in listed]
        for text, one in zip(listed, ids, strict=True):
            if self.trigger in text:
                one[-1] += 1
        return Ragged.from_sequences(ids)


@pytest.fixture
def short_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    """The battery's short part only, where the point is not the battery."""
    monkeypatch.setattr(
        engines, "battery_texts", lambda specials, added: [*short_texts(), *specials, *added]
    )


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> Any:
    """Make a liar the only candidate of the byte-bpe tokenizer, with no proof kept from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def make(trigger: str) -> Liar:
        liar = Liar(tokenizers["byte-bpe"], trigger)
        monkeypatch.setattr(engines, "fast_candidates", lambda _: Candidates((liar,), ()))
        return liar

    return make


# -- the battery


def test_the_battery_holds_every_code_point_between_two_letters() -> None:
    seen = np.zeros(0x110000, bool)
    for text in battery_texts():
        if len(text) % 3 == 0 and text[:1] == "a" and text[2:3] == "b":
            points = np.frombuffer(text.encode("utf-32-le"), "<u4").reshape(-1, 3)
            if (points[:, 0] == ord("a")).all() and (points[:, 2] == ord("b")).all():
                seen[points[:, 1]] = True
    assert int(seen.sum()) == 1_112_064  # all but the surrogates
    assert not seen[0xD800:0xE000].any()


def test_the_battery_holds_long_runs_long_lines_and_specials() -> None:
    texts = set(battery_texts(["<|end|>"]))
    assert {"a" + space * 20_000 + "b" for space in WHITESPACE} <= texts
    assert sum(len(text) >= 2**18 and "\n" not in text[:1000] for text in texts) >= 5
    assert {"<|end|>", "a<|end|>b", "<|end|><|end|><|end|>", "<|end|"} <= texts


def test_the_battery_is_the_same_on_every_machine() -> None:
    assert (
        battery_sha256(battery_texts(SPECIALS))
        == "0c4c2c6ef650ac44a39a61e07fa002c09810c33aae97620e9afc8895da38e31a"
    )
    assert battery_sha256(["ab", "c"]) != battery_sha256(["a", "bc"])


# -- real engines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "names"), [("byte-bpe", ["fastokens", "gigatoken"]), ("bpe", ["gigatoken"])]
)
def test_real_engines_equal_the_reference_on_the_whole_battery(
    tokenizers: dict[str, Tokenizer], kind: str, names: list[str]
) -> None:
    found = {one.name: one for one in fast_candidates(tokenizers[kind]).engines}
    texts = list(battery_texts(SPECIALS))
    reference: Any = tokenizers[kind]
    for name in names:
        assert engines.compare(reference, found[name], texts) is None
        reference = found[name]  # as good as the reference from here on, and quicker


@pytest.mark.parametrize(
    ("kind", "engine"),
    [("byte-bpe", "fastokens"), ("byte-bpe", "gigatoken"), ("bpe", "gigatoken")],
)
@settings(deadline=None, max_examples=30)
@given(texts=st.lists(nasty_texts(SPECIALS), max_size=5))
def test_real_engines_equal_the_reference(
    tokenizers: dict[str, Tokenizer], kind: str, engine: str, texts: list[str]
) -> None:
    found = {one.name: one for one in fast_candidates(tokenizers[kind]).engines}[engine]
    wanted = tokenizers[kind].encode_batch(texts)
    assert found.encode_batch(texts) == wanted
    assert found.encode_batch(pa.array(texts, pa.large_string())) == wanted


@pytest.mark.parametrize("kind", ["byte-bpe", "bpe"])
def test_real_engines_refuse_a_lone_surrogate(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    for engine in fast_candidates(tokenizers[kind]).engines:
        with pytest.raises(TokenizerError, match="text 1 of 2: character 0 is the lone surrogate"):
            engine.encode_batch(["a", "\udfff"])


@pytest.mark.usefixtures("short_battery")
@pytest.mark.parametrize(
    ("kind", "engine", "reference"),
    [("byte-bpe", "fastokens", "tokenizers"), ("bpe", "gigatoken", "sentencepiece")],
)
def test_auto_uses_the_fast_engine_and_records_the_proof(
    tokenizers: dict[str, Tokenizer], kind: str, engine: str, reference: str
) -> None:
    chosen = choose_encoder(tokenizers[kind], engine="auto", corpus=CORPUS)
    made = chosen.produced_by
    assert (made["engine"], made["reference"]) == (engine, reference)
    assert set(made["versions"]) == {engine, reference}  # type: ignore[arg-type]
    assert made["proof"]["corpus"] == {  # type: ignore[index, call-overload]
        "documents": 3,
        "bytes": sum(len(text.encode()) for text in CORPUS),
        "sha256": battery_sha256(CORPUS),
    }
    assert json.loads(json.dumps(made)) == made
    assert chosen.encode_batch(CORPUS) == tokenizers[kind].encode_batch(CORPUS)


@pytest.mark.parametrize("kind", ["byte", "unigram", "hf unigram", "hf wordpiece"])
def test_without_a_candidate_auto_uses_the_reference_and_fast_refuses(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    chosen = choose_encoder(tokenizers[kind], engine="auto", corpus=CORPUS)
    assert not chosen.is_fast
    assert chosen.produced_by["reason"] == "no fast engine for this model"
    assert chosen.encode_batch(CORPUS) == tokenizers[kind].encode_batch(CORPUS)
    with pytest.raises(TokenizerError, match="no fast engine for"):
        choose_encoder(tokenizers[kind], engine="fast", corpus=CORPUS)


def test_a_normalising_sentencepiece_model_has_no_candidate() -> None:
    from shardmill.tokenizers.sentencepiece import SentencePieceTokenizer
    from tests.tokenizers.test_sentencepiece import train

    assert fast_candidates(SentencePieceTokenizer(train(model_type="bpe"))).engines == ()


# -- choosing


def test_small_input_is_not_worth_a_proof(tokenizers: dict[str, Tokenizer], lying: Any) -> None:
    liar = lying("never")
    assert not choose_encoder(tokenizers["byte-bpe"], size_hint=32 * 2**20 - 1).is_fast
    assert not choose_encoder(tokenizers["byte-bpe"], engine="reference").is_fast
    assert liar.calls == 0


@pytest.mark.usefixtures("short_battery")
@pytest.mark.parametrize("size_hint", [None, 32 * 2**20])
def test_large_or_unknown_input_is_worth_a_proof(
    tokenizers: dict[str, Tokenizer], lying: Any, size_hint: int | None
) -> None:
    lying("never")
    assert choose_encoder(tokenizers["byte-bpe"], size_hint=size_hint).is_fast


@pytest.mark.usefixtures("short_battery")
@pytest.mark.parametrize(("trigger", "where"), [("\u1100", "battery"), ("second one", "corpus")])
def test_an_engine_that_differs_is_never_used(
    tokenizers: dict[str, Tokenizer],
    lying: Any,
    caplog: pytest.LogCaptureFixture,
    trigger: str,
    where: str,
) -> None:
    lying(trigger)
    with caplog.at_level(logging.WARNING):
        chosen = choose_encoder(tokenizers["byte-bpe"], engine="auto", corpus=CORPUS)
    assert not chosen.is_fast
    assert "liar 1.0 is not used" in caplog.text
    (rejected,) = chosen.produced_by["rejected"]  # type: ignore[misc, union-attr]
    assert rejected["engine"] == "liar"  # type: ignore[index, call-overload]
    assert rejected["difference"].startswith(f"{where}: text ")  # type: ignore[index, call-overload, union-attr]
    with pytest.raises(EngineMismatchError, match=f"no fast engine for .*{where}"):
        choose_encoder(tokenizers["byte-bpe"], engine="fast", corpus=CORPUS)


@pytest.mark.usefixtures("short_battery")
def test_only_the_first_megabytes_of_the_corpus_are_proved(
    tokenizers: dict[str, Tokenizer], lying: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engines.CORPUS_BYTES == 2 * 2**20
    monkeypatch.setattr(engines, "CORPUS_BYTES", 2000)
    lying("liar, liar")
    first = ["word " * 100] * 5
    assert choose_encoder(tokenizers["byte-bpe"], corpus=[*first, "liar, liar"]).is_fast
    assert not choose_encoder(tokenizers["byte-bpe"], corpus=[*first[:3], "liar, liar"]).is_fast


def test_invalid_options_are_refused(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(OptionError, match="engine='quick'"):
        choose_encoder(tokenizers["byte"], engine="quick")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="check='some'"):
        choose_encoder(tokenizers["byte"], check="some")  # type: ignore[arg-type]


# -- watching


@pytest.mark.usefixtures("short_battery")
def test_a_full_check_catches_the_one_document_that_differs(
    tokenizers: dict[str, Tokenizer], lying: Any
) -> None:
    lying("needle")
    chosen = choose_encoder(tokenizers["byte-bpe"], check="full")
    texts = ["hay " * 5] * 500
    chosen.encode_batch(texts)
    assert chosen.documents_compared == 500
    right = tokenizers["byte-bpe"].encode("hay needle")
    with pytest.raises(EngineMismatchError, match=r"liar 1\.0 is not this tokenizer") as caught:
        chosen.encode_batch([*texts, "hay needle", *texts])
    message = str(caught.value)
    assert f"text 'hay needle' (10 characters): from token {len(right) - 1} on" in message
    assert f"the reference gives [{right[-1]}], the fast engine [{right[-1] + 1}]" in message


@pytest.mark.usefixtures("short_battery")
@settings(deadline=None, max_examples=25)
@given(batches=st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=8), max_size=12))
def test_the_sample_is_never_too_small(
    tokenizers: dict[str, Tokenizer], batches: list[list[int]]
) -> None:
    tokenizer = tokenizers["byte"]
    chosen = engines.ChosenEncoder(
        tokenizer, Liar(tokenizer, "never"), check="sample", produced_by={"engine": "liar"}
    )
    for sizes in batches:
        chosen.encode_batch(["x" * size for size in sizes])
        assert chosen.bytes_compared * 2048 >= chosen.bytes_seen
    longest = max((size for sizes in batches for size in sizes), default=0)
    assert chosen.bytes_compared * 2048 <= chosen.bytes_seen + 2048 * (longest + 1)


@pytest.mark.usefixtures("short_battery")
def test_a_sample_catches_an_engine_that_starts_to_lie(
    tokenizers: dict[str, Tokenizer], lying: Any
) -> None:
    liar = lying("never")
    chosen = choose_encoder(tokenizers["byte-bpe"])
    texts = [f"document {number} " * 20 for number in range(300)]
    chosen.encode_batch(texts)
    liar.trigger = "document"
    many = [*texts] * 10
    with pytest.raises(EngineMismatchError):
        chosen.encode_batch(many)


@pytest.mark.usefixtures("short_battery")
def test_every_document_has_its_turn_in_the_sample(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte"]
    chosen = engines.ChosenEncoder(
        tokenizer, Liar(tokenizer, "never"), check="sample", produced_by={"engine": "liar"}
    )
    places = {int(chosen._choose_sample(np.full(10, 4096))[0]) for _ in range(10)}
    assert places == set(range(10))


def test_an_engine_that_loses_a_document_is_caught(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte"]

    class Forgetful(Liar):
        def encode_batch(self, texts: Any) -> Ragged:
            return super().encode_batch(texts[:-1])

    chosen = engines.ChosenEncoder(
        tokenizer, Forgetful(tokenizer, "never"), check="sample", produced_by={"engine": "liar"}
    )
    with pytest.raises(EngineMismatchError, match="gave 2 sequences for 3 texts"):
        chosen.encode_batch(["a", "b", "c"])


# -- the cache of proofs


@pytest.mark.usefixtures("short_battery")
def test_a_cached_proof_saves_time_and_changes_nothing(
    tokenizers: dict[str, Tokenizer], lying: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for trigger in ("never", "\u1100"):
        liar = lying(trigger)
        liar.version = trigger
        first = choose_encoder(tokenizers["byte-bpe"], corpus=CORPUS)
        work = liar.calls
        again = choose_encoder(tokenizers["byte-bpe"], corpus=CORPUS)
        assert liar.calls - work < work
        assert (again.is_fast, again.produced_by) == (first.is_fast, first.produced_by)
    files = sorted((tmp_path / "shardmill" / "engine-proofs").iterdir())
    assert [file.suffix for file in files] == [".json", ".json"]


@pytest.mark.usefixtures("short_battery")
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"facts": {}, "difference": null}', b"\xff\x00"]
)
def test_an_unreadable_cache_is_ignored(
    tokenizers: dict[str, Tokenizer],
    lying: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lying("\u1100")
    wanted = choose_encoder(tokenizers["byte-bpe"], corpus=CORPUS).produced_by
    for file in (tmp_path / "shardmill" / "engine-proofs").iterdir():
        file.write_bytes(content)
    again = choose_encoder(tokenizers["byte-bpe"], corpus=CORPUS)
    assert not again.is_fast
    assert again.produced_by == wanted


@pytest.mark.usefixtures("short_battery")
def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    tokenizers: dict[str, Tokenizer], lying: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    lying("never")
    assert choose_encoder(tokenizers["byte-bpe"], corpus=CORPUS).is_fast


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_look_around_are_left_to_the_reference(
    tokenizers: dict[str, Tokenizer], flag: str
) -> None:
    config = json.loads(tokenizers["byte-bpe"]._original.to_str())  # type: ignore[attr-defined]
    plain = {"special": False, "normalized": False, "lstrip": False, "rstrip": False}
    plain |= {"single_word": False, "id": tokenizers["byte-bpe"].vocab_size, "content": "FooBar"}
    config["added_tokens"].append({**plain, flag: True})
    looking = HuggingFaceTokenizer(json.dumps(config))
    assert fast_candidates(looking).engines == ()
    with pytest.raises(TokenizerError, match="strip or ask for a word"):
        choose_encoder(looking, engine="fast", corpus=["x"])
    config["added_tokens"][-1] = plain
    assert fast_candidates(HuggingFaceTokenizer(json.dumps(config))).engines != ()


def test_the_battery_holds_the_models_own_added_tokens() -> None:
    texts = list(itertools.islice(battery_texts([], ["AB", "C D"]), 2000))
    assert {"AB", "ABAB", "ABC D", "C DAB", "aABb", "AB C D"} <= set(texts)


@pytest.mark.parametrize("number", [None, "5"])
def test_fastokens_leaves_one_core_free_unless_a_number_is_set(
    tokenizers: dict[str, Tokenizer], tmp_path: Path, number: str | None
) -> None:
    code = (
        "import os, sys\n"
        "from shardmill.tokenizers import open_tokenizer\n"
        "from shardmill.tokenizers.engines import FastEngine\n"
        "source = open_tokenizer(sys.argv[1]).engine_source\n"
        "FastEngine('fastokens', source).encode_batch(['some text'])\n"
        "print(os.environ['FASTOKENS_BPE_THREADS'], len(os.sched_getaffinity(0)))\n"
    )
    source = tokenizers["byte-bpe"].engine_source  # type: ignore[attr-defined]
    model = tmp_path / "tokenizer.json"
    model.write_bytes(source.model)
    environment = {key: value for key, value in os.environ.items() if key[:9] != "FASTOKENS"}
    environment |= {"FASTOKENS_BPE_THREADS": number} if number else {}
    command = [sys.executable, "-c", code, str(model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    threads, cores = map(int, done.stdout.split())
    assert threads == (int(number) if number else max(1, cores - 1))


@given(
    texts=st.lists(st.sampled_from(["", "a", "\u7d20\u65e9", "some words " * 3]), max_size=9),
    size=st.integers(1, 40),
)
def test_parts_cover_the_texts_in_order_and_are_about_as_large_as_asked(
    texts: list[str], size: int
) -> None:
    array = pa.array(["before", *texts], pa.large_string()).slice(1)
    for given_as in (texts, tuple(texts), array):
        parts = list(parts_of(given_as, size))
        assert [text for part in parts for text in part] == texts
        assert parts == [[]] if not texts else [] not in parts
        assert all(sum(map(len, part[:-1])) <= size for part in parts)


@pytest.mark.parametrize("engine", ["fastokens", "gigatoken"])
def test_a_batch_in_parts_has_the_ids_of_each_text_alone(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(engines, "_PART_BYTES", 1)
    found = {one.name: one for one in fast_candidates(tokenizers["byte-bpe"]).engines}[engine]
    texts = ["", *CORPUS, "", "caf\u00e9", ""]
    for some in (texts, [], [""], pa.array(texts, pa.large_string())):
        assert found.encode_batch(some) == tokenizers["byte-bpe"].encode_batch(some)
    with pytest.raises(TokenizerError, match="text 3 of 4: character 1 is the lone surrogate"):
        found.encode_batch(["a", "b", "c", "d\udfff"])


def test_ids_beyond_sixteen_bits_stay_as_they_are() -> None:
    offsets = np.array([0, 1, 2])
    narrow = engines._narrowed(Ragged(np.array([1, 2**16 - 1], np.uint32), offsets))
    wide = engines._narrowed(Ragged(np.array([1, 2**16], np.uint32), offsets))
    assert (narrow.values.dtype, narrow.values.tolist()) == (np.uint16, [1, 2**16 - 1])
    assert (wide.values.dtype, wide.values.tolist()) == (np.uint32, [1, 2**16])
