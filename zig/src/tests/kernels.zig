//! Kernels and their cache.

const std = @import("std");
const zmlx = @import("zmlx");
const Array = zmlx.Array;
const Dtype = zmlx.Dtype;
const KernelSpec = zmlx.KernelSpec;
const testing = std.testing;
const gpa = testing.allocator;

const double: KernelSpec = .{
    .name = "double",
    .input_names = &.{"x"},
    .output_names = &.{"y"},
    .body = "uint i = thread_position_in_grid.x; y[i] = x[i] + T(SHIFT) * T(x[i]);",
};

fn launchDouble(kernel: zmlx.MetalKernel, x: Array, shift: i32, stream: ?zmlx.Stream) !Array {
    var y: [1]Array = undefined;
    try kernel.launch(&.{x}, .{
        .template = &.{
            .{ .name = "T", .value = .{ .dtype = x.dtype() } },
            .{ .name = "SHIFT", .value = .{ .int = shift } },
        },
        .grid = .{ @intCast(x.size()), 1, 1 },
        .threadgroup = .{ 8, 1, 1 },
        .output_shapes = &.{x.shape()},
        .output_dtypes = &.{x.dtype()},
        .stream = stream,
    }, &y);
    return y[0];
}

test "a kernel with template arguments, a view as input, and a stream of its own" {
    const kernel = try zmlx.MetalKernel.create(gpa, double);
    defer kernel.deinit();
    const a = try Array.fromSlice(f32, &.{ 1, 2, 3, 4, 5, 6 }, &.{ 2, 3 });
    defer a.deinit();
    const x = try a.transpose();
    defer x.deinit();
    const stream: zmlx.Stream = try .new(zmlx.target());
    for ([_]?zmlx.Stream{ null, stream }, [_]i32{ 1, 2 }) |s, shift| {
        const y = try launchDouble(kernel, x, shift, s);
        defer y.deinit();
        try testing.expectEqualSlices(i32, &.{ 3, 2 }, y.shape());
        var data: [6]f32 = undefined;
        try y.copyTo(f32, &data);
        for ([_]f32{ 1, 4, 2, 5, 3, 6 }, data) |before, after| {
            try testing.expectEqual(before * @as(f32, @floatFromInt(1 + shift)), after);
        }
    }
    try stream.synchronize();
}

test "every dtype runs through a kernel" {
    const kernel = try zmlx.MetalKernel.create(gpa, .{
        .name = "same",
        .input_names = &.{"x"},
        .output_names = &.{"y"},
        .body = "uint i = thread_position_in_grid.x; y[i] = x[i];",
    });
    defer kernel.deinit();
    for ([_]Dtype{
        .bool,  .uint8, .uint16, .uint32,  .uint64,   .int8,
        .int16, .int32, .int64,  .float16, .bfloat16, .float32,
    }) |dtype| {
        const ones = try Array.fromSlice(f32, &.{ 0, 1, 1 }, &.{3});
        defer ones.deinit();
        const x = try ones.astype(dtype);
        defer x.deinit();
        var y: [1]Array = undefined;
        try kernel.launch(&.{x}, .{
            .grid = .{ 3, 1, 1 },
            .output_shapes = &.{&.{3}},
            .output_dtypes = &.{dtype},
        }, &y);
        defer y[0].deinit();
        const back = try y[0].astype(.float32);
        defer back.deinit();
        var data: [3]f32 = undefined;
        try back.copyTo(f32, &data);
        try testing.expectEqualSlices(f32, &.{ 0, 1, 1 }, &data);
    }
}

test "what a launch fills its outputs with, and several outputs" {
    const kernel = try zmlx.MetalKernel.create(gpa, .{
        .name = "split",
        .input_names = &.{},
        .output_names = &.{ "a", "b" },
        .body = "uint i = thread_position_in_grid.x; if (i % 2 == 0) a[i] = i; else b[i] = i;",
    });
    defer kernel.deinit();
    var outputs: [2]Array = undefined;
    try kernel.launch(&.{}, .{
        .grid = .{ 4, 1, 1 },
        .threadgroup = .{ 2, 1, 1 },
        .output_shapes = &.{ &.{4}, &.{ 2, 2 } },
        .output_dtypes = &.{ .int32, .float16 },
        .init_value = -1,
    }, &outputs);
    defer for (outputs) |y| y.deinit();
    var a: [4]i32 = undefined;
    try outputs[0].copyTo(i32, &a);
    try testing.expectEqualSlices(i32, &.{ 0, -1, 2, -1 }, &a);
    var b: [4]f16 = undefined;
    try outputs[1].copyTo(f16, &b);
    try testing.expectEqualSlices(f16, &.{ -1, 1, -1, 3 }, &b);
}

test "a lazy launch runs after its kernel and its input are gone" {
    const kernel = try zmlx.MetalKernel.create(gpa, double);
    const x = try Array.fromSlice(f32, &.{ 1, 2 }, &.{2});
    const y = try launchDouble(kernel, x, 1, null);
    defer y.deinit();
    x.deinit();
    kernel.deinit();
    var data: [2]f32 = undefined;
    try y.copyTo(f32, &data);
    try testing.expectEqualSlices(f32, &.{ 2, 4 }, &data);
}

test "a specification that is none is refused with Python's text" {
    var spec = double;
    spec.name = "2 x";
    try testing.expectError(error.InvalidArgument, zmlx.MetalKernel.create(gpa, spec));
    try testing.expectEqualStrings(
        "[kernel] 'name' must be an identifier but got '2 x'.",
        zmlx.lastError(),
    );
    spec = double;
    spec.math_mode = "slow";
    try testing.expectError(error.InvalidArgument, zmlx.MetalKernel.create(gpa, spec));
    spec = double;
    spec.body = " \n";
    try testing.expectError(error.InvalidArgument, zmlx.MetalKernel.create(gpa, spec));
}

test "a launch that cannot be is refused" {
    const kernel = try zmlx.MetalKernel.create(gpa, double);
    defer kernel.deinit();
    const x = try Array.zeros(.float32, &.{4});
    defer x.deinit();
    var y: [1]Array = undefined;
    const good: zmlx.metal.Launch = .{
        .grid = .{ 4, 1, 1 },
        .output_shapes = &.{&.{4}},
        .output_dtypes = &.{.float32},
    };
    try testing.expectError(error.InvalidArgument, kernel.launch(&.{}, good, &y));
    var bad = good;
    bad.output_dtypes = &.{};
    try testing.expectError(error.InvalidArgument, kernel.launch(&.{x}, bad, &y));
    bad = good;
    bad.output_shapes = &.{&.{-4}};
    try testing.expectError(error.InvalidArgument, kernel.launch(&.{x}, bad, &y));
    try testing.expectEqualStrings(
        "[double] 'output_shapes' must have sizes of at least 0 but got (-4,).",
        zmlx.lastError(),
    );
    bad = good;
    bad.output_dtypes = &.{.float64};
    try testing.expectError(error.InvalidArgument, kernel.launch(&.{x}, bad, &y));
    const wide = try Array.scalar(f64, 1);
    defer wide.deinit();
    try testing.expectError(error.InvalidArgument, kernel.launch(&.{wide}, good, &y));
    try testing.expectEqualStrings(
        "[double] 'x' must have a dtype that Metal knows but got float64.",
        zmlx.lastError(),
    );
    bad = good;
    for ([_][3]u32{ .{ 0, 1, 1 }, .{ 32, 33, 1 }, .{ 1 << 31, 1, 1 } }) |threadgroup| {
        bad.threadgroup = threadgroup;
        try testing.expectError(error.InvalidArgument, kernel.launch(&.{x}, bad, &y));
        const reason = "[double] 'threadgroup' must have 1 to 1024 threads but got (";
        try testing.expectStringStartsWith(zmlx.lastError(), reason);
    }
    bad = good;
    bad.grid = .{ 1 << 31, 1, 1 };
    try testing.expectError(error.InvalidArgument, kernel.launch(&.{x}, bad, &y));
    // No thread would write the output; an initial value does.
    bad = good;
    bad.template = &.{
        .{ .name = "T", .value = .{ .dtype = .float32 } },
        .{ .name = "SHIFT", .value = .{ .int = 1 } },
    };
    bad.grid = .{ 0, 1, 1 };
    try testing.expectError(error.InvalidArgument, kernel.launch(&.{x}, bad, &y));
    try testing.expect(std.mem.find(u8, zmlx.lastError(), "'grid' must not be empty") != null);
    bad.init_value = 1;
    try kernel.launch(&.{x}, bad, &y);
    y[0].deinit();
}

test "names of template arguments that no compiler takes are refused with Python's text" {
    const kernel = try zmlx.MetalKernel.create(gpa, double);
    defer kernel.deinit();
    const x = try Array.zeros(.float32, &.{4});
    defer x.deinit();
    const reserved =
        "must have names that are neither words of Metal nor inputs or outputs but got ";
    inline for (.{
        .{ "", "must be identifiers but got ''." },
        .{ "1T", "must be identifiers but got '1T'." },
        .{ "T\x00", "must be identifiers but got 'T\\x00'." },
        .{ "T = 3, int Z", "must be identifiers but got 'T = 3, int Z'." },
        .{ "SHIFT", "must not repeat a name but got ['SHIFT', 'SHIFT']." },
        .{ "float", reserved ++ "'float'." },
        .{ "x", reserved ++ "'x'." },
        .{ "y", reserved ++ "'y'." },
    }) |case| {
        var y: [1]Array = undefined;
        try testing.expectError(error.InvalidArgument, kernel.launch(&.{x}, .{
            .template = &.{
                .{ .name = "SHIFT", .value = .{ .int = 1 } },
                .{ .name = case[0], .value = .{ .int = 1 } },
            },
            .grid = .{ 4, 1, 1 },
            .output_shapes = &.{&.{4}},
            .output_dtypes = &.{.float32},
        }, &y));
        try testing.expectEqualStrings("[double] 'template' " ++ case[1], zmlx.lastError());
    }
}

test "an initial value that a dtype does not hold is refused with Python's text" {
    const kernel = try zmlx.MetalKernel.create(gpa, .{
        .name = "nothing",
        .input_names = &.{},
        .output_names = &.{"y"},
        .body = ";",
    });
    defer kernel.deinit();
    const nan = std.math.nan(f32);
    const Case = struct { Dtype, f32, ?[]const u8 };
    for ([_]Case{
        .{ .uint8, 255, null },
        .{ .uint8, 0.5, "uint8 but got 0.5." },
        .{ .uint8, 300, "uint8 but got 300." },
        .{ .uint8, -1, "uint8 but got -1." },
        .{ .uint8, nan, "uint8 but got nan." },
        .{ .int8, -128, null },
        .{ .int32, nan, "int32 but got nan." },
        .{ .int32, 0x1p31, "int32 but got 2147483648." },
        .{ .int64, -0x1p63, null },
        .{ .int64, std.math.inf(f32), "int64 but got inf." },
        .{ .uint64, 0x1p64, "uint64 but got 1.8446744073709552e+19." },
        .{ .bool, 0.5, null },
        .{ .float16, nan, null },
    }) |case| {
        var y: [1]Array = undefined;
        const done = kernel.launch(&.{}, .{
            .grid = .{ 0, 1, 1 },
            .output_shapes = &.{&.{1}},
            .output_dtypes = &.{case[0]},
            .init_value = case[1],
        }, &y);
        if (case[2]) |reason| {
            try testing.expectError(error.InvalidArgument, done);
            const start = "[nothing] 'init_value' must be of dtype ";
            try testing.expectEqualStrings(reason, zmlx.lastError()[start.len..]);
        } else {
            try done;
            y[0].deinit();
        }
    }
}

test "a reason is not cut off by a long name" {
    var spec = double;
    spec.name = "n" ** 5000;
    const kernel = try zmlx.MetalKernel.create(gpa, spec);
    defer kernel.deinit();
    var y: [1]Array = undefined;
    try testing.expectError(error.InvalidArgument, kernel.launch(&.{}, .{
        .grid = .{ 4, 1, 1 },
        .output_shapes = &.{&.{4}},
        .output_dtypes = &.{.float32},
    }, &y));
    try testing.expectEqualStrings(
        "[" ++ "n" ** 5000 ++ "] 'inputs' must be 1 arrays but got 0.",
        zmlx.lastError(),
    );
}

test "a kernel that does not compile passes the compiler's message on" {
    if (zmlx.target() == .gpu) return; // Metal compiles at evaluation
    const kernel = try zmlx.MetalKernel.create(gpa, .{
        .name = "broken",
        .input_names = &.{"x"},
        .output_names = &.{"y"},
        .body = "y[0] = x[0] + undeclared_name;",
    });
    defer kernel.deinit();
    const x = try Array.zeros(.float32, &.{1});
    defer x.deinit();
    var y: [1]Array = undefined;
    try testing.expectError(error.MlxFailure, kernel.launch(&.{x}, .{
        .grid = .{ 1, 1, 1 },
        .output_shapes = &.{&.{1}},
        .output_dtypes = &.{.float32},
    }, &y));
    try testing.expect(std.mem.find(u8, zmlx.lastError(), "undeclared_name") != null);
}

test "the cache gives one kernel per specification, which outlives the cache" {
    var cache: zmlx.KernelCache = .init(gpa, testing.io);
    const a = try cache.get(double);
    defer a.deinit();
    const b = try cache.get(double);
    defer b.deinit();
    try testing.expectEqual(a.shared, b.shared);
    var other = double;
    other.header = "// other";
    const c = try cache.get(other);
    defer c.deinit();
    try testing.expect(a.shared != c.shared);
    try testing.expectEqual(2, cache.count());
    other.name = "a b";
    try testing.expectError(error.InvalidArgument, cache.get(other));
    try testing.expectEqual(2, cache.count());
    cache.deinit();
    const x = try Array.fromSlice(f32, &.{3}, &.{1});
    defer x.deinit();
    const y = try launchDouble(a, x, 1, null);
    defer y.deinit();
    try testing.expectEqual(6, try y.item(f32));
}

test "many threads share a cache" {
    const Worker = struct {
        fn work(cache: *zmlx.KernelCache, failed: *std.atomic.Value(bool)) void {
            workOrFail(cache) catch failed.store(true, .release);
        }

        fn workOrFail(cache: *zmlx.KernelCache) !void {
            for (0..50) |i| {
                var names: [4]u8 = "k0_x".*;
                names[1] = '0' + @as(u8, @intCast(i % 5));
                var spec = double;
                spec.name = &names;
                const kernel = try cache.get(spec);
                defer kernel.deinit();
                if (!std.mem.startsWith(u8, kernel.fullName(), &names)) return error.Wrong;
                if (i > 5) continue;
                const x = try Array.fromSlice(f32, &.{ 1, 2 }, &.{2});
                defer x.deinit();
                const y = try launchDouble(kernel, x, 1, null);
                defer y.deinit();
                var data: [2]f32 = undefined;
                try y.copyTo(f32, &data);
                if (data[1] != 4) return error.Wrong;
            }
        }
    };
    // The testing allocator is thread-safe.
    var cache: zmlx.KernelCache = .init(gpa, testing.io);
    defer cache.deinit();
    var failed: std.atomic.Value(bool) = .init(false);
    var threads: [4]std.Thread = undefined;
    for (&threads) |*t| t.* = try std.Thread.spawn(.{}, Worker.work, .{ &cache, &failed });
    for (threads) |t| t.join();
    try testing.expect(!failed.load(.acquire));
    try testing.expectEqual(5, cache.count());
}
