"""Which rows make which batch: the permutation is one, looks like a random one and never changes; spans cut an epoch exactly."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prefetchshard.base.errors import ConfigError
from prefetchshard.ordering import epoch_order as order
from prefetchshard.ordering.epoch_order import LONGEST, EpochOrder, Permutation

Permute = Callable[[NDArray[np.int64]], NDArray[np.int64]]
Make = Callable[[int, int], Permute]  # (length, epoch) -> a permutation of range(length)

unhurried = settings(deadline=None, max_examples=60)
some_keys = st.lists(st.integers(0, 2**80), max_size=3)


def seeded(length: int, epoch: int) -> Permute:
    return Permutation(length, 1234, epoch)


def identity(length: int, epoch: int) -> Permute:
    return lambda positions: positions.copy()


def shift(length: int, epoch: int) -> Permute:
    by = int(np.random.default_rng(epoch).integers(length))
    return lambda positions: (positions + by) % length


def one_order_turned(length: int, epoch: int) -> Permute:
    base = Permutation(length, 1234)
    return lambda positions: (base(positions) + epoch) % length


# --- a bijection ---------------------------------------------------------------------------------------------------------------


@unhurried
@given(length=st.integers(0, 5000), key=some_keys)
@example(length=0, key=[])
@example(length=1, key=[0])
@example(length=4096, key=[0, 0])
@example(length=4097, key=[0, 0])
def test_every_row_comes_once(length: int, key: list[int]) -> None:
    rows = Permutation(length, *key)(np.arange(length))
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(np.sort(rows), np.arange(length))


@pytest.mark.parametrize("length", [10_007, 65_536, 2**17 + 1, 2**20 + 1])
def test_every_row_comes_once_in_longer_ones(length: int) -> None:
    np.testing.assert_array_equal(np.sort(Permutation(length, 5, 6)(np.arange(length))), np.arange(length))


@unhurried
@given(length=st.integers(4097, LONGEST), key=some_keys, data=st.data())
@example(length=LONGEST, key=[1], data=None)
@example(length=LONGEST - 1, key=[1], data=None)
@example(length=2**33, key=[1], data=None)
def test_windows_and_samples_of_huge_ones_are_distinct_and_in_range(length: int, key: list[int], data: st.DataObject | None) -> None:
    start = data.draw(st.integers(0, length - 1000)) if data else length - 1000
    window = np.arange(start, start + 1000)
    sample = np.random.default_rng(0).integers(length, size=3000)
    positions = np.unique(np.concatenate([window, sample, [0, length - 1]]))
    rows = Permutation(length, *key)(positions)
    assert rows.min() >= 0
    assert rows.max() < length
    assert len(np.unique(rows)) == len(positions)


def test_a_piece_of_the_positions_gives_that_piece_of_the_rows() -> None:
    for length in (1000, 5000, 2**40):
        permutation = Permutation(length, 3)
        whole = permutation(np.arange(1000))
        np.testing.assert_array_equal(permutation(np.arange(1000)[::-7]), whole[::-7])
        np.testing.assert_array_equal(permutation(np.arange(1000).reshape(10, 100)), whole.reshape(10, 100))
        assert permutation(np.array(5)) == whole[5]
        assert permutation(np.arange(0)).shape == (0,)


@pytest.mark.parametrize("length", [100, 5000])
def test_the_positions_asked_for_are_not_touched(length: int) -> None:
    positions = np.arange(100)
    Permutation(length, 3)(positions)
    np.testing.assert_array_equal(positions, np.arange(100))


@pytest.mark.parametrize(("length", "position"), [(0, 0), (1, 1), (10, 10), (10, -1), (5000, 5000), (5000, -1), (LONGEST, LONGEST)])
def test_a_position_outside_is_an_error(length: int, position: int) -> None:
    with pytest.raises(IndexError, match=f"outside range\\({length}\\)"):
        Permutation(length, 3)(np.array([position]))


# --- the same for ever ---------------------------------------------------------------------------------------------------------

# (length, *key) -> the rows at positions 0, 1, 2, 3, length // 2 and length - 1
GOLDEN: dict[tuple[int, ...], list[int]] = {
    (10, 0, 0): [6, 0, 3, 8, 1, 2],
    (10, 0, 1): [2, 4, 7, 3, 6, 9],
    (1000, 42, 3): [332, 830, 113, 304, 4, 919],
    (4096, 42, 3): [3915, 1263, 2810, 137, 997, 2388],
    (4097, 42, 3): [2911, 2637, 619, 2059, 1696, 876],
    (2**20 + 1, 0, 0): [267829, 939473, 28809, 779710, 588929, 1036142],
    (2**20 + 1, 2**64 - 1, 7): [795198, 410870, 156484, 614776, 395469, 325376],
    (2**33, 5, 0): [5456416402, 384333785, 753267796, 78028169, 4536843672, 6091517854],
    (2**40, 2**100, 1): [826797082097, 415015397278, 743109237100, 436408931834, 188836900215, 601251635297],
}


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_what_a_key_gives_never_changes(key: tuple[int, ...]) -> None:
    length = key[0]
    positions = np.array([0, 1, 2, 3, length // 2, length - 1])
    assert Permutation(*key)(positions).tolist() == GOLDEN[key]


def in_plain_integers(position: int, a: int, b: int, length: int, keys: list[int]) -> int:
    """Method 3 of Black and Rogaway, one position at a time."""
    right, left = divmod(position, a)
    for index, key in enumerate(keys):
        modulus = (a, b)[index % 2]
        word = (right + key) % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        bits = modulus.bit_length()
        left, right = right, (left + ((word >> bits) * modulus >> (64 - bits))) % modulus
    position = right * a + left
    return position if position < length else in_plain_integers(position, a, b, length, keys)


@pytest.mark.parametrize(("length", "a", "b"), [(4097, 72, 57), (LONGEST, 2**20, 2**20)])
def test_it_is_the_network_of_the_paper(length: int, a: int, b: int) -> None:
    # What is hashed: how many integers; of each, how many 32-bit words it has, then these.
    words = [3, 1, 4097, 1, 9, 0] if length == 4097 else [3, 2, 0, 256, 1, 9, 0]
    keys = [int(key) for key in np.random.SeedSequence(words).generate_state(8, np.uint64)]
    positions = np.append(np.arange(0, length, length // 500), length - 1)
    expected = [in_plain_integers(int(position), a, b, length, keys) for position in positions]
    assert Permutation(length, 9, 0)(positions).tolist() == expected


def test_no_two_keys_are_the_same_key() -> None:
    keys = [(), (0,), (0, 0), (7, 3), (3, 7), (3 * 2**32 + 7, 0), (3 * 2**32 + 7,), (2**64,), (0, 0, 1), (2**200,), (2**200 + 1,)]
    for length in (1000, 10_000):
        orders = {tuple(Permutation(length, *key)(np.arange(100)).tolist()) for key in keys}
        assert len(orders) == len(keys)


def test_a_length_or_key_out_of_range_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"length=-1: between 0 and 2\*\*40"):
        Permutation(-1)
    with pytest.raises(ConfigError, match="length=1099511627777"):
        Permutation(LONGEST + 1)
    with pytest.raises(ConfigError, match=r"key=\(1, -2\)"):
        Permutation(5, 1, -2)
    with pytest.raises(TypeError):
        Permutation(5, 1.5)  # type: ignore[arg-type]


# --- as good as random ---------------------------------------------------------------------------------------------------------
# Seeds are fixed, so each test passes always or never; a sound permutation would fail one of them in 10,000.

HONEST = 1e-4


def two_sided(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64] | float, freedom: int, scale: float = 1.0) -> float:
    """How likely counts at least as uneven, or as even, as these are; by Wilson and Hilferty's cube root approximation."""
    statistic = scale * float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return two_sided(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def positions_test(make: Make, length: int, keys: int = 3000) -> float:
    """Each row equally often at each position. Rows and columns of the table have fixed sums: (n - 1)**2 degrees of freedom."""
    counts = np.zeros((length, length), np.int64)
    positions = np.arange(length)
    for epoch in range(keys):
        counts[positions, make(length, epoch)(positions)] += 1
    return chi_square(counts, keys / length, (length - 1) ** 2, scale=(length - 1) / length)


def pairs_test(make: Make, length: int, keys: int = 3000) -> float:
    """Each pair of rows, or of tenths of the rows, equally often at two neighbouring positions."""
    places = min(length, 10)
    counts = np.zeros((places, places), np.int64)
    for epoch in range(keys):
        start = 37 * epoch % (length - 1)
        counts[tuple(make(length, epoch)(np.arange(start, start + 2)) * places // length)] += 1
    sizes = place_sizes(length, places)
    expected = (np.outer(sizes, sizes) - np.diag(sizes)) / (length * (length - 1)) * keys
    possible = expected > 0
    assert not counts[~possible].any()
    return chi_square(counts[possible], expected[possible], int(possible.sum()) - 1)


def place_sizes(length: int, places: int) -> NDArray[np.float64]:
    """How many rows each of the places has, row r being in place `r * places // length`."""
    return np.diff([-(-length * place // places) for place in range(places + 1)]).astype(np.float64)


def epochs_test(make: Make, length: int, keys: int = 3000) -> float:
    """By how much a position's row moves from one epoch to the next: equally often by each distance, or tenth of the length."""
    places = min(length, 10)
    counts = np.zeros(places, np.int64)
    for epoch in range(0, 2 * keys, 2):
        position = np.array([epoch % length])
        moved = (make(length, epoch + 1)(position) - make(length, epoch)(position)) % length
        counts[moved * places // length] += 1
    return chi_square(counts, place_sizes(length, places) / length * keys, places - 1)


def neighbours_test(make: Make, length: int = 5000, keys: int = 1500) -> float:
    """How many neighbours stay neighbours: about Poisson of mean 2. The sharpest test for a network of too few rounds."""
    positions = np.arange(length)
    kept = [int((abs(np.diff(make(length, epoch)(positions))) == 1).sum()) for epoch in range(keys)]
    return two_sided((float(np.mean(kept)) - 2 * (length - 1) / length) / math.sqrt(2 / keys))


def balance_test(make: Make, length: int = 5000, keys: int = 1500) -> float:
    """How much the share of even rows varies among the even positions: as in a draw without replacement."""
    drawn, even = length // 2, (length + 1) // 2
    share = even / length
    variance = drawn * share * (1 - share) * (length - drawn) / (length - 1)
    got = np.array([(make(length, epoch)(np.arange(0, length, 2)[:drawn]) % 2 == 0).sum() for epoch in range(keys)])
    ratio = float(((got - drawn * share) ** 2).mean()) / variance
    return two_sided((ratio - 1) / math.sqrt(2 / keys))


SMALL = [2, 3, 5, 7, 10, 16, 100]
LARGE = [4097, *(pytest.param(length, marks=pytest.mark.slow) for length in (5000, 2**20 + 1, 2**33)), 2**40]


@pytest.mark.parametrize("length", SMALL)
def test_each_row_comes_equally_often_at_each_position(length: int) -> None:
    assert positions_test(seeded, length) > HONEST


@pytest.mark.parametrize("length", SMALL[1:] + LARGE)
def test_each_pair_of_rows_comes_equally_often(length: int) -> None:
    assert pairs_test(seeded, length) > HONEST


@pytest.mark.parametrize("length", SMALL + LARGE)
def test_an_epoch_says_nothing_about_the_next(length: int) -> None:
    assert epochs_test(seeded, length) > HONEST


@pytest.mark.parametrize("length", [4097, *(pytest.param(length, marks=pytest.mark.slow) for length in (3000, 5000))])
def test_neighbours_part_and_classes_stay_balanced(length: int) -> None:
    assert neighbours_test(seeded, length) > HONEST
    assert balance_test(seeded, length) > HONEST


def test_all_orders_of_four_rows_come_equally_often() -> None:
    orders = [tuple(Permutation(4, 8, epoch)(np.arange(4)).tolist()) for epoch in range(4800)]
    counts = np.array([orders.count(one) for one in set(orders)])
    assert len(counts) == 24
    assert chi_square(counts, 200.0, 23) > HONEST


@pytest.mark.parametrize("length", [7, 100, pytest.param(2**20 + 1, marks=pytest.mark.slow)])
def test_the_tests_refuse_what_is_not_random(length: int) -> None:
    assert pairs_test(identity, length) < 1e-12
    assert pairs_test(shift, length) < 1e-12
    assert epochs_test(identity, length) < 1e-12
    assert epochs_test(one_order_turned, length) < 1e-12
    if length <= 100:  # a shift by a random distance is even over positions; that is what the pairs are for
        assert positions_test(identity, length) < 1e-12


def test_the_tests_refuse_a_network_of_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_ROUNDS", 4)
    assert neighbours_test(seeded) < 1e-12
    assert balance_test(seeded) < 1e-12


# --- batches of an epoch -------------------------------------------------------------------------------------------------------


def epoch_order(length: int, batch_size: int, *, drop: bool = False, shuffle: bool = False, seed: int = 0) -> EpochOrder:
    return EpochOrder(length, batch_size, drop=drop, shuffle=shuffle, seed=seed)


@pytest.mark.parametrize(
    ("length", "batch_size", "drop", "rows_done", "steps", "span"),
    [
        (10, 4, False, 0, 3, (0, 4)),
        (10, 4, False, 4, 2, (4, 8)),
        (10, 4, False, 8, 1, (8, 10)),
        (10, 4, False, 10, 0, None),
        (10, 4, True, 0, 2, (0, 4)),
        (10, 4, True, 8, 0, None),
        (10, 4, True, 10, 0, None),
        (10, 4, False, 3, 2, (3, 7)),
        (10, 4, False, 7, 1, (7, 10)),
        (10, 4, True, 2, 2, (2, 6)),
        (10, 4, True, 6, 1, (6, 10)),
        (10, 4, True, 7, 0, None),
        (12, 4, True, 8, 1, (8, 12)),
        (12, 4, False, 8, 1, (8, 12)),
        (3, 4, False, 0, 1, (0, 3)),
        (3, 4, True, 0, 0, None),
        (0, 4, False, 0, 0, None),
        (0, 4, True, 0, 0, None),
        (1, 1, True, 0, 1, (0, 1)),
    ],
)
def test_spans_and_steps(length: int, batch_size: int, drop: bool, rows_done: int, steps: int, span: tuple[int, int] | None) -> None:
    epoch = epoch_order(length, batch_size, drop=drop)
    assert epoch.steps(rows_done) == steps
    assert epoch.span(rows_done) == span


def rows_from(epoch_order: EpochOrder, epoch: int, rows_done: int) -> list[list[int]]:
    """The batches of an epoch from there on."""
    source = np.arange(epoch_order.length)
    batches: list[list[int]] = []
    while span := epoch_order.span(rows_done):
        batches.append(source[epoch_order.rows(epoch, *span)].tolist())
        rows_done = span[1]
    return batches


def joined(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


@unhurried
@given(
    length=st.integers(0, 300),
    sizes=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    drop=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**64),
    data=st.data(),
)
def test_batches_cut_one_order_whatever_their_size(
    length: int, sizes: tuple[int, int], drop: bool, shuffle: bool, seed: int, data: st.DataObject
) -> None:
    first, second = (epoch_order(length, size, drop=drop, shuffle=shuffle, seed=seed) for size in sizes)
    whole = joined(rows_from(epoch_order(length, 7, shuffle=shuffle, seed=seed), 3, 0))
    assert sorted(whole) == list(range(length))
    batches = rows_from(first, 3, 0)
    assert len(batches) == first.steps()
    assert joined(batches) == whole[: length - length % sizes[0] if drop else length]
    assert all(len(batch) == sizes[0] for batch in batches[: None if drop else -1])
    done = data.draw(st.integers(0, len(batches)).map(lambda count: len(joined(batches[:count]))))
    rest = rows_from(second, 3, done)
    assert len(rest) == second.steps(done)
    assert joined(rest) == whole[done : done + len(joined(rest))]
    assert len(whole) - done - len(joined(rest)) < (sizes[1] if drop else 1)


def test_rows_are_a_slice_in_source_order_else_indices() -> None:
    assert epoch_order(10, 4).rows(5, 4, 8) == slice(4, 8)
    rows = epoch_order(10, 4, shuffle=True, seed=3).rows(5, 4, 8)
    assert isinstance(rows, np.ndarray)
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(rows, Permutation(10, 3, 5)(np.arange(4, 8)))


def test_source_order_has_no_longest_length() -> None:
    assert epoch_order(2**50, 4).rows(0, 2**50 - 4, 2**50) == slice(2**50 - 4, 2**50)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    rows = [epoch_order(50, 50, shuffle=True, seed=seed).rows(epoch, 0, 50) for seed in range(5) for epoch in range(5)]
    assert len({tuple(np.r_[one].tolist()) for one in rows}) == 25


def test_threads_in_different_epochs_share_an_order() -> None:
    shared = epoch_order(200, 10, shuffle=True, seed=9)

    def read(task: int) -> bool:
        epoch, start = task % 5, task % 190
        return np.array_equal(np.r_[shared.rows(epoch, start, start + 10)], Permutation(200, 9, epoch)(np.arange(start, start + 10)))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(500)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_is_outside_the_epoch_is_an_error(shuffle: bool) -> None:
    epoch = epoch_order(10, 4, shuffle=shuffle)
    for start, stop in ((-1, 4), (8, 12), (5, 4)):
        with pytest.raises(IndexError, match="of an epoch of 10 rows"):
            epoch.rows(0, start, stop)
    for rows_done in (-1, 11):
        with pytest.raises(IndexError, match=f"rows_done={rows_done} of an epoch of 10 rows"):
            epoch.span(rows_done)
        with pytest.raises(IndexError, match=f"rows_done={rows_done}"):
            epoch.steps(rows_done)


def test_settings_that_cannot_work_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="batch_size=0: at least 1"):
        epoch_order(10, 0)
    with pytest.raises(ConfigError, match="length=-1: at least 0"):
        epoch_order(-1, 4)
    with pytest.raises(ConfigError, match="seed=-1: at least 0"):
        epoch_order(10, 4, shuffle=True, seed=-1)
    with pytest.raises(ConfigError, match="can be shuffled"):
        epoch_order(LONGEST + 1, 4, shuffle=True)


def test_it_is_a_frozen_value() -> None:
    epoch = epoch_order(5000, 4, shuffle=True, seed=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        epoch.length = 11  # type: ignore[misc]
    rows = epoch.rows(7, 0, 10)
    copy = pickle.loads(pickle.dumps(epoch))
    assert copy == epoch == epoch_order(5000, 4, shuffle=True, seed=2)
    assert hash(copy) == hash(epoch)
    assert copy != epoch_order(5000, 4, shuffle=True, seed=3)
    assert repr(epoch) == "EpochOrder(length=5000, batch_size=4, drop=False, shuffle=True, seed=2)"
    np.testing.assert_array_equal(copy.rows(7, 0, 10), rows)
