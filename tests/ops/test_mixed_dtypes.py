"""Arguments of different dtypes, of every op that takes several arrays."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import zmlx
from zmlx.arguments import dtype_name
from zmlx.launch import gpu_target
from zmlx.testing import (
    EPS,
    check_forward,
    check_gradient,
    differentiated,
    draw,
    gradients,
    to_numpy,
)
from zmlx.transforms import strict

from .sweep import DTYPES, OPS, outputs, turns, with_gradients

#: Arguments whose dtypes outputs have, in order, where the op does not promote: weights, masks,
#: sinks and quantised scales are data, and what is kept from call to call keeps its dtype.
KEPT = {
    "adamw": ("p", "m", "v"),
    "cross_entropy": ("logits",),
    "decode_attention": ("q",),
    "dropout_add_layer_norm": (("x", "residual", "weight", "bias"), ("x", "residual")),
    "dropout_add_rms_norm": (("x", "residual", "weight"), ("x", "residual")),
    "expert_ffn": ("x",),
    "linear_cross_entropy": (("hidden", "weight", "bias"),),
    "lion": ("p", "m"),
    "moe_combine": ("x",),
    "paged_attention": ("q",),
    "quantized_attention": ("q",),
    "rope_append": ("k_cache", "v_cache", "q"),
    "scaled_dot_product_attention": (("q", "k", "v"),),
    "sgd": ("p", "v"),
    "topk_gating": ("logits", mx.uint32),
    "varlen_attention": (("q", "k", "v"),),
}

#: Arguments that must have the dtype of the first.
ALIKE = {"decode_attention": ("k", "v"), "paged_attention": ("k_cache", "v_cache")}


def floats(op):
    return [a.name for a in op.arguments if mx.float32 in a.dtypes]


def mixtures(op):
    """Dtypes of the arguments: one that differs from all others, which are each of three, then each
    a different one."""
    names = floats(op)
    some = [{n: DTYPES[(turn + 1 + i % 2) % 3] if n == odd else DTYPES[turn] for n in names}
            for i, odd in enumerate(names) for turn in range(3)]  # fmt: skip
    some += [{n: DTYPES[(turn + step * i) % 3] for i, n in enumerate(names)}
             for turn in range(3) for step in (1, 2)]  # fmt: skip
    some = [{n: d[names[0]] if n in ALIKE.get(op.name, ()) else dtype for n, dtype in d.items()}
            for d in some]  # fmt: skip
    some = [d for i, d in enumerate(some) if d not in some[:i] and len(set(d.values())) > 1]
    bools = [n for n in names if mx.bool_ in op.arguments[index(op, n)].dtypes]
    return some + [dict.fromkeys(names, d) | {n: mx.bool_} for n in bools for d in DTYPES[1:]]


def index(op, name):
    return [a.name for a in op.arguments].index(name)


SEVERAL = [op for op in OPS if len(floats(op)) > 1]


def over_mixtures(every):
    """Parametrises over (op, case): one in `every` of the mixtures runs by default."""
    rows = []
    for turn, op in enumerate(SEVERAL):
        some = [
            pytest.param(
                op,
                replace(op.cases[1], dtypes={**op.cases[1].dtypes, **d}),
                id="-".join([op.name, *map(dtype_name, d.values())]),
            )
            for d in mixtures(op)
        ]
        rows += turns(some, turn, min(every, len(some)))
    return pytest.mark.parametrize("op, case", rows)


def promoted(op, values, names):
    """The dtype that the arguments of these names promote to."""
    if not isinstance(names, (str, tuple)):
        return names
    names = (names,) if isinstance(names, str) else names
    return mx.result_type(*[values[index(op, n)] for n in names])


def coarsest(arrays):
    return max(EPS.get(x.dtype, 0.0) for x in arrays if x is not None)


@over_mixtures(every=12)
def test_mixed_dtypes(op, case):
    """A result has the dtype of MLX's op on the same arrays, or of the arguments that the op says,
    and a gradient that of its argument. An output that is rounded is read again, by a norm of a sum
    or by the gradient of a softmax: the bound is one of the coarsest output."""
    values = draw(op, case, mx.float32)
    got = outputs(op.function(*values))
    want = [y.dtype for y in outputs(op.reference(*values))]
    if op.name in KEPT:
        want = [promoted(op, values, names) for names in KEPT[op.name]]
    assert [y.dtype for y in got] == want
    eps = coarsest(got)
    check_forward(op, case, mx.float32, eps=eps)
    check_gradient(op, case, mx.float32, eps=eps)


def assert_alike(got, want, eps, name):
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        a, b = to_numpy(a), to_numpy(b)
        np.testing.assert_allclose(a, b, 0, 8 * eps * np.abs(b).max(initial=1e-3), err_msg=name)


@over_mixtures(every=24)
def test_transforms_of_mixed_dtypes(op, case):
    """Each gives what the call without it gives, in the same dtypes."""
    values = draw(op, case, mx.float32)
    want = with_gradients(op, values)
    eps = coarsest([*values, *want])

    def both(*some):
        return list(with_gradients(op, some))

    assert_alike(mx.compile(both)(*values), want, eps, "compile")
    with zmlx.target("reference"):
        assert_alike(both(*values), want, eps, "reference")
    layouts = [
        None if x is None else mx.repeat(x, 2, axis=-1)[..., ::2] if x.ndim else x for x in values
    ]
    assert_alike(both(*layouts), want, 0.0, "layout")
    which = differentiated(op, values)
    if op.differentiable:
        results = outputs(op.function(*values))
        rng = np.random.default_rng(1)
        cotangents = [mx.array(rng.standard_normal(y.shape)).astype(y.dtype) for y in results]
        again = gradients(mx.checkpoint(op.function), values, which, cotangents)
        assert_alike(again, want[len(results) :], eps, "checkpoint")
        with strict():
            assert_alike(both(*values), want, eps, "by the route of Metal")
    if gpu_target() != "metal" and "vmap" not in op.refuses:
        shared = [not a.shape.startswith(("(*", "(...")) for a in op.arguments]
        axes = tuple(None if s else 0 for s in shared)
        batched = [x if s else mx.stack([x, x]) for x, s in zip(values, shared, strict=True)]
        if not all(shared):
            mapped = outputs(mx.vmap(op.function, in_axes=axes)(*batched))
            for k in range(2):
                assert_alike([y[k] for y in mapped], want[: len(mapped)], eps, "vmap")


INTEGERS = [
    pytest.param(op, i, id=f"{op.name}-{a.name}")
    for op in OPS
    for i, a in enumerate(op.arguments)
    if len(a.dtypes) > 1 and mx.int32 in a.dtypes and mx.float32 not in a.dtypes
]


@pytest.mark.parametrize("op, i", INTEGERS)
def test_integers_of_any_dtype_are_the_same(op, i):
    values = draw(op, op.cases[1], mx.float32)
    want = with_gradients(op, values)
    for dtype in op.arguments[i].dtypes:
        values[i] = values[i].astype(dtype)
        assert_alike(with_gradients(op, values), want, 0.0, dtype_name(dtype))


@pytest.mark.parametrize("dtype", [mx.float64, mx.int8], ids=dtype_name)
@pytest.mark.parametrize("op", OPS, ids=lambda o: o.name)
def test_a_dtype_that_no_kernel_takes_is_refused(op, dtype):
    """Of each argument, before anything runs."""
    values = draw(op, op.cases[1], mx.float32)
    for i, argument in enumerate(op.arguments):
        if dtype in argument.dtypes:
            continue
        odd = [*values[:i], mx.zeros(values[i].shape).astype(dtype), *values[i + 1 :]]
        with pytest.raises(ValueError, match=rf"\[{op.name}\] '{argument.name}' must have dtype"):
            op.function(*odd)
