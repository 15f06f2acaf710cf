"""Parts of tiles that the CPU target has in registers."""

import mlx.core as mx
import numpy as np
import pytest

from zmlx import metal, tiles

DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.bool_, mx.uint32, mx.int8]


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), [(64, 64), (16, 48), (8, 1), (23, 37)])
def test_a_tile_turned_in_registers_equals_that_of_loops(dtype, m, n):
    """What a GPU compiles in its place computes the same."""
    header = tiles.header(on_cpu=True)
    begin = header.index("template <int M, int N, class Source>")
    loops = header[begin : header.index("#endif", begin)].replace(
        "zmlx_load_transposed", "loop_load_transposed"
    )
    kernel = metal.kernel(
        name="turn",
        input_names=["x"],
        output_names=["registers", "looped"],
        source="""
        zmlx_load_transposed<M, N>(registers, x + 3, size_t(M + 5));
        loop_load_transposed<M, N>(looped, x + 3, size_t(M + 5));
        """,
        header=header + "const constant int found = ZMLX_LOAD_TRANSPOSED;\n" + loops,
    )
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((n + 1, m + 5)) * 50).astype(dtype)
    registers, looped = kernel(
        x,
        template=[("M", m), ("N", n)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(m, n)] * 2,
        output_dtypes=[mx.float32] * 2,
    )
    want = x.flatten()[3:][: n * (m + 5)].reshape(n, m + 5)[:, :m].T.astype(mx.float32)
    assert np.array_equal(registers, looped)
    assert np.array_equal(registers, want)
