"""Hugging Face datasets: load JSON, `map` in batches over two processes, save."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Features, List, Value, load_dataset, load_from_disk
from datasets.utils.logging import disable_progress_bar

from peers.builders import TEXTS_PER_CALL, WORKERS, Ragged, Task, encoder

_mine: dict[str, Any] = {}


def tokenise(batch: dict[str, list[str]], task: Task) -> dict[str, list[list[int]]]:
    if not _mine:  # once a process: a tokenizer that travels with the function is hashed first
        _mine["encode"] = encoder(task)
    return {"ids": _mine["encode"](batch["text"])}


def build(task: Task) -> None:
    disable_progress_bar()
    data = load_dataset(
        "json",
        data_files=list(task.files),
        split="train",
        cache_dir=f"{task.out}/cache",
        num_proc=WORKERS,
    )
    data.map(
        tokenise,
        batched=True,
        batch_size=TEXTS_PER_CALL,
        num_proc=WORKERS,
        remove_columns=["text"],
        features=Features({"ids": List(Value("uint16"))}),
        fn_kwargs={"task": task},
        new_fingerprint="tokens",  # else the function is hashed, with all it refers to
    ).save_to_disk(f"{task.out}/saved", num_proc=WORKERS)


def documents(task: Task) -> Ragged:
    column = load_from_disk(f"{task.out}/saved").with_format("arrow")[:]["ids"].combine_chunks()
    flat = column.flatten().to_numpy().astype(np.uint16)
    return Ragged.from_lengths(flat, np.diff(column.offsets.to_numpy()))
