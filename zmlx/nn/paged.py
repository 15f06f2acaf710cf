"""Attention over keys and values in blocks of a pool, and writing into the pool.

The layout and the names are vLLM's (Kwon et al. 2023, arXiv:2309.06180): a pool of blocks of
`block_size` slots, of which sequences own some; a block table says which, in order; a slot is
`block · block_size + place in the block`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from .. import checks, kernels, launch
from ..arguments import FLOATING, INDICES, check_array, check_heads, check_size, dtype_name
from ..choice import use_kernel
from ..targets import cpu
from ..transforms import refuses_any_shape
from .choosing import typical


class PagedAttention(mnn.Module):
    r"""Scaled dot-product attention over keys and values in blocks, without parameters.

    .. math::

        y = \mathrm{softmax}(\mathrm{scale} \cdot q K^\top) V
        \quad\text{with}\quad K, V = \text{the blocks that the table names, up to the length}

    A step of a server writes its keys and values and then attends::

        k_cache, v_cache = attention.make_cache(num_blocks=1024, block_size=16)
        slots = slot_mapping(block_table, context_lens, 1, block_size=16)
        k_cache, v_cache = reshape_and_cache(keys, values, k_cache, v_cache, slots)
        y = attention(queries, k_cache, v_cache, block_table, context_lens)

    Args:
        n_heads (int): The number of heads of queries.
        n_kv_heads (int, optional): The number of heads of keys and values; divides ``n_heads``.
            Default: ``n_heads``.
        head_dim (int): The dimension of a head.
        scale (float, optional): Default: ``head_dim ** -0.5``.
        window (int, optional): The keys that a query sees at most. Default: all.
        softcap (float, optional): The cap of the scores. Default: none.

    Shape:
        - queries: :math:`(B, n\_heads, L, head\_dim)`; of more than one, the last is at the end of
          the context, and none sees keys after its own.
        - k_cache, v_cache: :math:`(blocks, block\_size, n\_kv\_heads, head\_dim)`.
        - block_table: :math:`(B, N)` integers; context_lens: :math:`(B,)` integers, the keys of
          each sequence, those of the queries included.
        - sinks: :math:`(n\_heads,)`, or ``None``.
        - Output: Same shape as the queries. Gradients are those of plain MLX.
    """

    def __init__(
        self,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int = 128,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_heads("PagedAttention", n_heads, n_kv_heads)
        check_size("PagedAttention", "head_dim", head_dim)
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.softcap = softcap

    def _extra_repr(self) -> str:
        runs = typical("paged_attention", self.head_dim, mx.float32)
        return (
            f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}, "
            f"runs={runs}"
        )

    def make_cache(
        self, num_blocks: int, block_size: int, dtype: mx.Dtype = mx.float32
    ) -> tuple[mx.array, mx.array]:
        """An empty pool: `k_cache` and `v_cache`."""
        for name, size in (("num_blocks", num_blocks), ("block_size", block_size)):
            check_size("PagedAttention", name, size)
        if dtype not in FLOATING:
            raise ValueError(
                f"[PagedAttention] 'dtype' must be float32, float16 or bfloat16 but got "
                f"{dtype_name(dtype)}."
            )
        shape = (num_blocks, block_size, self.n_kv_heads, self.head_dim)
        return mx.zeros(shape, dtype), mx.zeros(shape, dtype)

    def __call__(
        self,
        queries: mx.array,
        k_cache: mx.array,
        v_cache: mx.array,
        block_table: mx.array,
        context_lens: mx.array,
        sinks: mx.array | None = None,
    ) -> mx.array:
        check_array("PagedAttention", "queries", queries)
        shape = tuple(queries.shape)
        if len(shape) != 4 or shape[1] != self.n_heads or shape[3] != self.head_dim:
            raise ValueError(
                f"[PagedAttention] 'queries' must have shape (B, {self.n_heads}, L, "
                f"{self.head_dim}) but got {shape}."
            )
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            check_array("PagedAttention", name, cache, FLOATING)
            if cache.ndim != 4 or cache.shape[2:] != (self.n_kv_heads, self.head_dim):
                raise ValueError(
                    f"[PagedAttention] '{name}' must have shape (blocks, block size, "
                    f"{self.n_kv_heads}, {self.head_dim}) but got {tuple(cache.shape)}."
                )
        options: Any = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        arrays = (queries, k_cache, v_cache, block_table, context_lens, sinks)
        causal = shape[2] > 1
        if use_kernel("paged_attention", queries):
            return kernels.paged_attention(*arrays, causal=causal, **options)
        with launch.target("reference"):
            return kernels.paged_attention(*arrays, causal=causal, **options)


def slot_mapping(
    block_table: mx.array, context_lens: mx.array, length: int, *, block_size: int
) -> mx.array:
    """The slots of the last `length` tokens of each sequence.

    Args:
        block_table: (B, N) integers.
        context_lens: (B,) integers, the keys of each sequence with these tokens.
        length: L, the tokens to write.
        block_size: slots of a block.

    Returns:
        (B, L) in int32; -1, which `reshape_and_cache` leaves out, before a sequence's beginning.
    """
    check_array("slot_mapping", "block_table", block_table, INDICES)
    check_array("slot_mapping", "context_lens", context_lens, INDICES)
    if block_table.ndim != 2 or context_lens.shape != block_table.shape[:1]:
        raise ValueError(
            f"[slot_mapping] 'context_lens' must have shape {tuple(block_table.shape[:1])} of a "
            f"block table (B, N) but got {tuple(context_lens.shape)}."
        )
    for name, value in (("length", length), ("block_size", block_size)):
        check_size("slot_mapping", name, value)
    width: int | mx.array = block_table.shape[1]
    if cpu.any_shape((block_table, context_lens)):
        width = mx.cumsum(mx.ones_like(block_table).astype(mx.int32), axis=1).max()
    capacity = width * block_size
    positions = context_lens.astype(mx.int32)[:, None] + mx.arange(-length, 0, dtype=mx.int32)
    inside = mx.clip(positions, 0, capacity - 1)
    blocks = mx.take_along_axis(block_table.astype(mx.int32), inside // block_size, axis=1)
    slots = blocks * block_size + inside % block_size
    # Past the table is past every pool, which `reshape_and_cache` does not leave out.
    slots = mx.where(positions < capacity, slots, mx.array(2**31 - 1, mx.int32))
    return mx.where(positions >= 0, slots, mx.array(-1, mx.int32))


def reshape_and_cache(
    keys: mx.array, values: mx.array, k_cache: mx.array, v_cache: mx.array, slots: mx.array
) -> tuple[mx.array, mx.array]:
    """Writes keys and values into their slots of the pool.

    Args:
        keys, values: (B, K, L, D) as attention layers have them, or (N, K, D) by token.
        k_cache, v_cache: (blocks, block size, K, D) in their dtype. Where nobody else holds them,
            they are written in place.
        slots: (B, L) or (N,) integers, all different; tokens of negative slots are left out. A slot
            past the pool makes all that the call writes NaN, or slot 0 where it writes nothing;
            with `ZMLX_CHECK=1` it raises.

    Returns:
        The pool after writing: k_cache and v_cache. Gradients are those of plain MLX.
    """
    op = "reshape_and_cache"
    check_array(op, "slots", slots, INDICES)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_array(op, name, cache)
        if cache.ndim != 4 or 0 in cache.shape[:2]:
            raise ValueError(f"[{op}] '{name}' must have 4 axes but got {tuple(cache.shape)}.")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"[{op}] 'v_cache' must have shape {tuple(k_cache.shape[:3])} and V but got "
            f"{tuple(v_cache.shape)}."
        )
    if cpu.any_shape((keys, values, k_cache, v_cache, slots)):
        refuses_any_shape(op)()
    count = k_cache.shape[0] * k_cache.shape[1]
    if checks.ENABLED and slots.size and cpu.have_values((slots,)):
        largest: Any = slots.max().item()
        if largest >= count:
            raise ValueError(f"[{op}] 'slots' must be below {count} but got {largest}.")
    written = []
    for name, x, cache in (("keys", keys, k_cache), ("values", values, v_cache)):
        check_array(op, name, x, (cache.dtype,))
        *_, heads, width = cache.shape
        expected = (
            (*slots.shape, heads, width)
            if slots.ndim == 1
            else (slots.shape[0], heads, *slots.shape[1:], width)
        )
        if slots.ndim not in (1, 2) or tuple(x.shape) != expected:
            raise ValueError(
                f"[{op}] '{name}' must have shape {expected} but got {tuple(x.shape)}."
            )
        tokens = x if slots.ndim == 1 else x.swapaxes(1, 2)
        written.append(_write(tokens.reshape(-1, heads, width), cache, slots.reshape(-1), count))
    return written[0], written[1]


def _write(tokens: mx.array, cache: mx.array, slots: mx.array, count: int) -> mx.array:
    if slots.size == 0:
        return cache
    flat = cache.reshape(count, *cache.shape[2:])
    kept, lost = mx.logical_and(slots >= 0, slots < count), mx.any(slots >= count)
    # A token that is left out repeats the first one that is not: writing it changes nothing.
    order = mx.arange(slots.size)
    source = mx.where(kept, order, mx.argmax(kept))
    places = mx.clip(slots[source], 0, count - 1)
    places = mx.where(mx.any(kept), places, 0)
    rows = mx.where(mx.any(kept), tokens[source], flat[:1])
    # Only one of the repeated rows has the gradient of what is written.
    rows = mx.where((source == order)[:, None, None], rows, mx.stop_gradient(rows))
    flat[places] = mx.where(lost, mx.array(mx.nan, cache.dtype), rows)
    return flat.reshape(cache.shape)
