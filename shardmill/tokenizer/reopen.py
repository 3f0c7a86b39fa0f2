"""Open in a worker the engine that its parent proved.

In: the tokenizer, and the parent's `produced_by`.  Out: an encoder that watches its sample as ever.
Promise: the same engine in the same version, or an error that names both; nothing is proved again,
so it opens at once. Engines themselves do not travel: the tokenizer does, by its model.
Not here: choosing and proving (`choose`).

Threads. A worker has n of them when `thread_limits(n)` is in its environment before it starts, for
each library reads its variable once:

    fastokens       FASTOKENS_BPE_THREADS, at its first call
    tokenizers      RAYON_NUM_THREADS, at its first batch, which opening one already is; and
                    TOKENIZERS_PARALLELISM, where "false" is no thread beside the caller's
    sentencepiece   no variable: SentencePieceTokenizer(num_threads=n), 1 unless said, which travels
    gigatoken       runs in the caller's thread
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.errors import OptionError, TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.records import JSON
from shardmill.tokenizer.choose import ChosenEncoder, EngineCheck
from shardmill.tokenizer.fast import FastEngine, open_fast
from shardmill.tokenizer.identity import EngineSource


def reopen_encoder(
    tokenizer: Tokenizer, produced_by: Mapping[str, JSON], *, check: EngineCheck = "sample"
) -> ChosenEncoder:
    """The encoder that `choose_encoder` gave for an equal tokenizer in another process.

    `produced_by` is its record, as it is or out of JSON. Every worker compares its own sample, at
    least one byte in 2,048 of what it encodes. For its threads see above.
    """
    if check not in ("sample", "full"):
        raise OptionError(f"check={check!r}: wanted sample or full")
    engine, reference = produced_by.get("engine"), produced_by.get("reference")
    if not isinstance(engine, str) or not isinstance(reference, str):
        raise TokenizerError(
            f"no record of a chosen engine: {dict(produced_by)!r:.200}; wanted the produced_by of "
            "the encoder that the parent chose"
        )
    fast = None if engine == reference else open_fast(tokenizer, engine)
    found, wanted = _versions(tokenizer, fast), produced_by.get("versions")
    if found != wanted:
        raise TokenizerError(
            f"the engine was proved with {wanted}, but this process has {found}; install the same "
            "versions everywhere, or choose and prove anew"
        )
    return ChosenEncoder(tokenizer, fast, check=check, produced_by=dict(produced_by))


def thread_limits(num_threads: int) -> dict[str, str]:
    """Environment variables for a process whose engines shall have so many threads."""
    if num_threads < 1:
        raise OptionError(f"num_threads={num_threads}: wanted 1 or more")
    return {
        "FASTOKENS_BPE_THREADS": str(num_threads),
        "RAYON_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "true" if num_threads > 1 else "false",
    }


def _versions(tokenizer: Tokenizer, fast: FastEngine | None) -> dict[str, JSON]:
    source: EngineSource | None = getattr(tokenizer, "engine_source", None)
    found: dict[str, JSON] = {} if fast is None else {fast.name: fast.version}
    if source is not None:
        found[source.library] = source.library_version
    return found
