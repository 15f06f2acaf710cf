"""The Zig front end: its tests, its values against Python's, its documentation."""

from __future__ import annotations

import base64
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import zig_build as zig

from zmlx import cache, kernels, launch

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
#: Odd, one, none, longer than a row that is kept in registers.
SHAPES = ((3, 1), (2, 3, 5), (7, 31), (9, 515), (300, 65), (40,), (0, 16), (2, 32769))


@pytest.fixture(scope="module")
def values() -> Iterator[zig.Process]:
    process = zig.Process("zmlx-values")
    yield process
    process.close()


def name_of(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.").rstrip("_")


def encoded(a: mx.array) -> dict[str, Any]:
    return {
        "dtype": name_of(a.dtype),
        "shape": list(a.shape),
        "data": base64.b64encode(bits(a)).decode(),
    }


def bits(a: mx.array) -> bytes:
    """The memory of an array."""
    return np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a).tobytes()


def drawn(seed: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return mx.array(numbers).astype(dtype)


def compare(
    values: zig.Process,
    op: str,
    function: Any,
    arrays: dict[str, mx.array],
    wanted: tuple[str, ...],
    **options: Any,
) -> None:
    """The op of Zig gives the bits of Python's, and so do the gradients of `wanted`."""
    others = {n: a for n, a in arrays.items() if n not in wanted}

    def of(*some: mx.array) -> mx.array:
        return function(**dict(zip(wanted, some, strict=True)), **others)

    y = of(*(arrays[n] for n in wanted))
    dy = drawn(99, y.shape, y.dtype)
    _, gradients = mx.vjp(of, [arrays[n] for n in wanted], [dy])
    expected = {"y": encoded(y)}
    expected |= {n: encoded(g) for n, g in zip(wanted, gradients, strict=True)}
    request = {
        "op": op,
        "arrays": {n: encoded(a) for n, a in arrays.items()},
        "cotangent": encoded(dy),
        **options,
    }
    (answer,) = values.ask([request])
    assert answer == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_python_s_bit_for_bit(values, shape, dtype):
    x = drawn(0, shape, dtype)
    weight, bias = (drawn(seed, shape[-1:], dtype) for seed in (1, 2))
    compare(values, "softmax", kernels.softmax, {"x": x}, ("x",))
    if 0 in shape:  # MLX's own vjp has nothing to say of no rows
        return
    compare(values, "rms_norm", kernels.rms_norm, {"x": x}, ("x",))
    both = {"x": x, "weight": weight, "bias": bias}
    compare(values, "rms_norm", kernels.rms_norm, {"x": x, "weight": weight}, ("x", "weight"))
    compare(values, "layer_norm", kernels.layer_norm, both, tuple(both))
    gated = {"gate": x, "up": drawn(3, shape, dtype)}
    compare(values, "swiglu", kernels.swiglu, gated, tuple(gated))


def test_optional_arguments_are_optional_in_zig(values):
    x, up = drawn(0, (5, 33), mx.float32), drawn(1, (5, 33), mx.float32)
    a, b = drawn(2, (33,), mx.float32), drawn(3, (33,), mx.float32)
    for given in ({"weight": a}, {"bias": b}, {}):
        arrays = {"x": x, **given}
        compare(values, "layer_norm", kernels.layer_norm, arrays, tuple(arrays))
    for given in ({"gate_bias": a}, {"up_bias": b}, {"gate_bias": a, "up_bias": b}):
        arrays = {"gate": x, "up": up, **given}
        compare(values, "swiglu", kernels.swiglu, arrays, tuple(arrays))


def test_mixed_dtypes_promote_as_in_python(values):
    arrays = {"x": drawn(0, (4, 9), mx.float16), "weight": drawn(1, (9,), mx.float32)}
    compare(values, "rms_norm", kernels.rms_norm, arrays, tuple(arrays))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignore_index", [None, 1])
def test_cross_entropy_is_python_s_bit_for_bit(values, dtype, reduction, ignore_index):
    for shape in ((7, 33), (2, 3, 5), (40,)):
        targets = np.random.default_rng(5).integers(0, shape[-1], shape[:-1]).astype(np.int32)
        targets = mx.array(
            np.where(np.arange(targets.size).reshape(targets.shape) == 0, 1, targets)
        )
        if shape == (40,) and ignore_index is not None:
            continue  # no row counts: 0 / 0
        arrays = {"logits": drawn(0, shape, dtype), "targets": targets}

        def function(logits: mx.array, targets: mx.array) -> mx.array:
            return kernels.cross_entropy(
                logits, targets, ignore_index=ignore_index, reduction=reduction
            )

        compare(
            values,
            "cross_entropy",
            function,
            arrays,
            ("logits",),
            reduction=reduction,
            **({} if ignore_index is None else {"ignore_index": ignore_index}),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "shape, options",
    [
        ((2, 3, 7, 16), {}),
        ((2, 4, 200, 16), {}),
        ((1, 5, 32), {"traditional": True, "offset": 1000}),
        ((2, 5, 4, 64), {"layout": "BLHD", "dims": 32, "base": 500.0}),
        ((3, 2, 2, 9, 8), {"scale": 0.5, "offset": -3, "dims": 6}),
        ((1, 1, 1, 128), {"offset": 123456, "base": 1e6}),
        ((1, 2, 5, 16), {"offset": 2**31 - 3}),
        ((1, 2, 5, 16), {"offset": 2**40}),
        ((0, 2, 3, 8), {}),
    ],
    ids=str,
)
def test_rope_is_python_s_bit_for_bit(values, shape, options, dtype):
    def function(x: mx.array, **arrays: mx.array) -> mx.array:
        return kernels.rope(x, **arrays, **options)

    x = drawn(0, shape, dtype)
    compare(values, "rope", function, {"x": x}, ("x",), **options)
    if "offset" in options:
        return
    steps = shape[1 if "layout" in options else -2]
    places = mx.array(np.random.default_rng(1).integers(0, 99, (shape[0], steps)), dtype=mx.int32)
    freqs = mx.abs(drawn(2, (options.get("dims", shape[-1]) // 2,), mx.float32)) + 0.5
    without = {n: v for n, v in options.items() if n != "base"}

    def placed(x: mx.array, **arrays: mx.array) -> mx.array:
        return kernels.rope(x, **arrays, **without)

    for positions in (places, places[:1], mx.arange(steps)):
        arrays = {"x": x, "positions": positions, "freqs": freqs}
        compare(values, "rope", placed, arrays, ("x",), **without)


def test_the_geometry_of_a_gpu_gives_python_s_bits_too(values):
    x, weight = drawn(0, (5, 129), mx.float32), drawn(1, (129,), mx.float32)
    with launch.geometry("gpu"):
        compare(values, "softmax", kernels.softmax, {"x": x}, ("x",), geometry="gpu")
        arrays = {"x": x, "weight": weight}
        compare(values, "rms_norm", kernels.rms_norm, arrays, tuple(arrays), geometry="gpu")
        heads = {"x": drawn(2, (2, 3, 5, 48), mx.float32)}
        compare(values, "rope", kernels.rope, heads, ("x",), geometry="gpu")


@pytest.mark.parametrize(
    "op, options",
    [
        ("rms_norm", {"eps": -100}),
        ("layer_norm", {"eps": -1e-5}),
        ("rope", {"base": 0}),
        ("rope", {"base": 1e39}),
        ("rope", {"base": 500, "freqs": mx.ones((4,))}),
    ],
    ids=str,
)
def test_errors_of_numbers_are_python_s(values, op, options):
    given = {"x": mx.zeros((2, 5, 8)), **options}
    with pytest.raises(ValueError, match=rf"\[{op}\] '(eps|base)' must be") as caught:
        getattr(kernels, op)(**given)
    arrays = {n: encoded(a) for n, a in given.items() if isinstance(a, mx.array)}
    numbers = {n: v for n, v in options.items() if n not in arrays}
    (answer,) = values.ask([{"op": op, "arrays": arrays, **numbers}])
    assert answer == {"error": str(caught.value)}


@pytest.mark.parametrize(
    "op, arrays",
    [
        ("rms_norm", {"x": mx.zeros((2, 5)), "weight": mx.zeros((4,))}),
        ("rms_norm", {"x": mx.zeros((2, 5)), "weight": mx.zeros((1, 5))}),
        ("softmax", {"x": mx.zeros((2, 5), dtype=mx.int32)}),
        ("softmax", {"x": mx.zeros(())}),
        ("layer_norm", {"x": mx.zeros((2, 5)), "bias": mx.zeros((5,), dtype=mx.bool_)}),
        ("swiglu", {"gate": mx.zeros((2, 5)), "up": mx.zeros((2, 4))}),
        ("swiglu", {"gate": mx.zeros((2, 5)), "up": mx.zeros((5,))}),
        ("cross_entropy", {"logits": mx.zeros((2, 5)), "targets": mx.zeros((3,), dtype=mx.int32)}),
        ("cross_entropy", {"logits": mx.zeros((2, 5)), "targets": mx.zeros((2,))}),
        ("cross_entropy", {"logits": mx.zeros((2, 5)), "targets": mx.array([0, 5])}),
        ("rope", {"x": mx.zeros((2, 5))}),
        ("rope", {"x": mx.zeros((2, 5, 7))}),
        ("rope", {"x": mx.zeros((1, 1, 2**17 + 2))}),
        ("rope", {"x": mx.zeros((0, 70000, 70000, 8))}),
        ("rope", {"x": mx.zeros((2, 5, 8)), "freqs": mx.zeros((3,))}),
        ("rope", {"x": mx.zeros((2, 5, 8)), "positions": mx.zeros((4,), dtype=mx.int32)}),
    ],
)
def test_errors_are_python_s(values, op, arrays):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        mx.eval(getattr(kernels, op)(**arrays))
    (answer,) = values.ask([{"op": op, "arrays": {n: encoded(a) for n, a in arrays.items()}}])
    assert answer == {"error": str(caught.value)}


# ---- what is around it --------------------------------------------------------------------------


def test_the_exported_files_are_current():
    command = [sys.executable, str(zig.ZIG / "export.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_there_is_no_python_in_the_library():
    library = zig.program("zmlx-values").parent.parent / "lib" / "libzmlx.so"
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    assert "mlx" in symbols
    assert not re.search(r"\b_?Py[A-Z_]", symbols)


def test_a_program_looks_for_the_library_beside_itself_and_nowhere_else():
    for name in ("zmlx-values", "zmlx-demo"):
        dynamic = subprocess.run(
            ["readelf", "-d", zig.program(name)], capture_output=True, text=True, check=True
        ).stdout
        assert re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", dynamic) == ["$ORIGIN/../lib"]


def test_mlx_is_found_from_any_folder_where_its_directory_was_given_relative_to_one():
    mlx = Path(mx.__file__).parent
    zig.build("zmlx-values", f"-Dmlx={os.path.relpath(mlx, zig.ZIG)}")
    library = zig.folder() / "out" / "lib" / "libzmlx.so"
    dynamic = subprocess.run(
        ["readelf", "-d", library], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", dynamic) == [f"{mlx}/lib"]


# ---- where compiled kernels are kept ------------------------------------------------------------


def softmax_with(
    cwd: Path, unset: tuple[str, ...] = (), **environment: str
) -> tuple[dict[str, Any], str]:
    """What Zig answers, and prints on the standard error, in an environment."""
    program = zig.program("zmlx-values")
    kept = {
        n: v for n, v in os.environ.items() if not n.startswith("ZMLX_CACHE") and n not in unset
    }
    done = subprocess.run(
        [program],
        input=json.dumps({"op": "softmax", "arrays": {"x": encoded(mx.zeros((2, 3)))}}) + "\n",
        capture_output=True, text=True, check=True, cwd=cwd, env={**kept, **environment},
        umask=0o002,  # folders above the cache are made with it, and the cache is not
    )  # fmt: skip
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    "environment, folder",
    [
        ({"ZMLX_CACHE_DIR": "~/kept"}, "home/kept"),
        ({"ZMLX_CACHE_DIR": "here"}, "here"),
        ({"ZMLX_CACHE_DIR": "above/here/"}, "above/here"),
        ({"ZMLX_CACHE_DIR": "HERE//./here/."}, "here"),
        ({"ZMLX_CACHE_DIR": "", "XDG_CACHE_HOME": "relative"}, "home/.cache/zmlx"),
        ({"XDG_CACHE_HOME": "HERE/xdg"}, "xdg/zmlx"),
    ],
    ids=str,
)
def test_zig_keeps_kernels_where_python_does(tmp_path, monkeypatch, environment, folder):
    environment = {n: v.replace("HERE", str(tmp_path)) for n, v in environment.items()}
    environment = {"XDG_CACHE_HOME": "", "HOME": f"{tmp_path}/home", **environment}
    answer, said = softmax_with(tmp_path, **environment)
    assert "y" in answer
    assert said == ""
    (entry,) = (tmp_path / folder / "cpu").iterdir()
    assert entry.suffix == ".so"
    monkeypatch.chdir(tmp_path)
    for name, value in {"ZMLX_CACHE_DIR": "", **environment}.items():
        monkeypatch.setenv(name, value)
    assert cache.root() == tmp_path / folder


@pytest.mark.parametrize("tilde", ["~", f"~{pwd.getpwuid(os.getuid()).pw_name}"])
def test_without_a_variable_home_is_where_the_system_says(tmp_path, tilde):
    home = pwd.getpwuid(os.getuid()).pw_dir
    answer, said = softmax_with(
        tmp_path, ("HOME",), ZMLX_CACHE_DIR=f"{tilde}/{os.path.relpath(tmp_path, home)}/kept"
    )
    assert "y" in answer
    assert said == ""
    assert (tmp_path / "kept" / "cpu").is_dir()


@pytest.mark.parametrize(
    "environment",
    [
        {"ZMLX_CACHE": "2"},
        {"ZMLX_CACHE_DIR": "~nobody-of-this-name/x"},
        {"ZMLX_CACHE_DIR": "~/\udcff"},
    ],
    ids=str,
)
def test_a_cache_that_python_refuses_zig_refuses(tmp_path, monkeypatch, environment):
    answer, _ = softmax_with(tmp_path, **environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"'ZMLX_CACHE(_DIR)?' must be") as caught:
        cache.root()
    said = str(caught.value).split(" but got ")[0]
    assert answer["error"].startswith(said)


@pytest.mark.parametrize("case", ["file", "mode", "kind", "proc"])
def test_an_unusable_folder_is_named_with_python_s_reason(tmp_path, monkeypatch, case):
    folder = tmp_path / "cache"
    if case == "file":
        folder.touch()
    elif case == "proc":
        folder = Path("/proc/zmlx-cache")
    else:
        folder.mkdir(mode=0o700)
        (folder / "cpu").mkdir(mode=0o700)
        (folder / ("cpu" if case == "kind" else "")).chmod(0o777)
    answer, said = softmax_with(tmp_path, ZMLX_CACHE_DIR=str(folder))
    assert "y" in answer
    monkeypatch.setenv("ZMLX_CACHE_DIR", str(folder))
    with pytest.warns(RuntimeWarning) as warned:
        cache.directory("cpu")
    assert said == f"{warned[0].message}\n"


def test_a_folder_that_lets_nothing_run_is_not_the_cache(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "noexec,mode=700", "tmpfs", tmp_path]
    if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        answer, said = softmax_with(tmp_path, ZMLX_CACHE_DIR=str(tmp_path))
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert "y" in answer
    assert "it is mounted noexec, so that nothing in it can run" in said


# ---- programs -----------------------------------------------------------------------------------


def test_a_missing_mlx_is_named(tmp_path):
    done = zig.build(f"-Dmlx={tmp_path}", check=False)
    assert done.returncode != 0
    assert f"'mlx' must be a directory with include/mlx/mlx.h but got '{tmp_path}'" in done.stderr
    done = zig.build("-Dpython=/nowhere/python", check=False)
    assert done.returncode != 0
    assert "pip install 'mlx[cpu]'" in done.stderr


def test_another_mlx_than_the_library_was_built_for_is_named(tmp_path):
    source, other = tmp_path / "other.cc", tmp_path / "other.so"
    source.write_text('namespace mlx::core { const char* version() { return "0.1.23"; } }')
    compiler = os.environ.get("ZMLX_CXX") or "g++"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", other], check=True)
    answer, _ = softmax_with(tmp_path, LD_PRELOAD=str(other))
    assert answer == {
        "error": f"[zmlx] 'mlx' must be the version {mx.__version__} that this library was built "
        "for but got 0.1.23. Build it again."
    }


def test_the_version_of_zig_is_pinned_in_one_place():
    import ziglang  # noqa: F401  (the pin is what is installed)

    pinned = re.search(r'"ziglang=(?:=)([0-9.]+)"', (zig.ROOT / "pyproject.toml").read_text())
    version = subprocess.run(
        [sys.executable, "-m", "ziglang", "version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert pinned is not None
    assert version == pinned[1]


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow  # compiles the shim and the core for a project of its own
def test_the_program_on_the_page_builds_and_runs_as_printed(tmp_path):
    """In a project of its own, with the files that the page shows."""
    page = zig.ROOT / "docs" / "zig.md"
    build, program = fenced(page, "zig")[:2]
    (manifest,) = fenced(page, "zon")
    assert len(program.splitlines()) <= 32
    (tmp_path / "src").mkdir()
    (tmp_path / "zmlx").symlink_to(zig.ROOT)
    (tmp_path / "build.zig").write_text(build)
    (tmp_path / "build.zig.zon").write_text(manifest)
    (tmp_path / "src" / "main.zig").write_text(program)
    # A prefix of its own: the library that it installs names the core in this folder.
    command = [sys.executable, "-m", "ziglang", "build", f"-Dpython={sys.executable}"]
    done = subprocess.run(
        [*command, "run"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    printed = fenced(page, "text")[-1]
    assert done.stderr + done.stdout == printed
    subprocess.run(command, cwd=tmp_path, check=True)
    shutil.rmtree(tmp_path / ".zig-cache")
    (tmp_path / "zig-out").rename(tmp_path / "moved")
    installed = tmp_path / "moved" / "bin" / "example"
    done = subprocess.run([installed], cwd="/", capture_output=True, text=True, check=False)
    assert done.stderr + done.stdout == printed


def test_the_demo_learns_from_a_file(tmp_path):
    text = tmp_path / "text"
    text.write_text("the cat sat on the mat and the dog on the log. " * 100)
    demo = zig.program("zmlx-demo")
    done = subprocess.run(
        [demo, "x * zmlx_sigmoid(x)", text], capture_output=True, text=True, check=True,
        env=os.environ,
    )  # fmt: skip
    assert "y_out[i_] = y_t(x * zmlx_sigmoid(x));" in done.stdout
    difference = re.search(r"largest difference +(\S+)", done.stdout)
    assert difference is not None
    assert float(difference[1]) < 1e-6
    losses = [float(x) for x in re.findall(r"loss (\d\.\d+)   #", done.stdout)]
    assert losses[0] > 2.5
    assert losses[-1] < 0.6


def test_the_demo_runs_every_function_that_it_takes():
    known = (zig.ZIG / "src" / "expression.zig").read_text()
    names = re.search(r"const Unary = enum \{\n    negate,\n(.*?)\n\n", known, re.DOTALL)
    assert names is not None
    unary = names[1].replace(",", "").split()
    binary = ("fmax", "fmin", "max", "min", "pow", "zmlx_maximum", "zmlx_minimum")
    calls = [f"{n}(x)" for n in unary] + [f"{n}(abs(x), 2.0f)" for n in binary]
    done = subprocess.run(
        [zig.program("zmlx-demo"), " + ".join(f"0.0f * {c}" for c in calls)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["-h"], 0, "usage: zmlx-demo"),
        (["--help"], 0, "usage: zmlx-demo"),
        (["--other"], 2, "usage: zmlx-demo"),
        (["x", "text", "more"], 2, "usage: zmlx-demo"),
        (["x + nothing"], 2, "'expression' must have x or a function"),
        (["sigmoid(x)"], 2, "'expression' must have x or a function"),
        (["x * (1/2)"], 2, "but both are integers, which Metal divides with truncation."),
        (["(" * 60_000 + "x" + ")" * 60_000], 2, "nested too deeply"),
    ],
    ids=["-h", "--help", "other", "too many", "name", "function", "integers", "too deep"],
)
def test_the_demo_answers_what_it_cannot_run(arguments, code, said):
    done = subprocess.run(
        [zig.program("zmlx-demo"), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert said in done.stdout


@pytest.mark.slow  # compiles the shim and the core with the sanitizer
def test_zig_tests_pass_under_address_sanitizer():
    zig.build("test", "-Dsanitize=true")
