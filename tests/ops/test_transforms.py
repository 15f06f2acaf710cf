"""What MLX's transforms do to every op."""

import io
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import zmlx
from zmlx.launch import gpu_target
from zmlx.targets import cpu
from zmlx.testing import draw, gradients, to_numpy
from zmlx.transforms import strict

from .sweep import DIFFERENTIABLE, OPS, option_cases, outputs

EVERY_OP = pytest.mark.parametrize("op", OPS, ids=lambda o: o.name)
NOT_ON_METAL = pytest.mark.skipif(
    gpu_target() == "metal", reason="MLX's own kernels, which Metal runs, know no such transform"
)
EVERY_GRADIENT = pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda o: o.name)


def close(got, want, tolerance=2e-5):
    for a, b in zip(got, want, strict=True):
        a, b = to_numpy(a), to_numpy(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(initial=1))


def is_shared(argument):
    """Whether all rows share the argument, as a weight (D,)."""
    return not argument.shape.startswith(("(*", "(..."))


def version(text):
    return tuple(int(part) for part in text.split(".")[:3])


def shapeless(op):
    """Whether the op may be compiled without a shape by this MLX."""
    needed = version(op.needs.get("shapeless compile", "0"))
    return "shapeless compile" not in op.refuses and version(mx.__version__) >= needed


#: Ops that count no rows by a cumulative sum, and the MLX that compiles one for other shapes.
SCANS = {"argmax": "0.32.3", "argmin": "0.32.3"}


def case_of(op):
    values = draw(op, op.cases[1], mx.float32)
    return values, op.differentiable


def weighted(result):
    """A sum of all outputs, with weights that tell elements and outputs apart."""
    return sum(
        (y * mx.cos(mx.arange(y.size, dtype=mx.float32) + k).reshape(y.shape)).sum()
        for k, y in enumerate(outputs(result))
    )


def with_arguments(function, values, which):
    """The outputs as a function of the arguments `which`, and these."""

    def of(*some):
        full = list(values)
        for i, value in zip(which, some, strict=True):
            full[i] = value
        return list(outputs(function(*full)))

    return of, [values[i] for i in which]


def loss_of(op, values, which, function=None):
    """A scalar function of the differentiable arguments."""
    of, some = with_arguments(function or op.function, values, which)
    return (lambda *some: weighted(of(*some))), some


def all_gradients(op, values, which, function=None):
    loss, some = loss_of(op, values, which, function)
    return mx.grad(loss, argnums=tuple(range(len(some))))(*some)


@EVERY_OP
def test_compile(op):
    values, which = case_of(op)
    close(outputs(mx.compile(op.function)(*values)), outputs(op.reference(*values)))
    if not which:
        return
    loss, some = loss_of(op, values, which)
    compiled = mx.compile(mx.grad(loss, argnums=tuple(range(len(some)))))
    close(compiled(*some), all_gradients(op, values, which, op.reference))


def of_three_axes(op, case):
    """Values of the op, with leading axes beside those of the case: not of one, since MLX's sums
    over an axis of 1 read beyond it in the compiled trace of another shape."""
    values = draw(op, case, mx.float32)
    while values[0].ndim < 3 and not is_shared(op.arguments[0]):
        values = [v if v is None or is_shared(op.arguments[i])
                  else mx.stack([v, v]) for i, v in enumerate(values)]  # fmt: skip
    return values


@NOT_ON_METAL
@EVERY_OP
def test_shapeless_compile_takes_another_shape(op):
    compiled = mx.compile(op.function, shapeless=True)
    if not shapeless(op):
        with pytest.raises(ValueError, match="cannot infer output shapes"):
            compiled(*draw(op, op.cases[1], mx.float32))
        return
    for case in op.cases[1:3]:
        values = of_three_axes(op, case)
        close(outputs(compiled(*values)), outputs(op.reference(*values)))


@NOT_ON_METAL
@pytest.mark.parametrize("op", [o for o in DIFFERENTIABLE if shapeless(o)], ids=lambda o: o.name)
def test_gradients_of_a_shapeless_compile_take_another_shape(op):
    def loss(*values):
        return sum(y.square().sum() for y in outputs(op.function(*values)))

    compiled = mx.compile(mx.grad(loss, argnums=op.differentiable), shapeless=True)
    for case in op.cases[1:3]:
        values = of_three_axes(op, case)
        close(compiled(*values), mx.grad(loss, argnums=op.differentiable)(*values))


@NOT_ON_METAL
@pytest.mark.parametrize("target", [None, "reference", "reference without a core"])
@EVERY_OP
def test_a_shapeless_compile_that_begins_without_rows_takes_rows(op, target, monkeypatch):
    """And none after them. What an op returns early for none would be the graph of all calls."""
    if target == "reference without a core":  # as on a Mac
        target = "reference"
        monkeypatch.setattr(cpu, "_core_if_any", lambda: None)
    case = op.cases[1]
    values = of_three_axes(op, case)
    sizes = {s: 0 if s == "R" else n for s, n in case.sizes.items()}  # R is a number of rows
    none = of_three_axes(op, replace(case, lead=(0, *case.lead[1:]), sizes=sizes))
    which, count = op.differentiable, len(values)

    def both(function, *arrays):
        """Outputs, and their gradients with the cotangents behind the arguments."""
        if not which:
            return outputs(function(*arrays))
        of, some = with_arguments(function, arrays[:count], which)
        return [y for found in mx.vjp(of, some, list(arrays[count:])) for y in found]

    compiled = mx.compile(partial(both, op.function), shapeless=True)
    for arrays in (none, values, none):
        with zmlx.target("reference"):
            wants = outputs(op.function(*arrays))
        cotangents = [mx.cos(mx.arange(y.size)).reshape(y.shape) for y in wants if which]
        with zmlx.target(target) if target else nullcontext():
            if not shapeless(op) or version(mx.__version__) < version(SCANS.get(op.name, "0")):
                with pytest.raises(ValueError, match="cannot infer output shapes"):
                    compiled(*arrays, *cotangents)
                continue
            got = compiled(*arrays, *cotangents)
        assert [y.shape for y in got[: len(wants)]] == [y.shape for y in wants]
        if arrays is values:
            close(got, both(op.reference, *arrays, *cotangents))


@EVERY_OP
def test_an_exported_function_is_of_the_reference(op, tmp_path):
    """A file holds no kernel of the CPU; what is exported in plain MLX runs anywhere."""
    values, _ = case_of(op)
    path = str(tmp_path / "op.mlxfn")
    with zmlx.target("reference"):
        mx.export_function(path, op.function, *values)
    close(mx.import_function(path)(*values), outputs(op.function(*values)))


@EVERY_GRADIENT
def test_checkpoint(op):
    values, which = case_of(op)
    loss, some = loss_of(op, values, which)
    got = mx.grad(mx.checkpoint(loss), argnums=tuple(range(len(some))))(*some)
    close(got, all_gradients(op, values, which, op.reference))
    # Of all arguments, indices among them, MLX asks for the gradient.
    whole = mx.checkpoint(lambda *full: weighted(op.function(*full)))
    close(mx.grad(whole, argnums=which)(*values), got)


@NOT_ON_METAL
@EVERY_OP
def test_vmap_over_the_first_argument(op):
    values, _ = case_of(op)
    if "vmap" in op.refuses:
        with pytest.raises(ValueError, match="Not implemented"):
            mx.vmap(lambda x: op.function(x, *values[1:]))(values[0][None])
        return
    in_axes = [None if is_shared(a) else 0 for a in op.arguments]
    batched = [mx.stack([v, v * 0.5 if mx.issubdtype(v.dtype, mx.floating) else v])
               if axis == 0 else v
               for v, axis in zip(values, in_axes, strict=True)]  # fmt: skip
    got = mx.vmap(op.function, in_axes=tuple(in_axes))(*batched)
    want = mx.vmap(op.reference, in_axes=tuple(in_axes))(*batched)
    close(outputs(got), outputs(want))


@NOT_ON_METAL
@pytest.mark.parametrize("op, index", [
    pytest.param(op, i, id=f"{op.name}-{argument.name}")
    for op in OPS if "vmap" not in op.refuses for i, argument in enumerate(op.arguments)
])  # fmt: skip
def test_vmap_over_one_argument_alone(op, index):
    """What is not mapped must be broadcast to what is."""
    values, _ = case_of(op)
    value = values[index]
    some = [value, value * 0.5 if mx.issubdtype(value.dtype, mx.floating) else value]

    def of(x):
        return op.function(*values[:index], x, *values[index + 1 :])

    wants = [outputs(of(x)) for x in some]
    got = outputs(mx.vmap(of)(mx.stack(some)))
    # MLX's bitwise operations do not broadcast an operand that is not mapped to one that is, and
    # read past its end. Random numbers, which need them, map all three of their arrays.
    graph = io.StringIO()
    mx.export_to_dot(graph, got)
    found = set(re.findall(r'label ="(Bitwise\w+|\w+Shift)"', graph.getvalue()))
    assert not found or "seed" in {o.name for o in op.options}, found
    close(got, [mx.stack(want) for want in zip(*wants, strict=True)])


@NOT_ON_METAL
@pytest.mark.parametrize(
    "op", [o for o in DIFFERENTIABLE if "vmap" not in o.refuses], ids=lambda o: o.name
)
def test_vmap_of_grad_and_grad_of_vmap(op):
    values, _ = case_of(op)
    first = mx.stack([values[0], values[0] * 0.5])

    def of(function):
        def one(x):
            return weighted(function(x, *values[1:]))

        return (
            mx.vmap(mx.grad(one))(first),
            mx.grad(lambda x: mx.vmap(one)(x).sum())(first),
        )

    close(of(op.function), of(op.reference))


@NOT_ON_METAL
@pytest.mark.parametrize("op", [o for o in OPS if "vmap" not in o.refuses], ids=lambda o: o.name)
def test_vmap_over_nothing(op):
    """A batch of 0, which MLX cannot reshape to (-1, D), and of which it takes no argmax."""
    for case in (op.cases[1], *option_cases(op)):
        values = draw(op, case, mx.float32)
        axes = tuple(None if is_shared(a) else 0 for a in op.arguments)
        empty = [v if a is None else mx.zeros((0, *v.shape), v.dtype)
                 for v, a in zip(values, axes, strict=True)]  # fmt: skip

        def function(*some, options=case.options):
            return outputs(op.function(*some, **options))

        mapped = mx.vmap(function, in_axes=axes)
        wants, gots = function(*values), mapped(*empty)
        for got, want in zip(gots, wants, strict=True):
            assert (got.shape, got.dtype) == ((0, *want.shape), want.dtype), case.options
        mx.eval(gots)
        which = op.differentiable
        if not which or not all(mx.issubdtype(y.dtype, mx.floating) for y in wants):
            continue
        each = mx.vmap(mx.grad(lambda *some: weighted(function(*some)), which), axes)(*empty)
        over = mx.grad(lambda *some, of=mapped: weighted(of(*some)), which)(*empty)
        for i, one, total in zip(which, outputs(each), outputs(over), strict=True):
            assert one.shape == (0, *values[i].shape), case.options
            assert total.shape == empty[i].shape, case.options
            assert not np.array(total).any(), case.options


@NOT_ON_METAL
@EVERY_GRADIENT
def test_jvp(op):
    values, which = case_of(op)
    loss, some = loss_of(op, values, which)
    if "jvp" in op.refuses:
        with pytest.raises(ValueError, match="Not implemented"):
            mx.jvp(loss, some, some)
        return
    plain, _ = loss_of(op, values, which, op.reference)
    tangents = [mx.cos(mx.arange(s.size, dtype=mx.float32)).reshape(s.shape) for s in some]
    close(mx.jvp(loss, some, tangents)[1], mx.jvp(plain, some, tangents)[1])


@NOT_ON_METAL
@EVERY_GRADIENT
def test_second_order(op):
    values, which = case_of(op)

    def second(function):
        loss, some = loss_of(op, values, which, function)

        def norm(*xs):
            return sum((g * g).sum() for g in mx.grad(loss, argnums=tuple(range(len(xs))))(*xs))

        return mx.grad(norm, argnums=tuple(range(len(some))))(*some)

    close(second(op.function), second(op.reference), 1e-4)


@EVERY_GRADIENT
def test_a_gradient_by_the_route_of_metal(op):
    """The launch refuses transforms as MLX's own kernels do; the rule is a custom_function."""
    values, which = case_of(op)
    with strict():
        got = all_gradients(op, values, which)
    close(got, all_gradients(op, values, which, op.reference))


@EVERY_OP
def test_the_reference_target_is_plain_mlx(op):
    import zmlx

    values, _ = case_of(op)
    with zmlx.target("reference"):
        close(outputs(op.function(*values)), outputs(op.reference(*values)))


@EVERY_GRADIENT
def test_value_and_grad_in_a_training_step(op):
    class Model(nn.Module):
        def __init__(self, values, which):
            super().__init__()
            self.arguments = [values[i] for i in which]

        def __call__(self):
            return loss_of(op, values, which)[0](*self.arguments)

    values, which = case_of(op)
    model = Model(values, which)
    step = nn.value_and_grad(model, lambda: model())
    _, grads = step()
    close(grads["arguments"], gradients(
        lambda *v: loss_of(op, values, which, op.reference)[0](*v),
        [values[i] for i in which], range(len(which)), [mx.array(1.0)]))  # fmt: skip
