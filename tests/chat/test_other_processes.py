"""Templates in other processes: the same ids, masks, turns and drops."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.chat import (
    Rendered,
    TrainPolicy,
    bind_template,
    known_template,
    open_jinja_template,
    with_encoder,
)
from shardmill.protocols import Tokenizer
from shardmill.records import Conversation
from shardmill.tokenizers import choose_encoder
from tests.chat.conftest import BINDABLE, CHAT_TOKENIZERS

CHILD = """
import pickle, sys
from pathlib import Path
folder = Path(sys.argv[1])
templates, conversations, policies = pickle.loads((folder / "sent").read_bytes())
found = {
    name: ([template.render(conversations, policy) for policy in policies], template.describe())
    for name, template in templates.items()
}
(folder / "found").write_bytes(pickle.dumps(found))
"""


def said(*texts: str, **more: Any) -> Conversation:
    roles = ("user", "assistant")
    turns = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return Conversation(messages=turns, **more)


CALL = {"name": "find", "arguments": {"word": "mill"}}
CONVERSATIONS = [
    said("what is a mill", "a house that grinds\n\n", "and  why", "\u00e9 \U0001f600 so"),
    said("write <|im_end|> and <end_of_turn>", "no <|eot|>"),
    said("no answer", id="rows.jsonl", row=7),
    Conversation(messages=[{"role": "system", "content": "be kind"}, *said("hi", "yo").messages]),
    Conversation(
        messages=[
            {"role": "user", "content": "look", "train": True},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "content": "found"},
        ],
        tools=[CALL],
    ),
]
POLICIES = [TrainPolicy(), TrainPolicy(train_on="all", train_on_eot=False)]


def in_a_fresh_process(templates: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "sent").write_bytes(pickle.dumps((templates, CONVERSATIONS, POLICIES)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = pickle.loads((folder / "found").read_bytes())
    return found


def parts(rendered: Rendered) -> list[Any]:
    examples = rendered.examples
    arrays = (examples.ids.values, examples.ids.offsets, examples.mask, rendered.kept)
    turns = (examples.turn_starts, examples.turn_roles)
    return [*(np.asarray(one).tolist() for one in (*arrays, *turns)), rendered.drops]


def check_same_elsewhere(templates: dict[str, Any], folder: Path) -> None:
    found = in_a_fresh_process(templates, folder)
    assert found.keys() == templates.keys()
    for name, template in templates.items():
        results, description = found[name]
        assert description == template.describe(), name
        for policy, there in zip(POLICIES, results, strict=True):
            here = template.render(CONVERSATIONS, policy)
            assert parts(there) == parts(here), (name, policy)
        assert len(results[0].kept) > 0, name
        assert ("rows.jsonl", 7) in {(drop.id, drop.row) for drop in results[0].drops}, name


@pytest.mark.slow
def test_a_template_of_tokens_renders_the_same_in_a_fresh_process(
    chat_tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    templates = {
        f"{name}, {kind}": bind_template(known_template(name), chat_tokenizers[kind])
        for name in BINDABLE
        for kind in CHAT_TOKENIZERS
    }
    check_same_elsewhere(templates, tmp_path)


@pytest.mark.slow
def test_a_jinja_template_renders_the_same_in_a_fresh_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.chat.jinja_kit import RIGHT, make_tokenizer

    opened: Any = {name: make_tokenizer(source) for name, source in RIGHT.items()}
    templates = {
        name: open_jinja_template(tokenizer, name=name, variables={"day": "monday"})
        for name, tokenizer in opened.items()
    }
    templates["given"] = open_jinja_template(opened["gemma"], chat_template=RIGHT["chatml"])
    check_same_elsewhere(templates, tmp_path)


@pytest.mark.parametrize("kind", CHAT_TOKENIZERS)
def test_a_fast_encoder_is_put_under_a_template_where_it_is(
    chat_tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = chat_tokenizers[kind]
    template = bind_template(known_template("chatml"), tokenizer)
    encoder = choose_encoder(tokenizer, engine="reference")
    fast = with_encoder(template, encoder)

    assert fast.describe() == template.describe()
    assert fast.encoder is encoder  # type: ignore[attr-defined]
    for policy in POLICIES:
        here, there = (one.render(CONVERSATIONS, policy) for one in (template, fast))
        assert parts(here) == parts(there)


def test_a_template_that_takes_no_encoder_stays_as_it_is() -> None:
    template: Any = object()
    assert with_encoder(template, object()) is template  # type: ignore[arg-type]
