"""Patched models learn as unpatched ones, with MLX's and mlx-lm's own training code."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as mnn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.trainer import default_loss
from small_models import build

import zmlx

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "tests" / "small_models.py").read_bytes()
STEPS = 32


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


# ---- convergence --------------------------------------------------------------------------------


def small(name):
    return build(name, vocab_size=256, tie_word_embeddings=False)


def first_layer(name):
    """The matrices of the first layer, by path."""
    flat = tree_flatten(small(name).parameters())
    return [path for path, value in flat if ".layers.0." in path and value.ndim == 2]


def losses(name, patched=False, scaled=None):
    """The losses of 32 steps on real text; `scaled`: the path of a weight that is off by 1e-7."""
    model = small(name)
    if scaled is not None:
        weight = dict(tree_flatten(model.parameters()))[scaled]
        model.update(tree_unflatten([(scaled, weight * (1 + 1e-7))]))
    if patched:
        with zmlx.prefer("zmlx"):
            assert {"norm", "loss"} <= set(zmlx.patch(model, mode="training").kinds())
    loss = zmlx.lm_loss if patched else default_loss
    step, optimizer = mnn.value_and_grad(model, loss), optim.AdamW(learning_rate=1e-3)
    rng, found = np.random.default_rng(0), []
    text = np.frombuffer(TEXT, np.uint8).astype(np.int32)
    for _ in range(STEPS):
        starts = rng.integers(0, text.size - 33, 4)
        batch = mx.array(np.stack([text[s : s + 33] for s in starts]))
        with zmlx.prefer("zmlx"):
            (value, _), gradients = step(model, batch, mx.array([[0, 32]] * 4))
            optimizer.update(model, gradients)
            mx.eval(value, model.parameters(), optimizer.state)
        found.append(value.item())
    return np.array(found)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("qwen3", "gemma3_text", "olmo2", "phi3")
        ),
    ],
)
def test_a_patched_model_learns_as_the_plain_one(name):
    """The first losses to 1e-5; later ones as near as plain MLX is to itself with one weight off by
    1e-7, each of the first layer in turn: a patched model rounds in another way from there on, too.
    Over the five families it stays within 1.1 times that spread, and plain MLX with any one of the
    other 18 to 30 weights off within 2.9. A draw of weights from all layers is no fair measure: one
    refuses plain MLX itself in up to 33 % of draws, four in 5 %, eight in 1 %."""
    base = losses(name)
    others = np.array([losses(name, scaled=path) for path in first_layer(name)])
    spread = np.abs(others - base).max(axis=0)
    ours = np.abs(losses(name, patched=True) - base)
    assert (ours[:10] <= 1e-5 * base[:10]).all()
    assert (ours[10:] <= 3 * np.maximum.accumulate(spread)[10:]).all()
    assert base[-1] < base[0] - 1


# ---- mlx-lm and MLX's engines -------------------------------------------------------------------


def printed(text):
    return [float(line.split()[3]) for line in text.splitlines() if line.startswith("step")]


def test_lora_through_mlx_lms_trainer_learns_the_same():
    patched, plain = (
        run("examples/lora_finetune.py", "--steps", "5", *flags) for flags in ((), ("--plain",))
    )
    assert patched.returncode == 0, patched.stderr
    assert "modules replaced for training" in patched.stdout
    assert len(printed(patched.stdout)) == 5
    # Printed with four digits.
    assert printed(patched.stdout) == pytest.approx(printed(plain.stdout), abs=2e-4)


def test_mlx_lms_generate_says_the_same():
    patched, plain = (run("examples/generate.py", *flags) for flags in ((), ("--plain",)))
    assert patched.returncode == 0, patched.stderr
    assert len(patched.stdout.split()) == 16
    assert patched.stdout == plain.stdout


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def test_two_processes_learn_as_one(tmp_path):
    """MLX's ring back end, on one machine."""
    one = run("examples/data_parallel.py", "--steps", "4")
    assert one.returncode == 0, one.stderr
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    command = [sys.executable, "examples/data_parallel.py", "--steps", "4"]
    workers = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), "MLX_RANK": str(rank),
                 "MLX_HOSTFILE": str(hosts)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert outputs[1][0] == ""
    assert len(printed(outputs[0][0])) == 4
    assert printed(outputs[0][0]) == pytest.approx(printed(one.stdout), abs=2e-5)


# ---- validate -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of random weights as mlx-lm loads it, with a tokenizer of single characters."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("model")
    model = build("llama", vocab_size=128)
    config = {k: v for k, v in vars(model.args).items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))
    model.save_weights(str(path / "model.safetensors"))
    letters = {chr(32 + i): i for i in range(95)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return path


def test_validate_compares_and_gives_a_verdict(folder):
    done = run("-m", "zmlx", "validate", str(folder), "--tokens", "6", "--rounds", "1", "--report")
    assert done.returncode == 0, done.stderr
    assert "modules replaced for inference" in done.stdout
    for row in ("unpatched", "patched"):
        assert any(line.split()[:1] == [row] for line in done.stdout.splitlines())
    assert "6 of 6 greedy tokens are the same" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("same tokens, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./no-such-folder"], "[validate] 'model' must be a folder or a hub name"),
        (["{empty}"], "has no config.json"),
        (["{empty}", "--tokens", "0"], "[validate] '--tokens' must be at least 1 but got 0."),
    ],
)
def test_validate_says_what_is_wrong(arguments, message, tmp_path):
    done = run("-m", "zmlx", "validate", *[a.format(empty=tmp_path) for a in arguments])
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_validate_reports_other_tokens():
    from zmlx.cli.validate import Result, table, verdict
    from zmlx.patching import Replaced, Report

    plain = Result([1, 2, 3], [10.0], [10.0], 10)
    other = Result([1, 5, 3], [20.0], [20.0], 10)
    report = Report("inference", [Replaced("a", "norm", "rms_norm", "zmlx", "")])
    assert "1 of 3 greedy tokens are the same" in table(plain, other, 4)
    assert verdict(plain, other, report).startswith("other tokens from the 2. on")
    assert verdict(plain, Result([1, 2, 3], [5.0], [5.0], 9), report) == (
        "same tokens, 2.00 times as slow"
    )
    assert verdict(plain, plain, Report("inference")) == "nothing was replaced"
