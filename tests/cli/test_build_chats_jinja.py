"""`shardmill build chats --template jinja`: the tokenizer's own template, proved like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmill.loading import ChatRows
from shardmill.store import open_store, verify
from shardmill.testing.stores import read_examples
from shardmill.tokenizers import open_tokenizer
from tests.cli.test_build_chats import call, write_chats  # noqa: F401

pytest.importorskip("transformers")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLIND = CHATML.replace("{{ message['role'] }}", "user")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small byte-level BPE with a chat template, as transformers saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator(["user assistant system question answer"] * 20, trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|im_end|>")
    whole.chat_template = CHATML
    whole.save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


@pytest.mark.slow
def test_the_tokenizers_own_template_builds_a_store_and_a_wrong_one_is_refused(
    call,  # noqa: F811
    model: Path,
):
    write_chats(Path("c.jsonl"))
    options = ["build", "chats", "c.jsonl", "--out", "s", "--tokenizer", str(model)]
    code, out, err = call(*options, "--template", "jinja")
    assert code == 0, err
    assert out.startswith("s: 30 conversations, 60 turns")
    assert verify("s").problems == []
    manifest = open_store("s").manifest
    assert manifest.options["chat"]["template"]["kind"] == "jinja"
    assert manifest.produced_by["mask_proof"]["checks"]
    found = read_examples(Path("s"), "train")
    opened = open_tokenizer(model)
    said = opened.decode(found.ids.values[found.mask])
    assert said == "".join(f"a{n}<|im_end|>" for n in range(30))
    code, out, _ = call("show", "s", "--example", "4", "--tokenizer", str(model))
    assert code == 0
    assert "[[a4<|im_end|>]]\\n\n" in out
    assert ChatRows("s", seq_len=8).pad_id == opened.special_token_ids()["eos"]
    Path("blind.jinja").write_text(BLIND)
    code, _, err = call(*options, "--template", "blind.jinja", "--overwrite")
    assert code == 2
    assert "refused" in err or "template" in err
    assert json.loads(Path("s/meta.json").read_text())["ledger"]["documents"]["kept"] == 30


@pytest.mark.parametrize(
    "source", ["a\n{{ cycler() }}", "a\n{{ 1 // 0 }}", "a\n{{ messages[0].pop('role') }}"]
)
def test_a_failure_inside_a_template_is_a_mistake_of_the_input_not_a_fault_of_ours(
    call,  # noqa: F811
    model: Path,
    source: str,
):
    write_chats(Path("c.jsonl"))
    Path("strange.jinja").write_text(source)
    options = ["build", "chats", "c.jsonl", "--out", "s", "--tokenizer", str(model)]
    code, out, err = call(*options, "--template", "strange.jinja")
    assert (code, out) == (2, "")
    assert "strange.jinja" in err
    assert "line 2" in err
    assert "Traceback" not in err
    assert not Path("s").exists()
