"""How much memory a build takes, and what fits into what there is.

In: how the work is to be done.  Out: how many processes fit, and how large a document may be.
Promise: memory is bounded by the number of processes and the largest document, never by the input;
a document that does not fit is refused by name and size: by its reader before it is whole, where
that can tell, else before it is encoded, which is where it would grow most.
Not here: measuring what was used (engines).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.arguments import available_memory
from shardmill.errors import BuildError, OptionError
from shardmill.protocols import Tokenizer
from shardmill.sources.batching import too_large
from shardmill.sources.clean import byte_lengths
from shardmill.tokenizer.identity import EngineSource

MIB = 2**20
PROCESS_BYTES = 512 * MIB
"""Of one process: libraries, a tokenizer, the batches that are read, encoded and written ahead."""
DOCUMENT_BYTES = {"tokenizers": 256, "sentencepiece": 80}
"""For each byte of the largest document, by the library that encodes it. Ordinary text takes half
of it; text of which every byte is a token takes all. A fast engine takes less, but is compared with
the library on every large document."""
PLAIN_BYTES = 16
"""The same without a library: as read, as text, as ids, as written."""
LEAST_DOCUMENT = MIB
"""A document that always fits: into what a process may take anyway."""
_UNKNOWN = 8 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Who may use how much."""

    workers: int
    total_bytes: int  # that the build takes when no document is large
    limit_bytes: int  # that one process may take

    def most_document(self, tokenizer: Tokenizer) -> int:
        """Bytes of text that one document may have."""
        source: EngineSource | None = getattr(tokenizer, "engine_source", None)
        library = None if source is None else source.library
        each = PLAIN_BYTES if library is None else DOCUMENT_BYTES.get(library, PLAIN_BYTES)
        return max((self.limit_bytes - PROCESS_BYTES) // each, LEAST_DOCUMENT)


def plan_memory(workers: int, memory: int | None, *, asked: bool) -> MemoryPlan:
    """As many of `workers` as fit into `memory` (None: what is free now); 1 is this process alone.

    Asked for by name, workers that do not fit are refused instead.
    """
    total = memory if memory is not None else free_memory()
    if memory is not None:
        fits = max(memory // PROCESS_BYTES - 1, 1)
        if memory < PROCESS_BYTES or (asked and workers > fits):
            asked_for = (
                f", {workers} workers take about {_needed(workers):,}"
                if asked and workers > 1
                else ""
            )
            raise OptionError(
                f"memory={memory:,}: one process takes about {_needed(1):,} bytes{asked_for}: "
                "allow that much" + (", or use fewer workers" if asked_for else "")
            )
        workers = min(workers, fits)
    num_processes = workers + 1 if workers > 1 else 1
    share = max(total // num_processes, PROCESS_BYTES + MIB)
    return MemoryPlan(
        workers=workers,
        total_bytes=_needed(workers),
        limit_bytes=share,
    )


def check_documents(texts: object, most: int, *, where: str) -> None:
    """Refuse a batch with a document over `most` bytes."""
    lengths = byte_lengths(texts)
    longest = int(lengths.max(initial=0))
    if longest > most:
        raise too_large(where, f"a document of {longest:,} bytes", most)


def no_memory(where: str) -> BuildError:
    """The one wording for memory that ran out."""
    return BuildError(
        f"{where}: the memory of this build is not enough for it; what is done is kept: allow more "
        "(memory=), use fewer workers, or cut what is large in the input, and go on with "
        "resume=True"
    )


def free_memory() -> int:
    """Bytes that can be had without swapping, as far as the system tells."""
    found = available_memory()
    return _UNKNOWN if found is None else found


def _needed(workers: int) -> int:
    return PROCESS_BYTES * (workers + 1 if workers > 1 else 1)
