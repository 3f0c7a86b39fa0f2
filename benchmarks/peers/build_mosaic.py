"""MosaicML Streaming: each process writes MDS shards of one file, then an index joins them.

Importing the package imports its vision part, and with it torchvision, which does not load beside
the CPU build of torch. Writing needs none of that, so only `streaming.base` is imported.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec, module_from_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from peers.builders import WORKERS, Ragged, Task, encoder, ragged, texts_of

_SCRIPTS = str(Path(__file__).parents[1])
# The package is called `streaming`, and so is one of our scripts: look past them.
sys.path.remove(_SCRIPTS)
_spec = find_spec("streaming")
assert _spec is not None, "it is installed, or this file would not be imported"
sys.modules["streaming"] = module_from_spec(_spec)
_base = importlib.import_module("streaming.base")
_util = importlib.import_module("streaming.base.util")
sys.path.insert(0, _SCRIPTS)


def write(task: Task, number: int) -> None:
    encode = encoder(task)
    columns = {"ids": "ndarray:uint16"}
    with _base.MDSWriter(out=f"{task.out}/mds/{number}", columns=columns) as out:
        for texts in texts_of(task.files[number]):
            for ids in encode(texts):
                out.write({"ids": np.array(ids, np.uint16)})


def build(task: Task) -> None:
    with get_context("fork").Pool(WORKERS) as pool:
        pool.starmap(write, [(task, number) for number in range(len(task.files))])
    _util.merge_index(f"{task.out}/mds", keep_local=True)


def documents(task: Task) -> Ragged:
    data = _base.StreamingDataset(local=f"{task.out}/mds", batch_size=1)
    return ragged([data[number]["ids"] for number in range(len(data))])
