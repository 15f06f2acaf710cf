//! Tests of arrays, kernels and ops, on this machine's target. Texts are compared with Python's by
//! `tests/test_zig_codegen.py`, and values by `tests/test_zig.py`.

test {
    _ = @import("expression.zig");
    _ = @import("tests/arrays.zig");
    _ = @import("tests/kernels.zig");
    _ = @import("tests/ops.zig");
    _ = @import("tests/patterns.zig");
}
