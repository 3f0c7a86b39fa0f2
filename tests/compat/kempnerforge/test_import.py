"""The room without torch: the import says what to install."""

from __future__ import annotations

import subprocess
import sys

import shardmill.compat.kempnerforge


def test_without_torch_the_import_names_the_pip_command():
    code = "import sys\nsys.modules['torch'] = None\nimport shardmill.compat.kempnerforge\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "shardmill.errors.MissingExtraError: torch is not installed: pip install 'shardmill[torch]'"
    )


def test_the_room_has_exactly_these_names():
    assert shardmill.compat.kempnerforge.__all__ == [
        "DistributedSampler",
        "LoaderConfig",
        "MemoryMappedDataset",
        "MixtureDataset",
        "MixtureSampler",
        "Samples",
        "StatefulDataLoader",
        "collate",
    ]
    assert all(
        hasattr(shardmill.compat.kempnerforge, name)
        for name in shardmill.compat.kempnerforge.__all__
    )
