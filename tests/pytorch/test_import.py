"""The room without torch: the import says what to install."""

from __future__ import annotations

import subprocess
import sys

import shardmill.pytorch


def test_without_torch_the_import_names_the_pip_command():
    code = "import sys\nsys.modules['torch'] = None\nimport shardmill.pytorch\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "shardmill.errors.MissingExtraError: torch is not installed: pip install 'shardmill[torch]'"
    )


def test_the_room_has_exactly_these_names():
    assert shardmill.pytorch.__all__ == [
        "DistributedSampler",
        "GPTSFTPackedDataset",
        "GPTSFTPackedMemmapDataset",
        "GPTSFTPackedMultiShardDataset",
        "LoaderConfig",
        "MemoryMappedDataset",
        "MixtureDataset",
        "MixtureSampler",
        "PackedDataset",
        "Samples",
        "StatefulDataLoader",
        "StreamingDataset",
        "TokenLoader",
        "collate",
        "collate_packed",
        "create_sft_dataset",
        "document_mask",
        "flex_block_mask",
    ]
    assert all(hasattr(shardmill.pytorch, name) for name in shardmill.pytorch.__all__)
