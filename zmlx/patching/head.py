"""A language model's head and loss in one op, which never holds the logits.

`lm_loss` is mlx-lm's training loss. Where the model is a body and a linear head, found by tracing
the model's call with stand-ins for both, it takes the body's output and the head's weight to
`linear_cross_entropy`; a softcap of the logits goes along.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..nn import losses
from .capture import Graphs
from .held import is_as_noted, noted
from .match import in_mode
from .wiring import Call, Given, UnmatchedError, child_of, detached, parameters_of_call, wiring

_HEAD = "_zmlx_head"


@dataclass(frozen=True)
class Head:
    """Where a model's body and head are.

    Attributes:
        body: path of the child that makes hidden states of tokens.
        weight: path of the linear layer, or of the embedding that serves as one.
        tied: whether it is an embedding.
        softcap: c for logits c · tanh(logits / c), or None.
        arguments, keywords: what the body gets besides tokens where the model gets nothing else.
        noted: what the model was when the head was found.
    """

    body: str
    weight: str
    tied: bool
    softcap: float | None
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()
    noted: Any = field(default=None, compare=False, repr=False)

    def __deepcopy__(self, memo: Any) -> Head:
        return replace(self, noted=copy.deepcopy(self.noted, memo))

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled model is the one that was patched, and needs no zmlx

    def layer(self, model: nn.Module) -> nn.Module | None:
        """The layer, None where its weight is not that of a linear layer (quantised, LoRA)."""
        found = child_of(model, self.weight)
        return found if type(found) is (nn.Embedding if self.tied else nn.Linear) else None


def find_head(model: nn.Module) -> Head:
    """The head of a model that is called with tokens; raises `UnmatchedError` with the reason."""
    twin = detached(model)
    with in_mode(twin, training=False):
        found = _find(twin)
    with in_mode(twin, training=True):
        try:
            same = _find(twin) == found
        except UnmatchedError:
            same = False
    if not same:
        raise UnmatchedError("no head and loss: it computes another thing in training")
    return replace(found, noted=noted(model))


def _find(model: nn.Module) -> Head:
    """The head in the mode that the model is in."""
    graphs = Graphs()
    try:
        found = wiring(graphs, model, mx.zeros((2, 3), mx.int32))
    except UnmatchedError as reason:
        raise UnmatchedError(f"no head and loss: {reason}") from None
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnmatchedError(f"no head and loss: its call cannot be captured: {first}") from None
    if len(found.calls) != 2:
        raise UnmatchedError("no head and loss: its call is not that of a body and a head")
    body, head = found.calls
    if not _first_is(body, graphs.input(0)) or body.method != "__call__":
        raise UnmatchedError("no head and loss: its body does not get the tokens")
    if not _first_is(head, graphs.input(1)) or len(head.arguments) != 1 or head.keywords:
        raise UnmatchedError("no head and loss: its head does not get the body's output alone")
    tied = head.method == "as_linear"
    if not tied and head.method != "__call__":
        raise UnmatchedError("no head and loss: its head is no linear layer")
    softcap = _softcap(graphs, model, found.result, found.shapes[1])
    defaults = {p.name: p.default for p in parameters_of_call(model) if p.default is not p.empty}

    def value(v: Any) -> Any:
        return defaults.get(v.name) if isinstance(v, Given) else v[0]

    rest = tuple(map(value, body.arguments[1:]))
    keywords = tuple((name, value(v)) for name, v in body.keywords)
    answer = Head(body.path, head.path, tied, softcap, rest, keywords)
    if answer.layer(model) is None:
        raise UnmatchedError("no head and loss: its head is no plain linear layer")
    return answer


def _first_is(call: Call, number: int) -> bool:
    """Whether a child gets this array, and else nothing but what the model got."""
    rest = [*call.arguments[1:], *(value for _, value in call.keywords)]
    given = all(isinstance(v, Given) or v == (None,) for v in rest)
    return bool(call.arguments) and call.arguments[0] == number and given


def _softcap(
    graphs: Graphs, model: nn.Module, result: int, shape: tuple[tuple[int, ...], mx.Dtype]
) -> float | None:
    """None if the model returns its head's output as it is, else the cap."""
    if result == graphs.input(2):
        return None
    arguments = getattr(model, "args", None)
    numbers = {v for v in vars(model).values() if isinstance(v, float)}
    numbers |= {v for v in vars(arguments).values() if isinstance(v, float)} if arguments else set()
    logits = mx.zeros(*shape)
    for cap in sorted(numbers):
        if cap > 0:
            for capped in (
                lambda _, __, y, c=cap: [mx.tanh(y / c) * c],
                lambda _, __, y, c=cap: [c * mx.tanh(y * (1 / c))],
            ):
                if graphs.capture(capped, [mx.zeros((1,)), mx.zeros((1,)), logits])[0] == result:
                    return cap
    raise UnmatchedError("no head and loss: it does more with the head's output than a softcap")


def put_head(model: nn.Module, head: Head) -> None:
    """Lets `lm_loss` use the head."""
    object.__setattr__(model, _HEAD, head)


def head_of(model: nn.Module) -> Head | None:
    """The head that `lm_loss` uses, None without one, or where the model has changed since."""
    head = vars(model).get(_HEAD)
    return head if head is not None and is_as_noted(model, head.noted) else None


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
    if head is None or layer is None:
        loss = losses.cross_entropy(model(inputs), targets)
    else:
        body: Any = child_of(model, head.body)
        hidden = body(inputs, *head.arguments, **dict(head.keywords))
        bias = None if head.tied else layer.get("bias")
        loss = losses.linear_cross_entropy(
            hidden, layer["weight"], targets, bias, softcap=head.softcap
        )
    steps = mx.arange(1, targets.shape[1] + 1)
    counts = mx.logical_and(steps >= lengths[:, 0:1], steps <= lengths[:, 1:])
    tokens = counts.sum()
    return (loss * counts).astype(mx.float32).sum() / tokens, tokens
