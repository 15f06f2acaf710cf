"""A language model's head and loss in one op, which never holds the logits.

`lm_loss` is mlx-lm's training loss. Where the last thing that a model calls is a linear head, found
by tracing the model's call with stand-ins for its children, it takes what the head gets and the
head's weight to `linear_cross_entropy`; a scale and a softcap of the logits go along.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import isfinite
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..nn import losses
from .capture import Graphs
from .held import is_as_noted, noted
from .match import in_mode
from .reasons import UnmatchedError, noticing
from .shadows import child_of, detached, original_class, parameters, shadow
from .surroundings import kept
from .wiring import Call, Wiring, parameters_of_call, stands, wiring

_HEAD = "_zmlx_head"

#: Logits that tell a scale or a cap from another.
_PROBE = (-3.0, 0.5, 30.0, 300.0)

_Form = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Head:
    """Where a model's head is.

    Attributes:
        weight: path of the linear layer, or of the embedding that serves as one.
        tied: whether it is an embedding.
        scale: s for logits that are s times the head's output.
        softcap: c for logits c · tanh(logits / c), or None.
        within: paths of models in the model, each in the one before: the model returns what the
            first one does, and so on to the last, which calls the head.
        noted: what all these models were when the head was found.
    """

    weight: str
    tied: bool
    scale: float
    softcap: float | None
    within: tuple[str, ...] = ()
    noted: Any = field(default=None, compare=False, repr=False)

    def __deepcopy__(self, memo: Any) -> Head:
        return replace(self, noted=copy.deepcopy(self.noted, memo))

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled model is the one that was patched, and needs no zmlx

    @property
    def method(self) -> str:
        """What is called of the layer."""
        return "as_linear" if self.tied else "__call__"

    def layer(self, model: nn.Module) -> nn.Module | None:
        """The layer, None where its weight is not that of a linear layer (quantised, LoRA)."""
        found = child_of(model, self.weight)
        return found if type(found) is (nn.Embedding if self.tied else nn.Linear) else None

    def models(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model, and those within it down to the one that calls the head."""
        yield model
        for path in self.within:
            yield child_of(model, path)


def find_head(model: nn.Module) -> Head:
    """The head of a model that is called with tokens; raises `UnmatchedError` with the reason."""
    twin = detached(model)
    try:
        with kept(twin, lenient=True), in_mode(twin, training=False):
            found = _find(twin)
    except UnmatchedError as reason:
        raise UnmatchedError(f"no head and loss: {reason}") from None
    with in_mode(twin, training=True):
        try:
            same = _find(twin) == found
        except UnmatchedError:
            same = False
    if not same:
        raise UnmatchedError("no head and loss: it computes another thing in training")
    return replace(found, noted=tuple(map(noted, found.models(model))))


def _find(model: nn.Module) -> Head:
    """The head in the mode that the model is in."""
    graphs = Graphs()
    tokens = mx.zeros((2, 3), mx.int32)
    found = wiring(graphs, model, tokens)
    if not found.calls:
        raise UnmatchedError("its call is not that of a model with a head")
    last = found.calls[-1]
    if [(c.path, c.method) for c in found.calls].count((last.path, last.method)) > 1:
        raise UnmatchedError(f"it calls {last.path} more than once")
    if _first(last, model) == graphs.input(0):
        if found.result != graphs.input(len(found.calls)):
            raise UnmatchedError(f"it does more than return what {last.path} does")
        if last.method != "__call__":
            raise UnmatchedError(f"it calls {last.path}.{last.method}")
        inner = _find(child_of(model, last.path))
        weight, *within = (f"{last.path}.{path}" for path in (inner.weight, *inner.within))
        return replace(inner, weight=weight, within=(last.path, *within))
    scale, softcap = _after_head(graphs, found, _learned(model))
    head = Head(last.path, last.method == "as_linear", scale, softcap)
    if last.method != head.method or head.layer(model) is None:
        raise UnmatchedError("its head is no plain linear layer")
    if len(last.arguments) != 1 or last.keywords:
        raise UnmatchedError("its head does not get hidden states alone")
    if found.shapes[-1][0][:-1] != tokens.shape:
        raise UnmatchedError("it has no logits for every token")
    return head


def _first(call: Call, model: nn.Module) -> Any:
    """What a call has for the first parameter of the child."""
    if call.arguments:
        return call.arguments[0]
    return dict(call.keywords).get(parameters_of_call(child_of(model, call.path))[0].name)


def _learned(model: nn.Module) -> set[float]:
    """The parameters that a graph shows as numbers."""
    leaves: Any = parameters(model).values()
    scalars = (x for x in leaves if x.ndim == 0 and mx.issubdtype(x.dtype, mx.floating))
    return {float(x.item()) for x in scalars}


def _after_head(graphs: Graphs, found: Wiring, learned: set[float]) -> tuple[float, float | None]:
    """The scale and the softcap of what the last call returns, which have no gradient."""
    shape, dtype = found.shapes[-1]
    inputs = [mx.zeros((1,))] * len(found.calls) + [mx.zeros(shape, dtype)]
    scalars = graphs.scalars([found.result], dtype) - learned
    numbers = sorted(v for v in scalars if v and isfinite(v))
    positive = [n for n in numbers if n > 0]
    scales: list[tuple[float, _Form]] = [(1.0, lambda y: y)]
    scales += [(n, partial(mx.multiply, n)) for n in numbers]
    scales += [(1 / n, partial(_divided, n)) for n in numbers]
    caps: list[tuple[float | None, _Form]] = [(None, lambda y: y)]
    caps += [(n, partial(_capped, n)) for n in positive]
    caps += [(n, partial(_capped_by_factor, n)) for n in positive]
    for (scale, scaled), (cap, capped) in product(scales, caps):

        def form(*given: mx.array, scaled: _Form = scaled, capped: _Form = capped) -> Any:
            return [capped(scaled(given[-1]))]

        if graphs.capture(form, inputs) == [found.result]:
            return scale, cap
    raise UnmatchedError("it does more with the head's output than a scale and a softcap")


def _divided(n: float, y: mx.array) -> mx.array:
    return y / n


def _capped(cap: float, y: mx.array) -> mx.array:
    return mx.tanh(y / cap) * cap


def _capped_by_factor(cap: float, y: mx.array) -> mx.array:
    return mx.tanh(y * (1 / cap)) * cap


def _hidden(model: nn.Module, head: Head, tokens: mx.array) -> mx.array | None:
    """What the head gets in a call of the model; None where the call has changed since."""
    taken: list[mx.array] = []
    try:
        with noticing():
            result = _record_head(model, head, taken, (tokens,), {})
    except UnmatchedError:  # it looks into a child for tokens like these
        return None
    return taken[0] if len(taken) == 1 and _is_as_found(head, result) else None


def _record_head(
    model: nn.Module, head: Head, taken: list[mx.array], a: Any, k: Any, above: str = ""
) -> Any:
    """Calls the model, or one within it with the path `above`, with `_PROBE` for the head's output.
    What the head gets is `taken`."""

    def record(path: str, method: str, child: nn.Module, a: Any, k: Any) -> Any:
        path = f"{above}{path}"
        if path in head.within and method == "__call__":
            return _record_head(child, head, taken, a, k, f"{path}.")
        if path == head.weight and method == head.method:
            taken.append(a[0])
            return mx.broadcast_to(mx.array(_PROBE), (*a[0].shape[:-1], len(_PROBE)))
        return getattr(child, method)(*a, **k)

    return original_class(model).__call__(shadow(model, stands(model, record)), *a, **k)


def _is_as_found(head: Head, result: Any) -> bool:
    """Whether a call makes of `_PROBE` what it did when the head was found: scales and caps are
    read from places that no note covers, such as a child's configuration."""
    expected = head.scale * np.array(_PROBE)
    if head.softcap is not None:
        expected = head.softcap * np.tanh(expected / head.softcap)
    try:
        got = np.array(result)
    except (RuntimeError, TypeError, ValueError):  # of arrays that a transform traces
        return False
    fits = got.ndim > 0 and got.shape[-1] == len(_PROBE)
    return fits and bool(np.allclose(got, expected, rtol=1e-5, atol=1e-6))


def put_head(model: nn.Module, head: Head) -> None:
    """Lets `lm_loss` use the head."""
    object.__setattr__(model, _HEAD, head)


def head_of(model: nn.Module) -> Head | None:
    """The head that `lm_loss` uses, None without one, or where the model has changed since."""
    head = vars(model).get(_HEAD)
    if head is None:
        return None
    same = all(is_as_noted(m, was) for m, was in zip(head.models(model), head.noted, strict=True))
    return head if same else None


def restore_head(model: nn.Module) -> bool:
    """Takes the head away; returns whether there was one."""
    return vars(model).pop(_HEAD, None) is not None


def lm_loss(model: nn.Module, batch: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
    """mlx-lm's training loss, for `mlx_lm.tuner.trainer.train(…, loss=zmlx.lm_loss)`.

    On a model patched with mode "training" whose head was recognised the logits are never held;
    on any other model it is the cross entropy of its logits.

    Args:
        model: called with tokens (B, L).
        batch: tokens (B, L + 1).
        lengths: (B, 2), the first and last position of each row that counts.

    Returns:
        The mean over the tokens that count, and their number.
    """
    inputs, targets = batch[:, :-1], batch[:, 1:]
    head = head_of(model)
    layer = None if head is None else head.layer(model)
    hidden = None if head is None or layer is None else _hidden(model, head, inputs)
    if head is None or layer is None or hidden is None:
        loss = losses.cross_entropy(model(inputs), targets)
    else:
        bias = None if head.tied else layer.get("bias")
        if head.scale != 1:
            hidden, bias = hidden * head.scale, None if bias is None else bias * head.scale
        loss = losses.linear_cross_entropy(
            hidden, layer["weight"], targets, bias, softcap=head.softcap
        )
    steps = mx.arange(1, targets.shape[1] + 1)
    counts = mx.logical_and(steps >= lengths[:, 0:1], steps <= lengths[:, 1:])
    tokens = counts.sum()
    return (loss * counts).astype(mx.float32).sum() / tokens, tokens
