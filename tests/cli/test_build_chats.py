"""`shardmill build chats` as a person calls it: receipts, refusals, what a store says of itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardmill.cli import main
from shardmill.store import open_store, verify
from shardmill.testing.stores import read_examples
from shardmill.tokenizers import open_tokenizer
from tests.cli.stops import small_units, stop_at_unit
from tests.helpers import folder_digest

SPECIALS = {"sys": "<|s|>", "usr": "<|u|>", "asst": "<|a|>", "eot": "<|e|>"}
TOKENIZER = [
    *("--tokenizer", "byte:4"),
    *(word for name, text in SPECIALS.items() for word in ("--special", f"{name}={text}")),
]


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run the command in a folder; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardmill", *arguments])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


def write_chats(path: Path, count: int = 30) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": f"a{n}"},
            ]
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_chats(tmp_path / "c.jsonl")
    return tmp_path


def build(call, *more: str, template: str = "four-marker"):
    options = ["--out", "s", "--template", template]
    return call("build", "chats", "c.jsonl", *options, *TOKENIZER, *more)


def test_a_build_prints_one_receipt_and_leaves_a_sound_store(call, corpus):
    code, out, _ = build(call)
    assert code == 0
    # 10 times "q1" and 20 times "q10": 4 marker ids each, 10 * 4 + 20 * 6 bytes
    assert out.startswith("s: 30 conversations, 60 turns, 280 tokens, 110 trained; left out: none;")
    assert out.count("\n") == 1
    assert verify(corpus / "s").problems == []
    found = read_examples(corpus / "s", "train")
    opened = open_tokenizer("byte:4", specials=SPECIALS)
    assert opened.decode(found.ids[12]) == "<|u|>q12<|e|><|a|>a12<|e|>"
    assert opened.decode(found.ids.values[found.mask]) == "".join(f"a{n}<|e|>" for n in range(30))
    manifest = open_store(corpus / "s").manifest
    assert manifest.dataset_name == "c.jsonl"
    assert manifest.produced_by["mask_proof"]["template"]["name"] == "four-marker"


def test_a_receipt_as_json_and_a_report_hold_the_counts(call, corpus):
    code, out, _ = build(
        call, "--json", "--report", "r.json", "--val-fraction", "0.5", "--seed", "3"
    )
    facts = json.loads(out)
    assert code == 0
    assert facts == json.loads((corpus / "r.json").read_text())
    assert (facts["conversations_read"], facts["conversations_kept"]) == (30, 30)
    assert (facts["turns"], facts["trained_tokens"]) == (60, 110)
    assert sum(facts["splits"].values()) == 30
    assert 5 <= facts["splits"]["val"] <= 25


def test_policies_reach_the_mask(call, corpus):
    assert build(call, "--no-train-on-eot")[0] == 0
    assert open_store(corpus / "s").manifest.ledger.chat.trained_tokens == 80
    assert build(call, "--train-on", "all", "--overwrite")[0] == 0
    assert open_store(corpus / "s").manifest.options["chat"]["train_on"] == "all"


def test_bad_records_stop_a_build_or_are_listed(call, corpus):
    with (corpus / "c.jsonl").open("a") as file:
        file.write('{"messages": [}\n' + '{"messages": [{"role": "user", "content": "alone"}]}\n')
    code, _, err = build(call)
    assert code == 2
    assert "c.jsonl:31" in err
    assert not (corpus / "s").exists()
    code, out, _ = build(call, "--on-bad", "skip", "--max-loss", "0.1")
    assert code == 0
    assert "left out: 1 bad_json, 1 no_assistant;" in out
    rows = [json.loads(line) for line in (corpus / "s/dropped.jsonl").read_text().splitlines()]
    assert rows == [
        {"id": "c.jsonl:31", "reason": "bad_json"},
        {"id": "c.jsonl:32", "reason": "no_assistant"},
    ]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--template", "chatml2"], "did you mean 'chatml'"),
        (["--template", "chatml"], "<|im_start|>"),
        (["--template", "no.json"], "no.json"),
        (["--template", "no.jinja"], "no.jinja"),
        (["--val-fraction", "1.5"], "--val-fraction 1.5: wanted a share"),
        (["--shape", "shap"], "shap"),
        (["--report", "no/r.json"], "there is no folder no"),
        (["--special", "x"], "wanted NAME=STRING"),
    ],
)
def test_a_mistake_in_the_call_is_one_message_and_leaves_nothing(call, corpus, arguments, wanted):
    code, _, err = build(call, *arguments)
    assert (code, "Traceback" in err) == (2, False)
    assert wanted in err
    assert [path.name for path in corpus.iterdir()] == ["c.jsonl"]


def test_a_template_from_a_file_that_trains_wrong_words_is_refused(call, corpus):
    spec = {
        "name": "mine",
        "roles": {
            role: {"before": [{"marker": name}], "end": [{"marker": "eot"}]}
            for role, name in (("system", "sys"), ("user", "usr"), ("assistant", "asst"))
        },
    }
    (corpus / "mine.json").write_text(json.dumps(spec))
    assert build(call, template="mine.json")[0] == 0
    spec["roles"]["assistant"]["after"] = spec["roles"]["assistant"].pop("end")
    (corpus / "mine.json").write_text(json.dumps(spec))
    code, _, err = build(call, "--overwrite", template="mine.json")
    assert code == 2
    assert "mine" in err
    assert open_store(corpus / "s").manifest.ledger.chat.trained_tokens == 110  # the old one


def test_an_unfinished_build_is_resumed_by_name(call, corpus, monkeypatch):
    write_chats(corpus / "c.jsonl", 300)
    small_units(monkeypatch)
    with monkeypatch.context() as patch:
        stop_at_unit(patch, 2)
        assert build(call)[0] == 130
    code, _, err = build(call)
    assert code == 2
    assert "--resume" in err
    code, out, _ = build(call, "--resume")
    assert code == 0
    assert out.startswith("s: 300 conversations")


@pytest.mark.slow
def test_workers_change_no_byte(call, corpus, monkeypatch):
    small_units(monkeypatch)
    write_chats(corpus / "c.jsonl", 300)
    shares = ("--val-fraction", "0.2", "--test-fraction", "0.1")
    assert build(call, *shares, "--workers", "1")[0] == 0
    (corpus / "s").rename(corpus / "one")
    code, out, _ = build(call, *shares, "--workers", "2", "--unit-bytes", "6KB")
    assert code == 0
    assert "(2 workers, " in out
    assert folder_digest(corpus / "s") == folder_digest(corpus / "one")
    assert set(open_store(corpus / "s").manifest.splits) == {"train", "val", "test"}


def test_a_folder_called_chats_is_written_with_its_dot(call, corpus):
    (corpus / "chats").mkdir()
    (corpus / "chats" / "a.txt").write_text("hello")
    code, out, _ = call("build", "./chats", "--out", "t", "--tokenizer", "byte", "--no-append-eot")
    assert code == 0
    assert out.startswith("t: 1 documents, 5 tokens")
    assert "./chats" in call("build", "--help")[1]
    assert "./chats" in call("build", "chats", "--help")[1]


TALK = {"who": "Human", "said": "q"}, {"who": "AI", "said": "<think>hm</think>ans"}
WORDS = ("--messages-field", "talk", "--role-field", "who", "--content-field", "said")
ROLES = ("--role-map", "human=user, ai=assistant")


THINKING = {
    "name": "mine",
    "roles": {
        role: {"before": [{"marker": name}], "end": [{"marker": "eot"}]}
        for role, name in (("system", "sys"), ("user", "usr"), ("assistant", "asst"))
    },
    "reasoning": {"before": [{"text": "("}], "after": [{"text": ")"}]},
}


def test_turns_under_other_names_are_read_and_found_again(call, corpus):
    (corpus / "c.jsonl").write_text(json.dumps({"talk": TALK}) + "\n")
    (corpus / "mine.json").write_text(json.dumps(THINKING))
    code, out, err = build(call, *WORDS, *ROLES, "--split-think", template="mine.json")
    assert code == 0, err
    found = read_examples(corpus / "s", "train")
    opened = open_tokenizer("byte:4", specials=SPECIALS)
    assert opened.decode(found.ids.values) == "<|u|>q<|e|><|a|>(hm)ans<|e|>"
    words = ("--document", "0", "--offset", "8", *TOKENIZER, "--input", "c.jsonl")
    code, out, err = call("blame", "s", *words)
    assert code == 0, err
    assert "[[a]]ns" in out


def test_what_is_missing_is_said_in_flags(call, corpus):
    (corpus / "c.jsonl").write_text(json.dumps({"talk": TALK}) + "\n")
    code, _, err = build(call)
    assert code == 2
    assert "'talk' (a list that begins with an object of 'who', 'said')" in err
    for flag in (*WORDS[::2], "--role-map", "--shape"):
        assert flag in err
    code, _, err = build(call, *WORDS)
    assert code == 1
    assert "the role 'AI' is unknown" in err
    assert "nothing is kept of 1 rows" in err
    assert err.count("(--role-map)") == 2  # before, and as the reason
    said = {"messages": [{"role": "gpt", "content": TALK[1]["said"]}]}
    (corpus / "c.jsonl").write_text((json.dumps(said) + "\n") * 9)
    code, _, err = build(call, "--overwrite", "--workers", "1")
    assert code == 0
    assert err.count("(--split-think)") == 1


@pytest.mark.parametrize("text", ["human", "human=", "=user", "a=user,a=user", "a=user,", ""])
def test_a_role_map_that_makes_no_sense_is_refused(call, corpus, text):
    code, _, err = build(call, "--role-map", text)
    assert code == 2
    assert "--role-map" in err


def test_what_no_message_can_hold_is_counted_by_reason(call, corpus):
    turns = {"image": [{"type": "image"}], "audio": [{"type": "audio_url"}]}
    rows = [{"messages": [{"role": "gpt", "content": part}]} for part in turns.values()]
    with (corpus / "c.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = build(call, "--max-loss", "0.1")
    assert code == 0
    assert "left out: 1 audio_part, 1 image_part;" in out
    listed = [json.loads(line) for line in (corpus / "s/dropped.jsonl").read_text().splitlines()]
    assert listed == [
        {"id": "c.jsonl:31", "reason": "image_part"},
        {"id": "c.jsonl:32", "reason": "audio_part"},
    ]


def test_the_list_of_a_json_file_is_built_like_lines(call, corpus):
    rows = [json.loads(line) for line in (corpus / "c.jsonl").read_text().splitlines()]
    assert build(call)[0] == 0
    lines = read_examples(corpus / "s", "train")
    (corpus / "d.json").write_text(json.dumps({"data": rows}, indent=1))
    options = ["--out", "t", "--template", "four-marker", *TOKENIZER]
    assert call("build", "chats", "d.json", *options)[0] == 0
    array = read_examples(corpus / "t", "train")
    assert (array.ids, array.mask.tolist()) == (lines.ids, lines.mask.tolist())
