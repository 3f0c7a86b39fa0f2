"""Text straight to a batch, in chomp's words; the position is saved and restored."""

import json
import tempfile
from pathlib import Path

from shardmill.compat.chomp import build_train_iterator

with tempfile.TemporaryDirectory() as folder:
    pages = Path(folder, "pages.jsonl")
    pages.write_text("".join(json.dumps({"text": f"page {n} " * 20}) + "\n" for n in range(50)))
    tokenizer = {"kind": "byte", "byte_offset": 4}
    data = {"backend": "files", "files": str(pages), "packing_mode": "bin", "tokenizer": tokenizer}
    train = {"seq_len": 64, "batch_size": 2, "grad_accum": 2}
    stream = build_train_iterator({"data": data, "model": {"eos_token_id": 2}, "train": train})
    assert next(stream).input_ids.shape == (2, 2, 64)
    stream.set_state(stream.get_state())
    stream.close()
