"""Puts zmlx's kernels into models of mlx.nn layers, and takes them out again.

    report = zmlx.patch(model)
    print(report)
    zmlx.unpatch(model)

Modules are found by what they compute, not by name: their call is traced, and replaced only if its
graph equals a known one and a probe on random arrays agrees.

capture       the graph of a function, as numbers that can be compared
wiring        how a module calls its children
templates     what is looked for
match         the plan for a module with children
leaves        the plan for one without
experts       the plan for stacked experts
routers       the plan for routers
mixtures      the plan for blocks of both
routing       the choices and weights that are looked for
plans         what runs instead
held          what it goes by that can change unseen
surroundings  and what of that no module holds
dtypes        the dtypes that modules are compared in
probe         the check before a plan is put in place
head          the head and loss of a language model
copies        of what other models may share
replace       putting it in place, and taking it out
report        what was done
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..arguments import check_size
from ..choice import catalogue, choice, prefer
from ..nn.choosing import TYPICAL_ROWS
from .copies import Place, distinct, make_own, own, places
from .dtypes import own_dtype
from .head import find_head, head_of, lm_loss, put_head, restore_head
from .match import Matcher, random_state_kept
from .plans import CodePlan, DropoutPlan, Plan, plan_of
from .probe import inlined, probe
from .reasons import NoGradientError, UnmatchedError, first_line, noticing
from .replace import is_current, is_trained, put, restore, set_trained, take_out
from .report import Replaced, Report, Skipped
from .shadows import child_of, detached, named

__all__ = ["KINDS", "Replaced", "Report", "Skipped", "lm_loss", "patch", "smart_patch", "unpatch"]

#: What `only` and `exclude` may name, besides paths.
KINDS = (
    "norm",
    "residual_norm",
    "activation",
    "gated",
    "mlp",
    "router",
    "experts",
    "rope",
    "attention",
    "calls",
    "dropout",
    "loss",
)

MODES = ("inference", "training")


def patch(
    model: nn.Module,
    *,
    mode: str = "inference",
    only: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> Report:
    """Makes the modules of a model run zmlx's kernels where `zmlx.choice` says so.

    Norms, sums that are normed, gated and plain feed-forward networks and activations are found by
    their graphs, in any model of mlx.nn modules; attention, and what else a module calls of MLX's
    fused functions, by what the names in its code stand for. The model is changed in place;
    parameters, their names and the identity of modules stay, so that it can be saved, quantised,
    trained and given LoRA layers like any other. Patching again looks at all modules anew, and
    changes nothing where none has changed.

    Args:
        model: an `mlx.nn.Module`.
        mode: "inference", or "training", which also replaces dropout, finds the head for
            `lm_loss`, and leaves alone what MLX has no gradient of.
        only: kinds (see `KINDS`) or paths such as "model.layers.0.*" to replace; all unless given.
        exclude: kinds or paths to leave alone.

    Returns:
        What was replaced, what was not and why, and what will run.
    """
    return _patch(model, Matcher(), mode=mode, only=only, exclude=exclude)


@random_state_kept()
def _patch(
    model: nn.Module,
    matcher: Matcher,
    *,
    mode: str,
    only: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
) -> Report:
    """As `patch`, with what a matcher found before, where nothing has changed since."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"[patch] 'model' must be an mlx.nn.Module but got {_name_of_type(model)}.")
    if mode not in MODES:
        raise ValueError(f"[patch] 'mode' must be one of {', '.join(MODES)} but got {mode!r}.")
    paths = [path for path, _ in named(model)]
    wanted, unwanted = _selection("only", only, paths), _selection("exclude", exclude, paths)
    report = Report(mode)
    found = _plans(model, matcher, report, wanted, unwanted, mode)
    make_own(place for place, _ in found)
    for place, plan in distinct(found):
        module = own(place)
        try:
            if plan_of(module) is None:  # it is in another place, too
                put(module, plan, mode == "training")
        except Exception as error:  # whatever making a class of its class raises
            why = f"no class can be derived from its own: {error}"
            report.skipped.append(Skipped(place.path, type(module).__name__, why))
            continue
        _add(report, place.path, module, plan, new=True)
    if mode == "training":
        _patch_head(model, report, wanted, unwanted)
    report.replaced.sort(key=lambda r: _natural(r.path))
    return report


def _plans(
    model: nn.Module,
    matcher: Matcher,
    report: Report,
    wanted: list[str] | None,
    unwanted: list[str] | None,
    mode: str,
) -> list[tuple[Place, Plan]]:
    """All replacements. Nothing is changed yet."""
    found: list[tuple[Place, Plan]] = []
    everywhere: dict[int, list[Place]] = {}
    for place in sorted(places(model), key=lambda place: _natural(place.path)):
        everywhere.setdefault(id(place.module), []).append(place)
    for several in everywhere.values():
        path, module = several[0].path, several[0].module
        patched = plan_of(module)
        if patched is not None and _stays(module, patched, matcher):
            try:
                if mode == "training" and not is_trained(module):
                    _probe(module, patched, mode)
                    set_trained(module)
                for place, _ in distinct((place, patched) for place in several):
                    _add(report, place.path, module, patched, new=False)
            except UnmatchedError as reason:
                take_out(module)
                report.skipped.append(Skipped(path, type(module).__name__, str(reason)))
            continue
        take_out(module)
        if not _chosen(several, None, wanted, unwanted):
            continue
        path = _chosen(several, None, wanted, unwanted)[0].path
        try:
            with prefer("mlx"):  # layers of zmlx.nn have the graphs of MLX's then
                plan = matcher.plan(module)
            if plan is None or not _chosen(several, plan.kind, wanted, unwanted):
                continue
            if plan.op not in catalogue():
                raise UnmatchedError(f"zmlx has no kernel for {plan.op}")
            _check_inlined(several, plan, unwanted)
            if isinstance(plan, DropoutPlan) and mode == "inference":
                continue
            _probe(module, plan, mode)
        except UnmatchedError as reason:
            report.skipped.append(Skipped(path, type(module).__name__, str(reason)))
            continue
        found += [(place, plan) for place in _chosen(several, plan.kind, wanted, unwanted)]
    found.sort(key=lambda entry: _natural(entry[0].path))
    return _of_use(found, report)


def _stays(module: nn.Module, plan: Plan, matcher: Matcher) -> bool:
    """Whether a patched module's plan is the one that is found for it as it is by now."""
    if not plan.is_of(own_dtype(module)) or not is_current(module):
        return False
    try:
        with prefer("mlx"):
            return bool(matcher.plan(module) == plan)
    except UnmatchedError:
        return False


def _probe(module: nn.Module, plan: Plan, mode: str) -> None:
    """Raises `UnmatchedError` where a plan is found to differ."""
    if isinstance(plan, (CodePlan, DropoutPlan)):
        return
    try:
        with noticing():
            probe(detached(module), plan)
    except NoGradientError:
        if mode == "training":
            raise
    except UnmatchedError:
        raise
    except Exception as error:  # whatever a call raises that gets stand-ins
        raise UnmatchedError(f"its probe failed: {first_line(error)}") from None


def _check_inlined(several: list[Place], plan: Plan, unwanted: list[str] | None) -> None:
    """Raises where a path of something that the plan computes itself is excluded."""
    paths = [pattern for pattern in unwanted or () if pattern not in KINDS]
    if not paths or isinstance(plan, CodePlan):
        return
    for below, place in product(inlined(several[0].module, plan), several):
        path = f"{place.path}.{below}" if place.path else below
        if any(_matches(path, pattern) for pattern in paths):
            raise UnmatchedError(f"it would compute {path}, which is excluded")


def _chosen(
    several: list[Place], kind: str | None, wanted: list[str] | None, unwanted: list[str] | None
) -> list[Place]:
    """The places of a module where it may be replaced. One that stays is the same module in all of
    them: the first counts, if none is excluded."""
    chosen = [place for place in several if _selected(place.path, kind, wanted, unwanted)]
    stays = [place for place in several if place.parent is None]
    if not stays:
        return chosen
    excluded = any(not _selected(place.path, kind, None, unwanted) for place in stays)
    return [] if excluded else chosen[:1]


def _of_use(found: list[tuple[Place, Plan]], report: Report) -> list[tuple[Place, Plan]]:
    """Without those that need a child to be replaced which is not."""
    replaced = {id(place.module) for place, _ in found}
    kept = []
    for place, plan in found:
        needed = [child_of(place.module, below) for below in plan.needs()]
        if all(id(c) in replaced or plan_of(c) is not None for c in needed):
            kept.append((place, plan))
        else:
            why = "what it adds up is not replaced"
            report.skipped.append(Skipped(place.path, type(place.module).__name__, why))
    return kept


def _patch_head(
    model: nn.Module, report: Report, wanted: list[str] | None, unwanted: list[str] | None
) -> None:
    """Finds the head for `lm_loss`."""
    known = head_of(model)
    if known is None and not _selected("", "loss", wanted, unwanted):
        return
    try:
        head = known or find_head(model)
    except UnmatchedError as reason:
        report.skipped.append(Skipped("", type(model).__name__, str(reason)))
        return
    put_head(model, head)
    layer = child_of(model, head.weight)
    shape = (TYPICAL_ROWS, layer.weight.shape[-1])
    chosen = choice("linear_cross_entropy", shape, own_dtype(layer), training=True)
    report.replaced.append(
        Replaced(
            head.weight, "loss", "linear_cross_entropy", chosen.runs, chosen.why, known is None
        )
    )


def unpatch(model: nn.Module) -> int:
    """Takes everything out that `patch` put in: every module is the object it was, of the class it
    had, with the parameters that it has now.

    Returns:
        How many modules were restored.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"[unpatch] 'model' must be an mlx.nn.Module but got {_name_of_type(model)}."
        )
    modules = [module for _, module in named(model)]
    count = sum(restore_head(module) + take_out(module) for module in modules)
    # What comes back may hold what was patched before it was copied.
    return count + sum(restore_head(module) + restore(module) for _, module in named(model))


def smart_patch(
    model: nn.Module,
    *sample: Any,
    mode: str = "inference",
    rounds: int = 7,
    loss: Callable[..., Any] | None = None,
    only: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> Report:
    """Patches a model, and keeps only the kinds of replacement that make its call on `sample`
    faster on this machine; with mode "training", its loss on `sample` with all gradients.

    Each kind is timed alone against the unpatched model, in turns, by medians; the report says
    what was kept and what was taken out again, with the numbers. A model that is patched already
    is unpatched first.

    Args:
        model: an `mlx.nn.Module`.
        sample: what the model is called with.
        mode, only, exclude: as in `patch`.
        rounds: timings of each variant.
        loss: with mode "training", a function of the model and `sample` that returns a loss, or a
            loss and more. Default: `lm_loss` of predicting the next token where `sample` is tokens
            (B, L), else the mean of the output's squares.
    """
    if not sample:
        raise TypeError("[smart_patch] 'sample' must be what the model is called with.")
    check_size("smart_patch", "rounds", rounds)
    if loss is not None and mode != "training":
        raise ValueError(f"[smart_patch] 'loss' must come with mode 'training' but got {mode!r}.")
    if loss is not None and not callable(loss):
        raise TypeError(f"[smart_patch] 'loss' must be a function but got {type(loss).__name__}.")
    if isinstance(model, nn.Module):
        unpatch(model)
    # Patching goes through them several times.
    only, exclude = (list(x) if isinstance(x, Iterator) else x for x in (only, exclude))
    options: dict[str, Any] = {"mode": mode, "only": only, "exclude": exclude}
    matcher = Matcher()
    kinds = list(_patch(model, matcher, **options).kinds())
    unpatch(model)
    timed = (lambda: model(*sample)) if mode == "inference" else _training(model, sample, loss)
    speeds = []
    for kind in kinds:
        excluded = [k for k in KINDS if k != kind]
        excluded += [exclude] if isinstance(exclude, str) else list(exclude or ())
        patched = partial(_patch, model, matcher, **{**options, "exclude": excluded})
        speeds.append((kind, _speed(model, patched, timed, rounds)))
    dropped = [(kind, speed) for kind, speed in speeds if speed < 1]
    excluded = [kind for kind, _ in dropped]
    excluded += [exclude] if isinstance(exclude, str) else list(exclude or ())
    report = _patch(model, matcher, **{**options, "exclude": excluded})
    report.dropped = dropped
    report.kept = [(kind, speed) for kind, speed in speeds if speed >= 1]
    return report


def _training(model: nn.Module, sample: Any, loss: Callable[..., Any] | None) -> Callable[[], Any]:
    """The model's loss on the sample with the gradients of all trainable parameters."""
    if not tree_flatten(model.trainable_parameters()):
        raise ValueError(
            "[smart_patch] 'model' must have trainable parameters with mode 'training' but got "
            "none."
        )
    chosen = loss or (_next_token if _is_tokens(sample) else _squares)
    with_gradients = nn.value_and_grad(model, chosen)
    return lambda: with_gradients(model, *sample)


def _is_tokens(sample: Any) -> bool:
    """Whether the sample is one array of at least two tokens a row."""
    x = sample[0]
    tokens = isinstance(x, mx.array) and x.ndim == 2 and mx.issubdtype(x.dtype, mx.integer)
    return len(sample) == 1 and tokens and x.shape[1] > 1


def _next_token(model: nn.Module, tokens: mx.array) -> mx.array:
    lengths = mx.array([[0, tokens.shape[1] - 1]] * tokens.shape[0])
    return lm_loss(model, tokens, lengths)[0]


def _squares(model: nn.Module, *sample: Any) -> mx.array:
    return model(*sample).astype(mx.float32).square().mean()  # type: ignore[no-any-return]


def _speed(
    model: nn.Module, patching: Callable[[], Any], timed: Callable[[], Any], rounds: int
) -> float:
    """How many times as fast the patched model is at what is timed."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(rounds + 1):
        for patched in (True, False) if i % 2 else (False, True):
            if patched:
                patching()
            try:
                if i == 0:
                    mx.eval(timed())  # compiles
                start = time.perf_counter()
                mx.eval(timed())
                if i:
                    times[patched].append(time.perf_counter() - start)
            finally:
                unpatch(model)
    return statistics.median(times[False]) / statistics.median(times[True])


def _add(report: Report, path: str, module: nn.Module, plan: Plan, new: bool) -> None:
    chosen = plan.runs(own_dtype(module), training=report.mode == "training")
    report.replaced.append(Replaced(path, plan.kind, plan.op, chosen.runs, chosen.why, new))


def _selection(name: str, given: str | Iterable[str] | None, paths: list[str]) -> list[str] | None:
    if given is None:
        return None
    several = isinstance(given, Iterable) and not isinstance(given, str)
    chosen: list[Any] = list(given) if several else [given]
    for pattern in chosen:
        if not isinstance(pattern, str):
            raise TypeError(
                f"[patch] '{name}' must be kinds or paths but got {type(pattern).__name__}."
            )
        if pattern not in KINDS and not any(_matches(path, pattern) for path in paths):
            raise ValueError(
                f"[patch] '{name}' must name kinds ({', '.join(KINDS)}) or paths of the model "
                f"but got {pattern!r}."
            )
    return chosen


def _selected(
    path: str, kind: str | None, wanted: list[str] | None, unwanted: list[str] | None
) -> bool:
    """Whether a module may be replaced; without its kind, whether that can be at all."""

    def listed(patterns: list[str]) -> bool:
        return any(p == kind if p in KINDS else _matches(path, p) for p in patterns)

    if unwanted is not None and listed(unwanted):
        return False
    return wanted is None or listed(wanted) or (kind is None and any(p in KINDS for p in wanted))


def _matches(path: str, pattern: str) -> bool:
    """A pattern matches a path, and what is below it."""
    return fnmatchcase(path, pattern) or path.startswith(pattern + ".")


def _natural(path: str) -> tuple[Any, ...]:
    """layers.2 before layers.10."""
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in path.split("."))


def _name_of_type(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
