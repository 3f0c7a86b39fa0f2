"""What a newcomer tries first: the version, an imported store, a pack plan by its length."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import shardmill
from shardmill.building import BuildSpec, build_chats, build_plan
from shardmill.chat import bind_template, known_template
from shardmill.errors import OptionError
from shardmill.loading import Loader, PackSource, SampleStream
from shardmill.loading.config import open_stream, read_config
from shardmill.records import Conversation
from shardmill.sources import MemoryChats
from shardmill.store import PlanOptions, open_store, verify
from shardmill.tokenizers import open_tokenizer
from tests.cli.test_build_chats import SPECIALS, TOKENIZER, call  # noqa: F401
from tests.formats.test_foreign_in import llmc

ROOT = Path(__file__).parent.parent.parent
OPENED = open_tokenizer("byte:4", specials=SPECIALS)


def test_the_printed_version_is_that_of_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardmill", "--version"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "shardmill 0.2.0\n", "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "shardmill.__version__"}
    assert shardmill.__version__ == "0.2.0"


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A file of llm.c: the bytes of a text as ids from 4 on."""
    return llmc(tmp_path / "gpt.bin", [byte + 4 for byte in b"hello there"])


IMPORT = ("--from", "llmc", "--to", "store")


def test_an_imported_store_decodes_with_the_tokenizer_named_when_reading(call, imported):  # noqa: F811
    assert call("convert", "gpt.bin", "s", *IMPORT)[0] == 0
    code, out, err = call("show", "s", "--example", "0", *TOKENIZER)
    assert code == 0
    assert "hello there" in out
    assert "records no tokenizer" in err
    code, out, err = call(
        "show", "s", "--step", "0", "--batch-size", "1", "--seq-len", "5", *TOKENIZER
    )
    assert code == 0, err
    assert "h[[ello ]]" in out


def test_a_vocabulary_smaller_than_the_ids_is_refused_when_reading(call, tmp_path):  # noqa: F811
    llmc(tmp_path / "gpt.bin", [5, 300, 7])
    assert call("convert", "gpt.bin", "s", *IMPORT)[0] == 0
    code, out, err = call("show", "s", "--example", "0", *TOKENIZER)
    assert (code, out) == (2, "")
    assert "id 300" in err
    assert "260 ids" in err


def test_a_tokenizer_named_at_conversion_is_recorded_as_builds_do(call, imported):  # noqa: F811
    assert call("convert", "gpt.bin", "s", *IMPORT, *TOKENIZER)[0] == 0
    manifest = open_store("s").manifest
    assert manifest.tokenizer_fingerprint == OPENED.fingerprint
    assert manifest.vocab_size == 260
    assert manifest.special_token_ids == OPENED.special_token_ids()
    assert verify("s").problems == []
    code, out, err = call("show", "s", "--example", "0", *TOKENIZER)
    assert (code, err) == (0, "")
    assert "hello there" in out
    code, _, err = call("show", "s", "--example", "0", "--tokenizer", "byte:9")
    assert code == 2
    assert "not the tokenizer of this store" in err
    assert "260 ids" in call("info", "s")[1]


def test_a_tokenizer_too_small_for_the_tokens_is_refused_at_conversion(call, tmp_path):  # noqa: F811
    llmc(tmp_path / "gpt.bin", [5, 300, 7])
    code, out, err = call("convert", "gpt.bin", "s", *IMPORT, *TOKENIZER)
    assert (code, out) == (2, "")
    assert "id 300" in err
    assert "260 ids" in err
    assert not Path("s").exists()


def test_a_tokenizer_is_for_conversions_to_a_store_only(call, imported):  # noqa: F811
    assert call("convert", "gpt.bin", "s", *IMPORT)[0] == 0
    code, _, err = call("convert", "s", "m", "--from", "store", "--to", "megatron", *TOKENIZER)
    assert code == 2
    assert "--tokenizer" in err
    assert "--to store" in err


def chats(number: int) -> list[Conversation]:
    return [
        Conversation(
            messages=[
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": f"answer {n}"},
            ]
        )
        for n in range(number)
    ]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build_chats(
        MemoryChats(chats(12)),
        tmp_path / "s",
        template=bind_template(known_template("four-marker"), OPENED),
        tokenizer=OPENED,
        spec=BuildSpec(),
    )
    return tmp_path / "s"


def test_a_plan_can_be_named_by_its_length_when_one_fits(store: Path) -> None:
    build_plan(store, "train", options=PlanOptions(seq_len=40))
    build_plan(store, "train", options=PlanOptions(seq_len=64))
    source = PackSource(store, 40)
    assert (source.seq_len, source.fingerprint) == (40, PackSource(store, "train-40").fingerprint)
    with pytest.raises(OptionError, match=r"shardmill pack .*/s --seq-len 2048"):
        PackSource(store, 2048)
    build_plan(
        store, "train", options=PlanOptions(seq_len=40, algorithm="concatenate", long="split")
    )
    with pytest.raises(OptionError, match=r"2 plans .* seq_len 40: 'train-40', 'train-40-conc"):
        PackSource(store, 40)
    for wrong in (True, 40.0, None):
        with pytest.raises(OptionError, match="name of a plan, its path or its seq_len"):
            PackSource(store, wrong)  # type: ignore[arg-type]


def test_a_config_can_name_a_plan(store: Path, tmp_path: Path) -> None:
    build_plan(store, "train", options=PlanOptions(seq_len=40))
    wanted = PackSource(store, "train-40", name="chats")
    alone = {"dataset_path": str(store), "plan": "train-40"}
    mixed = {"datasets": [{"name": "chats", "path": str(store), "plan": "train-40"}]}
    for table in (alone, mixed):
        opened = open_stream(read_config({"data": table}), seq_len=40, global_batch_size=2)
        with closing(opened) as stream:
            (source,) = stream.sources
            assert isinstance(source, PackSource)
            assert source.fingerprint == wanted.fingerprint
            stream.take(np.arange(2))
    path = tmp_path / "train.toml"
    path.write_text(
        f'[data]\n[[data.datasets]]\nname = "chats"\npath = "{store}"\nplan = "train-40"\n'
    )
    config = read_config(path)
    batches = []
    for stream in (
        open_stream(config, seq_len=40, global_batch_size=2),
        SampleStream([wanted]),
    ):
        with Loader(stream, batch_size=2) as loader:
            batches.append(next(iter(loader)).input_ids)
    assert np.array_equal(*batches)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"dataset_path": "S", "plan": "train-40"}, "seq_len=40; wanted 'train' with 64"),
        ({"dataset_path": "S", "plan": "train-41"}, "no plan 'train-41'"),
        ({"dataset_path": "S", "plan": "train-40", "split": "val"}, "plan .* of split 'train'"),
        ({"dataset_path": "F", "plan": "train-40"}, "is not a store"),
        ({"datasets": [{"name": "a", "path": "S"}], "plan": "train-40"}, "data.plan"),
        ({"dataset_path": "S", "plan": 7}, "wanted a string"),
    ],
)
def test_a_plan_that_does_not_fit_the_config_is_refused(store: Path, tmp_path, table, says) -> None:
    build_plan(store, "train", options=PlanOptions(seq_len=40))
    (tmp_path / "f").mkdir()
    np.arange(100, dtype="<u2").tofile(tmp_path / "f/a.bin")
    places = {"S": str(store), "F": str(tmp_path / "f")}

    def placed(value):
        if isinstance(value, list):
            return [{k: places.get(v, v) for k, v in one.items()} for one in value]
        return places.get(value, value)

    with pytest.raises(shardmill.ShardmillError, match=says):
        open_stream(
            read_config({"data": {key: placed(value) for key, value in table.items()}}),
            seq_len=64,
            global_batch_size=1,
        )


def test_a_row_of_a_plan_is_shown_example_by_example(call, store: Path):  # noqa: F811
    build_plan(store, "train", options=PlanOptions(seq_len=40))
    code, out, err = call("show", "s", "--plan", "train-40", "--row", "0", *TOKENIZER)
    assert (code, err) == (0, "")
    source = PackSource(store, 40)
    found = source.span(0).documents
    assert found is not None
    headings = re.findall(r"-- columns (\d+)\.\.(\d+): example (\d+), tokens (\d+)\.\.(\d+)", out)
    assert [tuple(map(int, one[2:])) for one in headings] == list(found)
    assert [int(one[0]) for one in headings] == source.rows([0]).starts.values.tolist()
    for number, _, _ in found:
        assert f"<|u|>q{number}<|e|><|a|>[[answer {number}<|e|>]]" in out
    assert "padding" in out
    code, out, _ = call("show", "s", "--plan", "train-40", "--row", "0", *TOKENIZER, "--json")
    facts = json.loads(out)
    rows = source.rows([0])
    assert facts["ids"] == rows.ids[0].tolist()
    assert facts["trained"] == rows.trained[0].astype(int).tolist()
    assert [one["example"] for one in facts["examples"]] == [number for number, _, _ in found]
    code, out, err = call("show", "s", "--plan", "40", *TOKENIZER)
    assert (code, "row 0 of" in out) == (0, True)


def test_the_batch_of_a_step_can_be_of_a_plan(call, store: Path):  # noqa: F811
    build_plan(store, "train", options=PlanOptions(seq_len=40))
    Path("train.toml").write_text('[data]\ndataset_path = "s"\nplan = "train-40"\n')
    words = ("--step", "0", "--batch-size", "1", *TOKENIZER)
    code, out, err = call("show", "s", "--plan", "train-40", *words)
    assert (code, err) == (0, "")
    with Loader(SampleStream([PackSource(store, 40)]), batch_size=1) as loader:
        ids = next(iter(loader)).input_ids[0]
    text = OPENED.decode(ids)
    for part in re.findall(r"answer \d+", text)[:-1]:
        assert f"[[{part}<|e|>]]" in out
    code, again, err = call("show", "--config", "train.toml", "--seq-len", "40", *words)
    assert (code, err) == (0, "")
    assert again == out
    code, out, _ = call("show", "s", "--plan", "train-40", *words, "--json")
    (row,) = json.loads(out)["rows"]
    for one in row["documents"]:
        assert f"answer {one['document']}" in one["text"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--plan", "train-40", "--row", "99"), "--row 99"),
        (("--plan", "train-41"), "no plan 'train-41'"),
        (("--row", "0"), "--row 0"),
        (("--plan", "train-40", "--example", "0"), "--example"),
        (("--plan", "train-40", "--row", "0", "--step", "1", "--batch-size", "1"), "--row"),
        (("--plan", "train-40", "--seq-len", "9"), "--seq-len 9"),
    ],
)
def test_a_call_for_a_row_that_makes_no_sense_is_refused(call, store, words, says):  # noqa: F811
    build_plan(store, "train", options=PlanOptions(seq_len=40))
    code, out, err = call("show", "s", *words, *TOKENIZER)
    assert (code, out) == (2, "")
    assert says in err


def test_steps_of_a_plan_are_not_excluded_as_windows(call, store: Path):  # noqa: F811
    build_plan(store, "train", options=PlanOptions(seq_len=40))
    Path("train.toml").write_text('[data]\ndataset_path = "s"\nplan = "train-40"\n')
    words = ("--batch-size", "1", "--seq-len", "40", "--reason", "bad")
    code, out, err = call("exclude", "s", "--config", "train.toml", "--step", "0", *words)
    assert (code, out) == (2, "")
    assert "exclude the conversations with --document" in err


def test_info_says_that_an_imported_store_records_no_tokenizer(call, imported):  # noqa: F811
    assert call("convert", "gpt.bin", "s", *IMPORT)[0] == 0
    assert "not recorded; name it with `show --tokenizer`" in call("info", "s")[1]
