"""Reductions over a row: how an accumulator starts, takes a value and is folded."""

from __future__ import annotations

from dataclasses import dataclass

from .. import msl
from .parts import Reduce
from .text import Body


@dataclass(frozen=True)
class Reduction:
    """How a reduction starts, takes a value, and folds over the threads of a row; `header` has what
    it calls beyond `ROW_HEADER`, but for the functions of `zmlx.msl`."""

    identity: str
    update: str
    fold: str
    header: str = ""


def _with_nan(name: str, identity: str) -> Reduction:
    """An extreme that is NaN where an element is; simd reductions of Metal leave NaN out."""
    return Reduction(
        identity,
        f"zmlx_{name}({{a}}, {{v}})",
        f"zmlx_row_{name}",
        f"""
struct zmlx_row_{name} {{
    template <typename T> static T fold(T a, T b) {{ return zmlx_{name}(a, b); }}
    template <typename T> static T simd(T a) {{
        for (ushort step = 16; step > 0; step /= 2) {{
            a = fold(a, simd_shuffle_xor(a, step));
        }}
        return a;
    }}
}};
""",
    )


#: `{a}` is the accumulator, `{v}` the value. Of "max" and "min" NaN may win or lose.
REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction("0", "{a} + {v}", "zmlx_sum"),
    "prod": Reduction("1", "{a} * {v}", "zmlx_product"),
    "max": Reduction("-INFINITY", "max({a}, {v})", "zmlx_max"),
    "min": Reduction("INFINITY", "min({a}, {v})", "zmlx_min"),
    "maximum": _with_nan("maximum", "-INFINITY"),
    "minimum": _with_nan("minimum", "INFINITY"),
}


def start_parts(body: Body, r: Reduce) -> None:
    """Declares the accumulators of a thread."""
    parts = [(r.name, "0.0f"), (r.peak, "-FLT_MAX")]
    if r.op != "sum_exp":
        parts = [(r.name, f"{r.type}({REDUCTIONS[r.op].identity})")]
    for name, _ in parts:
        body.add(f"{r.type} {name}_part[U];")
    body.open_step()
    for name, identity in parts:
        body.add(f"{name}_part[u_] = {identity};")
    body.close()


def update_part(body: Body, r: Reduce, part: str) -> None:
    """Takes an element into accumulator `part`.

    The running sum of "sum_exp" is rescaled to the running peak (Milakov & Gimelshein 2018,
    arXiv:1805.02867), with the one exponential that either the sum or the element needs. Equal
    infinities count as equal.
    """
    a = f"{r.name}_part[{part}]"
    if r.op != "sum_exp":
        body.add(f"{a} = {REDUCTIONS[r.op].update.format(a=a, v=f'({r.expr})')};")
        return
    peak = f"{r.peak}_part[{part}]"
    body.add("{")
    body.depth += 1
    body.add(f"const float v_ = {r.expr};")
    body.add(f"const float d_ = v_ == {peak} ? 0.0f : v_ - {peak};")
    body.add("const float e_ = ZMLX_EXP_BOUNDED(-fabs(d_));")
    body.add(f"{a} = d_ > 0.0f ? {a} * e_ + 1.0f : {a} + e_;")
    body.add(f"{peak} = max({peak}, v_);")
    body.close()


def fold_parts(body: Body, r: Reduce) -> None:
    """Declares the result: the accumulators of all threads of the row, folded."""
    if r.op != "sum_exp":
        _fold(body, r.name, r.op, r.type, f"{r.name}_part")
        return
    body.add(f"float {r.peak}_most[U];")
    body.open_step()
    body.add(f"{r.peak}_most[u_] = {r.peak}_part[u_];")
    body.close()
    _fold(body, r.peak, "max", "float", f"{r.peak}_most")
    body.open_step()
    old = f"{r.peak}_part[u_]"
    body.add(f"{r.name}_part[u_] *= {old} == {r.peak} ? 1.0f : exp({old} - {r.peak});")
    body.close()
    _fold(body, r.name, "sum", "float", f"{r.name}_part")


def _fold(body: Body, name: str, op: str, type_: str, parts: str) -> None:
    how = REDUCTIONS[op]
    body.open("for (uint w_ = U / 2; w_ > 0; w_ /= 2)")
    body.open_step("w_")
    a, v = f"{parts}[u_]", f"{parts}[u_ + w_]"
    body.add(f"{a} = {how.update.format(a=a, v=v)};")
    body.close()
    body.close()
    body.add(
        f"const {type_} {name} = zmlx_row_reduce<TPR, {how.fold}>"
        f"({parts}[0], scratch_{type_}, lane_);"
    )


#: Header of every kernel that asks for memory ahead.
PREFETCH_HEADER = """
// ZMLX_PREFETCH_FAR asks for what is wanted later, ZMLX_PREFETCH_WALK_FAR for what a walk comes
// to, in ZMLX_PLACES_AHEAD places in turn; the CPU target defines them.
#ifndef ZMLX_PREFETCH_FAR
#define ZMLX_PREFETCH_FAR(pointer)
#define ZMLX_PREFETCH_WALK_FAR(pointer)
#define ZMLX_PLACES_AHEAD 1
#endif
"""

#: Header of every kernel that reduces over a row.
ROW_HEADER = (
    msl.header_for("ZMLX_EXP_BOUNDED")
    + PREFETCH_HEADER
    + """
struct zmlx_sum {
    template <typename T> static T simd(T a) { return simd_sum(a); }
    template <typename T> static T fold(T a, T b) { return a + b; }
};
struct zmlx_product {
    template <typename T> static T simd(T a) { return simd_product(a); }
    template <typename T> static T fold(T a, T b) { return a * b; }
};
struct zmlx_max {
    template <typename T> static T simd(T a) { return simd_max(a); }
    template <typename T> static T fold(T a, T b) { return max(a, b); }
};
struct zmlx_min {
    template <typename T> static T simd(T a) { return simd_min(a); }
    template <typename T> static T fold(T a, T b) { return min(a, b); }
};

// Reduces over the TPR threads of a row and gives every one of them the result. Rows of up to 32
// threads (a power of two) lie side by side in a simdgroup; a longer row owns its threadgroup.
template <int TPR, typename Op, typename T>
T zmlx_row_reduce(T value, threadgroup T* scratch, uint lane) {
    if (TPR <= 32 && (TPR & (TPR - 1)) == 0) {
        for (ushort step = TPR / 2; step > 0; step /= 2) {
            value = Op::fold(value, simd_shuffle_xor(value, step));
        }
        return value;
    }
    value = Op::simd(value);
    if (TPR > 32) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (lane % 32 == 0) {
            scratch[lane / 32] = value;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        value = scratch[0];
        for (uint s = 1; s < (TPR + 31) / 32; ++s) {
            value = Op::fold(value, scratch[s]);
        }
    }
    return value;
}
"""
)
