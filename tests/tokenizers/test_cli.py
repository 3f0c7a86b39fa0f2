"""`shardmill tokenizer`: train and info, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmill.cli.options import parse_special
from shardmill.errors import OptionError
from tests.helpers import CommandResult, run_command
from tests.tokenizers.conftest import LANGUAGES

pytestmark = pytest.mark.slow


def shardmill(*words: str | Path) -> CommandResult:
    return run_command("tokenizer", *map(str, words))


def test_train_prints_a_receipt_and_info_reads_the_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LANGUAGES * 10)
    done = shardmill(
        *("train", tmp_path / "*.txt", "--out", tmp_path / "out", "--vocab-size", "400"),
        *("--model-type", "bpe", "--special", "eot=<end>", "--special", "sys=<system>"),
    )
    assert done.exit_code == 0, done.stderr
    size = len((LANGUAGES * 10).encode())
    assert done.stdout == (
        f"{tmp_path}/out/spm.model: bpe, 400 ids, sys=1 eot=2, "
        f"trained on {size:,} of {size:,} bytes\n"
    )
    shown = shardmill("info", tmp_path / "out", "--json")
    facts = json.loads(shown.stdout)
    assert facts["vocab_size"] == 400
    assert facts["dtype"] == "uint16"
    assert facts["special_token_ids"] == {"sys": 1, "eot": 2}
    assert facts["fast_engines"][0].startswith("gigatoken ")
    plain = shardmill("info", tmp_path / "out").stdout
    assert "special_token_ids  sys=1 eot=2\n" in plain
    assert facts["fingerprint"] in plain


def test_train_prints_meta_as_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LANGUAGES * 10)
    done = shardmill(
        *("train", tmp_path / "a.txt", "--out", tmp_path / "out", "--vocab-size", "400"),
        *("--model-type", "byte-bpe", "--max-bytes", "0", "--json"),
    )
    assert done.exit_code == 0, done.stderr
    meta = json.loads(done.stdout)
    assert meta == json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["max_bytes"] is None


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = shardmill("train", tmp_path / "*.txt", "--out", tmp_path / "out")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("shardmill: no input matched ")
    assert "Traceback" not in done.stderr


def test_train_reads_structured_files_through_a_source(tmp_path: Path) -> None:
    lines = [json.dumps({"text": line}) for line in (LANGUAGES * 10).splitlines()]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    done = shardmill(
        *("train", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--vocab-size", "400"),
        *("--model-type", "bpe", "--json"),
    )
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["vocab_size"] == 400


def test_train_takes_conversations_and_says_so_with_the_same_bytes_each_time(
    tmp_path: Path,
) -> None:
    said = (LANGUAGES * 10).splitlines()
    chats = [{"messages": [{"role": "user", "content": line}]} for line in said]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "b.json").write_text(json.dumps(chats))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"x": t}) + "\n" for t in said))
    models = []
    for number, words in enumerate(
        (["a.jsonl"], ["a.jsonl"], ["b.json", "--shape", "messages"], ["texts.jsonl", "--field=x"])
    ):
        out = tmp_path / f"out{number}"
        done = shardmill(
            *("train", tmp_path / words[0], *words[1:], "--out", out, "--vocab-size", "400"),
            *("--model-type", "byte-bpe"),
        )
        assert done.exit_code == 0, done.stderr
        assert ("conversations; trained on the texts" in done.stderr) == (number < 3)
        models.append((out / "tokenizer.json").read_bytes())
    assert set(models) == {models[0]}


def test_text_files_of_any_name_are_trained_on_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "wiki.train.raw").write_text(LANGUAGES * 10)
    done = shardmill(
        *("train", tmp_path / "wiki.train.raw", "--out", tmp_path / "out", "--vocab-size", "400"),
        *("--model-type", "byte-bpe", "--json"),
    )
    assert done.exit_code == 0, done.stderr
    assert "wiki.train.raw: read as plain text" in done.stderr
    (one,) = json.loads(done.stdout)["inputs"]
    assert (one["name"], one["bytes"]) == ("wiki.train.raw", len((LANGUAGES * 10).encode()))


def test_specials_are_name_equals_string() -> None:
    assert parse_special(["eot=<a=b>"]) == {"eot": "<a=b>"}
    assert parse_special(None) is None
    for wrong in (["eot"], ["=x"], ["eot="], ["eot=a", "eot=b"]):
        with pytest.raises(OptionError, match="wanted NAME=STRING"):
            parse_special(wrong)
