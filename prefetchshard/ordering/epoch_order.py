"""The order of rows in an epoch, and their division into batches: pure arithmetic, in memory that does not grow with the source.

The order of an epoch is a function of (length, seed, epoch) alone. Batch size, workers, devices and processes only cut it into pieces;
none of them changes the order.

The permutation of a given key must never change, on any platform or NumPy version: saved states hold positions in an order, not the
order itself. So this file uses only what NumPy promises never to change: `SeedSequence` and the raw words of a bit generator. The
methods of `numpy.random.Generator` carry no such promise (NEP 19).
"""

from __future__ import annotations

import math
import operator
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from prefetchshard.base.errors import ConfigError

LONGEST: Final = 2**40
"""The most rows that can be shuffled."""
_TABLE_ROWS: Final = 4096
_ROUNDS: Final = 8

_Words = NDArray[np.uint64]


def _constant(value: int) -> _Words:
    # A 0-d array: for arrays of a batch's size it is half as expensive an operand as a NumPy scalar or an int.
    return np.array(value, dtype=np.uint64)


_MIX: Final = tuple((_constant(shift), _constant(factor)) for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)))


def seed_sequence(*numbers: int) -> np.random.SeedSequence:
    """A `SeedSequence` that differs for any two lists of non-negative integers of any size.

    `SeedSequence` joins the 32-bit words of its integers and pads with zeros, so `[2**32 + 7, 0]` and `[7, 1]` give the same one. Putting
    the number of integers first, and before each integer the number of its words, makes the encoding unique.
    """
    words = [len(numbers)]
    for number in numbers:
        count = -(-number.bit_length() // 32)
        words.append(count)
        words.extend(number >> 32 * place & 0xFFFFFFFF for place in range(count))
    return np.random.SeedSequence(words)


class Permutation:
    """A permutation of `range(length)` from a key, in memory that does not grow with the length.

    Up to 4,096 rows it is a table, uniform over all permutations. Above, it is a generalised Feistel network over a domain
    slightly larger than the length, with cycle walking: methods 2 and 3 of Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", CT-RSA 2002. It shuffles well, but is not cryptographically secure.

    Args:
        length: rows, at most 2**40.
        key: non-negative integers of any size, e.g. a seed and an epoch. The length is part of the key too, so the orders of two
            lengths are unrelated.

    Raises:
        ConfigError: the length or the key is out of range.

    Thread safety: immutable; call it from any thread.
    """

    __slots__ = ("_forward", "length")

    def __init__(self, length: int, *key: int) -> None:
        length, *numbers = map(operator.index, (length, *key))
        if not 0 <= length <= LONGEST:
            raise ConfigError(f"length={length}: between 0 and 2**40 = {LONGEST} rows can be shuffled")
        if min(numbers, default=0) < 0:
            raise ConfigError(f"key={tuple(numbers)}: the integers of a key cannot be negative")
        self.length = length
        seeds = seed_sequence(length, *numbers)
        self._forward = _Table(length, seeds) if length <= _TABLE_ROWS else _Feistel(length, seeds)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row at each position.

        Args:
            positions: integers in `range(length)`, of any shape; not modified.

        Returns:
            A new array of the same shape; distinct positions give distinct rows.

        Raises:
            IndexError: a position is out of range.
        """
        words = positions.astype(np.uint64).reshape(-1)  # negative positions become huge
        if words.size and int(words.max()) >= self.length:
            raise IndexError(f"a position is outside range({self.length})")
        return self._forward(words).view(np.int64).reshape(positions.shape)


class _Table:
    """The permutation that sorts random words (method 1 of the paper). The only bias is a tie, with a probability below 2**-40."""

    def __init__(self, length: int, seeds: np.random.SeedSequence) -> None:
        self._rows = np.argsort(np.random.Philox(seeds).random_raw(length), kind="stable").astype(np.uint64)

    def __call__(self, words: _Words) -> _Words:
        return self._rows[words.view(np.int64)]


class _Feistel:
    """A word below a*b is a pair (left below a, right below b); each round adds a hash of one half to the other.

    The factors a and b are those near the square root of the length with the least excess a*b - length, so that few words need cycle
    walking. Four rounds are too few: at lengths near 5,000 they leave too many neighbours together. Six are just enough.
    """

    def __init__(self, length: int, seeds: np.random.SeedSequence) -> None:
        root = math.isqrt(length - 1) + 1
        a = min(range(root, root + min(root // 4, 64)), key=lambda candidate: -length % candidate)
        b = -(-length // a)
        self._a, self._length = _constant(a), _constant(length)
        keys = seeds.generate_state(_ROUNDS, np.uint64)
        self._rounds = tuple(_Round(int(key), (a, b)[index % 2]) for index, key in enumerate(keys))

    def __call__(self, words: _Words) -> _Words:
        words = self._encipher(words)
        walking = np.flatnonzero(words >= self._length)
        while walking.size:
            words[walking] = self._encipher(words[walking])
            walking = walking[words[walking] >= self._length]
        return words

    def _encipher(self, words: _Words) -> _Words:
        right = np.floor_divide(words, self._a)
        left = words - right * self._a
        hashed, spare = np.empty_like(words), np.empty_like(words)
        for one_round in self._rounds:
            one_round.add_hash(left, right, hashed, spare)
            left, right = right, left
        # The number of rounds is even, so the halves are back on their own sides.
        right *= self._a
        right += left
        return right


class _Round:
    """left = (left + hash(right)) mod modulus, the hash being the SplitMix64 finaliser of a keyed word.

    Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, with the constants of Stafford's mix 13.
    The finaliser's last step, which improves the low bits, is left out, as the reduction uses the high bits.
    """

    def __init__(self, key: int, modulus: int) -> None:
        self._key, self._modulus = _constant(key), _constant(modulus)
        self._drop_bits, self._keep_bits = _constant(modulus.bit_length()), _constant(64 - modulus.bit_length())

    def add_hash(self, left: _Words, right: _Words, hashed: _Words, spare: _Words) -> None:
        np.add(right, self._key, out=hashed)
        for shift, factor in _MIX:
            np.right_shift(hashed, shift, out=spare)
            np.bitwise_xor(hashed, spare, out=hashed)
            np.multiply(hashed, factor, out=hashed)
        # Multiply and shift to [0, modulus): keep only as many high bits that the product fits into 64.
        np.right_shift(hashed, self._drop_bits, out=hashed)
        np.multiply(hashed, self._modulus, out=hashed)
        np.right_shift(hashed, self._keep_bits, out=hashed)
        np.add(left, hashed, out=left)
        np.subtract(left, self._modulus, out=hashed)  # wraps to a huge word if left was below the modulus already
        np.minimum(left, hashed, out=left)


@dataclass(frozen=True)
class EpochOrder:
    """The rows of each batch of an epoch.

    A place in an epoch is counted in rows, never in batches, so a run can resume at any row with another batch size.

    Args:
        length: rows of the source.
        batch_size: rows of a global batch.
        drop: whether an incomplete last batch is dropped.
        shuffle: whether each epoch has its own random order; else all have the order of the source.
        seed: a non-negative integer of any size.

    Raises:
        ConfigError: a number is out of range.

    Thread safety: immutable except for a cache, a single reference to a tuple; call it from any thread.
    """

    length: int
    batch_size: int
    _: KW_ONLY
    drop: bool
    shuffle: bool
    seed: int
    _recent: tuple[tuple[int, Permutation], ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("length", 0), ("batch_size", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: at least {least}")
        if self.shuffle:
            self._permutation(0)  # raises now, not in a reader thread, if the length is too large

    def steps(self, rows_done: int = 0) -> int:
        """The number of batches left in an epoch after `rows_done` rows."""
        left = self._left(rows_done)
        return left // self.batch_size if self.drop else -(-left // self.batch_size)

    def span(self, rows_done: int) -> tuple[int, int] | None:
        """Positions `[start, stop)` of the batch after `rows_done` rows; None at the epoch's end.

        With `drop`, the epoch ends when less than a full batch is left.
        """
        left = self._left(rows_done)
        if left < (self.batch_size if self.drop else 1):
            return None
        return rows_done, rows_done + min(left, self.batch_size)

    def rows(self, epoch: int, start: int, stop: int) -> NDArray[np.int64] | slice:
        """The rows of the source at positions `[start, stop)` of an epoch.

        Returns:
            A slice if there is no shuffling; else indices of shape `(stop - start,)`.

        Raises:
            IndexError: the positions are not within the epoch.
        """
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"positions [{start}, {stop}) of an epoch of {self.length} rows")
        if not self.shuffle:
            return slice(start, stop)
        return self._permutation(epoch)(np.arange(start, stop, dtype=np.int64))

    def _left(self, rows_done: int) -> int:
        if not 0 <= rows_done <= self.length:
            raise IndexError(f"rows_done={rows_done} of an epoch of {self.length} rows")
        return self.length - rows_done

    def _permutation(self, epoch: int) -> Permutation:
        recent = self._recent  # read once: another thread may replace the tuple, which at worst loses a cache entry
        for known, permutation in recent:
            if known == epoch:
                return permutation
        permutation = Permutation(self.length, self.seed, epoch)
        object.__setattr__(self, "_recent", ((epoch, permutation), *recent)[:2])
        return permutation
