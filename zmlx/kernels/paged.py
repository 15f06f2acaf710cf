"""Attention over keys and values that lie in blocks of a pool (Kwon et al. 2023).

    out = decode_attention(q, k_cache[block_table], v_cache[block_table], context_lens)

Bytes: the blocks that a batch has, once per group of heads that share them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..arguments import FLOATING, INDICES, Argument, check_array
from ..registry import Case, Op, register
from ..remembered import Remembered, Way
from .attention import check_options
from .decode import decode_attention_reference
from .decode_cache import NAMES, PAGED, Cache
from .decode_launch import (
    OPTIONS,
    SHAPELESS,
    SINKS,
    attending,
    check_indices,
    numbers_of,
    paged_dense,
    same_dtype,
)


def paged_attention_reference(
    q: mx.array, k_cache: mx.array, v_cache: mx.array, block_table: mx.array,
    context_lens: mx.array, sinks: mx.array | None = None, *, scale: float | None = None,
    causal: bool = False, window: int | None = None, softcap: float | None = None, xp: Any = mx,
) -> Any:  # fmt: skip
    """paged_attention in plain MLX."""
    k, v = paged_dense(k_cache, block_table), paged_dense(v_cache, block_table)
    return decode_attention_reference(
        q, k, v, context_lens, sinks, scale=scale, causal=causal, window=window, softcap=softcap,
        xp=xp,
    )  # fmt: skip


def _paged(
    q: mx.array, k_cache: mx.array, v_cache: mx.array, block_table: mx.array,
    context_lens: mx.array, sinks: mx.array | None, scale: float | None, causal: bool,
    window: int | None, softcap: float | None,
) -> Way:  # fmt: skip
    op = NAMES[PAGED]
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_array(op, name, x, FLOATING)
        if x.ndim != 4:
            raise ValueError(f"[{op}] '{name}' must have 4 axes but got {tuple(x.shape)}.")
    same_dtype(op, q, k_cache=k_cache, v_cache=v_cache)
    b, h, _, d = q.shape
    kv = k_cache.shape[2]
    if k_cache.shape[3] != d or k_cache.shape[1] == 0 or kv == 0 or h % kv:
        raise ValueError(
            f"[{op}] 'k_cache' must have shape (blocks, size, K, {d}) where K divides {h} but got "
            f"{tuple(k_cache.shape)}."
        )
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"[{op}] 'v_cache' must have shape {tuple(k_cache.shape[:3])} and V but got "
            f"{tuple(v_cache.shape)}."
        )
    check_indices(op, "block_table", block_table, (b, None))
    check_indices(op, "context_lens", context_lens, (b,))
    window = check_options(op, q, scale, causal, window, softcap, sinks)
    flags: dict[str, Any] = {"causal": causal, "lengths": True}
    factor, after = numbers_of(flags, scale, d, window, softcap)
    arrays = (q, k_cache, v_cache, block_table, context_lens)
    run = attending(Cache(PAGED, **flags), arrays, v_cache.shape[-1], sinks is not None)
    return lambda q, k, v, table, lengths, sinks: run(
        (q, k, v, factor, table, lengths, *after), sinks
    )


_PAGED = Remembered(_paged)


def paged_attention(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    block_table: mx.array,
    context_lens: mx.array,
    sinks: mx.array | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> mx.array:
    """`decode_attention` over keys and values that lie in blocks.

    Args:
        q: (B, H, L, D) in float32, float16 or bfloat16.
        k_cache, v_cache: (blocks, block size, K, D) and (blocks, block size, K, V), q's dtype;
            D and V are at most 8192.
        block_table: (B, N) integers: block n of a batch has its keys n · block size and on.
            Entries past the context, and those before the window of every query, are not read and
            may be any number.
        context_lens: (B,) integers in [0, N · block size], the keys of each batch.
        sinks, scale, causal, window, softcap: as in `decode_attention`.

    Returns:
        (B, H, L, V) in q's dtype. A block or a length that is out of range makes its batch NaN; on
        the CPU the evaluation raises. Gradients are those of plain MLX, for q, the caches and
        sinks.

    Kwon et al. 2023, arXiv:2309.06180.
    """
    arrays = (q, k_cache, v_cache, block_table, context_lens, sinks)
    return _PAGED(arrays, (scale, causal, window, softcap))  # type: ignore[no-any-return]


def _paged_case(b: int, h: int, k: int, queries: int, blocks: int, size: int, d: int, why: str = "",
                optional: bool = True, **options: Any) -> Case:  # fmt: skip
    sizes = {"H": h, "K": k, "L": queries, "N": blocks, "P": 2 * blocks + 1, "Z": size, "D": d}
    return Case((b,), sizes, why, options, optional)


#: The table names every block of the pool once and the contexts fill it, so that all bytes of the
#: arrays, which the benchmark counts, are read.
_WHOLE_POOL = Case(
    (4,),
    {"H": 32, "K": 8, "L": 1, "N": 256, "P": 4 * 256, "Z": 16, "D": 128},
    optional=False,
    follows=("P",),
    samples={
        "block_table": lambda rng, shape, sizes: rng.permutation(sizes["P"]).reshape(shape),
        "context_lens": lambda rng, shape, sizes: [sizes["N"] * sizes["Z"]] * shape[0],
    },
)

register(
    Op(
        name="paged_attention",
        family="attention",
        summary="attention over keys and values in blocks",
        formula="decode_attention over the blocks that a table names",
        function=paged_attention,
        reference=paged_attention_reference,
        arguments=(
            Argument("q", "(*, H, L, D)", differentiable=False),
            Argument("k_cache", "(P, Z, K, D)", differentiable=False),
            Argument("v_cache", "(P, Z, K, D)", differentiable=False),
            Argument("block_table", "(*, N)", INDICES, False, False, "in [0, blocks)"),
            Argument("context_lens", "(*)", INDICES, False, False, "in [0, N · block size]"),
            SINKS,
        ),
        options=OPTIONS,
        outputs=("(*, H, L, D)",),
        paper="https://arxiv.org/abs/2309.06180",
        samples={
            "block_table": lambda rng, shape, sizes: rng.integers(0, sizes["P"], shape),
            "context_lens": lambda rng, shape, sizes: rng.integers(
                sizes["L"], sizes["N"] * sizes["Z"] + 1, shape
            ),
        },
        cases=(
            _paged_case(1, 1, 1, 1, 1, 1, 1, "one of everything"),
            _paged_case(2, 4, 2, 2, 3, 3, 8, "two heads share keys"),
            _paged_case(1, 2, 1, 1, 9, 8, 40, "one past a tile of keys"),
            _paged_case(3, 12, 1, 1, 2, 16, 33, "more rows than a group has"),
            _paged_case(2, 2, 2, 3, 10, 32, 64, "several spans on a GPU, causal", causal=True),
            _paged_case(3, 2, 1, 1, 2, 5, 16, "no sinks", False),
            _paged_case(0, 2, 1, 1, 2, 4, 8, "no rows"),
        ),
        long_cases=(_paged_case(1, 2, 1, 1, 66, 32, 64, "several spans"),),
        benchmarks=(_WHOLE_POOL,),
        refuses=SHAPELESS,
    )
)
