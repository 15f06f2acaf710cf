//! Ops of the catalogue.

const std = @import("std");
const zmlx = @import("zmlx");
const Array = zmlx.Array;
const Dtype = zmlx.Dtype;
const ops = zmlx.catalogue;
const testing = std.testing;
const gpa = testing.allocator;

/// The shapes of `zmlx.registry.ROWS`: see there why each is in.
const rows = [_][]const i32{
    &.{ 3, 1 },    &.{ 2, 3, 5 }, &.{ 7, 31 },         &.{ 1, 32 }, &.{ 5, 129 },
    &.{ 9, 515 },  &.{ 300, 65 }, &.{ 2, 2, 3, 1024 }, &.{40},      &.{ 0, 16 },
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

test "losses of 2^31 rows are refused where they are reduced" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const zero = try Array.zeros(.float32, &.{ 1, 1, 1 });
    defer zero.deinit();
    const target = try Array.zeros(.int32, &.{ 1, 1 });
    defer target.deinit();
    const logits = try zero.broadcastTo(&.{ 2, 1 << 30, 1 });
    defer logits.deinit();
    const targets = try target.broadcastTo(&.{ 2, 1 << 30 });
    defer targets.deinit();
    try testing.expectError(
        error.InvalidArgument,
        ops.crossEntropy(&context, logits, targets, .{}),
    );
    try testing.expectEqualStrings(
        "[cross_entropy] 'targets' must be fewer than 2^31 where losses are reduced " ++
            "but got (2, 1073741824).",
        zmlx.lastError(),
    );
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

test "a backward refuses what another norm gave" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const x = try Array.zeros(.float32, &.{ 2, 5 });
    defer x.deinit();
    const normed = try ops.layerNormTraining(&context, x, null, null, 1e-5);
    defer normed.deinit();
    try testing.expectError(
        error.InvalidArgument,
        ops.rmsNormBackward(&context, x, null, normed, x),
    );
    try testing.expectEqualStrings(
        "[rms_norm] 'normed' must be what rms_norm gave but has statistics of another norm.",
        zmlx.lastError(),
    );
}

test "numbers out of range are refused with Python's text" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    const x = try Array.zeros(.float32, &.{ 2, 5, 8 });
    defer x.deinit();
    const freqs = try Array.zeros(.float32, &.{4});
    defer freqs.deinit();
    const nan = std.math.nan(f32);
    const inf = std.math.inf(f32);
    inline for (.{
        .{ -100, "at least 0 but got -100." },
        .{ -1e-5, "at least 0 but got -1e-05." },
        .{ nan, "at least 0 but got nan." },
        .{ inf, "finite but got inf." },
    }) |case| {
        inline for (.{ ops.rmsNorm, ops.rmsNormTraining }) |op| {
            try testing.expectError(error.InvalidArgument, op(&context, x, null, case[0]));
            const wanted = "[rms_norm] 'eps' must be " ++ case[1];
            try testing.expectEqualStrings(wanted, zmlx.lastError());
        }
        inline for (.{ ops.layerNorm, ops.layerNormTraining }) |op| {
            try testing.expectError(error.InvalidArgument, op(&context, x, null, null, case[0]));
            const wanted = "[layer_norm] 'eps' must be " ++ case[1];
            try testing.expectEqualStrings(wanted, zmlx.lastError());
        }
    }
    for ([_]struct { ops.RopeOptions, []const u8 }{
        .{ .{ .base = inf }, "'base' must be positive and finite but got inf." },
        .{ .{ .base = nan }, "'base' must be positive and finite but got nan." },
        .{ .{ .base = -0.5 }, "'base' must be positive and finite but got -0.5." },
        .{ .{ .base = 1e-50 }, "'base' must be positive and finite but got 1e-50." },
        .{ .{ .base = 1e39 }, "'base' must be positive and finite but got 1e+39." },
        .{ .{ .scale = -inf }, "'scale' must be finite but got -inf." },
        .{
            .{ .offset = std.math.maxInt(i64) - 4 },
            "'offset' must be a position of 64 bits but got 9223372036854775803.",
        },
        .{
            .{ .base = 500, .freqs = freqs },
            "'base' must be None where freqs are given but got 500.",
        },
    }) |case| {
        for ([_]@TypeOf(&ops.rope){ ops.rope, ops.ropeBackward }) |op| {
            try testing.expectError(error.InvalidArgument, op(&context, x, case[0]));
            try testing.expectEqualStrings(case[1], zmlx.lastError()["[rope] ".len..]);
        }
    }
}

test "rope of nothing is nothing" {
    var context: zmlx.Context = .init(gpa, testing.io);
    defer context.deinit();
    for ([_][]const i32{ &.{ 0, 2, 3, 2, 8 }, &.{ 2, 0, 3, 8 } }) |shape| {
        const x = try Array.zeros(.float32, shape);
        defer x.deinit();
        const y = try ops.rope(&context, x, .{});
        defer y.deinit();
        try y.eval();
        try testing.expectEqualSlices(i32, shape, y.shape());
    }
}

test "the kernels of the catalogue have the names that Python gives them" {
    var arena_state: std.heap.ArenaAllocator = .init(gpa);
    defer arena_state.deinit();
    const arena = arena_state.allocator();
    try testing.expectEqualStrings(
        ops.catalogue.rope_full_name,
        try ops.catalogue.rope.fullName(arena),
    );
    for (ops.catalogue.kernels) |entry| {
        const spec = try entry.kernel.spec(arena);
        try testing.expectEqualStrings(entry.full_name, try spec.fullName(arena));
    }
}
