"""One batch of a mixture of two stores reaches PyTorch, and its position is saved and restored."""

import sys
import tempfile
import threading
from pathlib import Path

import shardmill as sm

hook = sys.getprofile()
with tempfile.TemporaryDirectory() as folder:
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]  # building is another walk
    for name in ("web", "wiki"):
        Path(folder, f"{name}.txt").write_text(f"A page of {name}. " * 600)
        sm.build(f"{folder}/{name}.txt", f"{folder}/{name}", tokenizer="byte:1", eot="<|eot|>")
    threading.setprofile(hook)
    sys.setprofile(hook)
    stores = {f"{folder}/web": 0.7, f"{folder}/wiki": 0.3}
    loader = sm.load(stores, seq_len=64, batch_size=4, seed=1, to="torch")
    batch = next(iter(loader))
    assert tuple(batch["input_ids"].shape) == (4, 64)
    loader.load_state_dict(loader.state_dict())
    loader.close()
