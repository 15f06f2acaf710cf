"""Functions of every kind that `jit` compiles, for its tests."""

from __future__ import annotations

import hashlib
import math
import runpy

import mlx.core as mx
import mlx.nn as nn

from zmlx.jit_compiler import JitFunction, jit

HALF = 0.5
TABLE_SIZE = 3


@jit
def polynomial(x):
    y = 1
    y += x
    y *= x
    y -= 2 * x**3
    y /= 1 + x**2
    return y


@jit
def early_return(x, y):
    if x > y:
        return math.exp(-x)
    if 0 < x <= 1:
        return x * y
    return abs(y) - x


@jit
def elif_chain(x):
    if x < -1:
        y = -1.0
    elif x < 0:
        y = x * x
    elif x == 0:
        y = 7
    else:
        y = math.sqrt(x)
    return y + HALF


@jit
def conditional(x, y):
    return x if x > y else (y if y > 0 else -x * y)


@jit
def logic(x, y):
    a = x > 0 and not y > 0
    b = a or (x < -1 or y < x)
    return 2.0 if b else (1.0 if a != b else 0.5)


@jit
def operands_of_and_or(x, y):
    return (x or 3.0) + (x and y)


@jit
def chained(x, y):
    return 1.0 if -1 < x < y < 2 else (2.0 if x == x != y else 0.0)


@jit
def newton(a, n: int):
    x = a * a + 1.0
    target = x
    for _ in range(n):
        x -= (x * x - target) / (2.0 * x)
    return x


@jit
def range_with_steps(x):
    total = 0.0
    for i in range(10, -3, -4):
        total += i * x
    for i in range(1, 8, 3):
        total -= i / (1 + x * x)
    return total + i


@jit
def range_at_run_time(x, start: int, stop: int, step: int):
    total = x
    for i in range(start, stop, step):
        total = total * 0.5 + i
        i = 100
    return total


@jit
def integers(n: int, m: int):
    k = n // (m * m + 1)
    k = k * 3 - n % 7 + (-n) % 5
    k += (n << 2) ^ (m & 6) | (n >> 1)
    k -= abs(m) + max(n, m, -2) * min(n, 4) + n**3
    return ~k, n / (m * m + 1), -((n // 3) ** 2)


@jit
def bools(flag: bool, x):
    count = flag + (x > 0) + True
    both = flag and x > 0
    return count, both, x * flag, flag == (x > 0), flag ^ (x > 0)


@jit
def type_grows(x):
    total = 0
    for i in range(4):
        total = total + i
        if i == 2:
            total = total * x
    return total


@jit
def swap(x, y):
    for _ in range(3):
        x, y = y, x + y
    a = b = x * y
    return a - y, b


@jit
def breaks(x, n: int):
    total = 0.0
    for i in range(n):
        if i == 3:
            continue
        total += x
        if total > 2.5:
            break
        for j in range(5):
            if j > i:
                break
            total += 0.125
    return total


@jit
def return_in_loop(x):
    y = x
    for i in range(20):
        y = y * 0.75 + 0.1
        if y < 0.5:
            return y + i
    return -y


@jit
def counted_while(x, n: int):
    total = x
    while n < 10 and total < 50:
        total += n * x
        n += 2
    return total, n


@jit(bound=40)
def bounded_while(x):
    y = abs(x) + 0.01
    while y < 5:
        y *= 1.5
    return y


@jit
def inner(u, v):
    return u * v, u - v


@jit
def square_plus(u):
    return u * u + 1


@jit
def nested(x, y):
    p, q = inner(square_plus(x), y * 2)
    if p > 0:
        p = square_plus(p - q)
    return p / square_plus(q)


@jit
def library(x):
    a = math.sin(x) + math.log1p(x * x) + math.erf(x) - math.atan2(x, 2)
    b = math.hypot(x, 1.5) + math.fabs(x) + math.cosh(x) * math.expm1(x)
    c = math.floor(x) + math.ceil(x) + round(x) + int(x) + math.log(x * x + 2, 3)
    return a * b + c * math.pi if math.isfinite(x) else math.inf


@jit
def operations_of_mlx(x, y):
    a = mx.sigmoid(x) - mx.maximum(x, y) + mx.where(x > 0, x, 2 * x) * mx.clip(y, -1, 1)
    b = nn.silu(x) + nn.gelu(y) * nn.softplus(x) + nn.relu(y) + mx.logaddexp(x, y)
    c = mx.sign(y) * x if mx.not_equal(x, 0.5) else 0.25
    return a * b + c + mx.floor(x) + mx.round(y) + mx.square(x) * mx.rsqrt(1 + mx.abs(y))


@jit
def remainders(x, y):
    return x % y + x // y, math.fmod(x, y)


@jit
def powers(x):
    return (x * x + 0.1) ** 0.5 + x**2 - pow(x, 3) + 2**x


@jit
def kinks(x, y):
    return max(x, y) * min(x, 1.0) + abs(x - y) + max(x, 0)


@jit
def dead_code(x):
    if x > 0:
        return x * x + x * x
        return x
    for i in range(2 * 3 + 2**2):
        if i > 8:
            break
            x = x + 100
        x = x + i
    return x
    return x * x


@jit
def underscores(half, sign, x_d_y, out):
    exp = half * sign
    exp_ = exp + x_d_y
    return math.exp(exp) + exp_ * out


@jit
def smooth_loop(x, y, n: int):
    s = 0.0
    v = x
    for i in range(n):
        v = math.tanh(v * y + i * 0.1)
        if v > 0.3:
            s += v * v
        else:
            s -= math.sin(v) / (i + 1)
    return s, v * y


@jit
def macros(x, __LINE__, ZMLX_STEP_LOOP, n: int):
    NAN = __LINE__ + x
    INT_MAX = wchar_t = _N = zmlx_int_power = NAN * ZMLX_STEP_LOOP
    for __ in range(3):
        INT_MAX = INT_MAX * 0.5 + __ + n**2
    return INT_MAX + wchar_t - _N * zmlx_int_power


@jit
def far_ranges(x, n: int):
    count = 0
    for i in range(0, 2147483647, 1073741824):
        count += i >= 0
    for j in range(2147483640, 2147483647, 3):
        if j % 2:
            continue
        count += 10
    for k in range(-2147483640, -2147483648, -3):
        count += 100 * (k < 0)
    last = n
    for last in range(2147483646 - 3 * n * n, 2147483647, 5):
        count += 1000 * (last > 0)
    for last in range(n - 2147483640, -2147483648, -1000000000):
        count += 10000 * (last < 0)
    return count, i, j, k, last, x


def early_exit(x, y):
    while x < 10.0 and y > 0:
        x = x * 2 + 1
        y -= 0.3
    return x * y


early_exit = jit(bound=100)(early_exit)


def function_from_text(text, folder):
    """The last function that `text`, which becomes a file, defines; compiled functions need one."""
    path = folder / f"f{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    path.write_text(text)
    scope = runpy.run_path(str(path))
    return [f for f in scope.values() if hasattr(f, "__code__")][-1]


JITTED = [f for f in list(globals().values()) if isinstance(f, JitFunction)]
#: Those that plain Python can run.
FUNCTIONS = [f for f in JITTED if f is not operations_of_mlx]
