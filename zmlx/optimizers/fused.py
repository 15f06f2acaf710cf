"""What the fused optimizers share: which parameters a kernel updates, and in which launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_map

from .. import launch
from ..arguments import (
    FLOATING,
    check_finite,
    check_flag,
    check_not_negative,
    check_number,
    dtype_name,
)
from ..kernels.gradient_norm import SQUARES
from ..packed import PackedKernel
from .clip import check_max_norm, clip_factor, clipped, norm_of

Mask = Callable[[str, mx.array], bool]
#: The scalars of a kernel after the clip: arrays, then what has one value for all steps unless it
#: is an array.
Numbers = tuple[list[mx.array], tuple[float | mx.array, ...]]


def check_options(op: str, rate: Any, numbers: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Raises unless the rate is a finite number or a schedule, `numbers` are finite, an eps and a
    decay at least 0, and `flags` True or False. A number may be a 0-d array, the rate one of a
    single element."""
    if not callable(rate):
        numbers = {"learning_rate": rate, **numbers}
    for name, value in numbers.items():
        if isinstance(value, mx.array) and (
            value.ndim == 0 or (name == "learning_rate" and value.size == 1)
        ):
            _check_real(op, name, value)
            continue
        check = check_not_negative if name in ("eps", "weight_decay") else check_finite
        check(op, name, value)
    for name, value in flags.items():
        check_flag(op, name, value)


def _check_real(op: str, name: str, value: mx.array) -> None:
    # A kernel's numbers are float32: the imaginary part would be lost.
    if mx.issubdtype(value.dtype, mx.complexfloating):
        raise ValueError(
            f"[{op}] '{name}' must be a real number but got {dtype_name(value.dtype)}."
        )


class Leaf(NamedTuple):
    """A parameter of the tree with all that its step needs."""

    path: str
    gradient: mx.array
    parameter: mx.array
    state: dict[str, mx.array]


@lru_cache(maxsize=1024)
def _constants(values: tuple[float, ...]) -> mx.array:
    array = mx.array(values, dtype=mx.float32)
    mx.eval(array)
    return array


class Fused(Optimizer):
    """An optimizer of MLX whose step takes a kernel for many parameters at once.

    A parameter takes the kernel if it, its gradient and its moments are float32, float16 or
    bfloat16 and, without `moment_dtype`, of one dtype; and if the class has not overridden
    `apply_single`. Every other parameter takes MLX's own step, that is `apply_single`.
    `statistics` counts both.

    On the CPU the new parameter and moments take the memory of the old ones where nobody else
    holds those. On a GPU outputs are new arrays, while MLX's compiled step works in place, so that
    MLX's step is the default there; `fused=True` takes the kernel.
    """

    weight_decay: Any

    @property
    def _moments(self) -> tuple[str, ...]:
        """Names of a parameter's state, in the order of the kernel's inputs."""
        raise NotImplementedError

    def _configure(
        self,
        fused: bool | None,
        moment_dtype: mx.Dtype | None,
        weight_decay_mask: Mask | None,
        max_norm: float | None,
    ) -> None:
        name = type(self).__name__
        if moment_dtype is not None and moment_dtype not in FLOATING:
            raise ValueError(
                f"[{name}] 'moment_dtype' must be None, float32, float16 or bfloat16 but got "
                f"{moment_dtype}."
            )
        if weight_decay_mask is not None and not callable(weight_decay_mask):
            raise TypeError(
                f"[{name}] 'weight_decay_mask' must be a function of path and parameter but got "
                f"{type(weight_decay_mask).__name__}."
            )
        if fused is not None and not isinstance(fused, bool):
            raise TypeError(f"[{name}] 'fused' must be None, True or False but got {fused!r}.")
        self.fused = fused
        self.moment_dtype = moment_dtype
        self.weight_decay_mask = weight_decay_mask
        self.max_norm = None if max_norm is None else check_max_norm(name, max_norm)
        for scheduled in self._schedulers:
            self.state[scheduled] = self._scheduled(scheduled, self.state[scheduled])
        #: Parameters updated by kernels and by MLX, and launches, those of the norm too, counted
        #: when a step is built.
        self.statistics = {"fused": 0, "plain": 0, "launches": 0}

    # ---- what an optimizer says of itself

    def _kernel(self) -> PackedKernel:
        raise NotImplementedError

    def _numbers(self, decays: bool) -> Numbers:
        """The scalars of the kernel after the clip."""
        raise NotImplementedError

    # ---- MLX's interface

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Moments of zeros, in `moment_dtype` where that is given."""
        super().init_single(parameter, state)
        if self.moment_dtype is not None and parameter.dtype in FLOATING:
            for name in self._moments:
                state[name] = mx.zeros(parameter.shape, self.moment_dtype)

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """The parameters after a step, in the tree of the gradients; the state is updated.

        Raises:
            ValueError: a gradient has no parameter or no state, or their shapes differ; the state
                is as it was, as it is where a schedule or the mask raises.
        """
        self._check_state()
        if not self._initialized:
            # The state of a step that is refused would not fit the next one.
            for _ in self._leaves("", gradients, parameters, ()):
                pass
            self.init(gradients)
        leaves = list(self._leaves("", gradients, parameters, (self.state,)))
        # All that may raise is asked before the state changes.
        decays = [self._decays(leaf) for leaf in leaves]
        numbers = {"learning_rate": self.state.get("learning_rate")}
        numbers |= {name: scheduler(self.step) for name, scheduler in self._schedulers.items()}
        self.state.update({name: self._scheduled(name, x) for name, x in numbers.items()})
        self.state["step"] = self.step + 1
        clip = self._clip([leaf.gradient for leaf in leaves])
        done: list[mx.array | None] = [None] * len(leaves)
        takes_kernel = self._takes_kernel()
        groups: dict[bool, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if takes_kernel and self._fits(leaf):
                groups.setdefault(decays[i], []).append(i)
            else:
                done[i] = self._plain(leaf, decays[i], clip)
        for decay, members in groups.items():
            for i, new in zip(members, self._launch(leaves, members, decay, clip), strict=True):
                done[i] = new
        rest = iter(done)
        return tree_map(lambda _: next(rest), gradients)

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, mx.array]
    ) -> mx.array:
        """MLX's step of one parameter; with `moment_dtype` in float32, and the parameter keeps its
        dtype."""
        if self.moment_dtype is None or parameter.dtype not in FLOATING:
            return super().apply_single(gradient, parameter, state)  # type: ignore[no-any-return]
        wide = {name: state[name].astype(mx.float32) for name in self._moments}
        new = super().apply_single(gradient.astype(mx.float32), parameter.astype(mx.float32), wide)
        state.update({name: x.astype(self.moment_dtype) for name, x in wide.items()})
        return new.astype(parameter.dtype)  # type: ignore[no-any-return]

    # ---- the step

    def _takes_kernel(self) -> bool:
        target = launch.settings().target
        if self.fused is False or target == "reference":
            return False
        return type(self).apply_single is Fused.apply_single and (
            target == "cpu" or self.fused is True
        )

    def _fits(self, leaf: Leaf) -> bool:
        arrays = (leaf.gradient, leaf.parameter, *(leaf.state[name] for name in self._moments))
        dtypes = {x.dtype for x in arrays}
        return dtypes <= set(FLOATING) and (self.moment_dtype is not None or len(dtypes) == 1)

    def _clip(self, gradients: Sequence[mx.array]) -> mx.array | None:
        """What the gradients are multiplied by. With `fused=None` the norm takes its kernel on a
        GPU too: it has nothing to do in place."""
        if self.max_norm is None:
            return None
        before = SQUARES.statistics["launches"]
        fused = self.fused is not False and launch.settings().target != "reference"
        norm = norm_of(gradients, fused)
        self.statistics["launches"] += SQUARES.statistics["launches"] - before
        return clip_factor(norm, self.max_norm)

    def _decays(self, leaf: Leaf) -> bool:
        mask = self.weight_decay_mask
        return mask is None or bool(mask(leaf.path, leaf.parameter))

    def _plain(self, leaf: Leaf, decays: bool, clip: mx.array | None) -> mx.array:
        self.statistics["plain"] += 1
        gradient = leaf.gradient
        if clip is not None:
            gradient = clipped(gradient, clip)
        with self._without_decay(not decays):
            return self.apply_single(gradient, leaf.parameter, leaf.state)

    @contextmanager
    def _without_decay(self, without: bool) -> Iterator[None]:
        if not without:
            yield
            return
        kept, self.weight_decay = self.weight_decay, 0.0
        try:
            yield
        finally:
            self.weight_decay = kept

    def _launch(
        self, leaves: Sequence[Leaf], members: Sequence[int], decays: bool, clip: mx.array | None
    ) -> list[mx.array]:
        arrays, constants = self._numbers(decays)
        if any(isinstance(x, mx.array) for x in constants):
            # An array may have another value at the next step, and none yet in a trace.
            arrays, constants = [*arrays, *map(mx.array, constants)], ()
        one = _constants((1.0,))[0] if clip is None else clip
        dynamic = mx.stack([x.astype(mx.float32) for x in (one, *arrays)])
        fixed = tuple(map(float, constants))
        numbers = mx.concatenate([dynamic, _constants(fixed)]) if fixed else dynamic
        sets = []
        for i in members:
            moments = [leaves[i].state[name] for name in self._moments]
            if self.moment_dtype is not None:
                moments = [x.astype(self.moment_dtype) for x in moments]
            sets.append((leaves[i].parameter, leaves[i].gradient, *moments))
        kernel = self._kernel()
        before = kernel.statistics["launches"]
        outputs = kernel(sets, numbers)
        self.statistics["fused"] += len(members)
        self.statistics["launches"] += kernel.statistics["launches"] - before
        for i, (_, *moments) in zip(members, outputs, strict=True):
            leaves[i].state.update(zip(self._moments, moments, strict=True))
        return [new for new, *_ in outputs]

    def _scheduled(self, name: str, value: Any) -> mx.array:
        """A number of the state as a 0-d array, or an error."""
        if isinstance(value, mx.array) and value.size == 1:
            _check_real(type(self).__name__, name, value)
            return value.reshape(()) if value.ndim else value
        return mx.array(check_number(type(self).__name__, name, value), dtype=mx.float32)

    # ---- the tree

    def _check_state(self) -> None:
        name = type(self).__name__
        if not isinstance(self.state, dict):
            raise TypeError(f"[{name}] 'state' must be a dict but got {type(self.state).__name__}.")
        for key in ("learning_rate", "step"):
            if key not in self.state and key not in self._schedulers:
                raise ValueError(f"[{name}] 'state' must hold {key} but got {list(self.state)}.")

    def _leaves(
        self, path: str, gradients: Any, parameters: Any, state: tuple[Any, ...]
    ) -> Iterator[Leaf]:
        """The leaves, checked; `state` is () where there is none yet."""
        if isinstance(gradients, (dict, list, tuple)):
            items = gradients.items() if isinstance(gradients, dict) else enumerate(gradients)
            for key, gradient in items:
                inner = f"{path}.{key}" if path else str(key)
                yield from self._leaves(
                    inner,
                    gradient,
                    self._child("parameters", parameters, key, path, inner),
                    tuple(self._child("state", tree, key, path, inner) for tree in state),
                )
            return
        self._check(path, gradients, parameters, state)
        yield Leaf(path, gradients, parameters, state[0] if state else {})

    def _child(self, argument: str, tree: Any, key: Any, path: str, inner: str) -> Any:
        try:
            return tree[key]
        except (KeyError, IndexError, TypeError, ValueError):
            if not isinstance(tree, (dict, list, tuple)):
                raise ValueError(
                    f"[{type(self).__name__}] '{argument}' must have the tree of the gradients "
                    f"but got {type(tree).__name__}{_at(path)}."
                ) from None
            what = "must hold every parameter that has a gradient"
            if argument == "state":
                what = "must hold every parameter that has a gradient (call init for new ones)"
            raise ValueError(
                f"[{type(self).__name__}] '{argument}' {what} but got none at {inner}."
            ) from None

    def _check(self, path: str, gradient: Any, parameter: Any, state: tuple[Any, ...]) -> None:
        name = type(self).__name__
        self._check_array("gradients", gradient, path)
        self._check_array("parameters", parameter, path)
        found = {"gradients": gradient}
        for held in state:
            if not isinstance(held, Mapping):
                raise ValueError(
                    f"[{name}] 'state' must have the tree of the gradients but got "
                    f"{type(held).__name__}{_at(path)}."
                )
            for moment in self._moments:
                if moment not in held:
                    raise ValueError(
                        f"[{name}] 'state' must hold {moment} but got {list(held)}{_at(path)}."
                    )
                self._check_array("state", held[moment], f"{path}.{moment}" if path else moment)
                found[f"state {moment}"] = held[moment]
        for what, x in found.items():
            if x.shape != parameter.shape:
                raise ValueError(
                    f"[{name}] '{what}' must have shape {parameter.shape}{_at(path)} "
                    f"but got {x.shape}."
                )

    def _check_array(self, argument: str, x: Any, path: str) -> None:
        if not isinstance(x, mx.array):
            raise TypeError(
                f"[{type(self).__name__}] '{argument}' must be a tree of mx.array but got "
                f"{type(x).__name__}{_at(path)}."
            )


def _at(path: str) -> str:
    """The place in an error; none for a tree that is a single array."""
    return f" at {path}" if path else ""
