"""The core and its process: forks, threads, other versions of MLX."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest
from core_kernels import core

from zmlx import native


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_forked_child_has_its_own_threads() -> None:
    code = """
import os, mlx.core as mx
from zmlx import native
core = native.load()
core.set_threads(4)
made = core.kernel("fork", ("x",), ("o",),
                   "uint i = thread_position_in_grid.x; o[i] = x[i] + 1;", "", True, False, "safe")
x = mx.zeros((1 << 20,))
launch = core.prepare(made, (x,), (), (x.size, 1, 1), (1, 1, 1), (x.shape,), (x.dtype,), None, ())
def run():
    with mx.stream(mx.new_stream(mx.cpu)):  # MLX's own threads do not survive a fork either
        assert core.launch(launch, (x,)).sum().item() == x.size
run()
child = os.fork()
if child == 0:
    run()
    os._exit(7)
run()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = python(code)
    assert done.stdout.strip() == "7", done.stderr


def test_a_check_leaves_no_guards_behind() -> None:
    """A larger group has the stacks of a smaller one that was checked."""
    code = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import mlx.core as mx
from metal_source import Metal, checking
def sums(n, group):
    source = (
        f"float a[{{n}}]; uint i = thread_position_in_threadgroup.x;"
        f"for (uint k = 0; k < {{n}}; ++k) a[k] = i; float s = simd_sum(a[i]);"
        f"for (uint k = 0; k < {{n}}; ++k) s += a[(k * 7) % {{n}}]; out[i] = s;"
    )
    return Metal(source, output=(group, mx.float32), grid=group, group=group)()
with checking():
    sums(8, 32)
try:
    sums(16800, 64)
except RuntimeError as error:
    print(error)
"""
    done = python(code)
    assert "a thread needs more than 64 KiB" in done.stdout, (done.returncode, done.stderr)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux alone has affinities")
@pytest.mark.parametrize("one", [False, True], ids=["all CPUs", "one CPU"])
def test_workers_are_kept_off_the_cpu_that_wakes_them(one: bool) -> None:
    """A virtual machine's Linux may wake them there, where they wait for milliseconds."""
    code = f"""
import os
if {one}:  # before there are other threads
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
import mlx.core as mx
from zmlx import kernels, native
native.load().set_threads(3)
cpus = os.sched_getaffinity(0)
for _ in range(2):
    mx.eval(kernels.exp(mx.zeros((1 << 20,))))
apart = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
apart = [mine for mine in apart if mine != cpus]
assert os.sched_getaffinity(0) == cpus
assert all(mine < cpus and len(mine) == len(cpus) - 1 for mine in apart), apart
print(len(apart), len(cpus))
"""
    done = python(code)
    apart, cpus = map(int, done.stdout.split() or ["-1", "-1"])
    assert apart == (2 if cpus > 1 else 0), done.stderr


def test_threads_are_set_by_the_environment() -> None:
    code = "from zmlx import native; print(native.load().threads())"
    assert python(code, ZMLX_NUM_THREADS="3").stdout.strip() == "3"
    assert python(code, ZMLX_NUM_THREADS="").stdout.strip() == str(
        min(len(os.sched_getaffinity(0)), int(python(code).stdout))
    )
    for wrong in ("x", "0", "257", "1" + "0" * 20):
        message = f"ZMLX_NUM_THREADS must be from 1 to 256 but got '{wrong}'"
        assert message in python(code, ZMLX_NUM_THREADS=wrong).stderr
    with pytest.raises(ValueError, match="'n' must be from 0"):
        core.set_threads(-1)


def test_objects_of_an_unknown_layout_are_refused_by_name() -> None:
    code = """
import ctypes, mlx.core as mx
from zmlx import native
path = native._built(native._installed_mlx())
table = ctypes.PyDLL(str(path)).zmlx_python
table.restype, table.argtypes = ctypes.py_object, [ctypes.py_object] * 5
class Other:
    __slots__ = ("a", "b", "c", "d", "e")
good = mx.array([[1, 2, 3], [4, 5, 6]], dtype=mx.int32)
stream = mx.default_stream(mx.cpu)
for arguments in [
    (Other(), good.__copy__, mx.bfloat16, stream, ""),
    (good.T, good.__copy__, mx.bfloat16, stream, ""),
    (good, good.__copy__, mx.float16, stream, ""),
    (good, mx.array(1).__copy__, mx.bfloat16, mx.new_stream(mx.cpu), ""),
]:
    try:
        table(*arguments)
    except RuntimeError as error:
        print(error)
"""
    done = python(code)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    for line, name in zip(lines, ("mx.array", "mx.array", "mx.Dtype", "mx.Stream"), strict=True):
        assert f"layout of {name} in MLX {mx.__version__} is not one that zmlx knows" in line


def test_only_the_binding_knows_of_python() -> None:
    # The Zig shim is built from the other files, in a process without Python.
    for path in sorted(native.HERE.glob("*.cc")):
        if not path.name.startswith("python"):
            assert not re.search(r"\bPy[A-Z]|python_", path.read_text()), path.name


def closing(text: str, start: int) -> int:
    """Where what is open at `start` ends."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "({") - (text[i] in ")}")
        if depth < 0:
            return i
    return len(text)


def captured_bindings(text: str) -> list[str]:
    """Names of structured bindings that lambdas capture by default."""
    text = re.sub(r"//.*|\"(?:\\.|[^\"\\\n])*\"", "", text)
    found = []
    for binding in re.finditer(r"\bauto\s*&{0,2}\s*\[([\w\s,]+)\]", text):
        end = closing(text, binding.end())
        if text[end : end + 1] == ")":  # of a loop's head, whose body follows
            end = closing(text, text.index("{", end) + 1)
        for introducer in re.finditer(r"\[[&=](?:,[^\]]*)?\]", text[: end + 1]):
            if introducer.start() > binding.end():
                body = text.index("{", introducer.end()) + 1
                used = re.findall(r"\w+", text[body : closing(text, body)])
                found += [name for name in re.findall(r"\w+", binding[1]) if name in used]
    return found


def test_no_lambda_captures_a_name_of_a_structured_binding() -> None:
    """Which clang refuses before version 16: the core would not compile there."""
    bad = "for (auto& [a, b] : all()) { auto f = [&](int x) { return x + b; }; f(a); }"
    assert captured_bindings(bad) == ["b"]
    assert captured_bindings("auto [a, b] = one(); use([=] { return a; });") == ["a"]
    assert captured_bindings("{ auto [a, b] = one(); } use([&] { return a; });") == []
    for source in sorted(native.HERE.glob("*.cc")):
        assert not captured_bindings(source.read_text()), source.name


def test_import_builds_nothing(tmp_path: Any) -> None:
    code = "import zmlx, sys; print('mlx.core' in sys.modules and 'zmlx.native' in sys.modules)"
    done = python(code, ZMLX_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("version", "remedy"), [("0.31.2", "0.32.2 or newer"), ("0.9", "0.32.2")])
def test_an_older_mlx_is_refused_by_name(
    version: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "__version__", version)
    native._installed_mlx.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=f"{remedy}.* but got {version}"):
            native._installed_mlx()
    finally:
        monkeypatch.undo()
        native._installed_mlx.cache_clear()
