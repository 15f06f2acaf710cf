"""The kernel language, as a table: what it has, and a kernel for every row with what it computes.

The page `docs/language.md`, the tests, and `python -m zmlx language` all derive from these rows.

    row            a row                       memory      threadgroup memory, barriers, atomics
    attributes     thread attributes           simdgroups  simd_* and quad_*
    declarations   address spaces to macros    matrices    simdgroup_matrix
    classes        structs to lambdas          functions   Metal's library
    expressions    literals to statements      utilities   what MLX adds
    types          scalars, vectors, matrices  refusals    what there is not
"""

from . import (
    attributes,
    classes,
    declarations,
    expressions,
    functions,
    matrices,
    memory,
    simdgroups,
    types,
    utilities,
)
from .refusals import REFUSALS
from .row import Refusal, Row

__all__ = ["REFUSALS", "SECTIONS", "Refusal", "Row"]

SECTIONS: dict[str, dict[str, Row]] = {
    "Thread attributes": attributes.ATTRIBUTES,
    "Threadgroup memory": memory.THREADGROUP,
    "Barriers": memory.BARRIERS,
    "Atomics": memory.ATOMICS,
    "Functions of a simdgroup": simdgroups.SIMD,
    "Functions of a quad": simdgroups.QUAD,
    "Types that simdgroups move": simdgroups.TYPES,
    "simdgroup_matrix": matrices.MATRICES,
    "Scalars": types.SCALARS,
    "Vectors": types.VECTORS,
    "Matrices": types.MATRICES,
    "Mathematical functions": functions.MATH,
    "precise::, fast:: and metal::": functions.NAMESPACES,
    "Common functions": functions.COMMON,
    "Geometric functions": functions.GEOMETRIC,
    "Relational functions": functions.RELATIONAL,
    "Integer functions": functions.INTEGER,
    "MLX's utilities": utilities.UTILITIES,
    "Address spaces": declarations.ADDRESS_SPACES,
    "Constants": declarations.CONSTANTS,
    "Templates": declarations.TEMPLATES,
    "Classes": classes.CLASSES,
    "Preprocessor": declarations.PREPROCESSOR,
    "Literals": expressions.LITERALS,
    "Swizzles": expressions.SWIZZLES,
    "Conditionals": expressions.CONDITIONALS,
    "Statements": expressions.STATEMENTS,
}
