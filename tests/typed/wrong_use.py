"""Mistakes that mypy must find, each with the code of its error. Nobody runs it."""

from __future__ import annotations

from pathlib import Path

import shardmill
from shardmill.compat.kempnerforge import MemoryMappedDataset, MixtureSampler, collate
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.trainers.torch import TokenLoader

folder = Path("store")
source = TokenSource(folder, seq_len="1024")  # error: arg-type
nameless = TokenSource(folder)  # error: call-arg
stream = SampleStream(source)  # error: arg-type
shuffled = SampleStream([source], shuffle="blocks")  # error: arg-type
loader = Loader(stream, batch_size=8, ranks=2)  # error: call-arg
loader.load_state_dict("state")  # error: arg-type
text: str = next(iter(loader)).input_ids  # error: assignment
maximum = next(iter(loader)).doc_ids.max()  # error: union-attr
tokens = TokenLoader(stream)  # error: arg-type
data = MemoryMappedDataset(folder, seq_len=None)  # error: arg-type
batch: list[int] = collate(data)  # error: arg-type, assignment
sampler = MixtureSampler([0, 10], "0.5", 1, 0)  # error: arg-type
store: str = shardmill.open_store(folder)  # error: assignment
report = shardmill.build_store([], folder, spec=shardmill.BuildSpec())  # error: call-arg
