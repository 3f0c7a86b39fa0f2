"""Whatever is wrong with a call, its input or its output is a sentence and an exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.arguments import choices, nearest
from shardmill.cli.app import every_command, open_app
from shardmill.loading.config import read_config
from shardmill.store import open_store
from tests.cli.stops import stop_at_unit

ROOT = open_app()
COMMANDS = dict(every_command(ROOT))
PYTHON = (sys.executable, "-m", "shardmill")


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """In another process, where streams are real."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run(words, check=False, timeout=600, **settings)  # type: ignore[call-overload]


# what was probably meant


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("biuld", "no command 'biuld'; did you mean build? (`shardmill --help` lists all)"),
        ("ver", "no command 'ver'; did you mean verify?"),
        ("qqq", "no command 'qqq'; wanted one of look, tokenizer, build, build chats, "),
        ("tokenizer trian x", "no command 'trian'; did you mean train? (`shardmill tokenizer"),
        ("build x --tokeniser y", "no option --tokeniser; did you mean --tokenizer? (`shardmill b"),
        ("build x --val_tokens 3", "no option --val_tokens; did you mean --val-tokens?"),
        (
            "build x --template y",
            "no option --template; shardmill look and shardmill build chats and shardmill blame",
        ),
        ("info store --debug", "--debug goes before the command"),
        ("info", "FOLDER is missing: The store to describe."),
        ("build data", "--out is missing: Where the store goes"),
        ("build x --out y --tokenizer byte --on-bad skipp", "--on-bad skipp: wanted one of error,"),
        ("build x --out y --tokenizer byte --engine fats", "; did you mean fast?"),
        ("build x --out y --tokenizer byte --seed z", "--seed: wanted a whole number"),
        ("show store --example 0 --split trian", "no split 'trian'; did you mean 'train'?"),
        ("check store --split vall", "none is 'vall'; did you mean 'val'?: --split val, or open"),
        ("build chats c.jsonl --out c --tokenizer spm.model --template chatm", "mean 'chatml'?"),
        (
            "build chats c.jsonl --out c --tokenizer spm.model --template chatml --shape sharegp",
            "--shape sharegp: did you mean 'sharegpt'? wanted one of",
        ),
        ("stream stream.toml --set data.sead=1", "unknown key; did you mean 'seed'?"),
        ("exclude store --document 99999999999999999999999 --reason r", "wanted a number from 0"),
        ("show store --step 0 --batch-size 99999999999 --seq-len 16", "wanted at most 1,048,576"),
        ("view store --tokenizer spm.model --input nosuch", "nosuch"),
        ("stream stream.toml --set data.packing_mode=bins", '"; did you mean "bin"?'),
    ],
)
def test_a_typo_is_answered_with_the_nearest_name(words, message, here, run_cli):
    code, out, err = run_cli(*words.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@given(st.sampled_from(sorted(COMMANDS)), st.integers(0, 40))
def test_two_letters_changed_over_are_found_again(name, place):
    word = name.split()[-1]
    place %= len(word) - 1
    typo = word[:place] + word[place + 1] + word[place] + word[place + 2 :]
    known = [one.split()[-1] for one in COMMANDS]
    assert nearest(typo, known) == (typo if typo in known else word)


def test_what_is_not_near_is_only_listed():
    assert nearest("qqq", ["train", "val"]) is None
    assert choices("qqq", ["train", "val"]) == "known here: train, val"
    assert choices("tra", ["train", "val"]) == "did you mean 'train'? Known here: train, val"
    assert choices("x", []) == "known here: none"


def test_a_config_error_names_the_nearest_key_value_and_dataset():
    def refusal(data: object) -> str:
        with pytest.raises(ValueError) as error:
            read_config({"data": data})
        return str(error.value)

    assert "data.sead: unknown key; did you mean 'seed'? Known here: " in refusal({"sead": 1})
    assert '; did you mean "block"?' in refusal({"dataset_path": "x", "shuffle": "blok"})
    two = [{"name": "web", "path": "x"}, {"name": "code", "path": "y"}]
    weights = {"datasets": two, "anneal_start_step": 5, "anneal_weights": {"wev": 1, "code": 1}}
    assert "an unknown dataset; data.datasets has 'web', 'code'; did you mean 'web'?" in refusal(
        weights
    )


@pytest.mark.parametrize(
    "words",
    [
        ["stream", "gone.toml"],
        ["show", "--config", "gone.toml", "--step", "0", "--batch-size", "1", "--seq-len", "8"],
        ["stream", "stream.toml", "--state", "gone.json"],
        ["show", "store", "--state", "gone.json", "--batch-size", "1"],
        ["info", "gone"],
        ["build", "gone", "--out", "new", "--tokenizer", "spm.model"],
        ["tokenizer", "info", "gone.model"],
        ["convert", "gone", "new", "--from", "megatron", "--to", "store"],
    ],
)
def test_a_file_that_is_not_there_is_named_once(words, here, run_cli):
    code, _, err = run_cli(*words)
    assert (code, err.count("gone")) == (2, 1), err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "chats", "--on-bad"], "requires an argument (`shardmill build chats --help`)"),
        (["tokenizer", "train", "x"], "Folder for the model and its meta.json. (`shardmill tokeni"),
        (["tokenizer", "--x"], "no option --x (`shardmill tokenizer --help`)"),
        (
            ["--ray-address", "x"],
            "no option --ray-address; shardmill build and shardmill build chats",
        ),
    ],
)
def test_a_mistake_names_the_help_of_its_command(words, message, run_cli):
    code, _, err = run_cli(*words)
    assert code == 2
    assert message in err


def test_debug_belongs_before_the_command(here, run_cli):
    assert "Traceback" in run_cli("--debug", "build", "chats", "gone", "--bogus")[2]
    assert "Traceback" not in run_cli("build", "x", "--debug")[2]


# mistakes of all kinds


WRONG_PLACES = ("nowhere", "notes.txt", "empty", "broken", "locked", "c.jsonl", "spm.model")


@pytest.fixture
def wrong(here) -> Path:
    """Beside the workshop: a file, an empty folder, a broken store, one that may not be read."""
    Path("notes.txt").write_bytes(b"\xff\x00 not much")
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/meta.json").write_text('{"format": "shardmill-store", "version": ')
    Path("locked").mkdir()
    Path("locked/meta.json").mkdir()
    return here


@pytest.mark.parametrize("place", WRONG_PLACES)
@pytest.mark.parametrize("command", ["info", "verify", "show", "check", "diff", "pack", "bench"])
def test_a_wrong_place_is_one_sentence(command, place, wrong, run_cli):
    more = {
        "show": [place, "--example", "0"],
        "diff": [place, "store"],
        "pack": [place, "--seq-len", "8"],
        "bench": ["--store", place],
    }
    code, _, err = run_cli(command, *more.get(command, [place]))
    assert code in (1, 2)
    assert "Traceback" not in err
    assert re.search("[a-z]", err)


@pytest.mark.parametrize("place", [*WRONG_PLACES, "data", "train.toml"])
def test_wrong_inputs_leave_no_store(place, wrong, run_cli):
    ways = ("--out", "new", "--tokenizer", "spm.model")
    for words in (
        ("build", place, *ways, "--field", "nothing"),
        ("build", "chats", place, *ways, "--template", "chatml", "--shape", "alpaca"),
        ("convert", place, "new", "--from", "megatron", "--to", "store"),
        ("stream", place),
        ("push", place, "memory://x/y") if place != "data" else ("push", "empty", "memory://x/y"),
        ("tokenizer", "train", place, "--out", "new", "--vocab-size", "9999999"),
    ):
        code, out, err = run_cli(*words)
        assert (code, out) == (2, ""), (words, out, err)
        assert "Traceback" not in err
        assert not Path("new").exists(), words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "", "--out", "new"], "word 2: found nothing ('')"),
        (["build", "data", "--out", ""], "--out: found nothing (''); is a variable of"),
        (["build", "data", "--out="], "--out: found nothing"),
        (["info", ""], "found nothing"),
        (["info", "a\0b"], "has a NUL"),
        (["build", "data", "--out", "hub:a/b"], "--out hub:a/b: a hub dataset, wanted a"),
        (["build", "data", "--out", "s3:/a/b"], "--out s3:/a/b: a URL, wanted a local folder"),
        (
            ["build", "data", "--out", "new", "--field", "txet"],
            "did you mean 'text'? The fields ar",
        ),
        (
            ["build", "data", "--out", "new", "--memory", "1"],
            "--memory 1: one process takes about ",
        ),
        (["build", "data", "--out", "new", "--workers", "0"], "--workers 0: wanted at least 1"),
        (["build", "data", "--out", "new", "--workers", "9" * 30, "--memory", "4GB"], "workers"),
        (["build", "data", "--out", "new", "--shard-bytes", "9" * 30], ""),
        (["build", "data", "--out", "new", "--max-tokens", "-1"], "--max-tokens -1: wanted 0 or"),
        (["build", "data", "--out", "new", "--val-tokens", "-1"], "--val-tokens -1: wanted 0 or"),
        (["tokenizer", "train", "books", "--out", "s3://a/b"], "--out s3:/a/b: a URL, wanted"),
        (["convert", "store", "s3://a/b", "--from", "store", "--to", "megatron"], "TARGET s3:/a/b"),
        (["pull", "memory://x", "hub:x"], "FOLDER hub:x: a hub dataset"),
        (["pack", "chats", "--seq-len", "9" * 30], "--seq-len"),
        (["show", "store", "--example", "9" * 30], "--example"),
        (["check", "store", "--seq-len", "-1"], "--seq-len"),
        (["stream", "stream.toml", "--steps", "-1"], "--steps"),
        (["bench", "data"], "--tokenizer is missing"),
        (["bench", "--store", "store", "--seconds", "nan"], "--seconds nan: wanted"),
        (["bench", "--store", "chats"], "a store of conversations"),
        (["bench", "--store", "store", "--seq-len", "99999999"], "--seq-len, or more text"),
    ],
)
def test_what_makes_no_sense_is_refused_by_flag(words, message, here, run_cli):
    more = ["--tokenizer", "spm.model"] if words[0] == "build" else []
    code, _, err = run_cli(*words, *more)
    assert (code != 0, "Traceback" in err, Path("new").exists()) == (True, False, False), err
    assert code == 2 or words[0] == "check"
    assert message in err


def test_a_tokenizer_without_an_end_token_is_refused_with_both_ways_out(here, run_cli):
    code, _, err = run_cli("build", "data", "--out", "new", "--tokenizer", "byte")
    assert code == 2
    assert "name one with --eot ('byte:1' in place of 'byte'" in err
    assert "or build with --no-append-eot" in err


def test_equal_manifests_are_no_proof_of_contents_and_that_is_said(here, run_cli):
    shard = next(Path("store-now").rglob("shard_*.bin"))
    data = bytearray(shard.read_bytes())
    data[0] ^= 255
    shard.write_bytes(data)
    code, out, _ = run_cli("diff", "store-before", "store-now")
    assert code == 0
    assert "(by their manifests; `shardmill verify` reads the contents)" in out
    assert run_cli("verify", "store-now")[0] == 1


def test_a_folder_of_token_files_is_not_called_a_build(here, run_cli):
    Path("tokens/meta.json").unlink()
    code, _, err = run_cli("diff", "store", "tokens")
    assert code == 2
    assert "tokens: no meta.json, so no store or an unfinished one, with files like a.bin" in err
    assert "delete" not in err


def test_a_fault_of_ours_keeps_its_traceback_and_has_its_own_code(here, run_cli, monkeypatch):
    def fails(store: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(sys.modules["shardmill.cli.commands.info"], "plans_of", fails)
    code, out, err = run_cli("info", "store", "--json")
    assert (code, out) == (70, "")
    assert "ZeroDivisionError: oops" in err
    assert err.endswith("shardmill: a fault of shardmill, not of this call\n")


def test_debug_shows_the_traceback_before_the_message(here, run_cli):
    code, _, err = run_cli("--debug", "info", "nowhere")
    assert code == 2
    assert err.startswith("Traceback")
    assert re.search(r"^shardmill: .*no such folder", err, re.MULTILINE)


def test_ctrl_c_in_a_build_of_chats_says_how_to_continue(here, run_cli, monkeypatch):
    ways = ("--out", "new", "--tokenizer", "spm.model", "--template", "chatml")
    with monkeypatch.context() as patch:
        stop_at_unit(patch, 0)
        code, out, err = run_cli("build", "chats", "c.jsonl", *ways)
    assert (code, out) == (130, "")
    assert re.search("new: stopped(;| before)", err)
    code, out, _ = run_cli("build", "chats", "c.jsonl", *ways, "--overwrite")
    assert code == 0
    assert " cores, at most " in out
    assert open_store("new").is_chat


def test_ctrl_c_while_modules_are_loaded_is_quiet(run_cli, monkeypatch):
    def stops(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardmill.cli.app.import_module", stops)
    assert run_cli("info", "store") == (130, "", "")


# streams


def test_a_closed_pipe_ends_the_command_silently(here):
    code = f"{sys.executable} -m shardmill show store --example 0; echo $? > code"
    done = run("bash", "-c", f"({code}) 2> err | true", text=True)
    assert done.stdout == ""
    assert Path("code").read_text() == "141\n"
    assert Path("err").read_text() == "shardmill: no --tokenizer, so ids are shown\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["info", "store"], ["diff", "store", "store", "--json"]])
def test_a_full_stdout_is_one_sentence(words, here):
    with Path("/dev/full").open("w") as full:
        done = run(*PYTHON, *words, stdout=full)
    assert (done.returncode, done.stderr) == (2, "shardmill: stdout: No space left on device\n")


def test_a_closed_stdout_is_one_sentence(here):
    done = run("bash", "-c", f"{' '.join(PYTHON)} info store >&-")
    assert done.returncode == 2
    assert done.stderr.startswith("shardmill: stdout is closed")


def test_a_terminal_without_utf_8_is_written_to_in_ascii(here):
    Path("store").rename("st\u00f6re")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = run(sys.executable, "-m", "shardmill", "info", "st\u00f6re", env=environment)
    assert done.returncode == 0, done.stderr
    assert "st\\xf6re" in done.stdout
