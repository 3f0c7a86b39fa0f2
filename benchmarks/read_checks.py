"""Does a reader give what was asked for?

In: a batch and the corpus it should come from.  Out: nothing, or an error with the reader's name.
Promise: contiguous int64 inputs and labels of 32 x 1,024; labels are the inputs one token on; the
tokens are the corpus's. Nobody is measured who gives less.
Not here: order and completeness of epochs; the tests of each loader are about that.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from read_corpus import BATCH, EOS, SEQ_LEN, VOCAB_SIZE, Corpus

IGNORED = -100
_PIECE = 24  # tokens that are looked for; some peers put documents together in another order


class WrongBatchError(ValueError):
    """This reader cannot be compared."""


def check_batch(batch: Sequence[Any], corpus: Corpus, name: str) -> None:
    inputs, labels = (np.asarray(part) for part in batch[:2])
    for what, array in (("inputs", inputs), ("labels", labels)):
        if array.shape != (BATCH, SEQ_LEN) or array.dtype != np.int64:
            raise WrongBatchError(f"{name}: {what} are {array.dtype} {array.shape}")
        if not array.flags.c_contiguous:
            raise WrongBatchError(f"{name}: {what} are a view with gaps")
    known = (labels[:, :-1] != IGNORED) & (inputs[:, :-1] != EOS)
    if not known.any() or (labels[:, :-1] != inputs[:, 1:])[known].any():
        raise WrongBatchError(f"{name}: labels are not the inputs one token on")
    if inputs.min() < 0 or inputs.max() >= VOCAB_SIZE:
        raise WrongBatchError(f"{name}: ids {inputs.min()}..{inputs.max()}, not of the corpus")
    pieces = [row[place : place + _PIECE] for row in inputs[:4] for place in (100, 500, 900)]
    if not any(_occurs(corpus, piece) for piece in pieces):
        raise WrongBatchError(f"{name}: its tokens do not occur in the corpus")


def _occurs(corpus: Corpus, piece: np.ndarray[Any, np.dtype[np.int64]]) -> bool:
    wanted = piece.astype("<u2").tobytes()
    for path in corpus.shards:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as bytes_:
            place = bytes_.find(wanted)
            if place >= 0 and place % 2 == 0:
                return True
    return False
