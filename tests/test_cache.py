"""The cache of compiled objects: what is kept, what is trusted, and what happens without it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from zmlx import cache, native

# One process that compiles one kernel, tells how, and runs it. The core itself is taken from the
# cache of this process, so that only kernels are at stake.
RUN = """
import os, sys
from zmlx import cache, native
path = os.environ["CORE"]
native._built = lambda mlx: path
core = native.load()
import mlx.core as mx
triple = "uint i = thread_position_in_grid.x; o[i] = x[i] * 3;"
source = sys.argv[1] if len(sys.argv) > 1 else triple
made = core.kernel("triple", ("x",), ("o",), source, "", True, False, "safe")
x = mx.ones((8,))
try:
    launch = core.prepare(made, (x,), (), (8, 1, 1), (1, 1, 1), ((8,),), (x.dtype,), None, ())
except RuntimeError as error:
    sys.exit(str(error))
assert core.launch(launch, (x,)).tolist() == [3] * 8
counts = core.statistics()
print(counts["compiles"], counts["cache_hits"])
"""


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    core = str(native._built(native._installed_mlx()))
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments],
        env={**os.environ, "CORE": core, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heeds_interrupts,
    )


def heeds_interrupts() -> None:
    """What a shell runs in the background ignores them, and with it all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(*arguments: str, **environment: str) -> tuple[str, str]:
    output, errors = start(*arguments, **environment).communicate(timeout=60)
    return output.strip(), errors


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cpu").iterdir())


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert run(ZMLX_CACHE_DIR=str(folder)) == ("1 0", "")
    assert run(ZMLX_CACHE_DIR=str(folder)) == ("0 1", "")
    (entry,) = entries(folder)
    assert entry.name.startswith("triple-")
    assert entry.suffix == ".so"


def test_only_the_user_can_read_or_write_entries(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    run(ZMLX_CACHE_DIR=str(folder))
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "cpu")] == [0o700, 0o700]


def test_processes_that_compile_at_once_do_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    racing = [start(ZMLX_CACHE_DIR=str(folder)) for _ in range(4)]
    results = [process.communicate(timeout=60) for process in racing]
    assert {output.strip() for output, _ in results} <= {"1 0", "0 1"}
    assert len(entries(folder)) == 1
    assert run(ZMLX_CACHE_DIR=str(folder)) == ("0 1", "")


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "unsealed"])
def test_a_damaged_entry_is_compiled_again(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "cache"
    run(ZMLX_CACHE_DIR=str(folder))
    (entry,) = entries(folder)
    data = bytearray(entry.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    elif damage == "unsealed":
        del data[-64 - len(cache.SEAL) :]
    else:
        del data[len(data) // 2 if damage == "short" else 0 :]
    entry.write_bytes(data)
    assert run(ZMLX_CACHE_DIR=str(folder)) == ("1 0", "")
    assert run(ZMLX_CACHE_DIR=str(folder)) == ("0 1", "")


def test_another_compiler_is_another_entry(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    run(ZMLX_CACHE_DIR=str(folder))
    wrapper = tmp_path / "my-compiler"
    wrapper.write_text('#!/bin/sh\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    assert run(ZMLX_CACHE_DIR=str(folder), ZMLX_CXX=str(wrapper)) == ("1 0", "")
    assert len(entries(folder)) == 2


def test_nothing_is_kept_where_the_user_asks_for_that(tmp_path: Path) -> None:
    settings = {"ZMLX_CACHE": "0", "ZMLX_CACHE_DIR": str(tmp_path / "cache")}
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    assert run(**settings, TMPDIR=str(temporary)) == ("1 0", "")
    assert not (tmp_path / "cache").exists()
    assert not list(temporary.iterdir())


def refused(folder: Path, reason: str) -> None:
    output, errors = run(ZMLX_CACHE_DIR=str(folder))
    assert output == "1 0"
    assert errors.count("RuntimeWarning: zmlx cannot keep compiled kernels in") == 1
    assert f"{folder}: " in errors
    assert reason in errors


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    refused(folder, f"{folder} has mode 0777 (remedy: chmod 700 {folder})")
    assert not (folder / "cpu").exists()


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir(mode=0o755)
    refused(tmp_path, "has mode 0755")
    assert not entries(tmp_path)


@pytest.mark.parametrize("kind", ["core", "cpu", "cuda"])
def test_a_folder_of_any_kind_may_be_unusable_alone(kind: str, tmp_path: Path) -> None:
    """The others are kept where they are."""
    (tmp_path / kind).mkdir(mode=0o755)
    code = "from zmlx import cache; print(*map(cache.directory, ('core', 'cpu', 'cuda')))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ZMLX_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count(f"{tmp_path / kind} has mode 0755") == 1
    for path in map(Path, done.stdout.split()):
        assert (path.parent == tmp_path) == (path.name != kind)


def test_a_directory_where_nothing_may_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = os.statvfs_result((4096,) * 8 + (os.ST_NOEXEC, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: flags)
    monkeypatch.setenv("ZMLX_CACHE_DIR", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="is mounted noexec, so that nothing in it can run"):
        assert cache.directory("cpu").parent != tmp_path


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "/tmp/\udcff"])
def test_a_directory_without_a_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMLX_CACHE_DIR", name)
    with pytest.raises(ValueError, match=r"^\[zmlx\] 'ZMLX_CACHE_DIR' must be a directory whose"):
        cache.directory("cpu")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, -1)
    refused(folder, f"{folder} belongs to user 65534 and not to 0")
    assert not list(folder.iterdir())


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "cache", "Not a directory")
    refused(Path("/proc/zmlx-cache"), "No such file or directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o500)
    refused(folder, "Permission denied")


def test_a_directory_that_goes_away_later_costs_one_line(tmp_path: Path) -> None:
    code = RUN.replace(
        "core = native.load()", "core = native.load(); os.rmdir(cache.directory('cpu'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "CORE": str(native._built(native._installed_mlx())),
            "ZMLX_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "1 0"
    assert done.stderr.count("zmlx: cannot write to") == 1


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_disk_that_is_full_costs_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    full = "echo 'ld: final link failed: No space left on device' >&2; exit 1"
    compiler = fake_compiler(tmp_path, f'case "$*" in *{folder}*) {full};; esac; exec g++ "$@"')
    output, errors = run(ZMLX_CACHE_DIR=str(folder), ZMLX_CXX=compiler)
    assert output.endswith(" 0")
    assert errors.count("(No space left on device); compiled kernels are not kept") == 1
    assert not entries(folder)


@pytest.mark.skipif(
    not (shutil.which("localedef") and shutil.which("msgfmt")), reason="makes a language"
)
def test_a_full_disk_is_known_in_every_language(tmp_path: Path) -> None:
    """The compiler speaks English, whatever the process does."""
    catalogue = tmp_path / "de" / "LC_MESSAGES"
    catalogue.mkdir(parents=True)
    (tmp_path / "libc.po").write_text(
        'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8"\n'
        'msgid "No space left on device"\nmsgstr "Kein Platz"\n'
    )
    subprocess.run(["msgfmt", tmp_path / "libc.po", "-o", catalogue / "libc.mo"], check=True)
    made = ["localedef", "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8"]
    if subprocess.run(made, capture_output=True).returncode > 1:
        pytest.skip("no source of a language")
    speak = f"""
import ctypes, locale, os
locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
ctypes.CDLL(None).bindtextdomain(b"libc", {str(tmp_path).encode()!r})
print(os.strerror({errno.ENOSPC}))
"""
    folder = tmp_path / "cache"
    full = "echo 'ld: final link failed: No space left on device' >&2; exit 1"
    done = subprocess.run(
        [sys.executable, "-c", speak + RUN],
        env={
            **os.environ,
            "CORE": str(native._built(native._installed_mlx())),
            "LOCPATH": str(tmp_path),
            "ZMLX_CACHE_DIR": str(folder),
            "ZMLX_CXX": fake_compiler(
                tmp_path, f'case "$*" in *{folder}*) {full};; esac; exec g++ "$@"'
            ),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("Kein Platz\n")
    assert done.stderr.count("compiled kernels are not kept") == 1, done.stderr


def test_a_core_that_does_not_fit_on_the_disk_is_made_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = cache.write

    def write(path: Path, data: bytes) -> None:
        if path.is_relative_to(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(path, data)

    monkeypatch.setattr(cache, "write", write)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        path = cache.keep(tmp_path / "core.so", b"core")
    assert cache.read(path) == b"core"
    assert not path.is_relative_to(tmp_path)
    path.unlink()


def test_a_compiler_that_is_killed_is_said_to_be(tmp_path: Path) -> None:
    killed = fake_compiler(tmp_path, 'case "$*" in *--version*) exec g++ "$@";; esac; kill -9 $$')
    errors = run(ZMLX_CACHE_DIR=str(tmp_path / "cache"), ZMLX_CXX=killed)[1]
    assert f"{killed} was killed by signal 9" in errors


def test_a_compiler_that_says_nothing_is_named(tmp_path: Path) -> None:
    silent = fake_compiler(tmp_path, 'case "$*" in *--version*) exec g++ "$@";; esac; exit 1')
    errors = run(ZMLX_CACHE_DIR=str(tmp_path / "cache"), ZMLX_CXX=silent)[1]
    assert f"{silent} failed and said nothing" in errors


def test_an_interrupt_from_a_terminal_is_one(tmp_path: Path) -> None:
    """It reaches the compiler, which dies of it, and Python."""
    stopped = fake_compiler(
        tmp_path, 'case "$*" in *--version*) exec g++ "$@";; esac; kill -INT $PPID; kill -INT $$'
    )
    errors = run(ZMLX_CACHE_DIR=str(tmp_path / "cache"), ZMLX_CXX=stopped)[1]
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "RuntimeError" not in errors


def test_processes_of_one_number_do_not_share_a_name(tmp_path: Path) -> None:
    """Containers that share the folder have process 1 each."""
    log = tmp_path / "log"
    compiler = fake_compiler(tmp_path, f'echo "$@" >> {log}; exec g++ "$@"')
    for folder in ("a", "b"):
        run(ZMLX_CACHE_DIR=str(tmp_path / folder), ZMLX_CXX=compiler)
    names = re.findall(r"cpu/(\S+)\.\d+\.(\d+)\.cc ", log.read_text())
    assert len(names) == 2
    (first, drawn), (second, other) = names
    assert first == second
    assert drawn != other


def test_a_compiler_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = fake_compiler(tmp_path, "exit 0")
    errors = run(ZMLX_CACHE_DIR=str(tmp_path / "cache"), ZMLX_CXX=nothing)[1]
    assert f"{nothing} wrote no object" in errors
    with pytest.raises(RuntimeError, match="wrote no object"):
        native._build(native._installed_mlx(), nothing)


@pytest.mark.parametrize("variable", ["ZMLX_CACHE", "ZMLX_CHECK"])
def test_a_switch_is_0_or_1(variable: str) -> None:
    code = "from zmlx import cache, checks; cache.enabled()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, variable: "yes"},
        capture_output=True,
        text=True,
    )
    assert f"'{variable}' must be 0 or 1 but got yes" in done.stderr


def test_without_a_compiler_the_error_names_the_remedy(tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    assert "apt install g++" in run(ZMLX_CACHE_DIR=folder, PATH=str(tmp_path))[1]
    missing = run(ZMLX_CACHE_DIR=folder, ZMLX_CXX="no-such-compiler")[1]
    assert "ZMLX_CXX must name a C++ compiler but got 'no-such-compiler'" in missing


def test_without_a_compiler_the_core_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ZMLX_CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"apt install g\+\+"):
        native.compiler_path()
    monkeypatch.setenv("ZMLX_CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="ZMLX_CXX must name a C\\+\\+ compiler"):
        native.compiler_path()


def test_a_compile_error_shows_the_users_line(tmp_path: Path) -> None:
    source = "uint i = thread_position_in_grid.x;\no[i] = no_such_function(x[i]);"
    error = run(source, ZMLX_CACHE_DIR=str(tmp_path))[1]
    assert "triple" in error
    assert "no_such_function" in error
    assert "o[i] = no_such_function(x[i]);" in error
    assert not entries(tmp_path)


def test_the_core_is_built_once_by_processes_that_start_together(tmp_path: Path) -> None:
    # The build itself is replaced by something short: the lock and the entry are what is tested.
    code = """
import time
from zmlx import native
def build(mlx, compiler):
    time.sleep(0.3)
    return b"core"
native._build = build
print(native._built(native._installed_mlx()).name)
"""
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "ZMLX_CACHE_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    results = [process.communicate(timeout=60) for process in racing]
    assert len({output for output, _ in results}) == 1
    assert "".join(errors for _, errors in results).count("building its CPU core") == 1


def test_every_header_that_the_core_includes_is_in_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shutil.copytree(native.HERE, tmp_path / "native")
    monkeypatch.setattr(native, "HERE", here)
    monkeypatch.setattr(native, "PRELUDE", here / "prelude")
    texts = [path.read_text() for path in (*here.glob("*.cc"), *here.glob("*.h"))]
    names = {name for text in texts for name in re.findall(r'#include "(.+)"', text)}
    assert "prelude/abi.h" in names
    mlx, compiler = native._installed_mlx(), native.compiler_path()
    for header in filter(Path.exists, (here / name for name in sorted(names))):
        before = native._key(mlx, compiler)
        header.write_text(f"{header.read_text()}//\n")
        assert native._key(mlx, compiler) != before, header.name


def test_sealed_data_is_returned_only_unchanged() -> None:
    sealed = cache.seal(b"data")
    assert cache.unseal(sealed) == b"data"
    assert cache.unseal(sealed[:-1] + b"0") in (None, b"data")
    assert cache.unseal(b"x" + sealed) is None
    assert cache.unseal(b"") is None
    assert cache.unseal(b"data") is None


def test_entries_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "entry"
    cache.write(path, b"one")
    cache.write(path, b"two")
    assert cache.read(path) == b"two"

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.write(path, b"three")
    assert cache.read(path) == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_the_directory_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZMLX_CACHE", raising=False)
    monkeypatch.delenv("ZMLX_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert cache.directory("cuda") == tmp_path / "home" / ".cache" / "zmlx" / "cuda"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache.directory("cpu") == tmp_path / "xdg" / "zmlx" / "cpu"
        monkeypatch.setenv("ZMLX_CACHE_DIR", str(tmp_path / "own"))
        assert cache.directory("cpu") == tmp_path / "own" / "cpu"
        assert cache.is_kept("cpu")
        monkeypatch.setenv("ZMLX_CACHE", "0")
        assert not cache.is_kept("cpu")
        assert not cache.enabled()
