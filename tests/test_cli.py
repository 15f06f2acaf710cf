"""The command line says what there is, what runs, and what to do where something does not."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from zmlx import registry, testing
from zmlx.__main__ import COMMANDS, main
from zmlx.language import SECTIONS, Row
from zmlx.targets import cuda, nvrtc

OPS = [op.name for op in registry.ops()]
ONE_PER_FAMILY = {op.family: op.name for op in registry.ops()}.values()


def subcommand(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "zmlx", *arguments],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    output = capsys.readouterr().out
    assert all(name in output for name in COMMANDS)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "run"])
def test_an_interrupt_ends_in_one_line(command, monkeypatch, capsys):
    module = importlib.import_module(f"zmlx.cli.{command}")

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", interrupted)
    wanted = {"show": ["softmax"], "tune": ["topk"], "validate": ["model"]}
    assert main([command, *wanted.get(command, [])]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_an_interrupted_script_shows_where(monkeypatch):
    module = importlib.import_module("zmlx.cli.run")

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["run", "script.py"])


def test_no_command_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as done:
        main([])
    assert done.value.code == 2


def test_a_script_is_required_and_its_arguments_are_not(capsys):
    with pytest.raises(SystemExit) as done:
        main(["run"])
    assert done.value.code == 2
    assert capsys.readouterr().err.endswith("arguments are required: SCRIPT\n")


def test_list_shows_every_op(capsys):
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in OPS)
    assert f"{len(OPS)} ops" in output


def test_list_as_json_has_arguments_and_gradients(capsys):
    assert main(["list", "norms", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["rms_norm"]["arguments"] == {"x": "(*, D)", "weight": "(D,)"}
    assert rows["rms_norm"]["gradients"] == ["x", "weight"]
    assert "silu" not in rows


def test_list_as_json_has_the_options_of_the_public_functions(capsys):
    """Not the values that benchmarks give them."""
    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["sum"]["options"]["axis"] is None
    assert rows["dropout"]["options"] == {"p": 0.5, "offset": 0}
    assert rows["dropout"]["required"] == ["seed"]


def test_list_of_an_unknown_family_names_the_known_ones(capsys):
    assert main(["list", "nonsense"]) == 2
    assert "norms" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "text"),
    [("metal", "[[kernel]]"), ("cuda", "__global__ void"), ("cpu", 'extern "C"')],
    ids=["metal", "cuda", "cpu"],
)
@pytest.mark.parametrize("op", ONE_PER_FAMILY)
def test_show_prints_final_source_and_geometry(op, target, text, capsys):
    assert main(["show", op, "--target", target, "--dtype", "bfloat16"]) == 0
    output = capsys.readouterr().out
    assert text in output
    assert "// grid (" in output
    group = output.partition("threadgroup (")[2].partition(",")[0]
    assert (int(group) > 1) == (target != "cpu")


def test_show_adds_the_kernels_of_a_training_step(capsys):
    main(["show", "rms_norm"])
    forward = capsys.readouterr().out
    main(["show", "rms_norm", "--gradient"])
    assert capsys.readouterr().out.count("// grid (") > forward.count("// grid (") == 1


@pytest.mark.parametrize("op", ["topk", "topk_gating", "varlen_attention"])
def test_show_gives_the_options_of_the_benchmark_to_the_gradient(op, capsys):
    assert main(["show", op, "--gradient"]) == 0
    assert "// grid (" in capsys.readouterr().out


def test_show_prints_what_a_gpu_runs_and_not_what_the_cpu_does(capsys):
    """Of the logsumexp, which the CPU takes in two walks."""
    names = {}
    for target in ("metal", "cuda", "cpu"):
        assert main(["show", "cross_entropy", "--target", target]) == 0
        names[target] = re.findall(r"^// (\w+)$", capsys.readouterr().out, re.M)
    assert names["metal"] == names["cuda"] != names["cpu"]


def test_show_of_an_unknown_op_suggests_a_near_one(capsys):
    assert main(["show", "rmsnorm"]) == 2
    assert "rms_norm" in capsys.readouterr().err


def test_doctor_reports_every_target_with_a_reason(capsys):
    status = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found["targets"]) == {"metal", "cuda", "cpu", "reference"}
    assert all(state["reason"] for state in found["targets"].values())
    assert status == (0 if found["targets"][found["target"]]["runs"] else 1)
    assert {"zmlx", "python", "mlx", "numpy"} <= found["versions"].keys()
    assert found["sgemm_gflops"]["MLX"] > 0
    assert bool(found["fresh_pages"]) == found["targets"]["cpu"]["runs"]
    assert all(milliseconds > 0 for milliseconds in found["fresh_pages"].values())


def test_the_doctor_says_what_fresh_pages_cost_and_leaves_the_limit(capsys):
    limit = mx.set_cache_limit(12345 << 10)
    try:
        main(["doctor"])
        assert mx.set_cache_limit(limit) == 12345 << 10
    finally:
        mx.set_cache_limit(limit)
    assert "a result of 64 MB takes" in capsys.readouterr().out


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CPU target is for Linux")
def test_doctor_fails_and_names_the_remedy_without_a_compiler(tmp_path):
    done = subcommand("doctor", PATH=str(tmp_path), ZMLX_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "apt install g++" in done.stdout
    assert "mx.compile does nothing on the CPU without g++" in done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CPU target is for Linux")
@pytest.mark.parametrize(
    "command", ["check silu", "show silu --target cpu", "bench silu", "demo --out", "tune"]
)
def test_nothing_is_begun_without_a_compiler(command, tmp_path):
    words = command.split()
    if "--out" in words:
        words.append(str(tmp_path / "out"))
    done = subcommand(*words, PATH=str(tmp_path), ZMLX_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "apt install g++" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CPU target is for Linux")
def test_the_metal_source_needs_no_compiler(tmp_path):
    cache = str(tmp_path / "cache")
    done = subcommand("show", "silu", "--gradient", PATH=str(tmp_path), ZMLX_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("// grid (") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CPU target is for Linux")
def test_doctor_names_a_cache_that_cannot_be_used(tmp_path, monkeypatch, capsys):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("ZMLX_CACHE_DIR", str(tmp_path))
    main(["doctor"])
    output = capsys.readouterr().out
    assert f"problem: zmlx cannot keep compiled kernels in {tmp_path}" in output
    assert "removed when the process ends" in output


def test_check_passes_and_counts(capsys):
    assert main(["check", "silu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == 0
    assert [row["op"] for row in found["ops"]] == ["silu"]
    assert found["ops"][0]["checks"] == 6 * len(registry.get("silu").cases)


def test_check_says_where_it_ran_and_what_was_executed_compiled_and_read(capsys):
    assert main(["check", "silu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"versions", "platform", "device"} <= found.keys()
    assert "executed" in found["targets"][found["target"]]
    (row,) = found["ops"]
    compiled = nvrtc.unavailable() is None
    assert (row["compiled for cuda"] > 2) == compiled
    assert found["targets"]["cuda"].startswith("compiled" if compiled else "not tried: ")


def test_check_names_what_it_could_not_try(monkeypatch, capsys):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no NVRTC here")
    assert main(["check", "silu"]) == 0
    output = capsys.readouterr().out
    assert "cuda      not tried: no NVRTC here" in output
    assert "  0 compiled" in output


def test_check_fails_where_a_kernel_does_not_compile_for_cuda(monkeypatch, capsys):
    def refuse(*arguments):
        raise RuntimeError("[kernel silu] line 1 of the source")

    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(cuda, "compiled", refuse)
    assert main(["check", "silu"]) == 1
    assert "for sm_80: [kernel silu] line 1 of the source" in capsys.readouterr().out


def test_check_fails_with_the_ops_error(monkeypatch, capsys):
    def wrong(op, case, dtype):
        raise AssertionError("off by one")

    monkeypatch.setattr(testing, "check_forward", wrong)
    assert main(["check", "silu"]) == 1
    output = capsys.readouterr().out
    assert "off by one" in output
    assert f"{3 * len(registry.get('silu').cases)} failed" in output


def test_check_of_an_unknown_op_is_wrong_usage(capsys):
    assert main(["check", "nonsense"]) == 2
    assert "'nonsense'" in capsys.readouterr().err


def test_check_without_its_oracle_names_the_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "autograd.scipy.special", None)
    assert main(["check", "silu"]) == 2
    assert "pip install 'autograd[scipy]'" in capsys.readouterr().err


def test_language_runs_the_table_and_counts(capsys):
    assert main(["language", "literals", "geometric", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["sections"]) == {"Literals", "Geometric functions"}
    assert set(found["sections"]["Literals"]) == set(SECTIONS["Literals"])
    assert found["failed"] == 0


def test_language_fails_with_the_row_that_is_wrong(monkeypatch, capsys):
    monkeypatch.setitem(SECTIONS, "Literals", {"one": Row("r = 1;", 2)})
    assert main(["language", "literals"]) == 1
    assert "one: Arrays are not equal" in capsys.readouterr().out


def test_language_of_an_unknown_section_is_wrong_usage(capsys):
    for sections in (["nonsense"], ["literals", "nonsense"]):
        assert main(["language", *sections]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Thread attributes" in err
        assert err.endswith("but got nonsense.\n")
    for option in ("--json", "literals"):
        assert main(["language", "--page", option]) == 2
        assert f"'--page' must stand alone but got {option}." in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_summary_is_a_sentence(command):
    # The help text shows the first line of the module's docstring.
    module = importlib.import_module(f"zmlx.cli.{command}")
    assert module.__doc__.splitlines()[0].endswith(".")


@pytest.mark.parametrize("arguments", [("list",), ("show", "softmax", "--target", "cuda")])
def test_a_reader_that_stops_early_is_no_error(arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "zmlx", *arguments],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 141, errors
    assert not errors


def test_a_closed_output_is_no_error():
    # The shell's `>&-`, after which sys.stdout is None.
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m zmlx list >&-', sys.executable],
        cwd=Path(__file__).parents[1],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_an_output_that_cannot_be_written_is_said_without_a_traceback():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "zmlx", "list"],
            cwd=Path(__file__).parents[1],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "zmlx: the output cannot be written: No space left on device\n"


def test_a_terminal_without_greek_gets_the_rest():
    done = subcommand("list", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "softmax" in done.stdout


def test_a_check_that_is_neither_on_nor_off_is_named():
    done = subcommand("list", ZMLX_CHECK="yes")
    assert done.returncode == 2
    assert done.stderr.strip() == "[zmlx] 'ZMLX_CHECK' must be 0 or 1 but got yes."


def test_a_wrong_environment_is_said_without_a_traceback():
    done = subcommand("list", ZMLX_TARGET="tpu")
    assert done.returncode == 2
    assert "'ZMLX_TARGET' must be one of" in done.stderr
    assert "Traceback" not in done.stderr
    done = subcommand("doctor", ZMLX_NUM_THREADS="many")
    assert done.returncode == 1
    assert "ZMLX_NUM_THREADS must be from 1 to 256 but got 'many'" in done.stdout


def test_the_doctor_calls_a_target_that_does_not_run_a_problem():
    done = subcommand("doctor", ZMLX_TARGET="cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "problem: cuda, the target in force, does not run: " in done.stdout
    done = subcommand("check", "silu", ZMLX_TARGET="cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "[check] the target cuda does not run here: " in done.stderr


@pytest.mark.parametrize("arguments, message", [
    (("check", "silo"), "no op or family is called 'silo'; did you mean silu"),
    (("check", "qqqq"), "no op or family is called 'qqqq'; `python -m zmlx list` names them."),
    (("show", "SOFTMAX"), "no op is called 'SOFTMAX'; did you mean softmax"),
    (("bench", "Softmax"), "no op or family is called 'Softmax'; did you mean softmax"),
    (("bench", "sum", "--mode", "backward"), "[bench] '--mode' must be forward for sum, "),
    (("bench", "silu", "--shape", "999999999x999999999"), "the arrays must fit in memory but: "),
    (("list", "softmax", "--page"), "'--page' must be given alone"),
    (("demo", "--steps", "1", "--out", "/dev/null/x"), "'--out' must name a folder to write into"),
    (("bench", "silu", "--compare", "/nowhere.json"), "'--compare' must name a file but got"),
])  # fmt: skip
def test_wrong_usage_is_said_in_a_line(arguments, message, capsys):
    assert main(list(arguments)) == 2
    assert message in capsys.readouterr().err
