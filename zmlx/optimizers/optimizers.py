"""AdamW, Adam, Lion and SGD."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import mlx.core as mx

# By name: these classes may be put in the place of theirs.
from mlx.optimizers import SGD as MLXSGD
from mlx.optimizers import Adam as MLXAdam
from mlx.optimizers import AdamW as MLXAdamW
from mlx.optimizers import Lion as MLXLion
from mlx.optimizers import optimizers as _mlx

from ..kernels import optimizer_steps as steps
from ..packed import PackedKernel
from ..stand_in import public_names
from .fused import Fused, Mask, Numbers, check_options

__all__ = public_names(_mlx)

Rate = float | Callable[[mx.array], mx.array]

_OPTIONS = """
    Beyond MLX's:

    Args:
        moment_dtype: dtype of the moments, such as float32 for bfloat16 parameters; arithmetic is
            in float32 and a parameter keeps its dtype. None: the parameter's dtype, as in MLX;
            float16 loses Adam's squares of gradients below some 5e-3.
@MASK@
        max_norm: bound of the joint norm of the gradients, which are scaled inside the step. An
            optimizer in a `MultiOptimizer` sees its own parameters only.
        fused: None takes kernels on the CPU; on a GPU, where they do not work in place, MLX's step
            and the kernel of the norm. True takes kernels everywhere, False nowhere.

    The state tree is MLX's, so that checkpoints of either go with the other. `statistics` says how
    many parameters took the kernel; see `zmlx.optimizers.fused.Fused` for which do. Learning rate,
    betas, eps and step are inputs of the kernel: a schedule compiles nothing.
"""
_MASK = """\
        weight_decay_mask: of the path ("layers.0.norm.weight") and the parameter, whether it
            decays. None: all do.
"""


def _documented(doc: str | None, mask: str = _MASK) -> str:
    """The docstring, which `python -OO` leaves out, and the options."""
    return (doc or "") + _OPTIONS.replace("@MASK@\n", mask)


class Adam(Fused, MLXAdam):
    """`mlx.optimizers.Adam` with a fused step."""

    __doc__ = _documented(__doc__, mask="")

    weight_decay = 0.0

    def __init__(
        self,
        learning_rate: Rate,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        bias_correction: bool = False,
        *,
        moment_dtype: mx.Dtype | None = None,
        max_norm: float | None = None,
        fused: bool | None = None,
    ) -> None:
        check_options("Adam", learning_rate, {"eps": eps}, {"bias_correction": bias_correction})
        MLXAdam.__init__(
            self, learning_rate, list(steps.check_betas("Adam", betas)), eps, bias_correction
        )
        self._configure(fused, moment_dtype, None, max_norm)

    @property
    def _moments(self) -> tuple[str, ...]:
        return ("m", "v")

    def _kernel(self) -> PackedKernel:
        return steps.ADAMW_TREE

    def _numbers(self, decays: bool) -> Numbers:
        b1, b2 = self.betas
        rate = _float32(self.learning_rate)
        decay = self.weight_decay
        # The value of an array is not known in a trace.
        decays = decays and (isinstance(decay, mx.array) or decay != 0)
        kept = 1 - rate * decay if decays else mx.array(1.0)
        step_size, root = rate, mx.array(1.0)
        if self.bias_correction:
            step_size, root = (
                rate / _one_minus_power(b1, self.step),
                mx.rsqrt(_one_minus_power(b2, self.step)),
            )
        return [step_size, kept, root], (b1, 1 - b1, b2, 1 - b2, self.eps)


class AdamW(Adam, MLXAdamW):
    """`mlx.optimizers.AdamW` with a fused step."""

    __doc__ = _documented(__doc__)

    def __init__(
        self,
        learning_rate: Rate,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        bias_correction: bool = False,
        *,
        moment_dtype: mx.Dtype | None = None,
        weight_decay_mask: Mask | None = None,
        max_norm: float | None = None,
        fused: bool | None = None,
    ) -> None:
        numbers = {"eps": eps, "weight_decay": weight_decay}
        check_options("AdamW", learning_rate, numbers, {"bias_correction": bias_correction})
        MLXAdam.__init__(
            self, learning_rate, list(steps.check_betas("AdamW", betas)), eps, bias_correction
        )
        self.weight_decay = weight_decay
        self._configure(fused, moment_dtype, weight_decay_mask, max_norm)


class Lion(Fused, MLXLion):
    """`mlx.optimizers.Lion` with a fused step."""

    __doc__ = _documented(__doc__)

    def __init__(
        self,
        learning_rate: Rate,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        moment_dtype: mx.Dtype | None = None,
        weight_decay_mask: Mask | None = None,
        max_norm: float | None = None,
        fused: bool | None = None,
    ) -> None:
        check_options("Lion", learning_rate, {"weight_decay": weight_decay}, {})
        MLXLion.__init__(self, learning_rate, list(steps.check_betas("Lion", betas)), weight_decay)
        self._configure(fused, moment_dtype, weight_decay_mask, max_norm)

    @property
    def _moments(self) -> tuple[str, ...]:
        return ("m",)

    def _kernel(self) -> PackedKernel:
        return steps.LION_TREE

    def _numbers(self, decays: bool) -> Numbers:
        b1, b2 = self.betas
        rate = _float32(self.learning_rate)
        # MLX leaves a negative decay out.
        kept = 1 - rate * self.weight_decay if decays and self.weight_decay > 0 else mx.array(1.0)
        return [rate, kept], (b1, 1 - b1, b2, 1 - b2)


class SGD(Fused, MLXSGD):
    """`mlx.optimizers.SGD` with a fused step. Its weight decay is an L2 penalty: a part of the
    gradient."""

    __doc__ = _documented(__doc__)

    def __init__(
        self,
        learning_rate: Rate,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        *,
        moment_dtype: mx.Dtype | None = None,
        weight_decay_mask: Mask | None = None,
        max_norm: float | None = None,
        fused: bool | None = None,
    ) -> None:
        numbers = {"momentum": momentum, "weight_decay": weight_decay, "dampening": dampening}
        check_options("SGD", learning_rate, numbers, {"nesterov": nesterov})
        MLXSGD.__init__(self, learning_rate, momentum, weight_decay, dampening, nesterov)
        self._configure(fused, moment_dtype, weight_decay_mask, max_norm)

    @property
    def _moments(self) -> tuple[str, ...]:
        return () if self.momentum <= 0 else ("v",)  # NaN is one, as in MLX

    def _kernel(self) -> PackedKernel:
        if self.momentum <= 0:
            return steps.SGD_WITHOUT_MOMENTUM_TREE
        return steps.SGD_NESTEROV_TREE if self.nesterov else steps.SGD_TREE

    def _numbers(self, decays: bool) -> Numbers:
        decay = self.weight_decay if decays else 0.0
        if self.momentum <= 0:
            return [self.learning_rate], (decay,)
        # MLX leaves a negative dampening out.
        rest = 1 - max(_float32(self.dampening), 0.0)
        return [self.learning_rate], (decay, self.momentum, rest)


def _float32(value: Any) -> Any:
    """An array in float32: one in half precision has no 1 - x of a small x."""
    return value.astype(mx.float32) if isinstance(value, mx.array) else value


def _one_minus_power(base: float, step: mx.array) -> mx.array:
    """1 - baseⁿ without the cancellation of small n."""
    if base == 0.0:
        return mx.array(1.0)
    return -mx.expm1(step.astype(mx.float32) * log(base))


def __getattr__(name: str) -> Any:
    return getattr(_mlx, name)
