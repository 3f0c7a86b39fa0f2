"""TRL's DPOTrainer trains from a store as it does from the text, step for step."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardmill
from shardmill.errors import OptionError
from tests.preferences import TOKENIZER, build_preferences, pair, records_of

pytest.importorskip("datasets")
EXAMPLES = Path(__file__).parent.parent.parent / "examples"

COMPARED = """
import copy, json, sys
from pathlib import Path
import numpy as np
import torch
sys.path.insert(0, sys.argv[1])
import train_dpo as example
from datasets import Dataset
from trl import DPOTrainer
import shardmill
from shardmill.trainers.trl import to_datasets

out, real = Path(sys.argv[2]), sys.argv[3:]
out.mkdir()
if real:
    kept = [row for row in json.loads(Path(real[0]).read_text())
        if sum(len(turn["value"]) for turn in row["conversations"]) < 300
        and max(len(row["chosen"]["value"]), len(row["rejected"]["value"])) < 300]
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    def messages(turns):
        return [{"role": roles[one["from"]], "content": one["value"]} for one in turns]
    pairs = [{"prompt": messages(row["conversations"]), "chosen": messages([row["chosen"]]),
        "rejected": messages([row["rejected"]])} for row in kept]
else:
    kept = pairs = [{"prompt": [{"role": "user", "content": row["prompt"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}]}
        for row in example.made_up_pairs()]
rows = out / "rows.jsonl"
rows.write_text("".join(json.dumps(row) + "\\n" for row in kept))
tokenizer = example.make_tokenizer(rows, out / "tokenizer")
shardmill.build(rows, out / "store", tokenizer=out / "tokenizer", template="jinja")
model = example.tiny_model(tokenizer, 1024)
weights = {name: one.clone() for name, one in model.state_dict().items()}

def trained(kind, dataset):
    model = example.tiny_model(tokenizer, 1024)
    model.load_state_dict(weights)
    args = example.trainer_args(out / "run", 20)
    trainer = kind(model=model, ref_model=copy.deepcopy(model), args=args,
        train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    return trainer, [one["loss"] for one in trainer.state.log_history if "loss" in one]

theirs, wanted = trained(DPOTrainer, Dataset.from_list(pairs))
ours, found = trained(example.StoreTrainer, to_datasets(out / "store", whole=True))
columns = ("prompt_ids", "chosen_ids", "rejected_ids")
assert len(ours.train_dataset) == len(pairs)
for name in columns:
    assert list(ours.train_dataset[name]) == list(theirs.train_dataset[name]), name
# the batches of a loader are those of TRL's collator, but for tokens that the store does not train
source = shardmill.PreferenceSource(out / "store", seq_len=1024, pad_id=tokenizer.pad_token_id)
batch = source.rows(np.arange(6))
plain = ours.data_collator([theirs.train_dataset[at] for at in range(6)])
width = plain["input_ids"].shape[1]
for name in ("input_ids", "attention_mask"):
    assert (getattr(batch, name)[:, :width] == plain[name].numpy()).all(), name
    padding = tokenizer.pad_token_id if name == "input_ids" else 0
    assert (getattr(batch, name)[:, width:] == padding).all(), name
extra = plain["completion_mask"].numpy() - batch.completion_mask[:, :width]
ends = {tokenizer.decode(ids[own == 1]) for ids, own in zip(plain["input_ids"], extra)}
assert ends == {"\\n"}, ends
short = ours.data_collator([to_datasets(out / "store")[at] for at in range(6)])
width = short["input_ids"].shape[1]
assert (short["completion_mask"].numpy() == batch.completion_mask[:, :width]).all()
print(json.dumps({"ours": found, "theirs": wanted}))
"""


OTHERS = """
import copy, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import train_dpo as example
from transformers import GPT2ForSequenceClassification
from trl import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
import shardmill
from shardmill.trainers.trl import HasTokens, to_datasets

out = Path(sys.argv[2])
out.mkdir()
same = dict(max_steps=2, per_device_train_batch_size=4, max_length=None, logging_steps=1,
    save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, seed=0)
example.main(["--steps", "5", "--out", str(out / "example")])
pairs = list(example.made_up_pairs(16))
labelled = [{"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row in pairs for name in ("chosen", "rejected")]
found = {}
for kind, rows in (("reward", pairs), ("kto", labelled)):
    path = out / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\\n" for row in rows))
    tokenizer = example.make_tokenizer(path, out / "tokenizer")
    shardmill.build(path, out / kind, tokenizer=out / "tokenizer", template="jinja")
    model = example.tiny_model(tokenizer, 256)
    dataset = to_datasets(out / kind, form=kind)
    if kind == "reward":
        config = copy.deepcopy(model.config)
        config.num_labels = 1
        model = GPT2ForSequenceClassification(config)
        trainer = RewardTrainer(model=model, args=RewardConfig(output_dir=str(out / "run"), **same),
            train_dataset=dataset, processing_class=tokenizer)
    else:
        class Trainer(HasTokens, KTOTrainer): pass
        trainer = Trainer(model=model, ref_model=copy.deepcopy(model),
            args=KTOConfig(output_dir=str(out / "run"), loss_type="apo_zero_unpaired", **same),
            train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    found[kind] = [one["loss"] for one in trainer.state.log_history if "loss" in one]
print(json.dumps(found))
"""


def environment(tmp_path: Path) -> dict[str, str]:
    places = {name: str(tmp_path / name) for name in ("TMPDIR", "HF_HOME", "HOME")}
    for place in places.values():
        Path(place).mkdir(exist_ok=True)
    return {**os.environ, **places, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(code: str, tmp_path: Path, *real: str) -> list[str]:
    """The lines that a script prints, in a process with temporary folders of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLES), str(tmp_path / "out"), *real],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_losses_are_those_of_trl_from_the_same_text(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    root = os.environ.get("SHARDMILL_REAL_DATA")
    real = [] if root is None else [str(Path(root) / "preference" / "dpo_en_demo.json")]
    found = json.loads(run(COMPARED, tmp_path, *real)[-1])
    assert len(found["ours"]) == 20
    np.testing.assert_allclose(found["ours"], found["theirs"], atol=1e-5, rtol=0)
    assert found["ours"][-1] < found["ours"][0]


@pytest.mark.slow
def test_the_example_trains_and_other_trainers_take_their_columns(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    lines = run(OTHERS, tmp_path)
    assert any(re.fullmatch(r"64 records, \d{3,} tokens saved", line) for line in lines)
    assert any(line.startswith("5 steps, loss 0.69") for line in lines)
    found = json.loads(lines[-1])
    assert {kind: len(own) for kind, own in found.items()} == {"reward": 2, "kto": 2}
    assert all(np.isfinite(own).all() for own in found.values())


def test_columns_hold_the_tokens_of_every_pair(tmp_path: Path) -> None:
    from shardmill.trainers.trl import to_datasets

    lists = {"prompt": "how", "completions": ["a", "b", "c"], "scores": [2, 1, 1]}
    build_preferences(tmp_path, [pair("why", "good", "bad"), lists])
    found = to_datasets(tmp_path / "store")
    texts = [[TOKENIZER.decode(np.array(row[name])) for name in row] for row in found]
    assert texts == [
        [prompt, good, bad]
        for prompt, answers in records_of(tmp_path / "store")
        for good, best in answers
        for bad, worse in answers
        if best < worse
    ]
    whole = to_datasets(tmp_path / "store", form="reward")
    assert [TOKENIZER.decode(np.array(one)) for one in whole["rejected_ids"]] == [
        prompt + bad for prompt, _, bad in texts
    ]
    shardmill.store.exclude_documents(tmp_path / "store", [2], reason="no", split="train")
    assert len(to_datasets(tmp_path / "store")) == 2
    with pytest.raises(OptionError, match="form"):
        to_datasets(tmp_path / "store", form="kto")


def test_labels_come_with_their_answers(tmp_path: Path) -> None:
    from shardmill.trainers.trl import to_datasets

    rows = [{"prompt": "why", "completion": f"c{n}", "label": n < 1} for n in range(3)]
    build_preferences(tmp_path, rows)
    found = to_datasets(tmp_path / "store")
    assert found.column_names == ["prompt_ids", "completion_ids", "label"]
    assert found["label"][:] == [True, False, False]
    answers = [TOKENIZER.decode(np.array(one)) for one in found["completion_ids"]]
    assert answers == ["c0<|e|>", "c1<|e|>", "c2<|e|>"]
