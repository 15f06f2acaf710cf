"""Philox4x32-10 in plain arrays: what the random operands of kernels are.

A counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four
random words are a function of a 128-bit counter and a 64-bit key, so that any element's number is
found without those before it, and the backward of a kernel draws what its forward drew.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any], xp: Any = mx) -> list[Any]:
    """Four words of each counter, as integers below 2^32 in uint64 arrays.

    `counter` and `key` are words, lowest first, in uint64 arrays that broadcast; `xp` is the array
    namespace.
    """

    def word(value: int) -> Any:
        return xp.array(value, dtype=xp.uint64)

    low = word(0xFFFFFFFF)
    a, b, c, d = counter
    for i in range(_ROUNDS):
        k0, k1 = ((k + word(i * step)) & low for k, step in zip(key, _KEY_STEPS, strict=True))
        p, q = a * word(_MULTIPLIERS[0]), c * word(_MULTIPLIERS[1])
        a, b, c, d = (q >> word(32)) ^ b ^ k0, q & low, (p >> word(32)) ^ d ^ k1, p & low
    return [a, b, c, d]


def uniform(index: Any, counter: Any, key: Any, xp: Any = mx) -> Any:
    """A float32 number in [0, 1) per index, of the stream that starts at `counter`.

    Counter `counter` + i div 8 under the 64-bit `key` gives number i: its words a, b, c, d are
    numbers 0 to 3 of the eight, and numbers 4 to 7 the same words with their halves exchanged. The
    high 24 bits of a word are the number. Numbers of one word are each uniform, and depend on each
    other only where one half is that of the threshold which they are compared with: 2^-16 of the
    time.
    """

    def wide(value: Any) -> Any:
        return xp.array(value).astype(xp.uint64)

    low, half = wide(0xFFFFFFFF), wide(32)
    index, counter, key = wide(index), wide(counter), wide(key)
    # All three get one shape and, under `mx.vmap`, are all mapped: MLX gives the result of a
    # bitwise operation on a mapped array and another one the shape of the first.
    none = index * wide(0) + counter * wide(0) + key * wide(0)
    index, counter, key = index + none, counter + none, key + none
    at = counter + (index >> wide(3))
    zero = at ^ at
    a, b, c, d = philox((at & low, at >> half, zero, zero), (key & low, key >> half), xp)
    place = index & wide(3)
    word = xp.where(place < 2, xp.where(place == 0, a, b), xp.where(place == 2, c, d))
    exchanged = (word << wide(16)) & low | word >> wide(16)
    word = xp.where((index & wide(4)) == 0, word, exchanged)
    return (word >> wide(8)).astype(xp.float32) * 2.0**-24
