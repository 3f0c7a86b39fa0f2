"""What the shares of a mixture promise, counted sample by sample."""

from __future__ import annotations

import numpy as np

from shardmill.sampling import Mixture
from shardmill.sampling.order import Indices


def assert_prefixes_keep_their_shares(mixture: Mixture, start: int, stop: int) -> None:
    """Before every sample of `start..stop` each source has come as often as its exact share says:
    rounded down or up in the first phase; in a later one within two samples since it started, since
    what was owed then is made up for. Each source's stream advances one by one, and `counts` agrees
    with `take` everywhere."""
    source, number = mixture.locate(np.arange(start, stop))
    counts = mixture.counts(start)
    for n, (own, at) in enumerate(zip(source.tolist(), number.tolist(), strict=True), start):
        assert at == counts[own], f"sample {n}: number {at} of source {own}, wanted {counts[own]}"
        counts[own] += 1
        _assert_in_quota(mixture, n + 1, counts)
    np.testing.assert_array_equal(mixture.counts(stop), counts)
    middle = (start + stop) // 2
    ahead = np.bincount(source[: middle - start], minlength=len(counts))
    np.testing.assert_array_equal(mixture.counts(middle), mixture.counts(start) + ahead)


def assert_sources_are_exhausted_before_they_repeat(mixture: Mixture, num_samples: int) -> None:
    """From the first sample on, an epoch of a source begins when the one before has given every
    item, and no item comes twice in an epoch."""
    samples = mixture.take(np.arange(num_samples))
    for source, num_items in enumerate(mixture.sizes):
        own = samples.source == source
        epoch, item = samples.epoch[own], samples.item[own]
        assert epoch.tolist() == [at // num_items for at in range(len(epoch))]
        for number in range(0 if not len(epoch) else int(epoch[-1]) + 1):
            seen = item[epoch == number].tolist()
            assert len(set(seen)) == len(seen)
            assert set(seen) <= set(range(num_items))


def _assert_in_quota(mixture: Mixture, n: int, counts: Indices) -> None:
    """counts: of each source before sample n, n > 0."""
    begin = max(start for start in mixture.phase_starts if start < n)
    since = (counts - mixture.counts(begin)).tolist()
    for source, (count, share) in enumerate(zip(since, mixture.shares(begin), strict=True)):
        exact = (n - begin) * share
        assert abs(count - exact) < (2 if begin else 1), (
            f"before sample {n}: source {mixture.names[source]!r} came {count} times since sample "
            f"{begin}, its share is {float(exact):.3f}"
        )
    assert sum(since) == n - begin
