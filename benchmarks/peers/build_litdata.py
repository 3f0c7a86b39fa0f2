"""LitData: `optimize` over the files, each read and tokenised by one worker, as its guide shows it.

A chunk is a count, the offsets of its items, and the items.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from litdata import TokensLoader, optimize

from peers.builders import WORKERS, Ragged, Task, encoder, ragged, texts_of


def tokenise(file: str, task: Task) -> Iterator[torch.Tensor]:
    encode = encoder(task)
    for texts in texts_of(file):
        for ids in encode(texts):
            yield torch.tensor(ids, dtype=torch.uint16)


def build(task: Task) -> None:
    optimize(
        fn=partial(tokenise, task=task),
        inputs=list(task.files),
        output_dir=f"{task.out}/chunks",
        chunk_bytes="64MB",
        num_workers=WORKERS,
        reorder_files=False,
        item_loader=TokensLoader(),
        start_method="fork",
    )


def documents(task: Task) -> Ragged:
    folder = Path(task.out, "chunks")
    found = []
    for chunk in json.loads((folder / "index.json").read_text())["chunks"]:
        data = (folder / chunk["filename"]).read_bytes()
        count = int(np.frombuffer(data, "<u4", 1)[0])
        edges = np.frombuffer(data, "<u4", count + 1, 4)
        tokens = np.frombuffer(data, "<u2", offset=int(edges[0]))
        found += np.split(tokens, (edges[1:-1] - edges[0]).astype(np.int64) // 2)
    return ragged(found)
