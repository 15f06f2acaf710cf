"""What `mx.fast.metal_kernel` promises, in one small kernel each."""

from zlib import crc32

import mlx.core as mx
import pytest


def run(source, inputs, shapes, dtypes=(mx.float32,), grid=None, group=32, template=(), **options):
    names = [f"y{i}" for i in range(len(shapes))]
    call = {k: options.pop(k) for k in ("init_value",) if k in options}
    kernel = mx.fast.metal_kernel(
        name=f"upstream_{crc32(source.encode()):x}",  # MLX keeps kernels by name
        input_names=[f"x{i}" for i in range(len(inputs))],
        output_names=names,
        source=source,
        **options,
    )
    return kernel(
        inputs=inputs, template=list(template), grid=grid or (inputs[0].size, 1, 1),
        threadgroup=(group, 1, 1), output_shapes=list(shapes),
        output_dtypes=list(dtypes) * (len(shapes) // len(dtypes)), **call,
    )  # fmt: skip


DOUBLE = "uint i = thread_position_in_grid.x; y0[i] = x0[i] + x0[i];"


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000])
def test_a_grid_need_not_divide_into_groups(size):
    x = mx.arange(size).astype(mx.float32)
    (y,) = run(DOUBLE, [x], [x.shape])
    assert mx.array_equal(y, 2 * x)


def test_inputs_are_made_contiguous():
    x = mx.arange(12.0).reshape(3, 4)
    (y,) = run(DOUBLE, [x.T], [x.T.shape])
    assert mx.array_equal(y, 2 * x.T)


def test_inputs_that_are_not_made_contiguous_come_with_strides():
    x = mx.arange(12.0).reshape(3, 4)
    source = """
        uint i = thread_position_in_grid.x;
        y0[i] = x0[elem_to_loc(i, x0_shape, x0_strides, x0_ndim)];
    """
    (y,) = run(source, [x.T], [x.T.shape], ensure_row_contiguous=False)
    assert mx.array_equal(y, x.T)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 100])
def test_a_simdgroup_sums_its_active_lanes(size):
    x = mx.ones((size,))
    source = "uint i = thread_position_in_grid.x; y0[i] = simd_sum(x0[i]);"
    (y,) = run(source, [x], [x.shape], group=min(size, 1024))
    whole = size // 32 * 32
    assert mx.array_equal(y[:whole], mx.full((whole,), 32.0))
    assert mx.array_equal(y[whole:], mx.full((size - whole,), float(size - whole)))


def test_a_barrier_shows_what_others_wrote():
    x = mx.arange(128.0)
    source = """
        uint i = thread_position_in_threadgroup.x;
        threadgroup float shared[64];
        shared[i] = x0[thread_position_in_grid.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y0[thread_position_in_grid.x] = shared[63 - i];
    """
    (y,) = run(source, [x], [x.shape], group=64)
    assert mx.array_equal(y, x.reshape(2, 64)[:, ::-1].reshape(-1))


def test_atomic_outputs_begin_at_their_initial_value():
    x = mx.ones((1000,))
    source = """
        atomic_fetch_add_explicit(&y0[thread_position_in_grid.x % 4], x0[thread_position_in_grid.x],
                                  memory_order_relaxed);
    """
    (y,) = run(source, [x], [(4,)], atomic_outputs=True, init_value=0)
    assert mx.array_equal(y, mx.full((4,), 250.0))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_template_arguments_are_types_numbers_and_flags(dtype):
    source = "uint i = thread_position_in_grid.x; y0[i] = T(NEGATE ? -N : N) * x0[i];"
    x = mx.arange(8).astype(dtype)
    for negate in (False, True):
        template = [("T", dtype), ("N", 3), ("NEGATE", negate)]
        (y,) = run(source, [x], [x.shape], [dtype], template=template)
        assert mx.array_equal(y, (-3 if negate else 3) * x)


def test_functions_of_the_header_are_there():
    header = "inline float cube(float x) { return x * x * x; }"
    x = mx.arange(8.0)
    source = "uint i = thread_position_in_grid.x; y0[i] = cube(x0[i]);"
    (y,) = run(source, [x], [x.shape], header=header)
    assert mx.array_equal(y, x * x * x)


def test_several_outputs_have_their_own_shapes():
    x = mx.arange(8.0)
    source = """
        uint i = thread_position_in_grid.x;
        y0[i] = -x0[i];
        if (i == 0) y1[0] = x0[7];
    """
    y, last = run(source, [x], [(8,), (1,)])
    assert mx.array_equal(y, -x)
    assert last.item() == 7


def test_a_scalar_is_an_input_without_an_index():
    x = mx.arange(8.0)
    source = "uint i = thread_position_in_grid.x; y0[i] = x0[i] * x1;"
    (y,) = run(source, [x, mx.array(3.0)], [x.shape])
    assert mx.array_equal(y, 3 * x)


def test_two_outputs_and_a_shape_need_no_thread_attribute():
    """MLX 0.32.4 writes a malformed signature for this one."""
    source = "y0[0] = float(x0_shape[0]); y1[0] = float(x0_ndim);"
    rows, axes = run(source, [mx.zeros((5, 3))], [(1,), (1,)], grid=(1, 1, 1), group=1)
    assert (rows.item(), axes.item()) == (5, 2)


def test_a_kernel_is_compiled_for_every_template_argument_anew():
    x = mx.arange(4.0)
    source = "uint i = thread_position_in_grid.x; y0[i] = x0[i] + N;"
    for n in (1, 2, 1):
        (y,) = run(source, [x], [x.shape], template=[("N", n)])
        assert mx.array_equal(y, x + n)
