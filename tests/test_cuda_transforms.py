"""Transforms on the CUDA target, without a GPU: the node that holds MLX's own answers them.

A launch of the CPU target stands in for MLX's, which knows no transform either.
"""

import mlx.core as mx
import pytest
from cuda_launches import standing_in
from ops.test_transforms import (  # noqa: F401  (tests of every op, run here once more)
    test_gradients_of_a_shapeless_compile_take_another_shape,
    test_jvp,
    test_second_order,
    test_vmap_of_grad_and_grad_of_vmap,
    test_vmap_over_nothing,
    test_vmap_over_the_first_argument,
)

import zmlx
from zmlx import metal
from zmlx.targets import cpu, cuda
from zmlx.transforms import strict


@pytest.fixture(autouse=True)
def cuda_on_the_cpu(monkeypatch):
    on_cuda = cuda.prepare, cuda._launch

    def prepare(spec, *arguments):
        if 0 in arguments[2]:
            return on_cuda[0](spec, *arguments)
        return cuda._Launch(spec.full_name, {"compiled_source": cpu.prepare(spec, *arguments)}, ())

    def launch(prepared, arrays):
        if not cuda.has_node(prepared):
            return on_cuda[1](prepared, arrays)
        outputs = cpu.launch(prepared.arguments["compiled_source"], arrays)
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(cuda, "prepare", prepare)
    monkeypatch.setattr(cuda, "_launch", launch)
    with standing_in("transforms"), zmlx.target("cuda"):
        yield


def kernel(**rules):
    return metal.kernel(
        name="pair", input_names=["x", "w"], output_names=["y", "z"],
        source="uint i = thread_position_in_grid.x; y[i] = x[i] * w[0]; z[i] = x[i] + w[0];",
        **rules,
    )  # fmt: skip


X, W = mx.array([1.0, -2.0, 3.0]), mx.array([2.0])


def test_without_a_rule_the_error_names_the_remedy():
    def first(x):
        return kernel()(x, W)[0]

    needs = r"CustomKernel pair_\w{12}: wrap .* a 'reference' through zmlx\.metal\.kernel"
    with pytest.raises(ValueError, match=needs):
        mx.vmap(first)(mx.stack([X, X]))
    with pytest.raises(ValueError, match=needs):
        mx.jvp(first, [X], [X])
    with pytest.raises(ValueError, match=r"pair_\w{12}: wrap .* a 'vjp' or 'reference'"):
        mx.grad(lambda x: first(x).sum())(X)


def test_several_outputs_have_a_node_of_their_own():
    pair = kernel(reference=lambda x, w: (x * w, x + w))

    def both(x, w):
        y, z = pair(x, w)
        return (y * z).sum()

    dx, dw = mx.grad(both, argnums=(0, 1))(X, W)
    assert dx.tolist() == (2 * X * W + W * W).tolist()
    assert dw.tolist() == [(X * X + 2 * X * W).sum().item()]
    (ys, zs) = mx.vmap(pair, in_axes=(0, None))(mx.stack([X, 2 * X]), W)
    assert ys.tolist() == [(2 * X).tolist(), (4 * X).tolist()]
    assert zs.tolist() == [(X + 2).tolist(), (2 * X + 2).tolist()]
    (dy, dz) = mx.jvp(pair, [X, W], [mx.ones(3), mx.zeros(1)])[1]
    assert (dy.tolist(), dz.tolist()) == ([2.0] * 3, [1.0] * 3)


def test_only_gradients_that_are_asked_for_are_computed():
    asked = []

    def vjp(primals, cotangents, outputs, wanted):
        asked.append(tuple(wanted))
        return [cotangents[0] * W + cotangents[1], None]

    mx.grad(lambda x: kernel(vjp=vjp)(x, W)[0].sum())(X)
    assert asked == [(0,)]


@pytest.mark.parametrize("name", ["pair", "Abs", "CustomKernel"])
def test_a_node_is_not_exported_as_a_primitive_of_mlx(tmp_path, name):
    own = metal.kernel(
        name=name, input_names=["x"], output_names=["y"],
        source="uint i = thread_position_in_grid.x; y[i] = 10 * x[i];", reference=lambda x: 10 * x,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"Unable to serialize primitive {name}_"):
        mx.export_function(str(tmp_path / "f.mlxfn"), own, X)


def test_a_grid_without_threads_keeps_its_gradient():
    total = metal.kernel(
        name="total", input_names=["x", "w"], output_names=["y"], source="y[0] = x[0] * w[0];",
        reference=lambda x, w: x.sum(keepdims=True) + w,
    )  # fmt: skip

    def loss(w):
        return total(mx.zeros((0,)), w, grid=0, output_shapes=[(1,)], init_value=0.0).sum()

    assert mx.grad(loss)(mx.ones((1,))).tolist() == [1.0]


def test_the_route_of_metal_refuses_what_mlx_s_kernels_refuse():
    pair = kernel(reference=lambda x, w: (x * w, x + w))
    with strict(), pytest.raises(ValueError, match=r"\[Primitive::vmap\] Not implemented"):
        mx.vmap(lambda x: pair(x, W)[0])(mx.stack([X, X]))
