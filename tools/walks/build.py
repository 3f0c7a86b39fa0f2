"""Two documents become a store, through the command line, in one process."""

import json
import sys
import tempfile
from pathlib import Path

from shardmill.cli import main

with tempfile.TemporaryDirectory() as folder:
    pages, store = Path(folder, "pages.jsonl"), Path(folder, "store")
    texts = ("hello world", "a second page")
    pages.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sys.argv = ["shardmill", "build", str(pages), "--out", str(store), "--tokenizer", "byte:1"]
    sys.argv += ["--workers", "1", "--eot", "none"]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    assert (store / "meta.json").exists()
