"""`shardmill show --step`: the batch that a rank trained on, found again from the numbers alone."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from shardmill.building import BuildSpec, Feed, build_chats, build_store
from shardmill.chat import bind_template, known_template
from shardmill.loading import FimOptions, Loader, SampleStream, TokenSource, load
from shardmill.loading.config import open_stream, read_config
from shardmill.records import Conversation
from shardmill.sources import MemoryChats, MemorySource
from shardmill.store.readers import open_token_folder
from shardmill.tokenizers import open_tokenizer
from tests.cli.test_build_chats import SPECIALS, TOKENIZER, call  # noqa: F401

OPENED = open_tokenizer("byte:4", specials=SPECIALS)
TEXTS = [f"Page {n} says {'hello ' * (n % 5)}" + "\u00e9" * (n % 3) for n in range(60)]

CONFIG = """
[data]
shuffle = "block"
seed = 7
pack_sequences = true

[[data.datasets]]
name = "pages"
path = "pages"
weight = 3

[[data.datasets]]
name = "other"
path = "pages/val"
weight = 1

[[data.phases]]
start_step = 3
dataset_weights = { pages = 0, other = 1 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A store `pages` of two splits, a folder `bin` of tokens, a `data.toml`, chats in `c`."""
    place = tmp_path_factory.mktemp("steps")
    feed = Feed(source=MemorySource(TEXTS), fill=(("val", 300), ("train", None)))
    build_store([feed], place / "pages", tokenizer=OPENED, spec=BuildSpec(append_eot=True))
    (place / "bin").mkdir()
    np.arange(500, dtype="<u2").tofile(place / "bin" / "a.bin")
    np.arange(500, 901, dtype="<u2").tofile(place / "bin" / "b.bin")
    (place / "bin" / "meta.json").write_text('{"dtype": "uint16"}')
    (place / "data.toml").write_text(CONFIG)
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    build_chats(
        MemoryChats([Conversation(messages=said)]),
        place / "c",
        template=bind_template(known_template("four-marker"), OPENED),
        tokenizer=OPENED,
        spec=BuildSpec(),
    )
    return place


@pytest.fixture
def show(call, folder, monkeypatch):  # noqa: F811
    monkeypatch.chdir(folder)
    return lambda *arguments: call("show", *map(str, arguments))


def batch_at(stream: SampleStream, step: int, **options):
    with Loader(stream, ahead=0, **options) as loader:
        return next(islice(iter(loader), step, None))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("shuffle", ["global", "block", "none"])
@pytest.mark.parametrize(
    ("step", "rank", "world", "batch_size"), [(0, 0, 1, 1), (31, 3, 8, 4), (200, 1, 2, 3)]
)
def test_the_rows_are_those_of_a_loader(
    show, folder, documents, shuffle, step, rank, world, batch_size
):
    code, out, _ = show(
        *("pages", "--step", step, "--rank", rank, "--world", world, "--batch-size", batch_size),
        *("--seq-len", 16, "--seed", 5, "--shuffle", shuffle, "--json"),
        *(["--documents"] if documents else []),
    )
    facts = json.loads(out)
    stream = SampleStream([TokenSource(folder / "pages", seq_len=16)], seed=5, shuffle=shuffle)
    batch = batch_at(
        stream, step, rank=rank, world=world, batch_size=batch_size, documents=documents
    )
    assert (code, facts["samples"], facts["documents"]) == (0, step * world * batch_size, documents)
    rows = facts["rows"]
    assert [row["sample"] for row in rows] == list(batch.samples)
    assert [row["epoch"] for row in rows] == batch.epoch.tolist()
    assert [row["window"] for row in rows] == batch.item.tolist()
    assert [row["input_ids"] for row in rows] == batch.input_ids.tolist()
    assert [row["labels"] for row in rows] == batch.labels.tolist()
    assert {row["source"] for row in rows} == {"pages"}
    assert {row["path"] for row in rows} == {str(folder / "pages")}
    assert facts["fingerprint"] == stream.fingerprint
    if documents:
        heads = [
            sum(piece["start"] < row["stop"] - 1 for piece in row["documents"]) for row in rows
        ]
        assert heads == (batch.doc_ids.max(axis=1) + 1).tolist()


def test_every_document_of_a_row_is_named_and_decoded(show):
    code, out, _ = show(
        *("pages", "--step", 0, "--batch-size", 2, "--seq-len", 40, "--shuffle", "none"),
        *("--json", *TOKENIZER),
    )
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [[(d["document"], d["start"], d["stop"]) for d in row["documents"]] for row in rows] == [
        [(0, 0, 26), (1, 26, 41)],
        [(1, 40, 60), (2, 60, 81)],
    ]
    assert [[d["text"] for d in row["documents"]] for row in rows] == [
        ["Page 12 says hello hello <|e|>", "Page 13 says he"],
        ["ello hello hello \u00e9<|e|>", "Page 14 says hello he"],
    ]
    assert rows[0]["text"] == "Page 12 says hello hello <|e|>Page 13 says he"


def test_a_batch_is_shown_document_by_document_with_its_borders(show, folder):
    arguments = ("pages", "--step", 0, "--batch-size", 1, "--seq-len", 40, "--shuffle", "none")
    code, out, err = show(*arguments, "--documents", *TOKENIZER)
    assert (code, err) == (0, "")
    assert out == (
        "-- step 0, samples 0..1; rank 0 of 1 has 0..1\n"
        f"-- sample 0: pages ({folder}/pages, split 'train'), epoch 0, window 0, tokens 0..41\n"
        "-- document 0, tokens 0..26\n"
        "P[[age 12 says hello hello <|e|>]]\n"
        "-- document 1, tokens 26..41; boundary: its first token is not a label\n"
        "P[[age 13 says he]]\n"
    )
    _, out, _ = show(*arguments, *TOKENIZER)
    assert (
        "-- document 1, tokens 26..41; its first token is the label of the document before\n"
        "[[Page 13 says he]]\n"
    ) in out


def test_the_tokens_shown_are_bounded_and_the_rest_is_counted(show):
    _, out, _ = show(
        *("pages", "--step", 0, "--batch-size", 2, "--seq-len", 40, "--shuffle", "none"),
        *("--max-tokens", 12, *TOKENIZER),
    )
    left_out = [int(number) for number in re.findall(r"\.\.\. (\d+) tokens left out", out)]
    assert sum(left_out) == 2 * 41 - 12


def test_a_config_gives_the_mixture_and_its_phases(show, folder):
    stream = open_stream(read_config(folder / "data.toml"), seq_len=8, global_batch_size=8)
    for step, names in ((2, {"pages", "other"}), (3, {"other"})):
        code, out, _ = show(
            *("--config", "data.toml", "--step", step, "--rank", 1, "--world", 2),
            *("--batch-size", 4, "--seq-len", 8, "--json"),
        )
        facts = json.loads(out)
        batch = batch_at(stream, step, rank=1, world=2, batch_size=4, documents=True)
        assert (code, facts["seed"], facts["shuffle"], facts["documents"]) == (0, 7, "block", True)
        assert [row["input_ids"] for row in facts["rows"]] == batch.input_ids.tolist()
        assert [row["labels"] for row in facts["rows"]] == batch.labels.tolist()
        assert {row["source"] for row in facts["rows"]} == names


def test_with_a_config_a_folder_is_one_of_its_sources_and_only_it_is_shown(show):
    arguments = ("--config", "data.toml", "--step", 0, "--batch-size", 8, "--seq-len", 8)
    _, out, _ = show("pages/val", *arguments, "--json")
    rows = json.loads(out)["rows"]
    assert [row["source"] for row in rows] == ["other", "other"]
    _, out, _ = show("pages/val", *arguments)
    assert out.startswith(
        "-- step 0, samples 0..8; rank 0 of 1 has 0..8, 6 of other sources are not shown\n"
    )
    code, _, err = show("bin", *arguments)
    assert code == 2
    assert "bin: none of the config's sources, which are" in err


def test_a_folder_without_a_manifest_is_shown_too(show, folder):
    code, out, _ = show("bin", "--step", 5, "--batch-size", 3, "--seq-len", 100, "--json")
    stream = SampleStream([TokenSource(open_token_folder(folder / "bin", "*.bin"), seq_len=100)])
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [row["labels"] for row in rows] == batch_at(stream, 5, batch_size=3).labels.tolist()
    assert [(row["documents"], row["split"]) for row in rows] == [(None, None)] * 3
    code, out, err = show("bin", "--step", 5, "--batch-size", 1, "--seq-len", 3, "--seed", 1)
    first = re.search(r"tokens (\d+)\.\.", out)[1]
    numbers = [int(first) + place for place in range(4)]
    assert "ids are shown" in err
    assert out.endswith(
        "-- it is not known where its documents begin\n"
        f"{numbers[0]} [[{numbers[1]} {numbers[2]} {numbers[3]} ]]\n"
    )


# a state


def test_a_state_shows_the_batch_that_comes_next(show, folder, tmp_path):
    stream = SampleStream([TokenSource(folder / "pages", seq_len=16, name="web")], seed=9)
    loader = Loader(stream, batch_size=4, world=2, rank=1, ahead=2)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    state = tmp_path / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    wanted = next(batches)
    loader.close()
    code, out, _ = show(
        *("pages", "--state", state, "--rank", 1, "--world", 2, "--batch-size", 4, "--json")
    )
    facts = json.loads(out)
    assert (code, facts["samples"], facts["seed"], facts["seq_len"]) == (0, 56, 9, 16)
    assert [row["input_ids"] for row in facts["rows"]] == wanted.input_ids.tolist()
    # the same position, by its number; the name of a source is part of the order
    _, out, _ = show(
        *("pages", "--samples", 56, "--rank", 1, "--world", 2, "--batch-size", 4, "--json"),
        *("--seq-len", 16, "--seed", 9, "--name", "web"),
    )
    assert json.loads(out) == facts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", 8], "seed: the state has 9, this loader 8"),
        (["--shuffle", "none"], "shuffle: the state has 'global', this loader 'none'"),
        (["--seq-len", 8], "seq_len: the state has 16, this loader 8"),
        (["--name", "wiki"], "source 'web' is in the state only"),
        (["--split", "val"], "source 'web': other data"),
    ],
)
def test_a_state_of_something_else_is_refused_by_name(show, folder, tmp_path, arguments, words):
    stream = SampleStream([TokenSource(folder / "pages", seq_len=16, name="web")], seed=9)
    state = tmp_path / "state.json"
    state.write_text(json.dumps(Loader(stream, batch_size=4).state_dict()))
    code, out, err = show("pages", "--state", state, "--batch-size", 4, *arguments)
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert words in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "a list, wanted a state that was saved"),
        ("{}", "wanted 'shardmill.loader'"),
        ('{"kind": "shardmill.loader", "version": 2}', "a later shardmill wrote"),
        ('{"seed": "x"}', "--seed x (str): wanted a whole number"),
        ('{"shuffle": [1]}', "--shuffle '[1]': wanted one of"),
        ('{"sources": [[]]}', "wanted 'shardmill.loader'"),
    ],
)
def test_a_file_that_is_no_state_is_refused(show, tmp_path, text, words):
    state = tmp_path / "state.json"
    state.write_text(text)
    code, out, err = show("pages", "--state", state, "--batch-size", 4, "--seq-len", 8)
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert words in err


# mistakes

PLACE = ["--step", "1", "--batch-size", "2", "--seq-len", "8"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["pages"],
            "found nothing to show; wanted one of --example, --step, --samples and --state",
        ),
        (["pages", "--rank", "1"], "found nothing to show"),
        (["pages", *PLACE, "--samples", "4"], "found --step and --samples; wanted one of"),
        (["pages", "--example", "0", "--step", "1"], "--step is for --step, --samples or --state"),
        (["pages", "--example", "0", "--seed", "1"], "--seed is for --step, --samples or --state"),
        (["--example", "0"], "--example 0: name the store"),
        ([*PLACE], "nothing to show: name a store"),
        (["pages", "--step", "1", "--seq-len", "8"], "--batch-size is missing"),
        (["pages", "--step", "1", "--batch-size", "8"], "--seq-len is missing"),
        (["pages", "--step", "-1", *PLACE[2:]], "--step -1: wanted at least 0"),
        (["pages", "--samples", "-1", *PLACE[2:]], "--samples -1: wanted at least 0"),
        (["pages", *PLACE, "--rank", "1"], "--rank 1: wanted 0 to 0, for --world 1"),
        (["pages", *PLACE, "--rank", "-1"], "--rank -1"),
        (["pages", *PLACE, "--world", "0"], "--world 0"),
        (["pages", "--step", "1", "--batch-size", "0", "--seq-len", "8"], "--batch-size 0"),
        (["pages", "--step", "1", "--batch-size", "1", "--seq-len", "0"], "--seq-len 0"),
        (["pages", "--step", "1", "--batch-size", "1", "--seq-len", "9999"], "smaller --seq-len"),
        (["pages", "--step", str(2**62), "--batch-size", "8", "--seq-len", "8"], "2**63"),
        (
            ["pages", *PLACE, "--shuffle", "random"],
            "--shuffle random: wanted one of global, block, none",
        ),
        (["pages", *PLACE, "--split", "test"], "none is 'test'"),
        (["bin", *PLACE, "--split", "train"], "bin is not a store, so it has no splits"),
        (["bin", *PLACE, "--documents"], "is not known where the documents of"),
        (["c", *PLACE], "a store of conversations"),
        (["nowhere", *PLACE], "nowhere is not a folder"),
        (["pages", *PLACE, "--tokenizer", "byte"], "not the tokenizer of this store"),
        (["--config", "no.toml", *PLACE], "no.toml: cannot be read as a config"),
        (["--config", "data.toml", *PLACE, "--name", "x"], "--name x: data.toml says that"),
        (["--config", "data.toml", *PLACE, "--split", "val"], "--split val: data.toml says that"),
    ],
)
def test_a_mistake_in_the_call_is_one_clear_message(show, arguments, words):
    code, out, err = show(*arguments)
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert words in re.sub(r"[\s|\u2502]+", " ", err)


def test_the_tokenizer_of_a_config_is_used_when_it_can_be_opened(show, folder, tmp_path):
    text = CONFIG.replace('"pages"\nw', f'"{folder}/pages"\nw').replace(
        '"pages/val"', f'"{folder}/pages/val"'
    )
    (tmp_path / "no.toml").write_text(text.replace("seed", 'tokenizer_path = "no.model"\nseed'))
    code, out, err = show("--config", tmp_path / "no.toml", *PLACE, "--json")
    assert code == 0
    assert "tokenizer_path: 'no.model': no such file or folder" in err
    assert "ids are shown" in err
    (tmp_path / "byte.toml").write_text(text.replace("seed", 'tokenizer_path = "byte:4"\nseed'))
    specials = [word for word in TOKENIZER if word not in ("--tokenizer", "byte:4")]
    code, out, err = show(
        "--config", tmp_path / "byte.toml", *PLACE, "--no-documents", "--json", *specials
    )
    row = json.loads(out)["rows"][0]
    assert (code, err) == (0, "")
    assert row["text"] == OPENED.decode([*row["input_ids"], row["labels"][-1]])


def test_showing_leaves_no_file_open(show):
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    show("pages", *PLACE, "--json")
    assert {path.name for path in Path("/proc/self/fd").iterdir()} <= before


def test_rows_are_filled_in_as_the_loader_did_by_option_and_by_state(show, folder):
    names = {name: f"<|{name}|>" for name in ("fim_prefix", "fim_suffix", "fim_middle", "eot")}
    feed = Feed(source=MemorySource(TEXTS), fill=(("train", None),))
    tokenizer = open_tokenizer("byte:4", specials=names)
    build_store([feed], folder / "code", tokenizer=tokenizer, spec=BuildSpec(append_eot=True))
    shape = ("--batch-size", 4, "--json")
    for fim in (0.5, FimOptions(rate=1, spm_rate=0.25, seed=8)):
        loader = load(folder / "code", seq_len=64, batch_size=4, fim=fim)
        next(iter(loader))
        Path("state.json").write_text(json.dumps(loader.state_dict()))
        batch = next(iter(loader))
        loader.close()
        found = [show("code", "--state", "state.json", *shape)]
        if fim == 0.5:
            found.append(show("code", "--step", 1, "--fim", 0.5, "--seq-len", 64, *shape))
        for code, out, _ in found:
            assert code == 0
            rows = json.loads(out)["rows"]
            assert [row["input_ids"] for row in rows] == batch.input_ids.tolist()
            assert [row["labels"] for row in rows] == batch.labels.tolist()
            for row in rows:
                assert len(row.get("rearranged", [])) == row["input_ids"].count(0)
    code, out, err = show("code", "--step", 1, "--fim", 1, "--seq-len", 64, "--batch-size", 4)
    assert code == 0, err
    assert "rearranged to fill in the middle" in out
    code, _, err = show("code", "--step", 1, "--fim", 2, "--seq-len", 64, "--batch-size", 4)
    assert (code, "--fim 2.0: wanted a share from 0 to 1" in err) == (2, True), err
