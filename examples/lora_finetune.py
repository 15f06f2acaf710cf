"""Fine-tune LoRA layers with mlx-lm's own trainer on a patched model.

python examples/lora_finetune.py                        # a small random llama, on this file
python examples/lora_finetune.py --model org/name       # a model of the hub
python examples/lora_finetune.py --plain                # without zmlx, to compare
"""

import argparse
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx_lm.models import llama
from mlx_lm.tuner.trainer import TrainingArgs, TrainingCallback, default_loss, train
from mlx_lm.tuner.utils import linear_to_lora_layers

import zmlx


class Losses(TrainingCallback):
    def __init__(self):
        self.losses = []

    def on_train_loss_report(self, info):
        self.losses.append(info["train_loss"])
        print(f"step {info['iteration']:>4}  loss {info['train_loss']:.4f}", flush=True)


def small_model():
    """A llama of random weights that reads bytes."""
    mx.random.seed(0)
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=256,
        tie_word_embeddings=False,
    )
    return llama.Model(arguments), lambda text: list(text.encode())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or hub name (default: small random weights)")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="do not patch")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"'--steps' must be at least 1 but got {arguments.steps}.")

    if arguments.model:
        from mlx_lm import load

        model, tokenizer = load(arguments.model)[:2]
        encode = tokenizer.encode
    else:
        model, encode = small_model()
    model.freeze()
    linear_to_lora_layers(model, 4, {"rank": 8, "scale": 10.0, "dropout": 0.0})

    if not arguments.plain:
        print(zmlx.patch(model, mode="training"))
    tokens = encode(arguments.text.read_text())
    data = [(tokens[i : i + 64], 0) for i in range(0, len(tokens) - 64, 64)]
    if len(data) < 4:
        print(f"[lora] '--text' must have at least 257 tokens but got {len(tokens)}.")
        return 2
    np.random.seed(0)  # the order of the batches
    report = Losses()
    with tempfile.TemporaryDirectory() as folder:
        train(
            model,
            optim.Adam(learning_rate=1e-3),
            data,
            args=TrainingArgs(
                batch_size=4,
                iters=arguments.steps,
                steps_per_report=1,
                max_seq_length=65,
                adapter_file=str(Path(folder) / "adapters.safetensors"),
            ),
            loss=default_loss if arguments.plain else zmlx.lm_loss,
            training_callback=report,
        )
    zmlx.unpatch(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
