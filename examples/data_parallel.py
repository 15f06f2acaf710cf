"""Data-parallel training on MLX's own distributed engine, with a patched model.

    python examples/data_parallel.py                                       # one process
    mlx.launch -n 2 --backend ring -- python examples/data_parallel.py     # two processes, here

Every process takes its part of each batch, and gradients are averaged, so that any number of
processes learns the same as one.
"""

import argparse

import mlx.core as mx
import mlx.nn as mnn
import mlx.optimizers as optim
from mlx.utils import tree_map
from mlx_lm.models import llama

import zmlx


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4, help="rows, of all processes together")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"'--steps' must be at least 1 but got {arguments.steps}.")

    world = mx.distributed.init()
    rank, size = world.rank(), world.size()
    if arguments.batch < 1 or arguments.batch % size:
        parser.error(f"'--batch' must be a multiple of {size} processes but got {arguments.batch}.")
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=256,
            tie_word_embeddings=False,
        )
    )
    zmlx.patch(model, mode="training")
    optimizer = optim.Adam(learning_rate=1e-3)
    step = mnn.value_and_grad(model, zmlx.lm_loss)
    text = mx.array(list(__doc__.encode()))
    for i in range(arguments.steps):
        starts = [(37 * (i * arguments.batch + row)) % (text.size - 33)
                  for row in range(arguments.batch)]  # fmt: skip
        batch = mx.stack([text[s : s + 33] for s in starts])[rank::size]
        lengths = mx.array([[0, 32]] * batch.shape[0])
        (loss, _), gradients = step(model, batch, lengths)
        loss = mx.distributed.all_sum(loss) / size
        gradients = tree_map(lambda g: mx.distributed.all_sum(g) / size, gradients)
        optimizer.update(model, gradients)
        mx.eval(loss, model, optimizer.state)  # in every process: each takes part in the sums
        if rank == 0:
            print(f"step {i} loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
