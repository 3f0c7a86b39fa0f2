"""Train a tiny GPT-2 with TRL's DPOTrainer from a store of preferences, on CPU, in a minute.

    python examples/train_dpo.py                         pairs that are made up here
    python examples/train_dpo.py --rows pairs.jsonl      your own: prompt, chosen, rejected
    python examples/train_dpo.py --steps 100 --out run

1. tokenizer:  a small byte-level BPE with ChatML's markers and its Jinja template
2. store:      every prompt once, then its answers; `shardmill info OUT/store` says what that saves
3. training:   TRL 1.16 makes the batches from the tokens of the store; nothing is tokenised again

Needs: pip install 'shardmill[torch,hub,hf]' trl accelerate
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import shardmill
from shardmill.trainers.trl import HasTokens, to_datasets

TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class StoreTrainer(HasTokens, DPOTrainer):  # type: ignore[misc]
    """DPOTrainer for a dataset that holds tokens already."""


def made_up_pairs(num: int = 64) -> Iterator[dict[str, Any]]:
    """Sums, right and wrong; each prompt is asked twice."""
    for number in range(num):
        a, b = number // 2 % 8, number // 16
        wrong = f"It is {a + b + 1 + number % 2}."
        yield {"prompt": f"What is {a} and {b}?", "chosen": f"It is {a + b}.", "rejected": wrong}


def make_tokenizer(rows: Path, folder: Path) -> PreTrainedTokenizerFast:
    """Trained on the rows as they are written, and saved."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(rows.read_text("utf-8").splitlines(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=found, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def tiny_model(tokenizer: PreTrainedTokenizerFast, seq_len: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=seq_len,
        n_embd=64,
        n_layer=2,
        n_head=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.eos_token_id,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def trainer_args(out: Path, steps: int) -> DPOConfig:
    return DPOConfig(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=4,
        max_length=None,  # the store has left out what is too long
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=0,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train with DPOTrainer from a store.")
    parser.add_argument("--rows", type=Path, help="JSON lines of preferences")
    parser.add_argument("--out", type=Path, default=Path("dpo"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=256)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = options.rows
    if rows is None:
        rows = options.out / "pairs.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in made_up_pairs()))
    tokenizer = make_tokenizer(rows, options.out / "tokenizer")
    report = shardmill.build(
        rows,
        options.out / "store",
        tokenizer=options.out / "tokenizer",
        template="jinja",
        overwrite=True,
    )
    entry = report.manifest.splits["train"].chat
    assert entry is not None
    assert entry.preference is not None
    print(f"{entry.preference.records} records, {entry.preference.saved_tokens} tokens saved")
    model = tiny_model(tokenizer, options.seq_len)
    trainer = StoreTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=trainer_args(options.out / "run", options.steps),
        train_dataset=to_datasets(options.out / "store", seq_len=options.seq_len),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
