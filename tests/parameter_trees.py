"""Trees of parameters and gradients, and an optimizer's steps over them."""

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

#: Empty, 0-d, smaller than eight elements (another address space), tails, several threads.
SHAPES = {"a": (), "b": (3,), "c": (8,), "d": (5, 7), "e": (0, 4), "f": (130, 67), "g": (9001,)}


def tree(seed, dtype=mx.float32, shapes=None, scale=1.0):
    rng = np.random.default_rng(seed)
    flat = [(k, mx.array(scale * rng.standard_normal(s)).astype(dtype))
            for k, s in (shapes or SHAPES).items()]  # fmt: skip
    nested = {"first": dict(flat[:3]), "rest": [dict(flat[3:5]), dict(flat[5:])]}
    return nested if shapes is None else dict(flat)


def leaves(x):
    return [v for _, v in tree_flatten(x)]


def run(optimizer, parameters, gradients):
    parameters = tree_map(lambda x: x + 0, parameters)
    for step in gradients:
        parameters = optimizer.apply_gradients(step, parameters)
        mx.eval(parameters, optimizer.state)
    return parameters
