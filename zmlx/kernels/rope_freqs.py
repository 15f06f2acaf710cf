"""Frequencies of rotary embeddings that models scale to longer contexts.

    linear         f · factor                                                   (Chen et al. 2023)
    dynamic        of a base that grows with the length: "NTK-aware" scaling
    llama3         f, f · factor for long waves, blended between them           (Llama 3)
    yarn           as llama3, blended by the number of the pair                 (Peng et al. 2023)
    longrope, su   f · a factor for each pair                                   (Ding et al. 2024)
    proportional   f · factor for the first pairs; the others do not turn       (Gemma)

where f = base^(2i / dims) is what pair i would have without scaling: its wavelength over 2π.

What mlx-lm computes from an entry is computed here. An entry that mlx-lm does not read means what
it means in Hugging Face's transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor, inf, log, pi, sqrt
from typing import Any

import mlx.core as mx

from ..arguments import check_finite, check_integer, check_number, check_size

_OP = "rope_freqs"
#: Elements of a head, at most.
_MOST_DIMS = 2**20


@dataclass(frozen=True)
class _Model:
    """What a scaling starts from: its entries, and what a model says elsewhere."""

    kind: str
    scaling: Mapping[str, Any]
    dims: int
    base: float
    longest: int | None
    length: int | None

    @property
    def half(self) -> int:
        return self.dims // 2

    def error(self, must: str, got: Any) -> ValueError:
        return ValueError(f"[{_OP}] 'scaling' must {must} for '{self.kind}' but got {got}.")

    def waves(self, base: float | None = None) -> list[float]:
        """f of every pair."""
        return [(base or self.base) ** (2 * i / self.dims) for i in range(self.half)]

    def number(self, name: str, default: float | None = None, above: float = 0.0) -> float:
        """An entry that is more than `above`."""
        value = self.scaling.get(name)
        if value is None:
            if default is None:
                raise self.error(f"have '{name}'", sorted(self.scaling))
            return default
        if not _is_number(value) or not value > above:
            raise self.error(f"have a number more than {above:g} as '{name}'", repr(value))
        return float(value)

    def numbers(self, name: str) -> list[float]:
        """An entry for each pair, or one for all."""
        value = self.scaling.get(name)
        if value is None:
            raise self.error(f"have '{name}'", sorted(self.scaling))
        if _is_number(value):
            value = [value] * self.half
        if not isinstance(value, list | tuple) or len(value) != self.half:
            got = len(value) if isinstance(value, list | tuple) else repr(value)
            raise self.error(f"have {self.half} numbers as '{name}'", got)
        if not all(_is_number(v) and v > 0 for v in value):
            raise self.error(f"have positive numbers as '{name}'", value)
        return [float(v) for v in value]

    def trained(self, default: int | None = None) -> float:
        """The length that the model was trained with before it was scaled."""
        return self.number("original_max_position_embeddings", default, above=1.0)


def _size(name: str, value: int | None) -> int | None:
    return None if value is None else check_size(_OP, name, value)


def _is_number(value: Any) -> bool:
    try:
        check_finite(_OP, "scaling", value)
    except (TypeError, ValueError):
        return False
    return True


_Scaled = tuple[list[float], float]


def _default(model: _Model) -> _Scaled:
    return model.waves(), 1.0


def _linear(model: _Model) -> _Scaled:
    factor = model.number("factor")
    return [f * factor for f in model.waves()], 1.0


def _dynamic(model: _Model) -> _Scaled:
    factor = model.number("factor")
    if model.longest is None or model.length is None:
        name = "max_position_embeddings" if model.longest is None else "length"
        raise ValueError(f"[{_OP}] '{name}' must be given for 'dynamic' but got None.")
    if model.dims == 2:
        return model.waves(), 1.0
    growth = factor * max(model.length, model.longest) / model.longest - (factor - 1)
    return model.waves(model.base * growth ** (model.dims / (model.dims - 2))), 1.0


def _llama3(model: _Model) -> _Scaled:
    factor, trained = model.number("factor"), model.trained(8192)
    low = model.number("low_freq_factor", 1.0)
    high = model.number("high_freq_factor", 4.0, above=low)

    def one(f: float) -> float:
        # 0 for waves that turn less than `low` times in the trained length, 1 from `high` times on.
        kept = min(max((trained / (2 * pi * f) - low) / (high - low), 0.0), 1.0)
        return f / ((1 - kept) / factor + kept)

    return [one(f) for f in model.waves()], 1.0


def _yarn(model: _Model) -> _Scaled:
    factor, trained = model.number("factor"), model.trained(4096)
    truncate = model.scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise model.error("have True or False as 'truncate'", repr(truncate))

    def pair_of(turns: float) -> float:
        """The number of the pair that turns so often in the trained length."""
        return model.dims * log(trained / (turns * 2 * pi)) / (2 * log(model.base))

    first = pair_of(model.number("beta_fast", 32.0))
    last = pair_of(model.number("beta_slow", 1.0))
    if truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, model.dims - 1)
    if first == last:
        last += 0.001

    def one(i: int, f: float) -> float:
        scaled = min(max((i - first) / (last - first), 0.0), 1.0)
        return f / ((1 - scaled) + scaled / factor)

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0

    attention = model.number("attention_factor", 0.0)
    if not attention:
        # mscale_all_dim may be zero, which is its default. transformers reads the two only where
        # both are there.
        attention = temperature(model.number("mscale", 1.0, above=-inf)) / temperature(
            model.number("mscale_all_dim", 0.0, above=-inf)
        )
    return [one(i, f) for i, f in enumerate(model.waves())], attention


def _longrope(model: _Model) -> _Scaled:
    trained = model.trained(4096)
    long = model.length is None or model.length > trained
    name = "long" if long else "short"
    freqs = [f * m for f, m in zip(model.waves(), model.numbers(f"{name}_factor"), strict=True)]
    for entry in (f"{name}_mscale", "attention_factor"):
        if model.scaling.get(entry) is not None:
            return freqs, model.number(entry)
    if model.longest is None and model.scaling.get("factor") is None:
        raise ValueError(
            f"[{_OP}] 'max_position_embeddings' must be given for '{model.kind}' without "
            f"'attention_factor' or 'factor' in 'scaling' but got None."
        )
    factor = model.number("factor", model.longest and model.longest / trained)
    return freqs, 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(trained))


def _proportional(model: _Model) -> _Scaled:
    factor = model.number("factor", 1.0)
    part = model.number("partial_rotary_factor", 1.0)
    if part > 1:
        raise model.error("have a number in (0, 1] as 'partial_rotary_factor'", part)
    turning = ceil(int(model.dims * part) / 2)
    return [factor * f if i < turning else inf for i, f in enumerate(model.waves())], 1.0


_KINDS: dict[str, Callable[[_Model], _Scaled]] = {
    "default": _default,
    "mrope": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "telechat3-yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "proportional": _proportional,
}


def rope_freqs(
    dims: int,
    scaling: Mapping[str, Any] | None = None,
    *,
    base: float | None = None,
    max_position_embeddings: int | None = None,
    length: int | None = None,
) -> tuple[mx.array, float]:
    """The frequencies of a model's configuration, for `rope`, `rope_append` and `qk_norm_rope`.

    ```python
    freqs, factor = rope_freqs(head_dim, config["rope_scaling"], base=config["rope_theta"])
    y = rope(x if factor == 1 else factor * x, freqs=freqs)
    ```

    Args:
        dims: how many elements of a head turn. Even.
        scaling: `rope_scaling` (or `rope_parameters`) of a Hugging Face configuration: its "type"
            or "rope_type" is default, mrope, linear, dynamic, llama3, yarn, longrope (or su) or
            proportional. Entries that a type does not know are not read. None is default. Where
            "original_max_position_embeddings" is missing it is 8192 for llama3, else 4096; put it
            in if a configuration has it elsewhere.
        base: Default: "rope_theta" of the scaling, or 10000.
        max_position_embeddings: the longest context, which dynamic needs, and longrope where the
            scaling has neither its attention factor nor the "factor" of the lengths.
        length: of the sequence: needed by dynamic; longrope takes the short factors for one that
            is not longer than the model was trained with, and the long ones if it is None, as
            mlx-lm does for every length. transformers takes the short ones for None.

    Returns:
        (dims / 2,) wavelengths over 2π in float32, as `freqs` of `rope` and `mx.fast.rope`, and the
        attention factor of yarn and longrope, by which queries and keys that turn are multiplied;
        else 1. Elements that do not turn (`dims` < D) keep their size.

    The attention factor is the first of these that the scaling has:

    - yarn: "attention_factor"; t(mscale) / t(mscale_all_dim) with t(s) = 1 + 0.1 s log(factor), or
      1 for a factor of at most 1. As in mlx-lm, a missing mscale is 1 and a missing mscale_all_dim
      0. transformers takes t(1) unless both are there and not 0.
    - longrope: "long_mscale" ("short_mscale" with the short factors); "attention_factor";
      √(1 + log(factor) / log(original_max_position_embeddings)), or 1 for a factor of at most 1,
      with the scaling's "factor", else max_position_embeddings / original_max_position_embeddings.
      The mscales are mlx-lm's, the rest is as in transformers: mlx-lm always takes the ratio of the
      lengths, which is what is computed without "factor" and "attention_factor".
    """
    dims = check_integer(_OP, "dims", dims)
    if dims < 2 or dims % 2:
        raise ValueError(f"[{_OP}] 'dims' must be even and positive but got {dims}.")
    if dims > _MOST_DIMS:
        raise ValueError(f"[{_OP}] 'dims' must be at most {_MOST_DIMS} but got {dims}.")
    if scaling is None:
        scaling = {}
    if not isinstance(scaling, Mapping):
        raise TypeError(f"[{_OP}] 'scaling' must be a dict but got {type(scaling).__name__}.")
    kind = scaling.get("type") or scaling.get("rope_type") or "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(
            f"[{_OP}] 'scaling' must have a 'type' of {', '.join(_KINDS)} but got {kind!r}."
        )
    longest = _size("max_position_embeddings", max_position_embeddings)
    steps = _size("length", length)
    if base is None:
        base = scaling.get("rope_theta", 10000.0)
    base = check_number(_OP, "base", base)
    if not 1 < base < inf:
        raise ValueError(f"[{_OP}] 'base' must be more than 1 and finite but got {base}.")
    freqs, factor = _KINDS[kind](_Model(kind, scaling, dims, base, longest, steps))
    return mx.array(freqs, dtype=mx.float32), factor
