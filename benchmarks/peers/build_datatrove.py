"""datatrove: its JSON reader and its DocumentTokenizer, a task for each file, no shuffling.

Batches smaller than its 10,000 documents, and forked workers, were no slower here. Its tokens and
the ends of its documents are plain files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

from peers.builders import TEXTS_PER_CALL, WORKERS, Ragged, Task, ragged


def build(task: Task) -> None:
    first = Path(task.files[0])
    size = first.name.partition("-")[0]
    reader = JsonlReader(str(first.parent), glob_pattern=f"{size}-*.jsonl")
    tokenizer = DocumentTokenizer(
        output_folder=f"{task.out}/tokens",
        tokenizer_name_or_path=task.model,
        eos_token=task.end,
        shuffle_documents=False,
        batch_size=TEXTS_PER_CALL,
    )
    LocalPipelineExecutor(
        pipeline=[reader, tokenizer],
        tasks=len(task.files),
        workers=WORKERS,
        logging_dir=f"{task.out}/logs",
        start_method="fork",
    ).run()


def documents(task: Task) -> Ragged:
    found = []
    for path in sorted(Path(task.out, "tokens").glob("*.ds")):
        tokens, ends = np.fromfile(path, "<u2"), np.fromfile(f"{path}.index", "<u8")
        found += np.split(tokens, ends[:-1].astype(np.int64))
    return ragged(found)
