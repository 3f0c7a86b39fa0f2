"""`shardmill check`: tokens that cannot be trained on are refused, others get their config."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed, build_chats, build_store
from shardmill.chat import bind_template, known_template
from shardmill.cli.commands import check as check_scan
from shardmill.cli.commands.check import _chunks, find_tokens, scan_ids
from shardmill.cli.steps import choose_pattern
from shardmill.loading.config import open_stream, read_config
from shardmill.records import Conversation, TokenFile
from shardmill.sources import MemoryChats, MemorySource
from shardmill.store.readers import TokenSpace
from shardmill.tokenizers import open_tokenizer
from tests.cli.test_build_chats import SPECIALS, TOKENIZER, call  # noqa: F401

OPENED = open_tokenizer("byte:4", specials=SPECIALS)  # 260 ids


def ids(count: int, most: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, most, count)


@pytest.fixture
def check(call, tmp_path):  # noqa: F811
    """Run it; gives (exit code, stdout, stderr)."""
    return lambda *arguments: call("check", *map(str, arguments))


@pytest.fixture
def tokens(tmp_path) -> Path:
    """Three uint16 .npy shards of 1,000 + 2,000 + 500 tokens; the largest id is 40,000."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    for number, count in enumerate((1000, 2000, 500)):
        shard = ids(count, 30_000, number).astype("<u2")
        if number == 1:
            shard[700] = 40_000
        np.save(folder / f"shard_{number:05d}.npy", shard)
    return folder


def test_a_sound_folder_gets_a_receipt_its_flags_and_its_toml(check, tokens):
    (tokens / "metadata.yaml").write_text("tokenizer: gpt2\nvocab_size: 50257\n")
    code, out, err = check("tokens", "--seq-len", 100)
    assert (code, err) == (0, f"{tokens}: 3 files of uint16 (the .npy headers say so)\n")
    assert out == (
        "tokens: ok\n"
        "  shards       3, 7,000 bytes\n"
        "  tokens       3,500\n"
        "  dtype        uint16: the .npy headers say so\n"
        "  tokenizer    gpt2\n"
        "  vocabulary   50,257 ids (metadata.yaml)\n"
        f"  largest id   40,000 ({tokens}/shard_00001.npy, token 700)\n"
        "  looked at    every token\n"
        "  windows      34 over all files, one after another\n"
        "  samples      32 when each file is cut separately\n"
        "\n"
        f"--data.dataset_path={tokens} --data.tokenizer_path=gpt2\n"
        "\n"
        "[data]\n"
        f'dataset_path = "{tokens}"\n'
        'tokenizer_path = "gpt2"\n'
    )


def test_the_toml_and_the_flags_are_read_back_and_open_the_same_tokens(check, tmp_path):
    folder = tmp_path / "odd 'name'\u00e9"
    folder.mkdir()
    np.zeros(4001, "<u4").tofile(folder / "a.bin")  # zeros fit both dtypes
    np.zeros(2000, "<u4").tofile(folder / "b.bin")
    code, out, _ = check(folder, "--dtype", "uint32", "--seq-len", 60, "--json")
    facts = json.loads(out)
    assert (code, facts["ok"], facts["dtype_rule"]) == (0, True, "argument")
    (tmp_path / "data.toml").write_text(facts["toml"], encoding="utf-8")
    config = read_config(tmp_path / "data.toml")
    assert (config.dataset_path, config.file_pattern) == (str(folder), "*.bin")
    stream = open_stream(config, seq_len=60, global_batch_size=1)
    assert stream.sources[0].num_tokens == facts["tokens"] == 6001
    assert len(stream.sources[0]) == facts["windows"] == 100
    words = shlex.split(" ".join(facts["flags"]))
    named = dict(word.removeprefix("--data.").split("=", 1) for word in words)
    assert read_config({"data": named}) == config


def test_the_human_toml_is_the_json_toml(check, tokens):
    _, out, _ = check("tokens")
    found = tomllib.loads(out[out.index("[data]") :])
    assert found == {"data": {"dataset_path": str(tokens)}}


# refused


def save(folder: Path, name: str, array: np.ndarray) -> None:
    np.save(folder / name, array, allow_pickle=True)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda f: save(f, "x.npy", np.zeros((2, 3), np.uint16)),
            "x.npy: an array of shape (2, 3)",
        ),
        (lambda f: save(f, "x.npy", np.zeros(3, np.float32)), "x.npy: holds '<f4', wanted"),
        (lambda f: save(f, "x.npy", np.array([{}])), "would have to be unpickled: that is never"),
        (lambda f: save(f, "x.npy", np.zeros(3, np.uint32)), "mixed dtypes: "),
        (lambda f: (f / "x.npy").write_bytes(b""), "x.npy: empty (0 bytes)"),
        (
            lambda f: (f / "x.npy").write_bytes((f / "shard_00000.npy").read_bytes()[:-3]),
            "x.npy: truncated: found 2,125 bytes, wanted 2,128",
        ),
        (
            lambda f: (f / "metadata.yaml").write_text("vocab_size: 40000\n"),
            "shard_00001.npy, token 700: id 40,000, but the vocabulary has 40,000 ids "
            "(metadata.yaml); 1 of 3,500 ids are outside",
        ),
        (
            lambda f: (f / "meta.json").write_text('{"vocab_size": "many"}'),
            "meta.json: vocab_size is 'many'",
        ),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_folder_that_cannot_be_trained_on_is_refused_with_exit_1(
    check, tokens, damage, words, as_json
):
    damage(tokens)
    code, out, err = check("tokens", *(["--json"] if as_json else []))
    assert (code, "Traceback" in err) == (1, False)
    if as_json:
        facts = json.loads(out)
        assert (facts["ok"], len(facts["problems"])) == (False, 1)
        assert words in facts["problems"][0]
    else:
        assert out.startswith("tokens: REFUSED, 1 problem\n")
        assert words in err
        assert "[data]" not in out


def test_bin_files_that_say_nothing_are_refused_with_the_flag_to_pass(check, tmp_path):
    (tmp_path / "bin").mkdir()
    np.zeros(4000, "<u4").tofile(tmp_path / "bin" / "a.bin")
    code, _, err = check("bin")
    assert code == 1
    assert "pass --dtype uint16 or 'uint32'" in err
    (tmp_path / "bin" / "b.bin").write_bytes(b"abc")
    code, _, err = check("bin", "--dtype", "uint16")
    assert code == 1
    assert "b.bin: truncated, or not uint16: 3 bytes" in err


def test_a_dtype_that_the_contents_deny_is_refused_until_it_is_said(check, tmp_path):
    (tmp_path / "bin").mkdir()
    (ids(4000, 49_000) + 100).astype("<u2").tofile(tmp_path / "bin" / "a.bin")
    (tmp_path / "bin" / "meta.json").write_text('{"dtype": "uint32"}')
    code, _, err = check("bin")
    assert code == 1
    assert "read as uint32, because the meta.json says 'uint32', but" in err
    assert "a.bin looks like uint16; correct the metadata, or pass --dtype" in err
    code, out, _ = check("bin", "--dtype", "uint16", "--json")
    assert (code, json.loads(out)["largest_id"] < 50_000) == (0, True)


def test_a_tokenizer_knows_its_vocabulary_better_than_metadata(check, tmp_path):
    (tmp_path / "t").mkdir()
    np.save(tmp_path / "t" / "a.npy", np.array([5, 259, 7], "<u2"))
    (tmp_path / "t" / "meta.json").write_text('{"vocab_size": 256, "tokenizer": "old"}')
    code, _, err = check("t")
    assert code == 1
    assert "compare with the tokenizer itself: --tokenizer" in err
    code, out, _ = check("t", *TOKENIZER)
    assert code == 0
    assert "  vocabulary   260 ids (byte:4); the metadata says 256\n" in out
    np.save(tmp_path / "t" / "b.npy", np.array([1, 260, 300], "<u2"))
    code, out, _ = check("t", *TOKENIZER, "--json")
    facts = json.loads(out)
    assert (code, facts["ids_outside_vocabulary"], facts["largest_id"]) == (1, 2, 300)
    assert "b.npy, token 1: id 260, but the vocabulary has 260 ids (byte:4)" in facts["problems"][0]
    assert "--tokenizer" not in facts["problems"][0]


def test_without_a_vocabulary_that_is_said(check, tokens):
    code, out, _ = check("tokens")
    assert code == 0
    assert (
        "  vocabulary   not recorded, so no id could be refused; name it with --tokenizer\n" in out
    )


def test_too_few_tokens_for_a_window_are_a_problem(check, tokens):
    code, _, err = check("tokens", "--seq-len", 3500)
    assert code == 1
    assert "--seq-len 3,500: no window: 3,500 tokens, wanted at least 3,501" in err
    code, out, _ = check("tokens", "--seq-len", 3499, "--json")
    assert (code, json.loads(out)["windows"]) == (0, 1)


# mistakes in the call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["empty"], "No files match '*.npy'"),
        (["tokens", "--file-pattern", "*.bin"], "No files match '*.bin'"),
        (["both"], "there are .npy and .bin files, perhaps the same tokens twice"),
        (["tokens", "--dtype", "int8"], "--dtype int8: wanted one of uint16, uint32"),
        (["tokens", "--dtype", "uint32"], "its header says uint16"),
        (["tokens", "--split", "train"], "tokens is not a store, so it has no splits"),
        (["tokens", "--seq-len", "0"], "--seq-len 0: wanted at least 1"),
        (["tokens", "--sample", "0"], "--sample 0: wanted at least 1"),
        (["tokens", "--tokenizer", "no.model"], "no such file or folder"),
    ],
)
def test_a_mistake_in_the_call_is_one_clear_message(check, tokens, tmp_path, arguments, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "both").mkdir()
    for name in ("a.npy", "a.bin"):
        (tmp_path / "both" / name).write_bytes(b"xx")
    code, out, err = check(*arguments)
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert words in re.sub(r"[\s|\u2502]+", " ", err)


def test_one_of_two_formats_can_be_named(check, tokens):
    (tokens / "rest.bin").write_bytes(b"12")
    code, out, _ = check("tokens", "--file-pattern", "*.npy", "--json")
    assert (code, json.loads(out)["shards"]) == (0, 3)


def test_a_folder_name_cannot_touch_the_terminal(check, tmp_path):
    folder = tmp_path / "red\x1b[31m"
    folder.mkdir()
    np.save(folder / "a.npy", np.arange(9, dtype="<u2"))
    code, out, _ = check(folder)
    assert code == 0
    shown, toml = out.split("[data]")
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert tomllib.loads("[data]" + toml)["data"]["dataset_path"] == str(folder)


# stores


@pytest.fixture
def store(tmp_path) -> Path:
    feed = Feed(
        source=MemorySource([f"page {n}" for n in range(99)]), fill=(("val", 90), ("train", None))
    )
    build_store([feed], tmp_path / "store", tokenizer=OPENED, spec=BuildSpec(append_eot=True))
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("arguments", "split"),
    [(["store"], "train"), (["store/val"], "val"), (["store", "--split", "val"], "val")],
)
def test_a_store_is_checked_by_its_manifest_and_read_back(check, store, tmp_path, arguments, split):
    code, out, _ = check(*arguments, "--seq-len", 7, "--json")
    facts = json.loads(out)
    assert (code, facts["dtype_rule"], facts["split"]) == (0, "store", split)
    assert (facts["vocab_size"], facts["vocab_size_from"]) == (260, "the manifest")
    assert facts["largest_id"] == ord("p") + 4
    (tmp_path / "data.toml").write_text(facts["toml"])
    source = open_stream(
        read_config(tmp_path / "data.toml"), seq_len=7, global_batch_size=1
    ).sources[0]
    assert (source.split, source.num_tokens, len(source)) == (
        split,
        facts["tokens"],
        facts["windows"],
    )


def test_a_damaged_store_is_refused_with_exit_1(check, store):
    shard = next((store / "train").glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    code, out, err = check("store")
    assert (code, out) == (1, "store: REFUSED, 1 problem\n")
    assert shard.name in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["store", "--file-pattern", "*.bin"], "is a store, which lists its files"),
        (["store", "--dtype", "uint32"], "is a store of uint16"),
        (["store", "--split", "test"], "none is 'test'"),
        (["store", "--tokenizer", "byte"], "not the tokenizer of this store"),
        (["chats"], "a store of conversations"),
    ],
)
def test_what_does_not_fit_a_store_is_a_mistake_in_the_call(
    check, store, tmp_path, arguments, words
):
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    build_chats(
        MemoryChats([Conversation(messages=said)]),
        tmp_path / "chats",
        template=bind_template(known_template("four-marker"), OPENED),
        tokenizer=OPENED,
        spec=BuildSpec(),
    )
    code, out, err = check(*arguments)
    assert (code, out) == (2, "")
    assert words in err


# looking


@settings(deadline=None, max_examples=200)
@given(
    total=st.integers(0, 10_000) | st.integers(0, 40_000_000),
    asked=st.none() | st.integers(1, 50_000_000) | st.integers(-500, 500).map(lambda n: -1000 + n),
)
def test_chunks_never_overlap_reach_both_ends_and_hold_what_was_asked(total, asked):
    # a negative number: so many fewer than there are, where the last chunks hardly fit
    sample = asked if asked is None or asked > 0 else max(1, total + asked)
    runs = list(_chunks(total, sample))
    assert all(0 <= start < stop <= total for start, stop in runs)
    assert all(left[1] <= right[0] for left, right in pairwise(runs))
    looked = sum(stop - start for start, stop in runs)
    if sample is None:
        assert looked == total
    else:
        assert min(sample, total) <= looked <= min(total, sample + check_scan.CHUNK)
    if total:
        assert runs[0][0] == 0
        assert runs[-1][1] == total or len(runs) == 1


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    chunk=st.integers(1, 50),
    vocab=st.none() | st.integers(1, 70_000),
    seed=st.integers(0, 99),
)
def test_the_scan_equals_numpy_over_all_files(tmp_path_factory, sizes, chunk, vocab, seed):
    folder = tmp_path_factory.mktemp("scan")
    parts = [ids(size, 65_536, seed + n).astype("<u2") for n, size in enumerate(sizes)]
    files = []
    for number, part in enumerate(parts):
        part.tofile(folder / f"{number}.bin")
        files.append(TokenFile(path=folder / f"{number}.bin", num_tokens=len(part), dtype="uint16"))
    whole = np.concatenate(parts)
    seen: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_scan, "CHUNK", chunk)
        found = scan_ids(
            TokenSpace(files),
            vocab_size=vocab,
            sample=None,
            on_progress=lambda done, total: seen.append((done, total)),
        )
    outside = np.flatnonzero(whole >= (vocab or 2**20))
    assert (found.num_seen, found.largest_id) == (len(whole), int(whole.max()))
    assert found.largest_at == int(whole.argmax())
    assert found.num_outside == len(outside)
    first = (int(outside[0]), int(whole[outside[0]])) if len(outside) else None
    assert found.first_outside == first
    assert seen[-1] == (len(whole), len(whole))


def test_a_sample_is_announced_and_counted(check, tmp_path):
    (tmp_path / "big").mkdir()
    np.save(tmp_path / "big" / "a.npy", np.arange(60_000, dtype="<u2"))
    code, out, _ = check("big", "--sample", 3000)
    assert code == 0
    assert "  looked at    only 3,072 of 60,000 tokens, as --sample asks\n" in out
    assert f"  largest id   59,999 ({tmp_path}/big/a.npy, token 59,999)\n" in out


def test_a_token_is_located_in_its_file(tokens):
    found = find_tokens(check_scan.CheckCommand(folder=tokens))
    assert [found.location(token) for token in (0, 999, 1000, 3499)] == [
        f"{tokens}/shard_00000.npy, token 0",
        f"{tokens}/shard_00000.npy, token 999",
        f"{tokens}/shard_00001.npy, token 0",
        f"{tokens}/shard_00002.npy, token 499",
    ]
    assert choose_pattern(tokens) == "*.npy"
