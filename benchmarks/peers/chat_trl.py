"""TRL: what `SFTTrainer` does with a file of conversations before it trains.

The trainer is made as anybody makes it, with a model of almost nothing; the clock runs while it
prepares its dataset, and while `datasets` reads the file.
"""

from __future__ import annotations

import importlib.util
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

_find_spec = importlib.util.find_spec
# A torchvision for another torch breaks imports of transformers; text needs none.
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] == "torchvision" else _find_spec(name, package)
)

from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from shardmill.records import IGNORE_INDEX  # noqa: E402


def prepare(
    file: Path, tokenizer: Path, chat_template: str, clock: AbstractContextManager[None]
) -> tuple[list[Any], list[Any]]:
    """The ids of each conversation, and which of them are trained."""

    class Timed(SFTTrainer):
        def _prepare_dataset(self, _nothing: Any, *values: Any, **options: Any) -> Any:
            with clock:
                read = Dataset.from_json(str(file), cache_dir=place)
                return super()._prepare_dataset(read, *values, **options)

    loaded = AutoTokenizer.from_pretrained(str(tokenizer))
    loaded.chat_template = chat_template
    loaded.pad_token = loaded.eos_token
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(loaded), n_embd=8, n_layer=1, n_head=1))
    with tempfile.TemporaryDirectory() as place:
        trainer = Timed(
            model=model,
            args=SFTConfig(
                output_dir=place,
                assistant_only_loss=True,
                max_length=None,
                report_to="none",
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=Dataset.from_list([{"messages": [{"role": "user", "content": ""}]}]),
            processing_class=loaded,
        )
        columns = trainer.train_dataset.with_format("numpy")
        ids, labels = list(columns["input_ids"]), list(columns["labels"])
    return ids, [np.asarray(one) != IGNORE_INDEX for one in labels]
