"""``python -m zmlx demo``: trains a small language model with and without zmlx's kernels.

==============  ==================================================================
``data``        the text and the batches
``model``       the decoder and the table of operations in which the rows differ
``train``       trains one row in its own process
``rows``        the rows that run on this machine, and the parent's side of a run
``progress``    the progress bar
``report``      table, loss curves and files
==============  ==================================================================

``examples/train_lm.py`` is the same training as one short program.
"""
