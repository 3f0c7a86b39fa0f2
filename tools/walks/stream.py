"""Text straight to a batch; the position is saved and restored."""

import json
import tempfile
from pathlib import Path

import shardmill as sm

with tempfile.TemporaryDirectory() as folder:
    pages = Path(folder, "pages.jsonl")
    pages.write_text("".join(json.dumps({"text": f"page {n} " * 20}) + "\n" for n in range(50)))
    stream = sm.stream(pages, tokenizer="byte:4", seq_len=64, batch_size=2, pack="first-fit")
    assert next(stream).input_ids.shape == (2, 64)
    stream.load_state_dict(stream.state_dict())
    stream.close()
