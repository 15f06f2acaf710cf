"""Attention in plain MLX: the reference, and what the transforms of its kernels fall back on."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..transforms import Arrays
from .attention_text import KEEPS, Form

#: The score of a key that a condition drops: finite, so that a query that has lost all its keys
#: attends to all of them alike, as in MLX.
DROPPED = -3.4028234663852886e38


def product(x: Any, y: Any, xp: Any) -> Any:
    """x @ y, where a head of y serves several of x."""
    heads = y.shape[1]
    group = x.shape[1] // heads if heads else 1
    if group == 1:
        return x @ y
    if xp is mx:  # sizes that a shapeless compile may change are not named
        return mx.flatten(mx.unflatten(x, 1, (-1, group)) @ mx.expand_dims(y, 2), 1, 2)
    split = x.reshape((x.shape[0], heads, group, *x.shape[2:])) @ y[:, :, None]
    return split.reshape((x.shape[0], x.shape[1], *split.shape[3:]))


def _scores(
    q: Any, k: Any, mask: Any, scale: Any, causal: bool, window: Any, softcap: Any, xp: Any,
    spans: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Scores, whether each is there (None: all), and the derivative by the product (None: 1)."""
    z = product(scale * q, xp.swapaxes(k, -1, -2), xp)
    slope = None
    if softcap is not None:
        t = xp.tanh(z / softcap)
        z, slope = softcap * t, 1.0 - t * t
    keep = None
    if mask is not None and mask.dtype in (mx.bool_, bool):
        keep = mask
    elif mask is not None:
        z = z + mask
    if causal or window is not None or spans is not None:
        # Positions and lengths from the elements, which a shapeless compile may change. Half
        # precision does not count far.
        ones_q, ones_k = (
            xp.max(xp.ones_like(xp.stop_gradient(x)), axis=(1, 3), keepdims=True).astype(xp.float32)
            for x in (q, k)
        )
        ones_k = xp.swapaxes(ones_k, -1, -2)
        key = xp.cumsum(ones_k, axis=-1)
        if spans is None:
            # The lengths as products: in a shapeless compile a sum over an axis of 1, such as that
            # of one query, makes MLX write out of bounds on the CPU.
            last = ones_k @ xp.swapaxes(ones_k, -1, -2) - xp.swapaxes(ones_q, -1, -2) @ ones_q
            position = xp.cumsum(ones_q, axis=-2) + last
            rule = key < position + (1 if causal else window)
            if window is not None:
                rule = xp.logical_and(rule, key > position - window)
            # A query that has no key near has them all alike.
            none = position + (0 if causal else window - 1) < 1
            if keep is not None:
                z = xp.where(keep, z, DROPPED)
            z = xp.where(rule, z, xp.where(none, DROPPED, -xp.inf))
            return z, rule if keep is None else xp.logical_and(keep, rule), slope
        some = spans.astype(mx.float32)
        rule = xp.logical_and(key > some[:, :1], key <= some[:, 1:2])
        lost = some[:, 2:3]
        z = xp.where(rule, xp.where(lost != 0, DROPPED, z), -xp.inf)
        z = xp.where(xp.logical_and(rule, lost == 2), xp.nan, z)
        return z, xp.logical_and(rule, lost == 0), slope
    if keep is not None:
        z = xp.where(keep, z, DROPPED)
    return z, keep, slope


def _twice(z: mx.array) -> mx.array:
    """z, and a last axis of 2 of the same: where lengths may change in a shapeless compile, a sum
    or a maximum over axes that are all 1, such as that of one key, makes MLX read out of bounds on
    the CPU."""
    return mx.expand_dims(z, -1) + mx.zeros(2)


def softmax_of(z: Any, sinks: Any, xp: Any, dynamic: bool = False) -> tuple[Any, Any, Any]:
    """exp(z - peak), the peak and the total; `dynamic` where lengths may change."""
    # Finite, so that a query without scores has no exponentials, and -inf as their logarithm.
    if dynamic:
        peak = mx.maximum(mx.max(_twice(z), axis=(-2, -1), keepdims=True).squeeze(-1), DROPPED)
    elif not z.shape[-1]:
        peak = xp.sum(z, axis=-1, keepdims=True) + DROPPED
    else:
        peak = xp.maximum(xp.max(z, axis=-1, keepdims=True), DROPPED)
    if sinks is not None:
        sinks = sinks[:, None, None]
        peak = xp.maximum(peak, sinks)
    peak = xp.stop_gradient(peak)
    e = xp.exp(z - peak)
    if dynamic:
        total = mx.sum(0.5 * _twice(e), axis=(-2, -1), keepdims=True).squeeze(-1)
    else:
        total = xp.sum(e, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(sinks - peak)
    return e, peak, total


def scaled_dot_product_attention_reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    xp: Any = mx,
) -> Any:
    """scaled_dot_product_attention in plain MLX."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    z, _, _ = _scores(q, k, mask, scale, causal, window, softcap, xp)
    e, peak, total = softmax_of(z, sinks, xp)
    out = product(e, v, xp) / total  # NaN where there is no key
    if return_lse:
        return out, (peak + xp.log(total))[..., 0]
    return out


def _float32(form: Form, inputs: Arrays) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Inputs by name in float32, and what `_scores` takes of them."""
    named = form.named(inputs)
    some = {n: x.astype(mx.float32) for n, x in named.items() if n in ("q", "k", "v", "sinks")}
    mask = named.get("mask")
    if mask is not None:
        mask = mask.astype(mx.bool_ if form.mask == KEEPS else mx.float32)
    options = {
        "mask": mask,
        "scale": named["scale"],
        "causal": form.causal and not form.spans,
        "window": None if form.spans else named.get("window"),
        "softcap": named.get("softcap"),
        "spans": named.get("spans"),
    }
    return some, options


def forward_in_mlx(form: Form, inputs: Arrays, dynamic: bool = False) -> Arrays:
    """out, peak and total as the forward kernel gives them; `dynamic` where lengths may change."""
    some, options = _float32(form, inputs)
    z, _, _ = _scores(some["q"], some["k"], xp=mx, **options)
    e, peak, total = softmax_of(z, some.get("sinks"), mx, dynamic)
    # A query without scores is NaN, and has the gradient 0.
    none = total == 0.0
    out = mx.where(none, mx.nan, product(e, some["v"], mx) / mx.where(none, 1.0, total))
    return out.astype(inputs[0].dtype), peak.squeeze(-1), total.squeeze(-1)


def backward_in_mlx(form: Form, inputs: Arrays, dynamic: bool = False) -> tuple[mx.array, ...]:
    """dq, dk, dv in float32 and the gradient of the scores; `dynamic` where lengths may change."""
    some, options = _float32(form, inputs)
    dout, _, _, delta = inputs[-4:]
    q, k, v, dout = some["q"], some["k"], some["v"], dout.astype(mx.float32)
    # A view that no elementwise kernel of `mx.compile` takes in. Gradients of several of these make
    # three equal transposes of dout; MLX 0.32 may merge two of them and then compute what they read
    # inside one kernel, where the third does not find it (IndexError).
    dout = dout.swapaxes(-1, -2).swapaxes(-1, -2)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = mx.repeat(k, group, axis=1), mx.repeat(v, group, axis=1)
    z, keep, slope = _scores(q, k, xp=mx, **options)
    e, _, total = softmax_of(z, some.get("sinks"), mx, dynamic)
    none = total == 0.0
    p = e / mx.where(none, 1.0, total)
    ds = mx.where(none, 0.0, p * (dout @ v.swapaxes(-1, -2) - delta[..., None]))
    if keep is not None:
        ds = mx.where(keep, ds, 0.0)
    dz = ds if slope is None else ds * slope
    dz = dz * options["scale"]
    dk, dv = dz.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
    if group > 1:
        dk, dv = (mx.unflatten(x, 1, (x.shape[1] // group, group)).sum(axis=2) for x in (dk, dv))
    return dz @ k, dk, dv, ds
