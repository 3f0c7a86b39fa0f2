"""`shardmill stream`: the batches of a config, seen, counted, stopped and resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.test_build_chats import call  # noqa: F401
from tests.services import LoopbackHub

CONFIG = """
[data]
backend = "local_text"
local_text = ["hello world", "the second document is longer than a row", "x"]
local_eval_text = "eval"
shuffle = false

[data.tokenizer]
kind = "byte"

[train]
seq_len = 15
batch_size = 2

[model]
eos_token_id = 256
"""


@pytest.fixture
def run(call, tmp_path):  # noqa: F811
    """Run `shardmill stream c.toml ...`; gives (exit code, stdout, stderr)."""
    (tmp_path / "c.toml").write_text(CONFIG)
    return lambda *arguments: call("stream", "c.toml", *arguments)


def facts(found: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = found
    assert code == 0, err
    return json.loads(out)


def rows_of(found: tuple[int, str, str]) -> list[tuple[list[int], list[int], list[int]]]:
    rows = facts(found)["rows"]
    return [(row["input_ids"], row["labels"], row["segment_ids"]) for row in rows]


def test_rows_are_shown_with_their_documents_and_what_is_trained(run) -> None:
    code, out, _ = run("--set", "data.repeat=false", "--steps", "9", "--show", "9")
    assert code == 0
    *shown, receipt = out.splitlines()
    assert shown == [
        "-- step 0, row 0",
        "-- document 1, tokens 0..12, 11 trained",
        "h[[ello world<eos>]]",
        "-- document 2, tokens 12..16, 3 trained",
        "t[[he ]]",
        "-- step 0, row 1",
        "-- document 1, tokens 0..16, 15 trained",
        "s[[econd document ]]",
        "-- step 1, row 0",
        "-- document 1, tokens 0..16, 15 trained",
        "i[[s longer than a]]",
        "-- step 1, row 1",
        "-- document 1, tokens 0..5, 4 trained",
        " [[row<eos>]]",
        "-- document 2, tokens 5..7, 1 trained",
        "x[[<eos>]]",
        "-- padding, tokens 7..15",
    ]
    assert receipt.startswith("c.toml: 2 steps of [1, 2, 15], the end of the stream; 55 tokens, ")
    assert receipt.endswith(
        " tokens/s; 3 documents, padding 14.06 %; truncated: 0 documents, 0 tokens; dropped: 0 rows"
    )


def test_an_end_that_is_not_trained_and_a_border_that_is(run) -> None:
    code, out, _ = run(
        *("--set", "data.train_on_eos=false", "--set", "data.mask_boundary_loss=false"),
        *("--steps", "1", "--show", "1"),
    )
    assert code == 0
    assert out.splitlines()[1:5] == [
        "-- document 1, tokens 0..12, 10 trained",
        "h[[ello world]]<eos>",
        "-- document 2, tokens 12..16, 4 trained",
        "[[the ]]",
    ]


def test_the_receipt_as_json(run) -> None:
    found = facts(run("--json", "--steps", "1", "--set", "data.tokenizer.max_doc_tokens=5"))
    counts = found["counts"]
    assert (found["steps"], found["ended"], found["rows"], found["state"]) == (1, False, [], None)
    assert (counts["rows"], counts["tokens"], counts["padding"]) == (2, 32, 0)
    # hello, the s, x and its end, again and again: 12 tokens an epoch, 6 + 35 of them cut off
    assert (counts["documents"], counts["truncated_documents"]) == (8, 6)
    assert counts["truncated_tokens"] == 3 * (6 + 35)
    assert found["vocab_size"] == 384
    assert found["effective"]["data"]["tokenizer"]["max_doc_tokens"] == 5


@pytest.mark.parametrize("mode", ["sequential", "bin"])
@pytest.mark.parametrize("prefetch", ["0", "2"])
def test_a_run_that_is_stopped_and_resumed_is_the_same_run(run, mode: str, prefetch: str) -> None:
    options = ["--set", f"data.packing_mode={mode}", "--set", "data.shuffle=true", "--json"]
    options += ["--set", f"data.grain_prefetch={prefetch}", "--show", "99"]
    options += ["--set", "data.packing_buffer_docs=4"]
    whole = rows_of(run("--steps", "7", *options))
    assert len(whole) == 14
    first = rows_of(run("--steps", "3", "--save-state", "s.json", *options))
    then = rows_of(run("--steps", "2", "--state", "s.json", "--save-state", "s.json", *options))
    last = rows_of(run("--steps", "2", "--state", "s.json", *options))
    assert first + then + last == whole
    assert Path("s.json").stat().st_size < 4096
    assert [path.name for path in Path().iterdir() if path.suffix == ".tmp"] == []


def test_two_processes_share_the_documents(run) -> None:
    texts: list[str] = []
    for index in ("0", "1"):
        found = facts(
            run(
                *("--process-index", index, "--process-count", "2", "--json", "--show", "99"),
                *("--set", "data.repeat=false", "--set", "train.seq_len=63"),
            )
        )
        texts += [text for row in found["rows"] for text in row["documents"]]
    assert sorted(texts) == [
        "hello world<eos>",
        "the second document is longer than a row<eos>",
        "x<eos>",
    ]


def test_evaluation_has_its_own_data_and_ends(run) -> None:
    found = facts(run("--eval", "--json", "--show", "99"))
    assert (found["steps"], found["ended"], found["counts"]["documents"]) == (1, True, 1)
    assert [row["documents"] for row in found["rows"]] == [["eval<eos>"], []]
    assert found["rows"][1]["labels"] == [-100] * 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "data.sead=3"], "override 'data.sead=3': data.sead: unknown key; did you mean"),
        (["--set", "data.seed"], "found no '='; wanted KEY=VALUE"),
        (
            [
                *("--set", "model.eos_token_id=null"),
                *("--set", "data.tokenizer.auto_set_special_tokens=false"),
            ],
            "data.tokenizer.add_eos is true, but there is no",
        ),
        (["--set", "model.eos_token_id=7"], "the ids 0 to 255 are bytes of text"),
        (["--steps", "-1"], "--steps -1: wanted at least 0"),
        (["--show", "-1"], "--show -1: wanted at least 0"),
        (["--state", "none.json"], "--state none.json: cannot be read as JSON"),
        (["--state", "list.json"], "--state list.json: a list, wanted a state that was saved"),
        (["--state", "s.json", "--set", "data.seed=3"], "seed"),
        (["--save-state", "no/s.json"], "--save-state no/s.json: there is no folder no"),
        (["--process-index", "1"], "--process-index 1, no --process-count: wanted both"),
        (["--process-index", "2", "--process-count", "2"], "--process-index 2: wanted 0 to 1"),
    ],
)
def test_a_mistake_is_one_line_and_changes_no_file(run, arguments: list[str], message: str) -> None:
    assert run("--save-state", "s.json", "--steps", "1")[0] == 0
    Path("list.json").write_text("[]")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    if "--save-state" not in arguments:
        arguments = [*arguments, "--save-state", "s.json"]
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_a_config_that_is_not_there_is_one_line(call) -> None:  # noqa: F811
    code, out, err = call("stream", "none.toml")
    assert (code, out) == (2, "")
    assert err.startswith("shardmill: none.toml: cannot be read as a config: ")


def test_no_steps_are_no_batches_and_a_state_to_begin_with(run) -> None:
    whole = rows_of(run("--steps", "2", "--json", "--show", "9"))
    assert facts(run("--steps", "0", "--json", "--save-state", "s.json"))["counts"]["rows"] == 0
    assert rows_of(run("--steps", "2", "--json", "--show", "9", "--state", "s.json")) == whole


@pytest.mark.slow
def test_without_grain_the_batches_are_the_same(run, tmp_path) -> None:
    wanted = rows_of(run("--steps", "3", "--json", "--show", "9"))
    code = (
        "import sys; sys.modules['grain'] = None\n"
        "sys.argv = ['shardmill', 'stream', 'c.toml', '--steps', '3', '--json', '--show', '9']\n"
        "from shardmill.cli import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert rows_of((done.returncode, done.stdout, done.stderr)) == wanted
    assert "grain is not installed: batches are not made ahead" in done.stderr


@pytest.mark.slow
def test_a_hub_dataset_is_read_by_split_column_and_revision(tmp_path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "hub/data").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    config = {
        "data": {
            "backend": "hf",
            "hf_dataset": "own/docs",
            "hf_eval_split": "test",
            "text_key": "content",
            "shuffle": False,
            "repeat": False,
            "max_retries": 1,
            "retry_delay_sec": 0.01,
            "tokenizer": {"kind": "byte"},
        },
        "train": {"seq_len": 31, "batch_size": 1},
        "model": {"eos_token_id": 256},
    }
    (tmp_path / "home/c.json").write_text(json.dumps(config))
    with LoopbackHub() as hub:
        commits = []
        for version in ("old", "new"):
            for split in ("train", "test"):
                table = pa.table({"text": ["wrong"], "content": [f"{version} {split}"]})
                pq.write_table(table, tmp_path / f"hub/data/{split}-00000-of-00001.parquet")
            folder = tmp_path / version
            shutil.copytree(tmp_path / "hub", folder)
            commits.append(hub.publish("own/docs", folder))

        def documents(*arguments: str) -> list[str]:
            command = [sys.executable, "-W", "ignore", "-m", "shardmill", "stream", "c.json"]
            done = subprocess.run(
                [*command, "--json", "--show", "9", *arguments],
                capture_output=True,
                text=True,
                check=False,
                cwd=tmp_path / "home",
                env=hub.environment(tmp_path / "home"),
            )
            found = facts((done.returncode, done.stdout, done.stderr))
            return [text for row in found["rows"] for text in row["documents"]]

        assert documents() == ["new train<eos>"]
        assert documents("--eval") == ["new test<eos>"]
        older = ("--set", f"data.hf_revision={commits[0]}", "--set", "data.hf_split=test")
        assert documents(*older) == ["old test<eos>"]
        assert documents("--set", "data.text_key=text") == ["wrong<eos>"]
