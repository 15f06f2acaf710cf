"""The experts of a mixture: a SwiGLU feed-forward network each, over tokens sorted by expert.

    y = (silu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ        with the weights of each row's expert

The products are MLX's: `gather_mm` (`gather_qmm` for quantised weights), the gradients of the
weights `segmented_mm`; the gate between them is zmlx's swiglu. On the GPUs every row is a product
of its own for MLX, which has kernels for rows that are sorted. On the CPU MLX would do a
matrix-vector product per row, so rows are laid out in blocks of one expert each, the last block of
an expert filled up with zeros, and each block is one product for the BLAS (Gale et al. 2022,
arXiv:2211.15841, blocks on one machine instead of one kernel). Nothing waits for the counts: the
number of blocks has a bound that shapes give. The reference BLAS of MLX's Linux wheel takes as long
for a row of a block as for a row alone, so that a block there is one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from .. import launch
from ..arguments import FLOATING, INDICES, Argument, check, check_array, check_integer
from ..registry import COUNTS_ELEMENTS, Case, Op, register
from ..remembered import Remembered, Way
from ..targets import cpu
from .glu import swiglu
from .moe_blocks import Blocks, block_size, blocks_of, places_to

#: A float weight, or a quantised one with its scales and biases.
Weight = mx.array | tuple[mx.array, mx.array, mx.array]


def expert_ffn_reference(
    x: mx.array,
    gate: mx.array,
    up: mx.array,
    down: mx.array,
    offsets: mx.array,
    *,
    xp: Any = mx,
) -> Any:
    """expert_ffn in plain MLX: every expert for every row."""
    # Rows and experts are counted, since a compiled function may not know their number.
    ones = xp.ones_like(xp.stop_gradient(xp.sum(x, axis=-1))).astype(offsets.dtype)
    row = xp.cumsum(ones, axis=-1) - 1
    expert = xp.sum(offsets <= row[:, None], axis=-1) - 1
    number = xp.cumsum(xp.ones_like(xp.stop_gradient(xp.sum(gate, axis=(1, 2)))), axis=-1) - 1
    # By row: MLX's fused kernels take an axis of one beside one of no rows for one row.
    chosen = xp.swapaxes(expert[:, None] == number, 0, 1)
    g = xp.matmul(x[None], xp.swapaxes(gate, -1, -2))
    u = xp.matmul(x[None], xp.swapaxes(up, -1, -2))
    y = xp.matmul(g * xp.sigmoid(g) * u, xp.swapaxes(down, -1, -2))
    lost = xp.where(xp.any(chosen, axis=0)[:, None], 0.0, xp.nan)
    return xp.sum(xp.where(chosen[..., None], y, 0.0), axis=0) + lost


# ---- products -----------------------------------------------------------------------------------


Product = Callable[[mx.array, Any], mx.array]


def _product(blocks: Blocks, dtype: mx.Dtype) -> Product:
    """(count, size, D), (E, H, D) → (count, size, H), all in `dtype` but the weights, which are
    cast: those of the blocks' experts where these are fewer."""

    def product(x: mx.array, w: mx.array) -> mx.array:
        experts = blocks.experts
        if w.dtype != dtype:
            if experts.size < w.shape[0]:
                w, experts = w[experts], places_to(experts.size)
            w = w.astype(dtype)
        return mx.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=True)

    return product


def _traced_product(blocks: Blocks, dtype: mx.Dtype) -> Product:
    """`_product`, differentiable any number of times: the gradient of a weight is a product over
    its own rows only, and that product's gradients are such products again. `stop_gradient` keeps
    `mx.jvp` from MLX's primitives, which have none; nothing keeps `mx.vmap` from what a custom
    function ran, before it asks for the function's own rule."""
    plain, segments = _product(blocks, dtype), blocks.segments()

    @mx.custom_function
    def product(x: mx.array, w: mx.array) -> mx.array:
        return plain(mx.stop_gradient(x), mx.stop_gradient(w))

    @product.vjp
    def _(primals: Any, dy: mx.array, outputs: Any) -> Any:
        x, w = primals
        dw = cast(mx.array, weights(dy, x))
        return product(dy, w.swapaxes(-1, -2)), dw.astype(w.dtype)

    product.jvp(_bilinear_jvp(product))

    @mx.custom_function
    def weights(dy: mx.array, x: mx.array) -> mx.array:
        dy, x = mx.stop_gradient(dy), mx.stop_gradient(x)
        return mx.segmented_mm(dy.reshape(-1, dy.shape[-1]).T, x.reshape(-1, x.shape[-1]), segments)

    @weights.vjp
    def _(primals: Any, dw: mx.array, outputs: Any) -> Any:
        dy, x = primals
        return product(x, dw), product(dy, dw.swapaxes(-1, -2))

    weights.jvp(_bilinear_jvp(weights))

    return cast(Product, product)


def _bilinear_jvp(function: Callable[..., Any]) -> Callable[..., Any]:
    """The tangent of a function that is linear in each of two arguments."""

    def jvp(primals: Any, tangents: Any) -> Any:
        (a, b), (da, db) = primals, tangents
        found = [function(da, b)] if da is not None else []
        found += [function(a, db)] if db is not None else []
        return sum(found[1:], found[0])

    return jvp


def _quantized_product(blocks: Blocks, group_size: int, bits: int) -> Product:
    def product(x: mx.array, w: Sequence[mx.array]) -> mx.array:
        weight, scales, biases = w
        return mx.gather_qmm(
            x, weight, scales, biases, rhs_indices=blocks.experts, transpose=True,
            group_size=group_size, bits=bits, sorted_indices=True,
        )  # fmt: skip

    return product


# ---- ops ----------------------------------------------------------------------------------------

_ARGUMENTS = (
    Argument("x", "(R, D)"),
    Argument("gate", "(E, H, D)"),
    Argument("up", "(E, H, D)"),
    Argument("down", "(E, D, H)"),
    Argument("offsets", "(O,)", INDICES, differentiable=False, values="ascending, 0 … R"),
)


def _check_gate(*weights: Any) -> None:
    """Names the gate where its number of experts is unlike that of both others."""
    if all(isinstance(w, mx.array) and w.ndim == 3 for w in weights):
        gate, up, down = (w.shape for w in weights)
        if gate[0] != up[0] == down[0]:
            raise ValueError(
                f"[expert_ffn] 'gate' must have shape {(up[0], *gate[1:])} but got {gate}."
            )


def _check_packing(group_size: int | None, bits: int | None) -> tuple[int, int]:
    """The group size and the bits of quantised weights, or an error."""
    size = 64 if group_size is None else check_integer("expert_ffn", "group_size", group_size)
    width = 4 if bits is None else check_integer("expert_ffn", "bits", bits)
    if size not in (32, 64, 128):
        raise ValueError(f"[expert_ffn] 'group_size' must be 32, 64 or 128 but got {size}.")
    if width not in (2, 3, 4, 5, 6, 8):
        raise ValueError(f"[expert_ffn] 'bits' must be 2, 3, 4, 5, 6 or 8 but got {width}.")
    return size, width


def _check_quantized(
    x: mx.array, weights: Sequence[Any], offsets: mx.array, group_size: int, bits: int
) -> None:
    op = "expert_ffn"
    check(op, [_ARGUMENTS[0], _ARGUMENTS[4]], [x, offsets])
    names = ("gate", "up", "down")
    for name, weight in zip(names, weights, strict=True):
        if not isinstance(weight, (tuple, list)) or len(weight) != 3:
            raise TypeError(
                f"[{op}] '{name}' must be (weight, scales, biases) as the others but got "
                f"{type(weight).__name__}."
            )
        check_array(op, name, weight[0], (mx.uint32,))
        for part in weight[1:]:
            check_array(op, name, part, FLOATING)
        if weight[0].ndim != 3:
            raise ValueError(
                f"[{op}] '{name}' must have a weight of three axes but got {weight[0].shape}."
            )
    found = {weight[0].shape[0] for weight in weights}
    experts = found.pop() if len(found) == 1 else offsets.size - 1
    _check_experts(experts, offsets)
    d, h = x.shape[-1], weights[0][0].shape[1]
    shapes = ((experts, h, d), (experts, h, d), (experts, d, h))
    for name, (packed, scales, biases), expected in zip(names, weights, shapes, strict=True):
        got = (*packed.shape[:-1], packed.shape[-1] * 32 // bits)
        if got != expected:
            raise ValueError(f"[{op}] '{name}' must have shape {expected} but got {got}.")
        groups = (*expected[:-1], expected[-1] // group_size)
        if expected[-1] % group_size or scales.shape != groups or biases.shape != groups:
            raise ValueError(
                f"[{op}] '{name}' must have a scale and a bias for every {group_size} of its "
                f"{expected[-1]} columns but got {scales.shape} and {biases.shape}."
            )


def _check_experts(experts: int, offsets: mx.array) -> None:
    """Of weights that agree: there are some, and an offset for each and one more."""
    if experts < 1:
        raise ValueError(f"[expert_ffn] 'gate' must have at least one expert but got {experts}.")
    if offsets.size != experts + 1:
        raise ValueError(
            f"[expert_ffn] 'offsets' must have shape ({experts + 1},) but got {offsets.shape}."
        )


def _plain(
    x: mx.array, gate: mx.array, up: mx.array, down: mx.array, offsets: mx.array
) -> mx.array:
    wide = [v.astype(mx.float32) for v in (x, gate, up, down)]
    y = expert_ffn_reference(wide[0], wide[1], wide[2], wide[3], offsets)
    return y.astype(x.dtype)  # type: ignore[no-any-return]


def _float(
    x: mx.array,
    gate: mx.array,
    up: mx.array,
    down: mx.array,
    offsets: mx.array,
    group_size: int | None,
    bits: int | None,
) -> Way:
    for name, value in (("group_size", group_size), ("bits", bits)):
        if value is not None:
            raise ValueError(
                f"[expert_ffn] '{name}' must be None for weights that are not quantised but got "
                f"{value}."
            )
    arrays = (x, gate, up, down, offsets)
    _check_gate(gate, up, down)
    check("expert_ffn", _ARGUMENTS, arrays)
    experts = gate.shape[0]
    _check_experts(experts, offsets)
    target = launch.settings().target
    if target == "reference" or cpu.any_shape(arrays):
        return _plain
    if x.size == 0:
        return lambda x, *_: x
    # MLX's products of the CPU are in float32.
    inner = mx.float32 if target == "cpu" else mx.result_type(x.dtype, gate.dtype)
    product_of = _traced_product if cpu.maybe_tracing(arrays) else _product

    def run(
        x: mx.array, gate: mx.array, up: mx.array, down: mx.array, offsets: mx.array
    ) -> mx.array:
        rows = x.shape[0]
        # Which BLAS MLX calls may change from call to call.
        blocks = blocks_of(offsets, rows, block_size(rows, experts) if target == "cpu" else 1)
        product = product_of(blocks, inner)
        wide = _aligned(x, blocks).astype(inner)
        hidden = swiglu(product(wide, gate), product(wide, up))
        return _rows(product(hidden, down), blocks).astype(x.dtype)

    return run


def _quantized(x: mx.array, *rest: Any) -> Way:
    *parts, offsets, group_size, bits = rest
    size, width = _check_packing(group_size, bits)
    _check_quantized(x, (parts[:3], parts[3:6], parts[6:]), offsets, size, width)
    if x.size == 0 and not cpu.any_shape((x, offsets)):
        return lambda x, *_: x

    def run(x: mx.array, *rest: mx.array) -> mx.array:
        """Row by row: MLX's quantised products of the CPU gain nothing from blocks."""
        *parts, offsets = rest
        blocks = blocks_of(offsets, x.shape[0], 1)
        product = _quantized_product(blocks, size, width)
        one = matrices(x)
        hidden = swiglu(product(one, parts[:3]), product(one, parts[3:6]))
        return _rows(product(hidden, parts[6:]), blocks).astype(x.dtype)

    return run


_FLOAT = Remembered(_float)
_QUANTIZED = Remembered(_quantized)


def expert_ffn(
    x: mx.array,
    gate: Weight,
    up: Weight,
    down: Weight,
    offsets: mx.array,
    *,
    group_size: int | None = None,
    bits: int | None = None,
) -> mx.array:
    """The SwiGLU network of each row's expert.

        y = (silu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ

    Args:
        x: (R, D) rows sorted by expert, as `moe_dispatch` returns them, in float32, float16 or
            bfloat16.
        gate, up: (E, H, D) weights, as those of `mlx_lm`'s SwitchGLU; down: (E, D, H). All in one
            floating dtype, or each as the (weight, scales, biases) of `mx.quantize` (affine).
        offsets: (E + 1,) from `moe_sort`: rows offsets[e] to before offsets[e + 1] are those of
            expert e. It must ascend from 0 to at most R; on the CPU the evaluation raises if it
            does not. Rows that no expert has are NaN.
        group_size, bits: of quantised weights, as in `mx.quantize`. Default: 64 and 4. Others have
            none.

    Returns:
        (R, D) in the dtype of x. Gradients for x and float weights; quantised ones are for the
        forward. `mx.vmap` is not known to MLX's `gather_mm`; with `zmlx.target("reference")` every
        row takes every expert in plain MLX, as it does in `mx.compile(shapeless=True)`.

    MLX's CPU products of experts are in float32: weights in half precision are widened at each
    call, those of the experts that have rows where rows are few. With `zmlx.use_openblas()` rows go
    in blocks of about a quarter of an expert's mean rows, at most 128.
    """
    packed = [isinstance(w, (tuple, list)) for w in (gate, up, down)]
    if not any(packed):
        return _FLOAT((x, gate, up, down, offsets), (group_size, bits))  # type: ignore[no-any-return, arg-type]
    if not all(packed) or [len(w) for w in (gate, up, down)] != [3, 3, 3]:
        # Raises, and says which one it is.
        size, width = _check_packing(group_size, bits)
        _check_quantized(x, (gate, up, down), offsets, size, width)
    return _QUANTIZED((x, *gate, *up, *down, offsets), (group_size, bits))  # type: ignore[no-any-return]


def matrices(x: mx.array) -> mx.array:
    """Rows as matrices of one row. The axis of `x[:, None]` has a stride by which MLX's sorted
    products on a GPU read other rows (0.32.4), and so has that of a cotangent behind `squeeze`:
    `mx.flatten` makes rows again."""
    return x.reshape(-1, 1, x.shape[-1])


def _aligned(x: mx.array, blocks: Blocks) -> mx.array:
    """Rows in their blocks; zeros where a block is not filled, so that no gradient comes of it."""
    if blocks.source is None or blocks.filled is None:
        return matrices(x)
    return mx.where(blocks.filled[..., None], x[blocks.source], mx.array(0.0, x.dtype))


def _rows(y: mx.array, blocks: Blocks) -> mx.array:
    """Rows of their blocks again; NaN where a row has no expert."""
    flat = y.reshape(-1, y.shape[-1])
    if blocks.places is not None:
        flat = flat[blocks.places]
    return mx.where(blocks.owned[:, None], flat, mx.array(mx.nan, y.dtype))


def _offsets_of(rng: Any, shape: tuple[int, ...], sizes: Any) -> Any:
    import numpy as np

    cuts = np.sort(rng.integers(0, sizes["R"] + 1, shape[0] - 2))
    return np.concatenate([[0], cuts, [sizes["R"]]])


def _weight(rng: Any, shape: tuple[int, ...], sizes: Any) -> Any:
    return rng.standard_normal(shape) / shape[-1] ** 0.5


def _switch_glu(
    x: mx.array, gate: mx.array, up: mx.array, down: mx.array, offsets: mx.array
) -> mx.array:
    """The three products of mlx-lm's SwitchGLU and its gate, on rows that are sorted already."""
    experts = mx.sum(offsets[1:-1] <= mx.arange(x.shape[0])[:, None], axis=-1)

    def product(rows: mx.array, weight: mx.array) -> mx.array:
        return mx.gather_mm(rows, weight.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=True)

    one = matrices(x)
    g = product(one, gate)
    return mx.flatten(product(g * mx.sigmoid(g) * product(one, up), down), 0, 1)


register(
    Op(
        name="expert_ffn",
        family="moe",
        summary="a SwiGLU network per expert over sorted rows",
        formula="(silu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ",
        function=expert_ffn,
        reference=expert_ffn_reference,
        arguments=_ARGUMENTS,
        outputs=("(R, D)",),
        reads_backward=("x", "gate", "up", "down"),
        # The BLAS in MLX's wheel adds the products of a weight's gradient one row after the other.
        # Sums of n random terms grow with √n, and each is rounded: measured on normal numbers, the
        # worst of 49152 is off by about 0.3·√n eps of the largest. The long case has n ≤ 575: 7.2.
        rounding=8.0,
        cases=(
            Case((), {"R": 1, "D": 4, "E": 1, "H": 3, "O": 2}, "one row, one expert"),
            Case((), {"R": 6, "D": 5, "E": 4, "H": 7, "O": 5}, "fewer rows than blocks"),
            Case((), {"R": 70, "D": 33, "E": 3, "H": 31, "O": 4}, "blocks that are not full"),
            Case((), {"R": 40, "D": 8, "E": 60, "H": 8, "O": 61}, "more experts than rows"),
            Case((), {"R": 300, "D": 16, "E": 2, "H": 65, "O": 3}, "several blocks per expert"),
            Case((), {"R": 0, "D": 16, "E": 2, "H": 8, "O": 3}, "no rows"),
        ),
        long_cases=(Case((), {"R": 2000, "D": 64, "E": 8, "H": 96, "O": 9}, "full blocks"),),
        benchmarks=(
            Case((), {"R": 1024, "D": 512, "E": 8, "H": 1024, "O": 9}),
            Case((), {"R": 512, "D": 512, "E": 64, "H": 256, "O": 65}),
        ),
        baseline=_switch_glu,
        flops="2 * 3 * R * D * H",
        samples={"gate": _weight, "up": _weight, "down": _weight, "offsets": _offsets_of},
        refuses={"vmap": 'with zmlx.target("reference")'},
        needs=COUNTS_ELEMENTS,
        paper="Shazeer 2020, arXiv:2002.05202; Gale et al. 2022, arXiv:2211.15841",
    )
)
