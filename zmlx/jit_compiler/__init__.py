"""`jit`: a scalar Python function, by its syntax tree, as one elementwise kernel.

    @zmlx.jit
    def newton(a, n: int):
        x = a
        for i in range(n):
            x -= (x * x - a) / (2.0 * x)
        return x

What is supported: assignments (augmented, tuples), if/elif/else, conditional expressions, chained
comparisons, and/or/not, `for` over range, `while`, break and continue, early return, several inputs
(float, or int and bool by annotation) and outputs, numbers from outside as constants, functions of
`math`, `mlx.core` and `mlx.nn`, calls of other jitted functions. Anything else is an error that
shows the line.

A variable has one type throughout, the largest of bool, int and float that it is assigned: an int
that is a float in another line is a float32 from the start, exact up to 2^24, and so is an int
beside a float, in a comparison too. Another name keeps it an int. What is declared int, an argument
too, is assigned no float.

A number from outside is read when the function is compiled. Where Python raises, a float comes out
as from MLX (1 / 0 is inf) and an int is undefined: ints have 32 bits, and neither overflow nor
division by zero is noticed. An int to the power of a variable is a float. max and min of floats
are NaN if either argument is.

`source`, `frontend` and `expressions` read Python into the typed form of `ir`; `emit` writes it as
Metal, with derivatives by forward mode; `reference` runs it in plain MLX.
"""

from .compiler import JitFunction, compile_function, jit, statements

__all__ = ["JitFunction", "compile_function", "jit", "statements"]
