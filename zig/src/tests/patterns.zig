//! Pattern kernels on arrays.

const std = @import("std");
const zmlx = @import("zmlx");
const Array = zmlx.Array;
const testing = std.testing;
const gpa = testing.allocator;

/// The sums of columns.
const total_of_columns: zmlx.PatternKernel = .{
    .name = "total",
    .pattern = .{ .fold = .{
        .op = "sum",
        .outputs = &.{.{ .name = "y", .expr = "total" }},
        .columns = true,
    } },
    .dtypes = &.{.{ .dtype = .float32 }},
};

/// A kernel of an expression in x.
fn rowwise(outputs: []const zmlx.codegen.parts.Output) zmlx.PatternKernel {
    return .{
        .name = "case__all",
        .pattern = .{ .rowwise = .{ .inputs = &.{.{ .name = "x" }}, .outputs = outputs } },
        .dtypes = &.{.{ .dtype = .float32 }},
    };
}

test "folds and scans run as pattern kernels" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const running: zmlx.PatternKernel = .{
        .name = "running",
        .pattern = .{ .scan = .{
            .op = "sum",
            .outputs = &.{.{ .name = "y", .expr = "total" }},
            .reverse = true,
        } },
        .dtypes = &.{.{ .promotion = &.{"x"} }},
    };
    const data = [_]f32{ 1, 2, 3, 4, 5, 6 };
    const cube = try Array.fromSlice(f32, &data, &.{ 1, 2, 3 });
    defer cube.deinit();
    const square = try Array.fromSlice(f32, &data, &.{ 2, 3 });
    defer square.deinit();
    for ([_]zmlx.launch.Kind{ .cpu, .gpu }) |kind| {
        context.kind = kind;
        const y = try context.one(&total_of_columns, &.{cube});
        defer y.deinit();
        try testing.expectEqualSlices(i32, &.{ 1, 3 }, y.shape());
        var sums: [3]f32 = undefined;
        try y.copyTo(f32, &sums);
        try testing.expectEqualSlices(f32, &.{ 5, 7, 9 }, &sums);
        const z = try context.one(&running, &.{square});
        defer z.deinit();
        var ends: [6]f32 = undefined;
        try z.copyTo(f32, &ends);
        try testing.expectEqualSlices(f32, &.{ 6, 5, 3, 15, 11, 6 }, &ends);
    }
    const point = try Array.scalar(f32, 1);
    defer point.deinit();
    for ([_]Array{ cube, point }, [_][]const u8{ "3", "0" }) |x, axes| {
        try testing.expectError(error.InvalidArgument, context.one(&running, &.{x}));
        const start = "[running] 'x' must have 2 axes but got ";
        try testing.expectEqualStrings(start, zmlx.lastError()[0..start.len]);
        try testing.expectEqualStrings(axes, zmlx.lastError()[start.len..][0..1]);
    }
}

test "moments of no elements are zeros" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const Case = struct { columns: bool = false, short: bool = false, shape: []const i32 };
    for ([_]Case{
        .{ .shape = &.{ 2, 0 } },
        .{ .shape = &.{ 2, 0 }, .short = true },
        .{ .shape = &.{ 1, 0, 2 }, .columns = true },
    }) |case| {
        const spread: zmlx.PatternKernel = .{
            .name = "spread",
            .pattern = .{ .fold = .{
                .op = "moments",
                .outputs = &.{.{ .name = "y", .expr = "m2" }},
                .columns = case.columns,
                .short = case.short,
            } },
            .dtypes = &.{.{ .dtype = .float32 }},
        };
        const x = try Array.zeros(.float32, case.shape);
        defer x.deinit();
        const y = try context.one(&spread, &.{x});
        defer y.deinit();
        var data: [2]f32 = undefined;
        try y.copyTo(f32, &data);
        try testing.expectEqualSlices(f32, &.{ 0, 0 }, &data);
    }
}

test "folds of columns may have more rows than 32 bits count" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const x = try Array.zeros(.float32, &.{ 1 << 16, 1 << 16, 0 });
    defer x.deinit();
    const y = try context.one(&total_of_columns, &.{x});
    defer y.deinit();
    try testing.expectEqualSlices(i32, &.{ 1 << 16, 0 }, y.shape());
    const one = try Array.scalar(f32, 1);
    defer one.deinit();
    const many = try one.broadcastTo(&.{ 1 << 20, 1 << 20, 1 << 20 });
    defer many.deinit();
    try testing.expectError(error.InvalidArgument, context.one(&total_of_columns, &.{many}));
    try testing.expectEqualStrings(
        "[total] arrays must be smaller than 2^60 but got (1048576, 1048576, 1048576).",
        zmlx.lastError(),
    );
}

test "parts of nothing may be more than 32 bits count" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const cut: zmlx.PatternKernel = .{
        .name = "cut",
        .pattern = .{ .fold = .{
            .op = "sum",
            .outputs = &.{.{ .name = "y", .expr = "total" }},
            .columns = true,
            .cut = true,
        } },
        .dtypes = &.{.{ .dtype = .float32 }},
    };
    const x = try Array.zeros(.float32, &.{ 1 << 27, 1024, 0 });
    defer x.deinit();
    const y = try context.one(&cut, &.{x});
    defer y.deinit();
    try testing.expectEqualSlices(i32, &.{ 1 << 27, 64, 0 }, y.shape());
}

test "a cut scan takes the states of its parts, and no others" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const one = try Array.scalar(f32, 1);
    defer one.deinit();
    const outputs: []const zmlx.codegen.parts.Output = &.{.{ .name = "y", .expr = "total" }};
    const Case = struct { columns: bool, shape: []const i32, states: []const u8 };
    for ([_]Case{
        .{ .columns = false, .shape = &.{ 1, 100_000 }, .states = "(1, 6)" },
        .{ .columns = true, .shape = &.{ 2, 500, 3 }, .states = "(2, 30, 3)" },
    }) |case| {
        const state: zmlx.PatternKernel = .{
            .name = "state",
            .pattern = .{ .fold = .{
                .op = "sum",
                .outputs = outputs,
                .columns = case.columns,
                .cut = true,
                .for_scan = true,
            } },
            .dtypes = &.{.{ .dtype = .float32 }},
        };
        const running: zmlx.PatternKernel = .{
            .name = "running",
            .pattern = .{ .scan = .{
                .op = "sum",
                .outputs = outputs,
                .columns = case.columns,
                .cut = true,
            } },
            .dtypes = &.{.{ .dtype = .float32 }},
        };
        const x = try one.broadcastTo(case.shape);
        defer x.deinit();
        const states = try context.one(&state, &.{x});
        defer states.deinit();
        const y = try context.one(&running, &.{ x, states });
        defer y.deinit();
        const data = try gpa.alloc(f32, y.size());
        defer gpa.free(data);
        try y.copyTo(f32, data);
        const width: usize = if (case.columns) @intCast(case.shape[2]) else 1;
        const along: usize = @intCast(case.shape[1]);
        for (data, 0..) |got, i| {
            const before: f32 = @floatFromInt(i / width % along);
            try testing.expectEqual(before + 1, got);
        }
        try testing.expectError(error.InvalidArgument, context.one(&running, &.{ x, x }));
        const start = "[running] 'total_of_part' must have shape ";
        try testing.expectEqualStrings(start, zmlx.lastError()[0..start.len]);
        try testing.expectEqualStrings(
            case.states,
            zmlx.lastError()[start.len..][0..case.states.len],
        );
    }
}

test "pattern kernels refuse arrays that do not fit the others" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const mixed: zmlx.PatternKernel = .{
        .name = "mixed__all",
        .pattern = .{ .rowwise = .{
            .inputs = &.{
                .{ .name = "first", .array = "x", .parts = 2 },
                .{ .name = "second", .array = "x", .part = 1, .parts = 2 },
                .{ .name = "w", .kind = .column },
                .{ .name = "r", .kind = .per_row },
                .{ .name = "e", .kind = .at, .index = "1" },
                .{ .name = "s", .kind = .scalar },
            },
            .outputs = &.{.{ .name = "y", .expr = "first * w + second * r + e * s" }},
        } },
        .dtypes = &.{.{ .dtype = .float32 }},
    };
    const x = try Array.fromSlice(f32, &.{ 1, 2, 3, 4, 5, 6, 7, 8 }, &.{ 2, 4 });
    defer x.deinit();
    const square = try Array.fromSlice(f32, &.{ 0, 10, 0, 20 }, &.{ 2, 2 });
    defer square.deinit();
    const two = try Array.fromSlice(f32, &.{ 1, 2 }, &.{2});
    defer two.deinit();
    const three = try Array.zeros(.float32, &.{ 2, 3 });
    defer three.deinit();
    const point = try Array.scalar(f32, 3);
    defer point.deinit();
    const y = try context.one(&mixed, &.{ x, two, two, square, point });
    defer y.deinit();
    var data: [4]f32 = undefined;
    try y.copyTo(f32, &data);
    try testing.expectEqualSlices(f32, &.{ 34, 38, 79, 88 }, &data);

    const Case = struct { [5]Array, []const u8 };
    for ([_]Case{
        .{
            .{ three, two, two, square, point },
            "'x' must have a last axis divisible by 2 but got (2, 3).",
        },
        .{ .{ x, point, two, square, point }, "'w' must have shape (2,) but got ()." },
        .{ .{ x, two, square, square, point }, "'r' must have shape (2,) but got (2, 2)." },
        .{ .{ x, two, two, three, point }, "'e' must have shape (2, 2) but got (2, 3)." },
        .{ .{ x, two, two, square, two }, "'s' must have shape () but got (2,)." },
    }) |case| {
        try testing.expectError(error.InvalidArgument, context.one(&mixed, &case[0]));
        try testing.expectEqualStrings(case[1], zmlx.lastError()["[mixed] ".len..]);
    }

    const sum: zmlx.PatternKernel = .{
        .name = "sum",
        .pattern = .{
            .elementwise = .{
                .inputs = &.{ .{ .name = "a", .kind = .full }, .{ .name = "b", .kind = .full } },
                .outputs = &.{.{ .name = "y", .expr = "a + b", .kind = .full }},
            },
        },
        .dtypes = &.{.{ .promotion = &.{"a"} }},
    };
    try testing.expectError(error.InvalidArgument, context.one(&sum, &.{ x, two }));
}

test "a pattern kernel is known by what it says and not by where it lies" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const x = try Array.fromSlice(f32, &.{3}, &.{ 1, 1 });
    defer x.deinit();
    var text = "x + 0.0f".*;
    var outputs: [1]zmlx.codegen.parts.Output = .{.{ .name = "y", .expr = &text }};
    const kernel = rowwise(&outputs);
    for (0..2) |_| for ([_]u8{ '1', '2', '3' }) |digit| {
        text[4] = digit;
        const y = try context.one(&kernel, &.{x});
        defer y.deinit();
        try testing.expectEqual(@as(f32, @floatFromInt(3 + digit - '0')), try y.item(f32));
    };
    try testing.expectEqual(3, context.kernels.count());

    var body = "y[0] = x[0] * 1;".*;
    const spec: zmlx.KernelSpec = .{
        .name = "times",
        .input_names = &.{"x"},
        .output_names = &.{"y"},
        .body = &body,
    };
    for ("122") |digit| {
        body[body.len - 2] = digit;
        const made = try context.body(&spec);
        defer made.deinit();
        const other = try context.kernels.get(spec);
        defer other.deinit();
        try testing.expectEqual(other.shared, made.shared);
    }
}

test "rows come from an operand that lies in its own row" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const table = try Array.zeros(.float32, &.{ 5, 4 });
    defer table.deinit();
    const index = try Array.zeros(.int32, &.{2});
    defer index.deinit();
    const kernel: zmlx.PatternKernel = .{
        .name = "looked_up",
        .pattern = .{ .rowwise = .{
            .inputs = &.{
                .{ .name = "i", .kind = .per_row, .type = "int" },
                .{ .name = "e", .kind = .row, .index = "i" },
            },
            .outputs = &.{.{ .name = "y", .expr = "e + 1.0f" }},
        } },
        .dtypes = &.{.{ .dtype = .float32 }},
    };
    try testing.expectError(error.InvalidArgument, context.one(&kernel, &.{ index, table }));
    try testing.expectEqualStrings(
        "[looked_up] the pattern must have a row or full operand but has none.",
        zmlx.lastError(),
    );
}

test "an array that is a scalar and has elements is refused" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const x = try Array.scalar(f32, 1);
    defer x.deinit();
    const kernel: zmlx.PatternKernel = .{
        .name = "both",
        .pattern = .{ .rowwise = .{
            .inputs = &.{
                .{ .name = "x", .array = "a" },
                .{ .name = "s", .kind = .scalar, .array = "a" },
            },
            .outputs = &.{.{ .name = "y", .expr = "x + s" }},
        } },
        .dtypes = &.{.{ .dtype = .float32 }},
    };
    try testing.expectError(error.InvalidArgument, context.one(&kernel, &.{x}));
    try testing.expectEqualStrings(
        "[both] 'a' must be a scalar or have elements but got operands of both kinds.",
        zmlx.lastError(),
    );
}

test "a row output of a 0-d array is 0-d" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const kernel = rowwise(&.{.{ .name = "y", .expr = "2.0f", .kind = .per_row }});
    for ([_][]const i32{ &.{}, &.{1} }) |shape| {
        const x = try Array.zeros(.float32, shape);
        defer x.deinit();
        const y = try context.one(&kernel, &.{x});
        defer y.deinit();
        try testing.expectEqual(0, y.ndim());
        try testing.expectEqual(2, try y.item(f32));
    }
}

test "a context keeps some constants, and makes others for each launch" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const kernel = rowwise(&.{.{ .name = "y", .expr = "float(D)", .kind = .per_row }});
    const one = try Array.scalar(f32, 1);
    defer one.deinit();
    for (0..5000) |d| {
        const x = try one.broadcastTo(&.{ 1, @intCast(d) });
        defer x.deinit();
        const y = try context.one(&kernel, &.{x});
        defer y.deinit();
        if (d % 499 == 0) try testing.expectEqual(@as(f32, @floatFromInt(d)), try y.item(f32));
    }
    try testing.expectEqual(4096, context.constants.count());
}

test "sizes that do not fit in 32 bits are refused" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const one = try Array.scalar(f32, 1);
    defer one.deinit();
    const x = try Array.zeros(.float32, &.{ 2, 3 });
    defer x.deinit();
    const long = try one.broadcastTo(&.{ 1, (1 << 30) + 7 });
    defer long.deinit();
    const many = try one.broadcastTo(&.{ 1 << 30, 1 << 30, 4 });
    defer many.deinit();
    const wider = rowwise(&.{
        .{ .name = "y", .expr = "x", .parts = 2 },
        .{ .name = "z", .expr = "x", .array = "y", .part = 1, .parts = 2 },
    });
    var twice = rowwise(&.{.{ .name = "y", .expr = "x" }});
    twice.pattern.rowwise.inputs = &.{ .{ .name = "x" }, .{ .name = "z", .parts = 2 } };
    var most = twice;
    most.pattern.rowwise.inputs = &.{.{ .name = "x", .parts = std.math.maxInt(u32) }};
    var none = twice;
    none.pattern.rowwise.inputs = &.{.{ .name = "x", .parts = 0 }};
    var chunked = rowwise(&.{.{ .name = "y", .expr = "x", .kind = .column }});
    chunked.chunks = std.math.maxInt(u32);
    const square: zmlx.PatternKernel = .{
        .name = "case",
        .pattern = .{ .elementwise = .{
            .inputs = &.{.{ .name = "x", .kind = .full }},
            .outputs = &.{.{ .name = "y", .expr = "x * x", .kind = .full }},
        } },
        .dtypes = &.{.{ .dtype = .float32 }},
    };
    const Case = struct { zmlx.PatternKernel, []const Array, []const u8 };
    for ([_]Case{
        .{ wider, &.{long}, "[case] 'y' must have axes below 2^31 but got 2147483662." },
        .{
            twice,
            &.{ long, x },
            "[case] 'z' must have shape (1, 2147483662) but got (2, 3).",
        },
        .{
            most,
            &.{x},
            "[case] 'x' must have a last axis divisible by 4294967295 but got (2, 3).",
        },
        .{ none, &.{x}, "[codegen] 'parts' must be at least 1 but got 0." },
        .{ chunked, &.{x}, "[case] 'y' must have axes below 2^31 but got 4294967295." },
        .{
            rowwise(&.{.{ .name = "y", .expr = "x" }}),
            &.{many},
            "[case] rows and row length must be below 2^32 but got 1152921504606846976 and 4.",
        },
        .{
            square,
            &.{many},
            "[case] arrays must be smaller than 2^60 but got (1073741824, 1073741824, 4).",
        },
    }) |case| {
        try testing.expectError(error.InvalidArgument, context.one(&case[0], case[1]));
        try testing.expectEqualStrings(case[2], zmlx.lastError());
    }
    try testing.expectError(
        error.InvalidArgument,
        zmlx.catalogue.swiglu(&context, .{ .gate = many, .up = many }),
    );
}

test "rows that are too long to be kept or summed are refused" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const x = try Array.zeros(.float32, &.{ 1, 32769 });
    defer x.deinit();
    var kept = rowwise(&.{.{ .name = "y", .expr = "e / total" }});
    kept.pattern.rowwise.lets = &.{.{ .name = "e", .expr = "x + 1.0f" }};
    kept.pattern.rowwise.passes = &.{.{
        .reductions = &.{.{ .name = "total", .op = "sum", .expr = "e" }},
    }};
    const computed = try context.one(&kept, &.{x});
    computed.deinit();
    kept.pattern.rowwise.keep = &.{"e"};
    const summed = rowwise(&.{.{ .name = "y", .expr = "x", .kind = .column }});
    for ([_]*const zmlx.PatternKernel{ &kept, &summed }) |kernel| {
        try testing.expectError(error.InvalidArgument, context.one(kernel, &.{x}));
        try testing.expectEqualStrings(
            "[case] rows must have at most 32768 elements where they are kept or summed but got " ++
                "32769.",
            zmlx.lastError(),
        );
    }
}

test "an empty expression is refused with Python's text" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const x = try Array.zeros(.float32, &.{ 2, 2 });
    defer x.deinit();
    const input: []const zmlx.codegen.parts.Operand = &.{.{ .name = "x" }};
    const patterns = [_]zmlx.codegen.Pattern{
        .{ .elementwise = .{
            .inputs = &.{.{ .name = "x", .kind = .full }},
            .outputs = &.{.{ .name = "y", .expr = " ", .kind = .full }},
        } },
        .{ .rowwise = .{
            .inputs = input,
            .outputs = &.{.{ .name = "y", .expr = "x" }},
            .lets = &.{.{ .name = "z", .expr = " " }},
        } },
        .{ .rowwise = .{
            .inputs = input,
            .outputs = &.{.{ .name = "y", .expr = "total", .kind = .per_row }},
            .passes = &.{.{ .reductions = &.{.{ .name = "total", .op = "sum", .expr = " " }} }},
        } },
    };
    for (patterns) |pattern| {
        const kernel: zmlx.PatternKernel = .{
            .name = "nothing",
            .pattern = pattern,
            .dtypes = &.{.{ .promotion = &.{"x"} }},
        };
        try testing.expectError(error.InvalidArgument, context.one(&kernel, &.{x}));
        try testing.expectEqualStrings(
            "[expression] an empty expression at column 1.\n   \n  ^",
            zmlx.lastError(),
        );
    }
}

test "column outputs of both patterns are sums over rows, and a promotion is one of inputs" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const inputs: []const zmlx.codegen.parts.Operand = &.{.{ .name = "x" }};
    const outputs: []const zmlx.codegen.parts.Output = &.{
        .{ .name = "y", .expr = "x", .kind = .column },
    };
    const x = try Array.fromSlice(f32, &.{ 1, 2, 3, 4 }, &.{ 2, 2 });
    defer x.deinit();
    const columns: zmlx.PatternKernel = .{
        .name = "columns",
        .pattern = .{ .columnwise = .{ .inputs = inputs, .outputs = outputs } },
        .dtypes = &.{.{ .dtype = .float32 }},
        .chunks = 1,
    };
    const walks: zmlx.PatternKernel = .{
        .name = "walks",
        .pattern = .{ .rowwise = .{ .inputs = inputs, .outputs = outputs } },
        .dtypes = &.{.{ .dtype = .float32 }},
        .chunks = 1,
    };
    for ([_]*const zmlx.PatternKernel{ &columns, &walks }) |kernel| {
        const y = try context.one(kernel, &.{x});
        defer y.deinit();
        var data: [2]f32 = undefined;
        try y.copyTo(f32, &data);
        try testing.expectEqualSlices(f32, &.{ 4, 6 }, &data);
    }
    var none = walks;
    none.dtypes = &.{.{ .promotion = &.{} }};
    try testing.expectError(error.InvalidArgument, context.one(&none, &.{x}));
}
