"""Compiles that threads, signals, forks and kills come into."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zmlx import native

# `launch()` compiles the kernel, or finds it compiled; what follows is one test's.
KERNEL = """
import os, signal, sys, threading, time
from zmlx import cache, native
path = os.environ["CORE"]
native._built = lambda mlx: path
core = native.load()
import mlx.core as mx
source = os.environ.get("SOURCE", "uint i = thread_position_in_grid.x; o[i] = x[i] * 3;")
made = core.kernel("triple", ("x",), ("o",), source, "", True, False, "safe")
x = mx.ones((8,))
def launch():
    grid = ((8, 1, 1), (1, 1, 1))
    return core.prepare(made, (x,), (), *grid, ((8,),), (x.dtype,), None, ())
"""


def start(script: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", KERNEL + script],
        env={**os.environ, "CORE": str(native._built(native._installed_mlx())), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell runs in the background ignores interrupts, and with it all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output.strip()


def compiler(folder: Path, before: str) -> str:
    """g++, with something that happens before each compile."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) {before};; esac\nexec g++ "$@"\n')
    path.chmod(0o755)
    return str(path)


def wait_until(condition: object, what: str) -> None:
    end = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.01)


def gone(process: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


THREADS = """
results = []
def call():
    ready.wait()
    try:
        results.append(launch())
    except RuntimeError as error:
        results.append(error)
ready = threading.Barrier(4)
threads = [threading.Thread(target=call) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for result in results:
    print(result if isinstance(result, Exception) else core.launch(result, (x,)).tolist())
print(core.statistics()["compiles"])
"""


def test_threads_compile_a_kernel_once(tmp_path: Path) -> None:
    slow = compiler(tmp_path, f"echo >> {tmp_path}/log; sleep 0.3")
    result = start(THREADS, ZMLX_CACHE_DIR=str(tmp_path / "cache"), ZMLX_CXX=slow)
    assert finish(result).splitlines() == [str([3.0] * 8)] * 4 + ["1"]
    assert (tmp_path / "log").read_text() == "\n"


FAILS = """
try:
    launch()
except RuntimeError as error:
    print(ascii(str(error)))
"""


def test_a_compiler_may_say_what_is_no_utf_8(tmp_path: Path) -> None:
    latin = compiler(tmp_path, r"printf 'kernel.cc: erreur d\351j\340 vue\n'; exit 1")
    output = finish(start(FAILS, ZMLX_CACHE_DIR=str(tmp_path / "cache"), ZMLX_CXX=latin))
    assert r"kernel.cc: erreur d\ufffdj\ufffd vue" in output


def test_a_compile_that_fails_fails_in_every_thread(tmp_path: Path) -> None:
    slow = compiler(tmp_path, f"echo >> {tmp_path}/log; sleep 0.3")
    output = finish(
        start(
            THREADS,
            ZMLX_CACHE_DIR=str(tmp_path / "cache"),
            ZMLX_CXX=slow,
            SOURCE="o[0] = no_such_function(x[0]);",
        )
    )
    assert output.count("o[0] = no_such_function(x[0]);") == 4
    assert output.endswith("\n1")
    assert (tmp_path / "log").read_text() == "\n"


INTERRUPTED = """
try:
    launch()
except KeyboardInterrupt:
    print("interrupted", core.statistics()["compiles"], flush=True)
os.environ["ZMLX_CXX"] = "g++"
print(core.launch(launch(), (x,)).tolist() == [3] * 8, core.statistics()["compiles"])
"""


def test_an_interrupt_of_python_alone_ends_the_compiler(tmp_path: Path) -> None:
    """As `kill -INT`, a notebook or a test runner send it: no terminal tells the compiler."""
    folder = tmp_path / "cache"
    endless = compiler(tmp_path, f"sleep 600 & echo $$ $! > {tmp_path}/new; "
                       f"mv {tmp_path}/new {tmp_path}/log; wait")  # fmt: skip
    process = start(INTERRUPTED, ZMLX_CACHE_DIR=str(folder), ZMLX_CXX=endless)
    wait_until((tmp_path / "log").exists, "the compiler starts")
    os.kill(process.pid, signal.SIGINT)
    assert finish(process) == "interrupted 0\nTrue 1"
    for started in (tmp_path / "log").read_text().split():
        wait_until(lambda started=started: gone(int(started)), "the compiler ends")
    assert [entry.suffix for entry in (folder / "cpu").iterdir()] == [".so"]


def test_an_interrupt_ends_a_wait_for_another_threads_compile(tmp_path: Path) -> None:
    script = """
threading.Thread(target=launch, daemon=True).start()
while not os.path.exists(os.environ["LOG"]): time.sleep(0.01)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
begun = time.monotonic()
try:
    launch()
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - begun < 2, flush=True)
os._exit(0)
"""
    log = tmp_path / "log"
    slow = compiler(tmp_path, f"echo >> {log}; sleep 4")
    directory = str(tmp_path / "cache")
    process = start(script, ZMLX_CACHE_DIR=directory, ZMLX_CXX=slow, LOG=str(log))
    assert finish(process) == "interrupted True"
    assert log.read_text() == "\n"


@pytest.mark.parametrize("seconds", [0.02, 0.3])
def test_a_daemon_that_compiles_does_not_abort_the_process_at_its_end(
    seconds: float, tmp_path: Path
) -> None:
    """It ends where it asks for Python's lock: after the compiler, or while that is at work."""
    script = """
threading.Thread(target=launch, daemon=True).start()
while not os.path.exists(os.environ["LOG"]): time.sleep(0.001)
class Last:
    def __del__(self): sleep(0.5)
sleep, sys.last = time.sleep, Last()
"""
    log = tmp_path / "log"
    slow = compiler(tmp_path, f"echo >> {log}; sleep {seconds}")
    directory = str(tmp_path / "cache")
    process = start(script, ZMLX_CACHE_DIR=directory, ZMLX_CXX=slow, LOG=str(log))
    assert finish(process) == ""


def test_a_compile_outlives_signals_that_raise_nothing(tmp_path: Path) -> None:
    """Even where the handler wants the very kernel that is being compiled."""
    script = """
seen = []
def handle(*_):
    os.environ["ZMLX_CXX"] = "g++"
    seen.append(core.launch(launch(), (x,)).tolist() == [3] * 8)
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.2)
print(core.launch(launch(), (x,)).tolist() == [3] * 8, seen)
"""
    slow = compiler(tmp_path, "sleep 1")
    process = start(script, ZMLX_CACHE_DIR=str(tmp_path / "cache"), ZMLX_CXX=slow)
    assert finish(process) == "True [True]"


def test_a_forked_process_does_not_wait_for_its_parents_threads(tmp_path: Path) -> None:
    script = """
thread = threading.Thread(target=launch)
thread.start()
while not os.path.exists(os.environ["LOG"]): time.sleep(0.01)
child = os.fork()
if child == 0:
    os.environ["ZMLX_CXX"] = "g++"
    launch()
    os._exit(0)
_, status = os.waitpid(child, 0)
thread.join()
print(status)
"""
    log = tmp_path / "log"
    slow = compiler(tmp_path, f"echo >> {log}; sleep 1")
    directory = str(tmp_path / "cache")
    assert finish(start(script, ZMLX_CACHE_DIR=directory, ZMLX_CXX=slow, LOG=str(log))) == "0"


def test_a_forked_process_is_refused_a_stream_whose_thread_it_has_not(tmp_path: Path) -> None:
    """MLX would wait for that thread without end."""
    script = """
prepared = launch()
print(core.launch(prepared, (x,)).tolist() == [3] * 8, flush=True)
child = os.fork()
if child == 0:
    signal.alarm(30)
    try:
        core.launch(prepared, (x,))
    except RuntimeError as error:
        print(error, flush=True)
    mx.set_default_stream(mx.new_stream(mx.cpu))
    print(core.launch(prepared, (x,)).tolist() == [3] * 8, flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    lines = finish(start(script, ZMLX_CACHE_DIR=str(tmp_path / "cache"))).splitlines()
    assert lines[0] == lines[2] == "True"
    assert lines[1].startswith("[triple] A forked process has none of MLX's threads")
    assert lines[3] == "0"


def test_a_forked_process_has_the_streams_that_ran_nothing(tmp_path: Path) -> None:
    script = """
def used():
    mx.eval(core.launch(launch(), (mx.ones((8,)),)))
    mx.clear_streams()
thread = threading.Thread(target=used)
thread.start()
thread.join()
child = os.fork()
if child == 0:
    signal.alarm(30)
    print(core.launch(launch(), (x,)).tolist() == [3] * 8, flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert finish(start(script, ZMLX_CACHE_DIR=str(tmp_path / "cache"))) == "True\n0"


def test_without_a_directory_for_temporary_files_the_remedy_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    script = "\ncore.set_cache_directory('')\ntry: launch()\nexcept RuntimeError as e: print(e)"
    error = finish(start(script, TMPDIR=missing))
    assert error == (
        f"[zmlx] Cannot make a temporary directory in {missing} (No such file or directory); set "
        "TMPDIR to a directory that can be written."
    )


@pytest.mark.parametrize("age, removed", [(3700, True), (600, False)])
def test_what_a_killed_process_left_is_removed(age: int, removed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir(mode=0o700)
    digest = "0" * 32
    left = [folder / f"softmax-{digest}.7.1234.{suffix}" for suffix in ("cc", "so")]
    entry = folder / f"softmax-{digest}.so"
    for path in (*left, entry):
        path.write_bytes(b"")
        os.utime(path, (time.time() - age, time.time() - age))
    finish(start("launch()", ZMLX_CACHE_DIR=str(tmp_path)))
    assert [path.exists() for path in left] == [not removed] * 2
    assert entry.exists()
