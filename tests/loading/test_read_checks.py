"""A reader is measured only when it gives the batch that was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """(the module under test, a corpus, a batch of it)"""
    sys.path.insert(0, BENCHMARKS)
    try:
        import read_checks
        import read_corpus
    finally:
        sys.path.remove(BENCHMARKS)
    corpus = read_corpus.write_corpus(
        tmp_path_factory.mktemp("corpus") / "store", 100_000, shard_bytes=150_000
    )
    tokens = np.concatenate(corpus.maps()).astype(np.int64)
    windows = np.stack([tokens[start : start + 1025] for start in range(0, 32_000, 1000)])
    return read_checks, corpus, (windows[:, :-1].copy(), windows[:, 1:].copy())


def test_a_right_batch_passes_also_with_ignored_labels(bench):
    checks, corpus, (inputs, labels) = bench
    checks.check_batch((inputs, labels), corpus, "ours")
    ignored = np.where(inputs == 0, -100, labels)
    assert (ignored == -100).sum() > 20
    checks.check_batch((inputs, ignored, "more"), corpus, "ours")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x, y: (x[:, :-1], y[:, :-1]), r"inputs are int64 \(32, 1023\)"),
        (lambda x, y: (x, y.astype(np.int32)), r"labels are int32 \(32, 1024\)"),
        (lambda x, y: (x, np.repeat(y, 2, axis=1)[:, ::2]), "labels are a view with gaps"),
        (lambda x, y: (x, x), "labels are not the inputs one token on"),
        (lambda x, y: (x, np.full_like(y, -100)), "labels are not the inputs one token on"),
        (lambda x, y: (x + 40_000, y + 40_000), "not of the corpus"),
        (lambda x, y: (15_999 - x, 15_999 - y), "tokens do not occur in the corpus"),
    ],
)
def test_a_wrong_batch_is_refused_with_the_name_of_its_reader(bench, change, what):
    checks, corpus, batch = bench
    with pytest.raises(checks.WrongBatchError, match=f"some peer: .*{what}"):
        checks.check_batch(change(*batch), corpus, "some peer")
