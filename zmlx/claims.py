"""The answers of a Mac: names of `mlx.core` that say that there is a GPU, or that take a stream.

Where MLX has no GPU, the claimed one is the CPU: its streams are streams of the CPU, and every
function of MLX and every method of an array that is given the GPU as stream or device takes the CPU
instead. Where MLX has a CUDA device, that is the GPU: devices and streams stay as they are, and
only questions about Metal are answered.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import mlx.core as mx

from . import launch

#: Modules whose functions take a stream.
_MODULES = ("", "distributed", "fast", "fft", "linalg", "random")

#: Arguments that are one, or a device.
_NAMES = ("stream", "device", "s")


class Patches:
    """Attributes replaced in modules and classes, and how to restore them."""

    def __init__(self) -> None:
        self._done: list[tuple[ModuleType | type, str, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._done)

    def put(self, module: ModuleType | type, name: str, value: Any) -> None:
        """Sets `module.name`."""
        self._done.append((module, name, getattr(module, name), value))
        setattr(module, name, value)

    def restore(self) -> None:
        """Sets every name back, unless someone else has replaced it since."""
        for module, name, original, value in reversed(self._done):
            if getattr(module, name, None) is value:
                setattr(module, name, original)
        self._done.clear()

    def names(self) -> tuple[str, ...]:
        """The replaced names, as `mlx.core.fast.metal_kernel`."""
        return tuple(f"{_name(module)}.{name}" for module, name, _, _ in self._done)


def _name(module: ModuleType | type) -> str:
    if isinstance(module, type):
        return f"{module.__module__}.{module.__qualname__}"
    return module.__name__


_GPU, _CPU = mx.Device(mx.gpu), mx.Device(mx.cpu)
_DEVICES = (mx.Device, mx.DeviceType)

_claimed_default = _GPU


def _has_gpu() -> bool:
    return launch.gpu_target() == "cuda"


def is_gpu(stream: Any) -> bool:
    """Whether `stream`, a device, a kind of device or a stream, may stand for the GPU. A stream of
    the CPU does where the GPU is only claimed, since those of the GPU are such streams."""
    if isinstance(stream, _DEVICES):
        return stream == mx.gpu
    if _has_gpu():
        return bool(stream.device == mx.gpu)
    return bool(mx.metal.is_available())


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """A block whose nodes go to `stream`, which may stand for the GPU; None is the default."""
    if stream is None:
        return nullcontext()
    if _has_gpu():
        return _on_gpu(stream)
    return nullcontext() if isinstance(stream, _DEVICES) else mx.stream(stream)


@contextmanager
def _on_gpu(stream: Any) -> Iterator[None]:
    # Where the default device is the CPU, `mx.stream` restores that device's stream alone.
    before = mx.default_stream(mx.gpu)
    try:
        with mx.stream(stream):
            yield
    finally:
        mx.set_default_stream(before)


def claim(patches: Patches) -> None:
    """Makes MLX answer as on a Mac."""
    if not _has_gpu():
        _claim_gpu(patches)
    patches.put(mx, "device_info", device_info)
    patches.put(mx.metal, "is_available", lambda: True)
    patches.put(mx.metal, "device_info", lambda: device_info(_GPU))


def _claim_gpu(patches: Patches) -> None:
    global _claimed_default
    _claimed_default = _GPU
    modules = [getattr(mx, name) if name else mx for name in _MODULES]
    for module in (*modules, mx.array):
        for attribute in sorted(vars(module)):
            function = getattr(module, attribute)
            if _takes_device(function) and attribute not in (*_ANSWERS, "device_info"):
                patches.put(module, attribute, _on_cpu(function))
    for attribute, value in _ANSWERS.items():
        patches.put(mx, attribute, value)


def _takes_device(function: Any) -> bool:
    kinds = ("nb_func", "nb_method")
    return type(function).__name__ in kinds and "Device" in (function.__doc__ or "")


def _to_cpu(value: Any) -> Any:
    return mx.cpu if isinstance(value, _DEVICES) and value == mx.gpu else value


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if args and args[-1].__class__ in _DEVICES:
            args = (*args[:-1], _to_cpu(args[-1]))
        if kwargs:
            kwargs.update({name: _to_cpu(kwargs[name]) for name in _NAMES if name in kwargs})
        return function(*args, **kwargs)

    return mapped


def _claimed(device: Any) -> mx.Device:
    return device if isinstance(device, mx.Device) else mx.Device(device)


def default_device() -> mx.Device:
    """The GPU, unless `set_default_device` chose the CPU."""
    return _claimed_default


def set_default_device(device: Any) -> None:
    """Remembers the device, for `default_device`."""
    global _claimed_default
    _claimed_default = _claimed(device)


def device_count(device: Any) -> int:
    """One of each kind."""
    return 1


def is_available(device: Any) -> bool:
    """Both kinds are."""
    return True


_mlx_device_info = mx.device_info


def device_info(device: Any = None) -> dict[str, Any]:
    """What MLX says of the device, of the CPU where that is the claimed GPU, with the keys that
    Metal has for a GPU; sizes in bytes."""
    info: dict[str, Any] = _mlx_device_info(device if _has_gpu() else _CPU)
    if _has_gpu():
        if "total_memory" not in info:  # the CPU, of which a Mac says no more either
            return info
        memory = info["total_memory"]
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sizes = {
        "memory_size": memory,
        "max_buffer_length": memory,
        "max_recommended_working_set_size": memory * 3 // 4,
        "resource_limit": 499_000,
    }
    return {**info, **sizes}


_ANSWERS: dict[str, Any] = {
    "default_device": default_device,
    "set_default_device": set_default_device,
    "device_count": device_count,
    "is_available": is_available,
}
