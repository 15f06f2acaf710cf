"""Recipes: a Metal kernel with its gradient, in plain MLX.

    silu        elementwise: the gradient is a second kernel of the same inputs and the cotangent
    rms_norm    rowwise: a simdgroup per row; the weight's gradient is a sum over rows, by columns,
                so that it needs no atomics and is the same in every run

A rule returns an array for every input, also where no gradient is wanted: of a `None` MLX keeps no
place, and the gradients after it move to the wrong inputs.
"""

from functools import cache

import mlx.core as mx
from threadgroup import threadgroup

# ---- elementwise --------------------------------------------------------------------------------

_SIGMOID = """
    uint i = thread_position_in_grid.x;
    float v = float(x[i]);
    float s = 1.0f / (1.0f + metal::exp(-v));
"""


@cache
def _silu_kernels():
    forward = mx.fast.metal_kernel(
        name="recipe_silu", input_names=["x"], output_names=["y"],
        source=_SIGMOID + "y[i] = T(v * s);",
    )  # fmt: skip
    backward = mx.fast.metal_kernel(
        name="recipe_silu_grad", input_names=["x", "dy"], output_names=["dx"],
        source=_SIGMOID + "dx[i] = T(float(dy[i]) * s * (1.0f + v * (1.0f - s)));",
    )  # fmt: skip
    return forward, backward


def _elementwise(kernel, *arrays):
    x = arrays[0]
    grid = (x.size, 1, 1)
    return kernel(
        inputs=list(arrays), template=[("T", x.dtype)], grid=grid, threadgroup=threadgroup(grid),
        output_shapes=[x.shape], output_dtypes=[x.dtype],
    )[0]  # fmt: skip


@mx.custom_function
def silu(x):
    """x · sigmoid(x), of at least one element."""
    return _elementwise(_silu_kernels()[0], x)


@silu.vjp
def _silu_vjp(primals, cotangent, _):
    # With one input the first argument is that array, and not a tuple of it.
    return _elementwise(_silu_kernels()[1], primals, cotangent)


# ---- rowwise ------------------------------------------------------------------------------------

_ROW = """
    uint row = thread_position_in_grid.y;
    uint lane = thread_index_in_simdgroup;
    float squares = 0.0f;
    for (uint i = lane; i < D; i += 32) {
        float v = float(x[row * D + i]);
        squares += v * v;
    }
    float r = metal::rsqrt(simd_sum(squares) / float(D) + eps);
"""


@cache
def _rms_norm_kernels():
    forward = mx.fast.metal_kernel(
        name="recipe_rms_norm", input_names=["x", "w", "eps"], output_names=["y", "rstd"],
        source=_ROW + """
    for (uint i = lane; i < D; i += 32) y[row * D + i] = T(float(x[row * D + i]) * r * float(w[i]));
    if (lane == 0) rstd[row] = r;
""",
    )  # fmt: skip
    of_x = mx.fast.metal_kernel(
        name="recipe_rms_norm_grad", input_names=["x", "w", "rstd", "dy"], output_names=["dx"],
        source="""
    uint row = thread_position_in_grid.y;
    uint lane = thread_index_in_simdgroup;
    float r = rstd[row];
    float dot = 0.0f;
    for (uint i = lane; i < D; i += 32) {
        uint k = row * D + i;
        dot += float(dy[k]) * float(w[i]) * float(x[k]);
    }
    float mean = simd_sum(dot) * r * r / float(D);
    for (uint i = lane; i < D; i += 32) {
        uint k = row * D + i;
        dx[k] = T(r * (float(dy[k]) * float(w[i]) - float(x[k]) * mean));
    }
""",
    )  # fmt: skip
    of_w = mx.fast.metal_kernel(
        name="recipe_rms_norm_grad_w", input_names=["x", "rstd", "dy"], output_names=["dw"],
        source="""
    uint i = thread_position_in_grid.x;
    float sum = 0.0f;
    for (uint row = 0; row < ROWS; ++row) {
        sum += float(dy[row * D + i]) * float(x[row * D + i]) * rstd[row];
    }
    dw[i] = T(sum);
""",
    )  # fmt: skip
    return forward, of_x, of_w


def _by_rows(kernel, inputs, shapes, dtypes):
    rows, width = inputs[0].shape
    return kernel(
        inputs=inputs, template=[("T", dtypes[0]), ("D", width)], grid=(32, rows, 1),
        threadgroup=(32, 1, 1), output_shapes=shapes, output_dtypes=dtypes,
    )  # fmt: skip


@mx.custom_function
def _rms_norm(x, w, eps):
    rows = x.shape[0]
    shapes, dtypes = [x.shape, (rows,)], [x.dtype, mx.float32]
    return tuple(_by_rows(_rms_norm_kernels()[0], [x, w, eps], shapes, dtypes))


@_rms_norm.vjp
def _rms_norm_vjp(primals, cotangents, outputs):
    x, w, eps = primals
    dy, rstd = cotangents[0], outputs[1]
    _, of_x, of_w = _rms_norm_kernels()
    (dx,) = _by_rows(of_x, [x, w, rstd, dy], [x.shape], [x.dtype])
    grid = (w.size, 1, 1)
    (dw,) = of_w(
        inputs=[x, rstd, dy], grid=grid, threadgroup=threadgroup(grid),
        template=[("T", w.dtype), ("D", w.size), ("ROWS", x.shape[0])],
        output_shapes=[w.shape], output_dtypes=[w.dtype],
    )  # fmt: skip
    return dx, dw, mx.zeros_like(eps)


def rms_norm(x, w, eps=1e-5):
    """x · rsqrt(mean(x²) + eps) · w for x (rows, D) and w (D,); `eps` is an input of the kernel, so
    that another value does not compile again."""
    return _rms_norm(x, w, mx.array(eps, mx.float32))[0]
