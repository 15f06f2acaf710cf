"""Attention layers."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as mnn

from ..arguments import check_heads, check_size
from ..kernels.attention_launch import fits
from . import functional as F
from .choosing import dtype_of, outputs, typical
from .positions import RoPE


def _runs(width: int, projection: mnn.Module) -> str:
    """What runs attention of heads of this width that the projection makes."""
    return typical(F.ATTENTION, width, dtype_of(projection)) if fits(width, width) else "mlx"


class MultiHeadAttention(mnn.MultiHeadAttention):
    """Implements the scaled dot product attention with multiple heads, as
    :class:`mlx.nn.MultiHeadAttention`.

    Args:
        dims (int): The model dimensions. This is also the default value for the queries, keys,
            values, and the output.
        num_heads (int): The number of attention heads to use.
        query_input_dims (int, optional): The input dimensions of the queries. Default: ``dims``.
        key_input_dims (int, optional): The input dimensions of the keys. Default: ``dims``.
        value_input_dims (int, optional): The input dimensions of the values.
            Default: ``key_input_dims``.
        value_dims (int, optional): The dimensions of the values after the projection.
            Default: ``dims``.
        value_output_dims (int, optional): The dimensions the new values will be projected to.
            Default: ``dims``.
        bias (bool, optional): Whether or not to use a bias in the projections.
            Default: ``False``.
    """

    def _extra_repr(self) -> str:
        return f"runs={_runs(outputs(self.query_proj) // self.num_heads, self.query_proj)}"

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any = None
    ) -> mx.array:
        def heads(x: mx.array) -> mx.array:
            return mx.unflatten(x, -1, (self.num_heads, -1)).transpose(0, 2, 1, 3)

        queries = heads(self.query_proj(queries))
        keys, values = heads(self.key_proj(keys)), heads(self.value_proj(values))
        scale = math.sqrt(1 / queries.shape[-1])
        output = F.attention(queries, keys, values, scale=scale, mask=mask)
        return self.out_proj(output.transpose(0, 2, 1, 3).flatten(-2, -1))


class Attention(mnn.Module):
    r"""Rotary self-attention with grouped keys and values and a cache, as mlx-lm's models have it.

    Each of the ``n_kv_heads`` heads of keys and values serves ``n_heads / n_kv_heads`` heads of
    queries (Ainslie et al. 2023, arXiv:2305.13245). The parameters have mlx-lm's names:
    ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``.

    Args:
        dims (int): The dimension of input and output.
        n_heads (int): The number of heads of queries.
        n_kv_heads (int, optional): The number of heads of keys and values; divides ``n_heads``.
            Default: ``n_heads``.
        head_dim (int, optional): The dimension of a head. Default: ``dims // n_heads``.
        bias (bool): Whether the projections have a bias. Default: ``False``.
        rope (Module, optional): The positional encoding, called with queries or keys and
            ``offset``. Default: :class:`RoPE` of ``head_dim``.

    Shape:
        - x: :math:`(B, L, D)`.
        - mask: ``None``, ``"causal"``, or an array that broadcasts to
          :math:`(B, n\_heads, L, L_{keys})`, boolean or additive.
        - cache: an object with ``offset`` and ``update_and_fetch(keys, values)``, such as
          mlx-lm's ``KVCache``.
        - Output: Same shape as x.
    """

    def __init__(
        self,
        dims: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        rope: mnn.Module | None = None,
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_size("Attention", "dims", dims)
        check_heads("Attention", n_heads, n_kv_heads)
        if head_dim is None:
            if dims % n_heads:
                raise ValueError(
                    f"[Attention] 'dims' must be divisible by {n_heads} heads but got {dims}."
                )
            head_dim = dims // n_heads
        check_size("Attention", "head_dim", head_dim)
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.q_proj = mnn.Linear(dims, n_heads * head_dim, bias=bias)
        self.k_proj = mnn.Linear(dims, n_kv_heads * head_dim, bias=bias)
        self.v_proj = mnn.Linear(dims, n_kv_heads * head_dim, bias=bias)
        self.o_proj = mnn.Linear(n_heads * head_dim, dims, bias=bias)
        self.rope = RoPE(head_dim) if rope is None else rope

    def _extra_repr(self) -> str:
        runs = _runs(self.head_dim, self.q_proj)
        return f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, runs={runs}"

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, length, _ = x.shape

        def heads(y: mx.array, count: int) -> mx.array:
            return y.reshape(batch, length, count, self.head_dim).transpose(0, 2, 1, 3)

        queries = heads(self.q_proj(x), self.n_heads)
        keys = heads(self.k_proj(x), self.n_kv_heads)
        values = heads(self.v_proj(x), self.n_kv_heads)
        offset = 0 if cache is None else cache.offset
        queries = self.rope(queries, offset=offset)
        keys = self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        output = F.attention(queries, keys, values, scale=self.scale, mask=mask)
        return self.o_proj(output.transpose(0, 2, 1, 3).flatten(-2, -1))
