"""A look says what a build would do, writes nothing, and gives commands that run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardmill
from shardmill.errors import OptionError, SourceError
from shardmill.store import open_store
from shardmill.testing.stores import read_examples
from shardmill.tokenizers import open_tokenizer
from tests.cli.test_build_chats import SPECIALS, TOKENIZER, call  # noqa: F401

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def write(path: Path | str, *rows: object) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


INPUTS: dict[str, list[Any]] = {
    "messages.jsonl": [{"messages": TALK}] * 3,
    "sharegpt.jsonl": [{"conversations": SHAREGPT, "system": "be kind"}],
    "alpaca.jsonl": [{"instruction": "q", "input": "", "output": "a"}],
    "pairs.jsonl": [{"question": "q", "answer": "a", "label": "good"}],
    "history.jsonl": [{"history": [["q", "a"]]}],
    "talks.json": [{"messages": TALK, "images": ["a.png"]}],
    "talks.parquet": [{"messages": TALK, "rating": 3.5}],
    "trees.jsonl": [
        {"message_id": "1", "parent_id": None, "role": "prompter", "text": "q"},
        {"message_id": "2", "parent_id": "1", "role": "assistant", "text": "a"},
    ],
    "texts.jsonl": [{"text": "a page", "label": 1}],
    "body.jsonl": [{"n": 1, "body": "a page"}],
    "captions.jsonl": [{"text": "a caption", "image": "a.png"}],
    "texts.parquet": [{"text": "a page"}],
    "some broken.jsonl": [*([{"messages": TALK}] * 30), "no object"],
    "a note.txt": ["just text"],
}


def prepare(folder: Path, name: str) -> str:
    rows, path = INPUTS[name], folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        write(path, *rows)
    return name


@pytest.mark.parametrize("name", INPUTS)
def test_every_command_that_a_look_gives_builds_what_it_showed(call, tmp_path, name):  # noqa: F811
    prepare(tmp_path, name)
    before = sorted(tmp_path.rglob("*"))
    found = shardmill.look(name)
    assert sorted(tmp_path.rglob("*")) == before, "it writes nothing"
    assert found.commands
    is_chat = found.kind == "conversations"
    for command in found.commands:
        program, *words = shlex.split(command.line)
        assert program == "shardmill"
        code, _, err = call(*words)
        assert code == 0, (command.line, err)
        store = open_store(words[words.index("--out") + 1])
        assert store.is_chat == is_chat
        assert store.num_documents("train") == found.num_rows - sum(found.left_out.values()) - (
            name == "trees.jsonl"  # two rows, one conversation
        )
        assert store.manifest.ledger.documents.dropped == found.left_out
        if is_chat:
            assert store.manifest.sources[0]["shape"] == found.shape
        elif found.field is not None:
            assert store.manifest.sources[0]["field"] == found.field


@pytest.mark.parametrize(
    ("name", "kind", "shape", "field", "meant"),
    [
        ("messages.jsonl", "conversations", "messages", None, []),
        ("pairs.jsonl", "conversations", "prompt-response", None, ["'label' (a string)"]),
        ("talks.json", "conversations", "messages", None, ["'images' (a list)"]),
        ("texts.jsonl", "documents", None, "text", []),
        ("body.jsonl", "documents", None, "body", []),
        ("captions.jsonl", "documents", None, "text", ["'image' (a string)"]),
    ],
)
def test_it_tells_documents_from_conversations(
    tmp_path, monkeypatch, name, kind, shape, field, meant
):
    monkeypatch.chdir(tmp_path)
    found = shardmill.look(prepare(tmp_path, name))
    assert (found.kind, found.shape, found.field) == (kind, shape, field)
    assert [text.partition(" usually")[0] for text in found.meanings] == meant
    assert found.why


def test_columns_are_listed_with_what_they_hold(tmp_path):
    path = write(
        tmp_path / "d.jsonl", {"text": "a", "n": 1}, {"text": None, "n": "x"}, {"text": "bc"}
    )
    found = shardmill.look(path)
    columns = {one.name: (one.kinds, one.num_null) for one in found.columns}
    assert columns == {
        "text": ({"a string": 2}, 1),
        "n": ({"a number": 1, "a string": 1}, 1),
    }
    assert found.left_out == {"no_text": 1}
    lengths = found.characters
    assert lengths is not None
    assert (lengths.least, lengths.median, lengths.most, lengths.total) == (1, 1, 2, 3)
    assert found.tokens is None
    tokens = shardmill.look(path, tokenizer="byte").tokens
    assert tokens is not None
    assert tokens.total == 3
    assert json.loads(json.dumps(found.to_json()))["columns"][0]["name"] == "text"


def test_what_is_shown_as_trained_is_what_a_build_trains(tmp_path):
    talks = [
        [*TALK, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "b"}],
        [{**TALK[0]}, {**TALK[1], "train": False}, *TALK],
    ]
    path = write(tmp_path / "c.jsonl", *({"messages": talk} for talk in talks))
    options: dict[str, Any] = {
        "tokenizer": "byte:4",
        "template": "four-marker",
        "special": SPECIALS,
    }
    found = shardmill.look(path, **options)
    shardmill.build(path, tmp_path / "s", **options)
    stored = read_examples(tmp_path / "s", "train")
    decode = open_tokenizer("byte:4", specials=SPECIALS).decode
    for number, example in enumerate(found.examples):
        start, stop = stored.ids.offsets[number : number + 2]
        ids, mask = stored.ids[number], stored.mask[start:stop]
        assert "".join(part.text for part in example.parts) == decode(ids)
        assert "".join(part.text for part in example.parts if part.trained) == decode(ids[mask])
    plain = shardmill.look(path)
    said = [[part.text for part in one.parts if part.trained] for one in plain.examples]
    assert said == [["a", "b"], ["a"]]


def test_few_rows_of_many_files_are_read(tmp_path, monkeypatch):
    for number in range(30):
        write(tmp_path / f"{number:02}.jsonl", *[{"text": f"{number} {row}"} for row in range(50)])
    found = shardmill.look(tmp_path, rows=40)
    assert (found.num_rows, found.is_all, found.formats) == (40, False, {"jsonl": 30})
    with (tmp_path / "00.jsonl").open("w") as file:
        for _ in range(400):
            file.write(json.dumps({"text": "x" * 2**18}) + "\n")
    found = shardmill.look(tmp_path / "00.jsonl", rows=400)
    assert found.num_rows < 50, "the bytes are bounded, too"
    assert len(found.examples[0].parts[0].text) == 2000
    assert found.examples[0].num_left_out == 2**18 - 2000


def test_input_at_a_url_is_looked_at(tmp_path):
    url = f"memory://looked/{tmp_path.name}/c.jsonl"
    with fsspec.open(url, "w") as file:
        file.write(json.dumps({"messages": TALK}) + "\n")
    found = shardmill.look(url)
    assert (found.shape, found.num_rows) == ("messages", 1)
    assert shlex.split(found.commands[0].line)[3] == url


def test_preferences_are_named_and_not_taken_for_documents(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "chosen": "a", "rejected": "b"})
    found = shardmill.look(path)
    assert found.kind != "documents"
    assert "preference" in f"{found.why} {found.shape}"


# the command


def test_the_command_prints_what_is_trained_in_brackets_and_escapes_text(call):  # noqa: F811
    write(
        "c.jsonl",
        {
            "messages": [
                {"role": "user", "content": "\x1b[31mred [[x]]"},
                {"role": "assistant", "content": "one\ntwo\u202e"},
            ],
            "a\nb\x1b": 1,
        },
        {"messages": [{"role": "ali\x1ben", "content": "x"}]},
    )
    code, out, err = call("look", "c.jsonl")
    assert code == 0
    assert "\x1b" not in out + err
    assert "\u202e" not in out + err
    assert "  a\\nb\\x1b: a number in 1, null or missing in 1\n" in out
    assert "user: \\x1b[31mred [\\[x]\\]\nassistant: [[one\\n\ntwo\\u202e]]\n" in out
    assert "would be left out: 1 unknown_role; a build refuses more than 5%" in out
    assert "unknown_role: a role is not" in err


def test_the_command_shows_tokens_with_a_template_and_prints_json(call):  # noqa: F811
    write("c.jsonl", {"messages": TALK, "label": False})
    code, out, _ = call("look", "c.jsonl", "--template", "four-marker", *TOKENIZER)
    assert code == 0
    assert "<|u|>q<|e|><|a|>[[a<|e|>]]" in out
    assert "lengths in tokens: 6 to 6" in out
    assert "would be ignored: 'label' (a boolean) usually says whether" in out
    code, out, _ = call("look", "c.jsonl", "--json")
    assert (code, json.loads(out)["shape"]) == (0, "messages")


def test_what_cannot_be_built_has_exit_code_1_and_what_is_not_there_2(call):  # noqa: F811
    write("n.jsonl", {"n": 1})
    write("empty.jsonl")
    write("alone.jsonl", {"messages": TALK[:1]})
    for name, words in (
        ("n.jsonl", "no shape of conversations has these columns: 'n' (a number)"),
        ("empty.jsonl", "no row can be read"),
        ("alone.jsonl", "1 no_assistant"),
    ):
        code, out, _ = call("look", name)
        assert (code, words in out) == (1, True)
    assert call("look", "nowhere.jsonl")[0] == 2
    for words in (["--rows", "0"], ["--template", "chatml"], ["--shape", "nosuch"]):
        code, out, err = call("look", "n.jsonl", *words)
        assert (code, out) == (2, "")
        assert words[0] in err


def test_options_for_conversations_are_refused_for_texts(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(OptionError, match="has no conversations"):
        shardmill.look(tmp_path / "a.txt", shape="messages")
    with pytest.raises(SourceError):
        shardmill.look(tmp_path / "b.txt")
