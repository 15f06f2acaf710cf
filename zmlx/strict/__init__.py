"""The strict front end: what Apple's Metal compiler would refuse, found without a Mac.

    >>> strict.check(metal_text)
    [Problem(line=3, where='source', message="float does not convert to 'T' (bfloat) …", …)]

The parts of the package:

    check         the checks and their result    tokens       a text's structure
    rules         what clang does not say        translate    Metal to OpenCL C++
    clang         runs clang                     comparisons  where they are
    conditionals  what #if takes                 literals     of float and bfloat
    catalogue     every kernel of the catalogue
"""

from .check import METAL_VERSION, Problem, check, check_kernel, check_many, metal_text

__all__ = ["METAL_VERSION", "Problem", "check", "check_kernel", "check_many", "metal_text"]
