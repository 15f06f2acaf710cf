"""Kernel bodies as text, from patterns.

Every elementwise, rowwise and column kernel of zmlx is written by this module: the catalogue, the
helpers, `jit` and user expressions all go through it. A pattern is a frozen dataclass of names,
integers and text; its `source()` is the body that `mx.fast.metal_kernel` takes. The same pattern
gives the same bytes in every process and in the Zig front end, which is why no parameter is a
float: a number that changes from call to call is an input of the kernel instead.

Geometry is not in the text. The bodies take it as template constants, which `zmlx.launch` picks
per target:

    N      consecutive elements per thread of an elementwise kernel, columns per thread of a
           column reduction
    TPR    threads per row: 32-lane simdgroups on a GPU, 1 on the CPU
    RPG    rows per threadgroup; more than 1 only for TPR a power of two up to 32
    U      consecutive elements per thread and step, and accumulators per reduction: a vector load
           on a GPU, a loop that vectorises without reassociation on the CPU; a power of two
    G      threads per group, where each has N columns
    STEPS  steps that cover a row, where a kernel keeps values of its row in registers
    <output>_t  dtype of an output

Inside a body the array `x_in` holds the operand whose element is `x`, and the element `y` is
stored to `y_out`. Arithmetic is in float unless an operand or a let names another type.
"""

from .columnwise import Columnwise
from .elementwise import Elementwise
from .fold import Fold
from .monoids import MONOIDS
from .named import (
    elementwise_binary,
    elementwise_unary,
    rowwise_map_reduce,
    rowwise_parallel_reduction,
    rowwise_reduction,
)
from .packed import Packed, PackedInto, PackedSum
from .parts import Check, Climb, Let, Operand, Output, Pass, Reduce
from .pattern import Pattern, free_names, name_beside, taken_names
from .random import BLOCK_HEADER
from .reductions import PREFETCH_HEADER, REDUCTIONS, ROW_HEADER, Reduction
from .rowwise import Rowwise
from .scan import Scan
from .text import STEP_HEADER, identifiers

__all__ = [
    "BLOCK_HEADER",
    "MONOIDS",
    "PREFETCH_HEADER",
    "REDUCTIONS",
    "ROW_HEADER",
    "STEP_HEADER",
    "Check",
    "Climb",
    "Columnwise",
    "Elementwise",
    "Fold",
    "Let",
    "Operand",
    "Output",
    "Packed",
    "PackedInto",
    "PackedSum",
    "Pass",
    "Pattern",
    "Reduce",
    "Reduction",
    "Rowwise",
    "Scan",
    "elementwise_binary",
    "elementwise_unary",
    "free_names",
    "identifiers",
    "name_beside",
    "rowwise_map_reduce",
    "rowwise_parallel_reduction",
    "rowwise_reduction",
    "taken_names",
]
