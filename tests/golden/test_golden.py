"""Nothing that is written or yielded changes by accident: stores, plans, states, batches.

A change of a format or an order is a decision: bump its version, say so in the changelog, and
record the hashes again: `python -c "from tests.golden.artifacts import record; record()"`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.golden.artifacts import HASHES, make_all


def test_every_byte_and_batch_is_as_recorded(tmp_path: Path) -> None:
    wanted = json.loads(HASHES.read_text())
    found = make_all(tmp_path)
    assert found.keys() == wanted.keys()
    for artifact, hashes in wanted.items():
        names = hashes.keys() | found[artifact].keys()
        changed = sorted(name for name in names if hashes.get(name) != found[artifact].get(name))
        assert not changed, f"{artifact}: {changed}"


def test_workers_change_no_byte_of_the_recorded_store() -> None:
    wanted = json.loads(HASHES.read_text())
    one, two = wanted["document_stores"], wanted["divided_store"]
    assert two == {f"two/{name}": value for name, value in one.items() if name.startswith("web/")}
