"""Options of Jinja templates on the command line, and what a refusal advises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.chat import Rendered
from shardmill.store import open_store
from shardmill.testing.stores import read_examples
from tests.cli.test_build_chats import TOKENIZER, call  # noqa: F401
from tests.helpers import folder_digest

pytest.importorskip("transformers")
from tests.chat.jinja_kit import CHATML, make_tokenizer, marked

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
THINKS = CHATML.replace(
    PROMPT,
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if think is not defined or think %}{{ '<think>\\n' }}{% endif %}{% endif %}",
)
"""Prompts for reasoning that it never writes, as those of R1."""
FORGETS = CHATML.replace(
    "m['content'] +",
    "('(hm) ' if loop.last and m['role'] == 'assistant' else '') + m['content'] +",
)
"""Writes something before the last answer only, as Qwen 3 does."""
SAYS = "{{ '<|im_start|>system\\n' + mode + ' ' + level | string + '<|im_end|>\\n' }}"
DATED = "{{ '<|im_start|>system\\nToday is ' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}"
TALK = [
    {"role": "user", "content": "question one"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "question two"},
    {"role": "assistant", "content": "second answer"},
]


@pytest.fixture
def build(call):  # noqa: F811
    """Build one conversation with a template; (exit code, stdout, stderr)."""

    def run(template: Any, *more: str, rows: int = 1) -> tuple[int, str, str]:
        make_tokenizer(template).save_pretrained("model")
        Path("c.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * rows)
        options = ["--out", "s", "--tokenizer", "model", "--template", "jinja", "--overwrite"]
        found: tuple[int, str, str] = call("build", "chats", "c.jsonl", *options, *more)
        return found

    return run


def shown(number: int = 0) -> str:
    """An example with [ ] around what is trained."""
    examples = read_examples(Path("s"), "train")
    rendered = Rendered(examples=examples, kept=np.arange(len(examples.ids)), drops=())
    return marked(make_tokenizer(), rendered, number).replace("|<|im_start", "<|im_start")


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = open_store("s").manifest.options["chat"]["template"]
    return found


def test_variables_are_json_or_text_and_are_recorded(build) -> None:
    code, _, err = build(
        SAYS + CHATML, "--template-var", "mode=no json", "--template-var", "level=3"
    )
    assert code == 0, err
    assert shown().startswith("<|im_start|>system\nno json 3<|im_end|>\n<|im_start|>user\n")
    assert recorded()["variables"] == {"mode": "no json", "level": 3}
    for wrong in ("mode", "=x"):
        code, _, err = build(SAYS + CHATML, "--template-var", wrong)
        assert (code, "wanted NAME=VALUE" in err) == (2, True)


def test_a_date_is_asked_for_by_its_option_written_and_recorded(build) -> None:
    code, _, err = build(DATED + CHATML)
    assert code == 2
    assert "today's date" in err
    assert "say which day it is with --template-date" in err
    code, _, err = build(DATED + CHATML, "--template-date", "July")
    assert (code, "--template-date July: wanted a date such as 2024-07-26" in err) == (2, True)
    code, _, err = build(DATED + CHATML, "--template-date", "2024-07-26")
    assert code == 0, err
    assert shown().startswith("<|im_start|>system\nToday is 26 Jul 2024<|im_end|>\n")
    assert recorded()["date"] == "2024-07-26T00:00:00"


def test_one_of_several_templates_of_a_tokenizer_is_named(build) -> None:
    both = {
        "default": CHATML,
        "loud": CHATML.replace("m['role'] +", "m['role'] + ('!' if m['role'] == 'user' else '') +"),
    }
    code, _, err = build(both, "--chat-template", "loud")
    assert code == 0, err
    assert "<|im_start|>user!\nquestion one<|im_end|>" in shown()
    code, _, err = build(both)
    assert code == 0, err
    assert "<|im_start|>user\nquestion one<|im_end|>" in shown()


def test_a_prompt_that_answers_do_not_follow_is_refused_with_what_helps(build) -> None:
    code, _, err = build(THINKS)
    assert code == 2
    assert "accept that with --any-prompt" in err
    advice = err.partition("it is accepted with one of these instead:\n")[2]
    assert [line.split(":")[0].strip() for line in advice.splitlines()] == [
        "--any-prompt",
        "--template chatml",
    ]
    code, _, err = build(THINKS, "--any-prompt")
    assert code == 0, err
    assert recorded()["any_prompt"] is True
    answer = "<|im_start|>assistant\n[first answer<|im_end|>]\n"
    assert answer in shown()
    code, _, err = build(THINKS, "--template-var", "think=false")
    assert code == 0, err
    assert answer in shown()


def test_a_template_that_changes_the_past_is_refused_with_what_helps_and_its_cost(build) -> None:
    code, _, err = build(FORGETS)
    assert code == 2
    assert "it was dropped (prefix_changes" in err
    advice = err.partition("it is accepted with one of these instead:\n")[2]
    # 24 characters and 49, of 49
    assert advice.splitlines() == [
        "  --fan-out: each answer is an example, with everything before it "
        "(1.5 times the tokens of the first 1 conversations)",
        "  --train-on last-assistant: only the last answer of each conversation is trained",
    ]
    code, out, err = build(FORGETS, "--fan-out")
    assert code == 0, err
    assert out.startswith("s: 2 conversations, 6 turns")
    first = "<|im_start|>user\nquestion one<|im_end|>\n<|im_start|>assistant\n"
    assert shown() == f"{first}[(hm) first answer<|im_end|>]\n"
    assert shown(1) == (
        f"{first}first answer<|im_end|>\n<|im_start|>user\nquestion two<|im_end|>\n"
        "<|im_start|>assistant\n[(hm) second answer<|im_end|>]\n"
    )
    code, _, err = build(FORGETS, "--train-on", "last-assistant")
    assert code == 0, err
    assert open_store("s").manifest.ledger.documents.kept == 1


@pytest.mark.parametrize("tokenizer", ["model", "model/tokenizer.json"])
def test_blame_needs_no_template_for_it_is_in_the_store(build, call, tokenizer) -> None:  # noqa: F811
    code, _, err = build(FORGETS, "--fan-out")
    assert code == 0, err
    words = ["--tokenizer", tokenizer, "--input", "c.jsonl", "--json"]
    found = read_examples(Path("s"), "train")
    second = make_tokenizer().encode("second", add_special_tokens=False)
    position = next(
        at
        for at in range(len(found.mask))
        if found.ids.values[at : at + len(second)].tolist() == second
    )
    code, out, err = call("blame", "s", "--token", str(position), *words)
    assert code == 0, err
    (token,) = json.loads(out)["tokens"]
    assert (token["file"], token["row"], token["document"]) == ("c.jsonl", 1, 1)
    assert (token["role"], token["turn"]) == ("assistant", 3)
    assert (token["kind"], token["row_id"]) == ("turn", "c.jsonl:1#3")


def test_blame_finds_the_answer_in_a_store_of_a_template_made_of_tokens(call, tmp_path) -> None:  # noqa: F811
    Path("c.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    options = ["--out", "s", "--template", "four-marker", "--fan-out", *TOKENIZER]
    code, _, err = call("build", "chats", "c.jsonl", *options)
    assert code == 0, err
    opening = len("question one" + "first answer" + "question two") + 7  # bytes and markers
    words = [
        "--document",
        "1",
        "--offset",
        str(opening),
        *TOKENIZER,
        "--input",
        "c.jsonl",
        "--json",
    ]
    code, out, err = call("blame", "s", *words)
    assert code == 0, err
    (token,) = json.loads(out)["tokens"]
    assert (token["row_id"], token["turn"], token["kind"]) == ("c.jsonl:1#3", 3, "text")
    assert token["text"][token["start"] : token["stop"]] == "s"
    assert token["text"] == "second answer"


@pytest.mark.slow
def test_two_workers_write_the_bytes_of_one(build) -> None:
    made = []
    for workers in ("1", "2"):
        code, _, err = build(
            FORGETS, "--fan-out", "--workers", workers, "--unit-bytes", "4000", rows=99
        )
        assert code == 0, err
        made.append(folder_digest(Path("s")))
    assert made[0] == made[1]


def test_a_template_without_end_is_stopped_on_the_battery_too(build, monkeypatch) -> None:
    """It knows the first messages it is tried with; what shows a refusal must not run it freely."""
    monkeypatch.setattr("shardmill.chat.jinja.sandbox.MAX_STEPS", 50_000)  # it is run very often
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tried = "['asked', 'answered', 'again', '']"
    code, _, err = build(
        f"{{% if messages[-1].content not in {tried} %}}{loops}{{% endif %}}{CHATML}"
    )
    assert code == 2
    assert "it was dropped (template_refuses" in err
