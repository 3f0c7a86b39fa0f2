"""Permutation: a bijection, the same numbers everywhere, and mixed like a true shuffle."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError
from shardmill.sampling import Permutation
from shardmill.testing.sampling import assert_is_bijection

SEEDS = st.integers(0, 2**64 - 1)
HUGE = [2**16, 2**16 + 1, 10**9, 2**31, 2**32 + 1, 10**12, 2**53 + 1, 2**62, 2**63 - 1]


@settings(deadline=None, max_examples=80)
@given(n=st.integers(0, 3000), seed=SEEDS)
def test_every_item_of_a_small_order_comes_once(n: int, seed: int) -> None:
    assert_is_bijection(Permutation(n, seed))


@settings(deadline=None, max_examples=40)
@given(n=st.sampled_from(HUGE) | st.integers(20_001, 2**63 - 1), seed=SEEDS)
def test_a_huge_order_has_an_exact_inverse(n: int, seed: int) -> None:
    assert_is_bijection(Permutation(n, seed, "x"), num_scattered=500)


@pytest.mark.parametrize("n", [2**16, 2**16 + 1, 100_003])
def test_a_middle_order_is_a_bijection_at_every_index(n: int) -> None:
    items = Permutation(n, 5).take(np.arange(n))
    assert np.array_equal(np.sort(items), np.arange(n))


GOLDEN = {
    (10, 7): [4, 6, 0, 5, 9, 7, 2, 8],
    (1000, 7, "wiki", "epoch", 3): [185, 926, 639, 60, 459, 696, 96, 325],
    (10**6, 7): [176570, 210459, 349795, 774161, 125716, 156901, 245256, 39401],
    (10**12, 7, "a"): [
        703467006455, 816482083602, 242541465909, 812444826038,
        231974010601, 863072538526, 855826888830, 84323526249,
    ],
    (2**63 - 1, 7): [
        2713937905437409689, 2491600919854361224, 697862813032964294, 3948973717784107203,
        7885915864798197618, 7584524394675420332, 3263774499584635234, 4352075347684747194,
    ],
}  # fmt: skip


@pytest.mark.parametrize("address", GOLDEN)
def test_the_numbers_never_change(address: tuple[int, ...]) -> None:
    order = Permutation(*address)
    assert order.take(range(8)).tolist() == GOLDEN[address]
    assert [order[index] for index in range(8)] == GOLDEN[address]
    assert order.find(GOLDEN[address]).tolist() == list(range(8))


def test_seed_path_and_size_each_make_another_order() -> None:
    addresses = [
        (1000, 1, 1), (1000, 2, 0), (1000, 1, "1"), (1000, 1), (1000, 1, 1, 0), (1000, 1, "a", "b"),
        (1000, 1, "ab"), (1000, 1, "a", "b", 0), (1001, 1, 1),
    ]  # fmt: skip
    orders = [Permutation(*address).take(np.arange(999)) for address in addresses]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).mean() < 0.02
    prints = {Permutation(*address).fingerprint for address in addresses}
    assert len(prints) == len(addresses)


def test_any_integer_dtype_is_accepted_and_nothing_else() -> None:
    order = Permutation(200, 3)
    expected = order.take([0, 5, 199])
    for dtype in ("i2", "u1", "i4", "u4", "i8", "u8"):
        given_ = np.array([0, 5, 199], dtype)
        assert order.take(given_).tolist() == expected.tolist()
        assert given_.tolist() == [0, 5, 199]
    assert Permutation(np.int32(200), np.uint8(3)).take([0, 5, 199]).tolist() == expected.tolist()
    assert order.take([]).tolist() == []
    with pytest.raises(OptionError, match="indices have dtype float64, wanted integers"):
        order.take([1.0])
    with pytest.raises(OptionError, match=r"indices have shape \(2, 1\), wanted one dimension"):
        order.take([[1], [2]])


@pytest.mark.parametrize("index", [-1, 200, 2**63 - 1, -(2**63)])
def test_an_index_outside_is_refused(index: int) -> None:
    order = Permutation(200, 3)
    for call in (order.take, order.find):
        with pytest.raises(IndexError, match=f"index {index:,} of 200"):
            call([3, index])
    with pytest.raises(IndexError, match=f"index {index:,} of 200"):
        order[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0), "n=-1: wanted at least 0"),
        ((2**63, 0), r"n=9,223,372,036,854,775,808: wanted at most 2\*\*63 - 1"),
        ((1.5, 0), "n=1.5.*: wanted a whole number"),
        ((True, 0), "n=True.*: wanted a whole number"),
        ((5, -1), "seed=-1: wanted at least 0"),
        ((5, 2**64), r"seed=18,446,744,073,709,551,616: wanted less than 2\*\*64"),
        ((5, "0"), "seed='0'.*: wanted a whole number"),
        ((5, None), "seed=None.*: wanted a whole number"),
        ((5, 0, 1.0), "path part 1.0: wanted a name or a whole number"),
        ((5, 0, True), "path part True: wanted a name or a whole number"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Permutation(*arguments)  # type: ignore[arg-type]


def test_orders_of_zero_items_and_of_one() -> None:
    assert len(Permutation(0, 1)) == 0
    assert Permutation(0, 1).take([]).tolist() == []
    assert Permutation(1, 1).take([0, 0]).tolist() == [0, 0]


def test_a_trillion_items_take_no_memory() -> None:
    tracemalloc.start()
    order = Permutation(10**12, 0)
    items = order.take(np.arange(10**12 - 1000, 10**12))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(items.tolist())) == 1000
    assert peak < 1_000_000


def test_an_order_survives_pickling() -> None:
    order = Permutation(10**6, 3, "x")
    again = pickle.loads(pickle.dumps(order))
    assert again.take(range(100)).tolist() == order.take(range(100)).tolist()
    assert (again.fingerprint, repr(again)) == (order.fingerprint, "Permutation(1000000, 3, 'x')")


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_few_items_are_equally_likely(n: int) -> None:
    """Chi-square over all n! orders; the bound is passed by chance less than once in 10**6."""
    kinds = dict.fromkeys(itertools.permutations(range(n)), 0)
    num_seeds = 60 * len(kinds)
    for seed in range(num_seeds):
        kinds[tuple(Permutation(n, seed).take(range(n)).tolist())] += 1
    freedom = len(kinds) - 1
    chi2 = sum((count - 60) ** 2 / 60 for count in kinds.values())
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5 + 20


@pytest.mark.parametrize("n", [37, 1000, 4096])
def test_every_item_comes_everywhere_equally_often(n: int) -> None:
    """Over many seeds: the item at an index, and how far the next one is from it, are even."""
    num_seeds = 40 * 37
    chosen = [Permutation(n, seed).take([0, 1, n // 2, n - 1]) for seed in range(num_seeds)]
    items = np.array(chosen)
    for column in (*items.T, (items[:, 1] - items[:, 0]) % n - 1):
        counts = np.bincount(column * 37 // n, minlength=37)
        chi2 = ((counts - 40) ** 2 / 40).sum()
        assert chi2 < 36 + 5 * 72**0.5 + 20


@pytest.mark.parametrize("n", [20_000, 2**20, 10**9, 10**12])
def test_neighbours_are_no_more_alike_than_in_a_true_shuffle(n: int) -> None:
    """Pairs at any distance fill a 16 x 16 grid evenly, and do not correlate."""
    for seed in range(4):
        where = Permutation(n, seed).take(np.arange(20_000)) / n
        cell = (where * 16).astype(int)
        for lag in (1, 2, 3, 7, 16, 32, 64, 128, 1024, 4096):
            pairs = np.bincount(cell[:-lag] * 16 + cell[lag:], minlength=256)
            even = (20_000 - lag) / 256
            assert ((pairs - even) ** 2 / even).sum() < 255 + 6 * 510**0.5
            assert abs(np.corrcoef(where[:-lag], where[lag:])[0, 1]) < 0.05


def test_orders_of_neighbouring_epochs_and_seeds_are_unrelated() -> None:
    n = 100_003
    first = Permutation(n, 5, "epoch", 0).take(np.arange(n))
    for other in (Permutation(n, 5, "epoch", 1), Permutation(n, 6, "epoch", 0)):
        assert abs(np.corrcoef(first, other.take(np.arange(n)))[0, 1]) < 0.02
        assert (first == other.take(np.arange(n))).sum() < 12


@pytest.mark.parametrize("bits", [16, 30, 40])
def test_flipping_one_bit_of_an_index_flips_half_of_the_items_bits(bits: int) -> None:
    index = Permutation(2**bits, 9).take(np.arange(4000) % 2**bits)  # scattered indices
    for seed in range(3):
        order = Permutation(2**bits, seed, "avalanche")
        for bit in range(bits):
            changed = order.take(index) ^ order.take(index ^ (1 << bit))
            flips = [((changed >> out) & 1).mean() for out in range(bits)]
            assert abs(np.array(flips) - 0.5).max() < 0.06
