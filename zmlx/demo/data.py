"""The demo's text: the help topics that ship with every Python, as bytes."""

import mlx.core as mx
import numpy as np


def corpus() -> bytes:
    """Returns all topics of ``pydoc_data.topics``, joined in sorted order, as UTF-8.

    About half a megabyte of English and Python; the exact text depends on the Python version.
    """
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


class Batches:
    """Random windows of a text: a sequence of batches that depends on the seed alone.

    Args:
        text: The bytes to draw from.
        batch: Windows per batch.
        context: Bytes per window that the model reads.
        seed: Seed of the windows' positions.
    """

    def __init__(self, text: bytes, *, batch: int, context: int, seed: int):
        if len(text) <= context:
            raise ValueError(
                f"[Batches] 'text' must be longer than 'context' but got {len(text)} bytes "
                f"for a context of {context}."
            )
        self._bytes = np.frombuffer(text, np.uint8)
        self._shape = (batch, context + 1)
        self._positions = np.random.default_rng(seed)

    def draw(self) -> tuple[mx.array, mx.array]:
        """Returns (inputs, targets), both int32 of shape (batch, context), targets one byte on."""
        batch, length = self._shape
        starts = self._positions.integers(0, len(self._bytes) - length + 1, size=(batch, 1))
        windows = mx.array(self._bytes[starts + np.arange(length)].astype(np.int32))
        return windows[:, :-1], windows[:, 1:]
