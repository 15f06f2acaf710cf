//! Tests of arrays, kernels and ops, on this machine's target. Texts are compared with Python's by
//! `tests/test_zig_codegen.py`, and values by `tests/test_zig.py`.

const std = @import("std");
const zmlx = @import("zmlx");
const Array = zmlx.Array;
const Dtype = zmlx.Dtype;
const KernelSpec = zmlx.KernelSpec;
const ops = zmlx.catalogue;
const testing = std.testing;
const gpa = testing.allocator;

// ---- arrays -------------------------------------------------------------------------------------

test "elements of every dtype come back as they went in" {
    inline for (.{ bool, u8, u16, u32, u64, i8, i16, i32, i64, f16, f32, f64 }) |T| {
        var data: [6]T = undefined;
        for (&data, 0..) |*x, i| x.* = switch (@typeInfo(T)) {
            .bool => i % 2 == 1,
            .int => if (i == 5) std.math.maxInt(T) else @intCast(i),
            else => @as(T, @floatFromInt(i)) - 2.5,
        };
        const a = try Array.fromSlice(T, &data, &.{ 2, 3 });
        defer a.deinit();
        try testing.expectEqual(Dtype.of(T), a.dtype());
        try testing.expectEqualSlices(i32, &.{ 2, 3 }, a.shape());
        const back = try a.toOwnedSlice(gpa, T);
        defer gpa.free(back);
        try testing.expectEqualSlices(T, &data, back);
    }
}

test "bfloat16 rounds to the nearest even as MLX does" {
    const values = [_]f32{ 0, -0.0, 1, 1.00390625, 1.01171875, 3.4e38, 1e-40, std.math.inf(f32) };
    const a = try Array.fromSlice(f32, &values, &.{values.len});
    defer a.deinit();
    const b = try a.astype(.bfloat16);
    defer b.deinit();
    var theirs: [values.len]zmlx.Bfloat16 = undefined;
    try b.copyTo(zmlx.Bfloat16, &theirs);
    for (values, theirs) |x, t| try testing.expectEqual(t, zmlx.Bfloat16.fromFloat(x));
    try testing.expect(std.math.isNan(zmlx.Bfloat16.fromFloat(std.math.nan(f32)).toFloat()));
}

test "a 0-d and an empty array" {
    const one = try Array.scalar(i64, -7);
    defer one.deinit();
    try testing.expectEqual(0, one.ndim());
    try testing.expectEqual(-7, try one.item(i64));
    const none = try Array.fromSlice(f32, &.{}, &.{ 0, 3 });
    defer none.deinit();
    try none.eval();
    try testing.expectEqual(0, none.size());
}

test "data that does not fit its shape is refused" {
    try testing.expectError(error.InvalidArgument, Array.fromSlice(f32, &.{ 1, 2 }, &.{3}));
    try testing.expectEqualStrings(
        "[Array] 'data' must have as many elements as the shape { 3 } but got 2.",
        zmlx.lastError(),
    );
    try testing.expectError(error.InvalidArgument, Array.fromSlice(f32, &.{}, &.{-1}));
    try testing.expectError(error.InvalidArgument, Array.fromSlice(f32, &.{}, &([_]i32{1 << 30} ** 4)));
    const a = try Array.scalar(f32, 1);
    defer a.deinit();
    try testing.expectError(error.InvalidArgument, a.item(i32));
}

test "a clone outlives what it was made of, and a view is read in row-major order" {
    const a = try Array.fromSlice(i32, &.{ 1, 2, 3, 4, 5, 6 }, &.{ 2, 3 });
    const b = try a.clone();
    a.deinit();
    defer b.deinit();
    const t = try b.transpose();
    defer t.deinit();
    var data: [6]i32 = undefined;
    try t.copyTo(i32, &data);
    try testing.expectEqualSlices(i32, &.{ 1, 4, 2, 5, 3, 6 }, &data);
}

test "an operation that cannot be is an error with MLX's text" {
    const a = try Array.zeros(.float32, &.{ 2, 3 });
    defer a.deinit();
    try testing.expectError(error.InvalidArgument, a.matmul(a));
    try testing.expect(std.mem.find(u8, zmlx.lastError(), "matmul") != null);
    try testing.expectError(error.InvalidArgument, a.reshape(&.{7}));
}

// ---- kernels ------------------------------------------------------------------------------------

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
    spec.name = "2x";
    try testing.expectError(error.InvalidArgument, zmlx.MetalKernel.create(gpa, spec));
    try testing.expectEqualStrings(
        "[kernel] 'name' must be an identifier but got '2x'.",
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
    bad = good;
    bad.threadgroup = .{ 2048, 1, 1 };
    try testing.expectError(error.InvalidArgument, kernel.launch(&.{x}, bad, &y));
    try testing.expect(std.mem.find(u8, zmlx.lastError(), "'threadgroup' must hold at most 1024") != null);
    bad = good;
    bad.grid = .{ 1 << 31, 1, 1 };
    try testing.expectError(error.InvalidArgument, kernel.launch(&.{x}, bad, &y));
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

// ---- ops ----------------------------------------------------------------------------------------

/// The shapes of `zmlx.registry.ROWS`: see there why each is in.
const rows = [_][]const i32{
    &.{ 3, 1 },   &.{ 2, 3, 5 }, &.{ 7, 31 },         &.{ 1, 32 }, &.{ 5, 129 },
    &.{ 9, 515 }, &.{ 300, 65 }, &.{ 2, 2, 3, 1024 }, &.{40},      &.{ 0, 16 },
    &.{ 3, 4097 },
};
const floating = [_]Dtype{ .float32, .float16, .bfloat16 };

fn eps(dtype: Dtype) f64 {
    return switch (dtype) {
        .float16 => 0x1p-10,
        .bfloat16 => 0x1p-7,
        else => 0x1p-23,
    };
}

/// Normally distributed numbers, rounded to the dtype.
fn drawn(random: std.Random, shape: []const i32, dtype: Dtype) !Array {
    var count: usize = 1;
    for (shape) |n| count *= @intCast(n);
    const data = try gpa.alloc(f32, count);
    defer gpa.free(data);
    for (data) |*x| x.* = random.floatNorm(f32);
    const a = try Array.fromSlice(f32, data, shape);
    defer a.deinit();
    return a.astype(dtype);
}

/// The elements as float64.
fn wide(a: Array) ![]f64 {
    const b = try a.astype(.float32);
    defer b.deinit();
    const data = try b.toOwnedSlice(gpa, f32);
    defer gpa.free(data);
    const result = try gpa.alloc(f64, data.len);
    for (result, data) |*to, x| to.* = x;
    return result;
}

fn expectClose(expected: []const f64, a: Array) !void {
    const got = try wide(a);
    defer gpa.free(got);
    var largest: f64 = 0;
    for (expected) |x| largest = @max(largest, @abs(x));
    for (expected, got) |x, y| try testing.expect(@abs(x - y) <= 6 * eps(a.dtype()) * largest);
}

test "softmax and its gradient against float64" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    var prng: std.Random.DefaultPrng = .init(1);
    for ([_]zmlx.launch.Kind{ .cpu, .gpu }) |kind| for (floating) |dtype| for (rows) |shape| {
        // Groups that meet at barriers are slow on the CPU: one dtype shows that they are right.
        if (kind == .gpu and dtype != .float32) continue;
        context.kind = kind;
        const x = try drawn(prng.random(), shape, dtype);
        defer x.deinit();
        const dy = try drawn(prng.random(), shape, dtype);
        defer dy.deinit();
        const y = try ops.softmax(&context, x);
        defer y.deinit();
        const dx = try ops.softmaxBackward(&context, y, dy);
        defer dx.deinit();
        try testing.expectEqualSlices(i32, shape, y.shape());
        try testing.expectEqual(dtype, y.dtype());

        const want = try wide(x);
        defer gpa.free(want);
        const gradient = try wide(dy);
        defer gpa.free(gradient);
        const rounded = try wide(y);
        defer gpa.free(rounded);
        const d: usize = @intCast(shape[shape.len - 1]);
        var first: usize = 0;
        while (first < want.len) : (first += d) {
            const row = want[first..][0..d];
            const high = std.mem.max(f64, row);
            var total: f64 = 0;
            for (row) |*v| {
                v.* = @exp(v.* - high);
                total += v.*;
            }
            for (row) |*v| v.* /= total;
            var dot: f64 = 0;
            for (rounded[first..][0..d], gradient[first..][0..d]) |v, g| dot += v * g;
            for (rounded[first..][0..d], gradient[first..][0..d]) |v, *g| g.* = v * (g.* - dot);
        }
        try expectClose(want, y);
        try expectClose(gradient, dx);
    };
}

test "rms_norm against float64" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    var prng: std.Random.DefaultPrng = .init(2);
    for (floating) |dtype| for (rows) |shape| {
        const d: usize = @intCast(shape[shape.len - 1]);
        const x = try drawn(prng.random(), shape, dtype);
        defer x.deinit();
        const weight = try drawn(prng.random(), shape[shape.len - 1 ..], dtype);
        defer weight.deinit();
        const y = try ops.rmsNorm(&context, x, weight, 1e-5);
        defer y.deinit();
        const want = try wide(x);
        defer gpa.free(want);
        const w = try wide(weight);
        defer gpa.free(w);
        var first: usize = 0;
        while (first < want.len) : (first += d) {
            var squares: f64 = 0;
            for (want[first..][0..d]) |v| squares += v * v;
            const scale = 1 / @sqrt(squares / @as(f64, @floatFromInt(d)) + 1e-5);
            for (want[first..][0..d], w) |*v, by| v.* *= scale * by;
        }
        try expectClose(want, y);
    };
}

/// The sum of f(x + h e_i) - f(x - h e_i) over 2 h: what the gradients of every op are checked by.
fn slope(
    context: *zmlx.Context,
    loss: *const fn (*zmlx.Context, []const Array, Array) anyerror!f64,
    list: []Array,
    dy: Array,
    which: usize,
    index: usize,
) !f64 {
    const h = 1e-2;
    const kept = list[which];
    const data = try kept.toOwnedSlice(gpa, f32);
    defer gpa.free(data);
    var ends: [2]f64 = undefined;
    for (&ends, [_]f32{ -h, h }) |*end, step| {
        const before = data[index];
        data[index] += step;
        defer data[index] = before;
        list[which] = try Array.fromSlice(f32, data, kept.shape());
        defer {
            list[which].deinit();
            list[which] = kept;
        }
        end.* = try loss(context, list, dy);
    }
    return (ends[1] - ends[0]) / (2 * h);
}

fn weighted(y: Array, dy: Array) !f64 {
    defer y.deinit();
    const a = try wide(y);
    defer gpa.free(a);
    const b = try wide(dy);
    defer gpa.free(b);
    var total: f64 = 0;
    for (a, b) |v, g| total += v * g;
    return total;
}

const losses = struct {
    fn rmsNorm(context: *zmlx.Context, l: []const Array, dy: Array) anyerror!f64 {
        return weighted(try ops.rmsNorm(context, l[0], l[1], 1e-5), dy);
    }
    fn layerNorm(context: *zmlx.Context, l: []const Array, dy: Array) anyerror!f64 {
        return weighted(try ops.layerNorm(context, l[0], l[1], l[2], 1e-5), dy);
    }
    fn swiglu(context: *zmlx.Context, l: []const Array, dy: Array) anyerror!f64 {
        return weighted(try ops.swiglu(context, .{
            .gate = l[0],
            .up = l[1],
            .gate_bias = l[2],
            .up_bias = l[3],
        }), dy);
    }
};

fn expectSlopes(
    context: *zmlx.Context,
    loss: *const fn (*zmlx.Context, []const Array, Array) anyerror!f64,
    list: []Array,
    dy: Array,
    gradients: []const Array,
) !void {
    for (gradients, 0..) |gradient, which| {
        try testing.expectEqualSlices(i32, list[which].shape(), gradient.shape());
        const got = try wide(gradient);
        defer gpa.free(got);
        for ([_]usize{ 0, got.len / 2, got.len - 1 }) |index| {
            const want = try slope(context, loss, list, dy, which, index);
            // The error of the difference, h² times the third derivative, and of float32 over h.
            try testing.expectApproxEqAbs(want, got[index], 5e-3 * @max(1, @abs(want)));
        }
    }
}

test "gradients of rms_norm, layer_norm and swiglu are slopes" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    var prng: std.Random.DefaultPrng = .init(3);
    const random = prng.random();
    const shape = [_]i32{ 6, 37 };
    const dy = try drawn(random, &shape, .float32);
    defer dy.deinit();
    var list: [4]Array = undefined;
    for (&list, 0..) |*a, i| a.* = try drawn(random, if (i == 0) &shape else shape[1..], .float32);
    defer for (list) |a| a.deinit();
    {
        const normed = try ops.rmsNormTraining(&context, list[0], list[1], 1e-5);
        defer normed.deinit();
        const g = try ops.rmsNormBackward(&context, list[0], list[1], normed, dy);
        defer g.deinit();
        try expectSlopes(&context, losses.rmsNorm, &list, dy, &.{ g.dx, g.dweight.? });
    }
    {
        const normed = try ops.layerNormTraining(&context, list[0], list[1], list[2], 1e-5);
        defer normed.deinit();
        const g = try ops.layerNormBackward(&context, list[0], list[1], list[2], normed, dy);
        defer g.deinit();
        try expectSlopes(&context, losses.layerNorm, &list, dy, &.{ g.dx, g.dweight.?, g.dbias.? });
    }
    const up = try drawn(random, &shape, .float32);
    var pair = [_]Array{ list[0], up, list[2], list[3] };
    defer up.deinit();
    const g = try ops.swigluBackward(&context, .{
        .gate = pair[0],
        .up = pair[1],
        .gate_bias = pair[2],
        .up_bias = pair[3],
    }, dy);
    defer g.deinit();
    const gradients = [_]Array{ g.gate, g.up, g.gate_bias.?, g.up_bias.? };
    try expectSlopes(&context, losses.swiglu, &pair, dy, &gradients);
}

test "cross_entropy: values, ignored rows, gradient" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    // Logits log p give the loss -log p[target].
    const data = [_]f32{ @log(0.5), @log(0.25), @log(0.25), @log(0.1), @log(0.2), @log(0.7) };
    const logits = try Array.fromSlice(f32, &data, &.{ 2, 3 });
    defer logits.deinit();
    const targets = try Array.fromSlice(i32, &.{ 1, 2 }, &.{2});
    defer targets.deinit();
    const wants = [_]f32{ -@log(0.25), -@log(0.7), (-@log(0.25) - @log(0.7)) / 2.0 };
    const mean = try ops.crossEntropy(&context, logits, targets, .{});
    defer mean.deinit();
    try testing.expectApproxEqRel(wants[2], try mean.item(f32), 1e-6);

    const options: ops.CrossEntropyOptions = .{ .ignore_index = 1 };
    const loss = try ops.crossEntropyTraining(&context, logits, targets, options);
    defer loss.deinit();
    try testing.expectApproxEqRel(wants[1], try loss.loss.item(f32), 1e-6);
    const one = try Array.scalar(f32, 1);
    defer one.deinit();
    const dx = try ops.crossEntropyBackward(&context, logits, targets, loss, one, options);
    defer dx.deinit();
    try expectClose(&.{ 0, 0, 0, 0.1, 0.2, -0.3 }, dx);
}

test "a target out of range is reported when the loss is evaluated" {
    if (zmlx.target() == .gpu) return; // a GPU gives NaN
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const logits = try Array.zeros(.float32, &.{ 2, 3 });
    defer logits.deinit();
    const targets = try Array.fromSlice(i32, &.{ 0, 3 }, &.{2});
    defer targets.deinit();
    const loss = try ops.crossEntropy(&context, logits, targets, .{});
    defer loss.deinit();
    try testing.expectError(error.MlxFailure, loss.eval());
    try testing.expect(std.mem.startsWith(u8, zmlx.lastError(), "[cross_entropy]"));
}

test "wrong shapes and dtypes are refused with Python's text" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const x = try Array.zeros(.float32, &.{ 2, 5 });
    defer x.deinit();
    const weight = try Array.zeros(.float32, &.{4});
    defer weight.deinit();
    const whole = try Array.zeros(.int32, &.{ 2, 5 });
    defer whole.deinit();
    const point = try Array.scalar(f32, 1);
    defer point.deinit();
    try testing.expectError(error.InvalidArgument, ops.rmsNorm(&context, x, weight, 1e-5));
    try testing.expectEqualStrings(
        "[rms_norm] 'weight' must have shape (5,) but got (4,).",
        zmlx.lastError(),
    );
    try testing.expectError(error.InvalidArgument, ops.softmax(&context, whole));
    try testing.expectEqualStrings(
        "[softmax] 'x' must have dtype float32, float16 or bfloat16 but got int32.",
        zmlx.lastError(),
    );
    try testing.expectError(error.InvalidArgument, ops.softmax(&context, point));
    try testing.expectEqualStrings(
        "[softmax] 'x' must have shape (*, D) but got ().",
        zmlx.lastError(),
    );
    try testing.expectError(
        error.InvalidArgument,
        ops.swiglu(&context, .{ .gate = x, .up = weight }),
    );
    try testing.expectError(error.InvalidArgument, ops.softmaxBackward(&context, x, weight));
}

test "the kernels of the catalogue have the names that Python gives them" {
    var arena_state: std.heap.ArenaAllocator = .init(gpa);
    defer arena_state.deinit();
    const arena = arena_state.allocator();
    for (ops.catalogue.kernels) |entry| {
        const spec = try entry.kernel.spec(arena);
        try testing.expectEqualStrings(entry.full_name, try spec.fullName(arena));
    }
}

test {
    _ = @import("expression.zig");
}
