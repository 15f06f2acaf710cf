"""What the tests of attention compare with: the reference in float64, and in float32 as the base of
the error rule (`zmlx.testing`)."""

import mlx.core as mx
import numpy as np
from autograd import make_vjp

from zmlx.kernels.attention import scaled_dot_product_attention_reference as plain
from zmlx.testing import EPS, assert_matches, gradients, oracle_namespace, to_numpy

XP = oracle_namespace()


def arrays(*shapes, dtype=mx.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [mx.array(rng.standard_normal(s)).astype(dtype) for s in shapes]


def qkv(b=1, h=2, k=1, queries=37, keys=70, d=16, v=8, **more):
    return arrays((b, h, queries, d), (b, k, keys, d), (b, k, keys, v), **more)


def _fixed(values, kind):
    fixed = [None if x is None else to_numpy(x) for x in values]
    return [x.astype(kind) if x is not None and x.dtype == np.float64 else x for x in fixed]


def _outputs(y):
    return tuple(y) if isinstance(y, (tuple, list)) else (y,)


def assert_right(got, values, reference=plain, *, rounding=4, **options):
    """Raises unless `got` is what `reference` makes of `values`, by the error rule."""
    both = [
        _outputs(reference(*_fixed(values, kind), **options, xp=XP))
        for kind in (np.float64, np.float32)
    ]
    for out, want, base in zip(_outputs(got), *both, strict=True):
        assert_matches(out, want, base, rounding=rounding, name="output")


def assert_right_gradients(function, values, which, cotangents, reference=plain, terms=None,
                           **options):  # fmt: skip
    """Raises unless the gradients of `function` for the arguments `which` are those of `reference`.

    An element that cancels has the error of its terms: `terms` are their magnitudes, by argument.
    """
    got = gradients(function, values, which, cotangents)

    def gradient(i, kind):
        fixed = _fixed(values, kind)

        def total(x):
            ys = _outputs(reference(*fixed[:i], x, *fixed[i + 1 :], **options, xp=XP))
            return sum(
                XP.sum(y * to_numpy(c).astype(kind)) for y, c in zip(ys, cotangents, strict=True)
            )

        return make_vjp(total, 0)(fixed[i])[0](kind(1))

    for i, out in zip(which, got, strict=True):
        want, base = gradient(i, np.float64), gradient(i, np.float32)
        assert out.dtype == values[i].dtype
        if terms is not None:
            base = want + np.maximum(np.abs(base - want), 2 * EPS[mx.float32] * terms[i].max())
        assert_matches(out, want, base, name=f"gradient {i}")


def terms_of(values, cotangents, *, return_lse=False, **options):
    """The magnitudes of what each gradient of `scaled_dot_product_attention` sums: of an added
    mask p (|dy| |v|ᵀ + Σ_j p |dy| |v|ᵀ + |dlse|), whose two first terms are equal and opposite
    where one key is left."""
    q, k, v, mask, sinks = [*_fixed(values, np.float64), None, None][:5]
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (np.repeat(np.abs(x), group, axis=1) for x in (k, v))
    every = np.broadcast_to(np.eye(k.shape[2]), (*k.shape[:3], k.shape[2]))
    p = plain(q, k, every, mask, sinks, **options, xp=XP)
    dy = np.abs(to_numpy(cotangents[0]))
    dp = dy @ wide_v.swapaxes(2, 3)
    whole = (p * dp).sum(axis=-1, keepdims=True)
    if return_lse:
        whole = whole + np.abs(to_numpy(cotangents[1]))[..., None]
    dz = p * (dp + whole)
    scale = options.get("scale", q.shape[-1] ** -0.5)

    def shared(x):
        return x.reshape((x.shape[0], -1, group, *x.shape[2:])).sum(axis=2)

    found = [
        scale * dz @ wide_k,
        shared(scale * dz.swapaxes(2, 3) @ np.abs(q)),
        shared(p.swapaxes(2, 3) @ dy),
    ]
    if mask is not None and mask.dtype != bool:
        shape = (1,) * (4 - mask.ndim) + mask.shape
        axes = tuple(i for i, n in enumerate(shape) if n == 1)
        found.append(dz.sum(axis=axes).reshape(mask.shape))
    else:
        found.append(None)
    found.append(((1 - p.sum(axis=-1)) * whole[..., 0]).sum(axis=(0, 2)))
    return found
