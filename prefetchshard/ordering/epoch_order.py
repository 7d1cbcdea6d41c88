"""Which rows make which batch of an epoch: pure arithmetic, in memory that does not grow with the source.

The order of an epoch is a function of (length, seed, epoch) alone. Batch sizes, workers, devices and processes only cut it into
pieces, so none of them changes which row follows which.

What a key gives here is fixed for ever, on every platform and NumPy version: saved states hold positions in an order, not the
order itself. Hence only what NumPy promises never to change is used: `SeedSequence` and the raw words of a bit generator. The
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
    # An array without axes: as an operand it costs half of what a NumPy scalar or an int does, at the size of a batch.
    return np.array(value, dtype=np.uint64)


_MIX: Final = tuple((_constant(shift), _constant(factor)) for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)))


def seed_sequence(*numbers: int) -> np.random.SeedSequence:
    """The seeds of several non-negative integers of any size.

    `SeedSequence([2**32 + 7, 0])` and `SeedSequence([7, 1])` are the same, as it joins the 32-bit words of its integers and pads
    with zeros. With their count in front, and before each the count of its words, no two lists are the same.
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
    Domains", CT-RSA 2002. It shuffles well; it hides nothing from an adversary.

    Args:
        length: rows, at most 2**40.
        key: non-negative integers of any size, e.g. a seed and an epoch. The length is part of the key too: the orders of two
            lengths have nothing to do with each other.

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
        """Where each position is sent.

        Args:
            positions: integers in `range(length)`, of any shape; left as they are.

        Returns:
            A new array of the same shape; distinct positions give distinct rows.

        Raises:
            IndexError: a position is outside.
        """
        words = positions.astype(np.uint64).reshape(-1)  # what is negative becomes huge
        if words.size and int(words.max()) >= self.length:
            raise IndexError(f"a position is outside range({self.length})")
        return self._forward(words).view(np.int64).reshape(positions.shape)


class _Table:
    """The order that sorts as many random words (method 1 of the paper): a tie, the only bias, has a chance below 2**-40."""

    def __init__(self, length: int, seeds: np.random.SeedSequence) -> None:
        self._rows = np.argsort(np.random.Philox(seeds).random_raw(length), kind="stable").astype(np.uint64)

    def __call__(self, words: _Words) -> _Words:
        return self._rows[words.view(np.int64)]


class _Feistel:
    """A word below a*b is a pair (left below a, right below b); each round adds a hash of one half to the other.

    Of the factors near the square root of the length those with the least excess a*b - length are taken, so that hardly a word
    has to walk. Four rounds are not enough: at lengths near 5,000 they keep too many neighbours together. Six do so by a hair.
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
        # The rounds are even in number: each half is on its own side again.
        right *= self._a
        right += left
        return right


class _Round:
    """left = (left + hash(right)) mod modulus, the hash being the SplitMix64 finaliser of a keyed word.

    Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, with the constants of Stafford's mix 13.
    The finaliser's last step, which repairs low bits, is left out: the reduction uses the high ones.
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
        # Multiply and shift to [0, modulus), with as many high bits as leave room for the modulus in 64.
        np.right_shift(hashed, self._drop_bits, out=hashed)
        np.multiply(hashed, self._modulus, out=hashed)
        np.right_shift(hashed, self._keep_bits, out=hashed)
        np.add(left, hashed, out=left)
        np.subtract(left, self._modulus, out=hashed)  # wraps to a huge word where left was below it already
        np.minimum(left, hashed, out=left)


@dataclass(frozen=True)
class EpochOrder:
    """Which rows make which batch of an epoch.

    A place in an epoch is a count of rows done, never of batches: a run can go on from any row with another batch size.

    Args:
        length: rows of the source.
        batch_size: rows of a global batch.
        drop: whether a last batch that is not full is left out.
        shuffle: whether each epoch has an order of its own; else all have that of the source.
        seed: a non-negative integer of any size.

    Raises:
        ConfigError: a number is out of range.

    Thread safety: immutable but for a cache, which is one reference to a tuple; call it from any thread.
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
            self._permutation(0)  # a length that cannot be shuffled is told now, not in a reader

    def steps(self, rows_done: int = 0) -> int:
        """Batches still to come in an epoch of which `rows_done` rows were consumed."""
        left = self._left(rows_done)
        return left // self.batch_size if self.drop else -(-left // self.batch_size)

    def span(self, rows_done: int) -> tuple[int, int] | None:
        """Positions `[start, stop)` of the batch that follows `rows_done` rows; None at the epoch's end.

        With `drop` the end is where less than a batch is left.
        """
        left = self._left(rows_done)
        if left < (self.batch_size if self.drop else 1):
            return None
        return rows_done, rows_done + min(left, self.batch_size)

    def rows(self, epoch: int, start: int, stop: int) -> NDArray[np.int64] | slice:
        """The rows of the source at positions `[start, stop)` of an epoch.

        Returns:
            A slice where the order is that of the source; else indices of shape `(stop - start,)`.

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
        recent = self._recent  # read once: another thread may put a new tuple in its place, at worst losing an entry
        for known, permutation in recent:
            if known == epoch:
                return permutation
        permutation = Permutation(self.length, self.seed, epoch)
        object.__setattr__(self, "_recent", ((epoch, permutation), *recent)[:2])
        return permutation
