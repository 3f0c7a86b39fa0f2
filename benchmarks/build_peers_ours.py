"""Our own build, as one of the contenders.

In: a corpus, an engine.  Out: seconds, of them those of the proof, and the documents that are in
the store.
Promise: `build_store` as anybody calls it, with a worker for each core.
Not here: which thread did what (build_peers_shares.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from build_peers_corpus import Corpus

from shardmill.building import BuildReport, BuildSpec, Feed, build_store
from shardmill.building import worker as engine_module
from shardmill.machine import num_cores
from shardmill.records import Ragged
from shardmill.sources import open_source
from shardmill.store import open_store
from shardmill.store.readers import open_tokens
from shardmill.tokenizers import ChosenEncoder, EngineChoice, choose_encoder, open_tokenizer

OURS = {"fast": "large", "reference": "small"}  # engine -> how much it gets
_SPLIT = "train"


@dataclass(slots=True)
class Proof:
    """The one part of a build that takes the same seconds for a megabyte and for a terabyte."""

    seconds: float = 0.0
    cpu: float = 0.0

    def __call__(self, *arguments: object, **options: object) -> ChosenEncoder:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        chosen = choose_encoder(*arguments, **options)  # type: ignore[arg-type]
        self.seconds += time.perf_counter() - begin
        self.cpu += time.process_time() - begin_cpu
        return chosen


def build(corpus: Corpus, engine: str, out: Path) -> tuple[BuildReport, Proof]:
    """One store at `out`, from the opening of the tokenizer on."""
    proof = Proof()
    engine_module.choose_encoder = proof  # type: ignore[assignment]
    size = OURS[engine]
    report = build_store(
        [Feed(source=open_source(list(corpus.files(size))), fill=((_SPLIT, None),))],
        out,
        tokenizer=open_tokenizer(corpus.own_model),
        spec=BuildSpec(append_eot=True),
        engine=cast(EngineChoice, engine),
        # `small` would be built by one process, with threads in the engine; a real corpus is not.
        workers=num_cores(),
    )
    return report, proof


def documents(corpus: Corpus, engine: str, out: Path) -> Ragged:
    """The documents of `small` in the store, which are some of those of `large`."""
    store = open_store(out)
    with open_tokens(store, _SPLIT) as space:
        values = space.read(0, store.num_tokens(_SPLIT))
    edges = [*store.document_starts(_SPLIT).tolist(), len(values)]
    every = corpus.times if OURS[engine] == "large" else 1
    return Ragged.from_sequences(
        [values[edges[one] : edges[one + 1]] for one in range(0, len(edges) - 1, every)],
        values.dtype,
    )
