"""One way to train a model, in a process of its own: `python -m zmlx.bench.model_worker`.

The first line of the input is the way, the size and the vocabulary as JSON; every further line is
"forward" or "step", and is answered by a line of JSON: by mode the seconds, and the highest memory
of the process until then, by MLX's counter and by its resident size.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers

from . import memory
from .model import MODES, Size, Way

_LEARNING_RATE = 1e-4


def model_of(size: Size, vocabulary: int) -> nn.Module:
    """mlx-lm's llama with random weights, evaluated."""
    try:
        from mlx_lm.models import llama
    except ImportError as error:
        raise SystemExit(f"mlx-lm is missing ({error}). Remedy: pip install mlx-lm") from None
    mx.random.seed(0)
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        intermediate_size=size.hidden,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        rms_norm_eps=1e-5,
        vocab_size=vocabulary,
        max_position_embeddings=size.tokens,
        tie_word_embeddings=False,
    )
    model = llama.Model(arguments)
    mx.eval(model.parameters())
    return model


class Training:
    """The model with its loss, its optimizer and one batch."""

    def __init__(self, way: Way, size: Size, vocabulary: int) -> None:
        import zmlx.optimizers

        if way.openblas:
            zmlx.use_openblas()
        self._model = model_of(size, vocabulary)
        if way.patched:
            zmlx.patch(self._model, mode="training")
        # On a model that is not patched this is mlx-lm's own loss, in MLX.
        self._loss: Any = zmlx.lm_loss if way.patched else _mlx_lm_loss()
        library: Any = zmlx.optimizers if way.patched else mlx.optimizers
        self._optimizer = library.AdamW(_LEARNING_RATE)
        self._optimizer.init(self._model.trainable_parameters())
        tokens = mx.random.randint(0, vocabulary, (1, size.tokens + 1))
        self._batch = tokens, mx.array([[0, size.tokens]])
        mx.eval(self._batch, self._optimizer.state)

    def forward(self) -> dict[str, Any]:
        """The loss alone."""
        clock = _Clock()
        mx.eval(self._loss(self._model, *self._batch))
        return {MODES[0]: clock.read()}

    def step(self) -> dict[str, Any]:
        """Loss and gradients, then the new parameters."""
        clock = _Clock()
        value, gradients = nn.value_and_grad(self._model, self._loss)(self._model, *self._batch)
        mx.eval(value, gradients)
        both = clock.read()
        self._optimizer.update(self._model, gradients)
        del value, gradients
        mx.eval(self._model.parameters(), self._optimizer.state)
        return {MODES[1]: both, MODES[2]: clock.read()}


def _mlx_lm_loss() -> Any:
    from mlx_lm.tuner.trainer import default_loss

    return default_loss


class _Clock:
    """Time and peak memory since it was made."""

    def __init__(self) -> None:
        mx.reset_peak_memory()
        self._resident = memory.reset_peak_resident()
        self._start = time.perf_counter()

    def read(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self._start
        process = None if self._resident is None else memory.peak_resident()
        return {"seconds": seconds, "mlx_peak": mx.get_peak_memory(), "process_peak": process}


def main() -> None:
    """Answers until the input ends."""
    given = json.loads(sys.stdin.readline())
    training = Training(Way(**given["way"]), Size(**given["size"]), given["vocabulary"])
    print("{}", flush=True)
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "forward": training.forward,
        "step": training.step,
    }
    for line in sys.stdin:
        print(json.dumps(calls[line.strip()]()), flush=True)


if __name__ == "__main__":
    main()
