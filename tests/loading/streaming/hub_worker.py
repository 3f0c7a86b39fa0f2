"""A process that trains on nothing: it prints each batch's hash and the state after it.

    python hub_worker.py CONFIG.json NUM_BATCHES [STATE.json]

It runs on its own because it gets killed, and because the client reads HF_ENDPOINT when imported.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import islice
from pathlib import Path

from shardmill.compat.chomp import build_train_iterator


def main(config: str, num_batches: str, *state: str) -> None:
    with build_train_iterator(json.loads(Path(config).read_text())) as batches:
        if state:
            batches.set_state(json.loads(Path(state[0]).read_text()))
        for batch in islice(batches, int(num_batches)):
            digest = hashlib.sha256(b"".join(array.tobytes() for array in batch)).hexdigest()
            print(json.dumps({"batch": digest, "state": batches.get_state()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
