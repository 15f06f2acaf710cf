"""torch's way to compute an op, eager and by `torch.compile`, from the entry's torch expression.

torch runs with as many threads as zmlx and on the CPU; against a GPU's kernels it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import numpy as np

from .. import launch
from ..arguments import dtype_name
from ..registry import Op
from .measure import Variant
from .variants import SMALL, TORCH, TORCH_COMPILED, Problem, Way


def is_installed() -> bool:
    """Whether torch is installed."""
    return find_spec("torch") is not None


def is_available() -> bool:
    """Whether torch is installed and zmlx's kernels run on the CPU."""
    return is_installed() and launch.settings().target == "cpu"


def torch_names(op: Op) -> tuple[str, ...]:
    """The variants of torch that there are of an op here."""
    return (TORCH, TORCH_COMPILED) if op.torch and is_available() else ()


def torch_ways(
    problem: Problem, mode: str, names: Sequence[str], threads: int
) -> dict[str, Callable[[], Way]]:
    """Both ways, each made when called."""
    return {
        name: lambda name=name: _way(name, problem, mode, threads)  # type: ignore[misc]
        for name in torch_names(problem.op)
        if name in names
    }


def function(problem: Problem) -> Callable[..., Any]:
    """The entry's expression as a function of the tensors, in the order of the op's arguments."""
    import torch
    from torch.nn import functional

    names = [a.name for a in problem.op.arguments]
    source = f"lambda {', '.join(names)}: {problem.op.torch}"
    scope = {"torch": torch, "F": functional, **problem.options}
    return eval(source, scope)  # type: ignore[no-any-return]


def _tensor(x: mx.array) -> Any:
    import torch

    floating = mx.issubdtype(x.dtype, mx.floating)
    values = np.array(x.astype(mx.float32) if floating else x)
    return torch.from_numpy(values).to(getattr(torch, dtype_name(x.dtype).rstrip("_")))


def _way(name: str, problem: Problem, mode: str, threads: int) -> Way:
    import torch

    torch.set_num_threads(threads)
    compute = function(problem)
    if name == TORCH_COMPILED:
        # Whatever earlier shapes left behind would make this one "dynamic".
        torch._dynamo.reset()
        compute = torch.compile(compute, dynamic=False)
    tensors: list[Any] = [None if x is None else _tensor(x) for x in problem.values]
    cotangents = [_tensor(c) for c in problem.cotangents]
    small = torch.zeros(SMALL)

    def small_call() -> None:
        torch.abs(small)

    def forward() -> tuple[Any, ...]:
        result = compute(*tensors)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    if mode == "forward":

        def call(given: Any) -> Any:
            with torch.no_grad():
                return forward()

        return Way(Variant(name, call, ready=small_call), lambda: _numbers(call(None)))

    leaves = [tensors[i].requires_grad_() for i in problem.which]

    def backward(outputs: Any) -> Any:
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
        given = [c.to(o.dtype) for o, c in pairs]
        return torch.autograd.grad([o for o, _ in pairs], leaves, given)

    def both(given: Any) -> Any:
        outputs = forward()
        return *outputs, *backward(outputs)

    if mode == "both":
        return Way(Variant(name, both, ready=small_call), lambda: _numbers(both(None)))
    variant = Variant(name, backward, forward, small_call)
    return Way(variant, lambda: _numbers(backward(forward())))


def _numbers(tensors: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    import torch

    return [t.detach().to(torch.float32).numpy() for t in tensors]
