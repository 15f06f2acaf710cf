//! Rotary position embedding, from the body that Python exports: what `zmlx/kernels/rope.py` plans.

const std = @import("std");
const arguments = @import("../arguments.zig");
const arrays = @import("../array.zig");
const table = @import("table.zig");
const errors = @import("../errors.zig");
const Array = arrays.Array;
const Context = @import("../context.zig").Context;
const Dtype = arrays.Dtype;
const Error = errors.Error;

/// Where the steps of an array lie: (B, *, L, D) or (B, L, *, D).
pub const Layout = enum { BHLD, BLHD };

pub const Options = struct {
    /// How many of the D elements turn, at most 131072; the rest is copied. Default: all.
    dims: ?i32 = null,
    /// Pair i is (2i, 2i + 1); else it is (i, i + dims / 2).
    traditional: bool = false,
    /// Of the frequencies. Default: 10000, unless `freqs` are given.
    base: ?f64 = null,
    /// Multiplies the positions.
    scale: f32 = 1,
    /// The position of the first step.
    offset: i64 = 0,
    /// (dims / 2,), wavelengths over 2π, in place of base.
    freqs: ?Array = null,
    /// The position of each step instead of `offset`: (L,), (B, L) or (1, L).
    positions: ?Array = null,
    layout: Layout = .BHLD,
};

/// y1 = x1 · cos θ - x2 · sin θ, y2 = x1 · sin θ + x2 · cos θ, θ = scale · position / freqs[i].
pub fn rope(context: *Context, x: Array, options: Options) Error!Array {
    return turn(context, x, options, 1);
}

/// The gradient of x: dy turned the other way.
pub fn ropeBackward(context: *Context, dy: Array, options: Options) Error!Array {
    return turn(context, dy, options, -1);
}

extern fn pow(f64, f64) f64;

/// The factors base^(-i / half) / 2π in two floats, one after the other.
fn paces(context: *Context, half: u32, base: f64) Error!Array {
    const factors = try context.gpa.alloc(f32, 2 * half);
    defer context.gpa.free(factors);
    for (0..half) |i| {
        const share = -@as(f64, @floatFromInt(i)) / @as(f64, @floatFromInt(half));
        const exact = pow(base, share) / (2.0 * std.math.pi);
        factors[i] = @floatCast(exact);
        factors[half + i] = @floatCast(exact - factors[i]);
    }
    return Array.fromSlice(f32, factors, &.{@intCast(2 * half)});
}

/// a / b, upwards.
fn ceil(a: u32, b: u32) u32 {
    return std.math.divCeil(u32, a, b) catch unreachable;
}

/// Runs of positions, at least, that threads share.
const RUNS = 16;

fn turn(context: *Context, x: Array, options: Options, direction: f32) Error!Array {
    const shape = x.shape();
    const heads_last = options.layout == .BLHD;
    errdefer |err| errors.note(err);
    try check(x, options);
    if (x.size() == 0) return Array.zeros(x.dtype(), shape);
    const d: u32 = @intCast(shape[shape.len - 1]);
    const batches: u32 = @intCast(shape[0]);
    const steps: u32 = @intCast(shape[if (heads_last) 1 else shape.len - 2]);
    var heads: u32 = 1;
    for (if (heads_last) shape[2 .. shape.len - 1] else shape[1 .. shape.len - 2]) |n| {
        heads *= @intCast(n);
    }
    const half: u32 = @intCast(@divExact(options.dims orelse @as(i32, @intCast(d)), 2));

    // Strides of the positions over batches and steps; a batch of one serves all.
    var per_batch: u32 = 0;
    var per_step: u32 = 0;
    if (options.positions) |p| {
        per_step = 1;
        if (p.ndim() == 2 and p.shape()[0] != 1) per_batch = steps;
    }
    const cpu = context.kind == .cpu;
    const lanes: u32 = if (cpu) 1 else @min(32, std.math.ceilPowerOfTwoAssert(u32, half));
    // Rows of a head follow each other for long; the table stays in the second cache.
    const least: u32 = if (!cpu or heads_last) 1 else @max(1, @min(16, 1024 / half));
    const block: u32 = if (least == 1) 1 else @max(1, @min(128, 8192 / half));
    const run = @min(block, @max(least, ceil(batches * steps, RUNS)));
    const blocks = ceil(batches * steps, run);
    // As few threads as fill a GPU: a thread that has more heads computes fewer cosines.
    const share = if (cpu) heads else 4;
    const group = if (cpu) 1 else @min(256 / lanes, @max(blocks, 1));

    var held: [5]Array = undefined;
    var count: usize = 0;
    defer for (held[0..count]) |a| a.deinit();
    held[0] = if (options.positions) |p|
        try p.clone()
    else if (std.math.cast(i32, options.offset)) |small|
        try Array.fromSlice(i32, &.{small}, &.{1})
    else
        try Array.fromSlice(i64, &.{options.offset}, &.{1});
    count = 1;
    held[1] = if (options.freqs) |f|
        try f.clone()
    else
        try paces(context, half, options.base orelse 10000);
    count = 2;
    held[2] = try Array.scalar(f32, options.scale);
    count = 3;
    held[3] = try Array.scalar(f32, direction);
    count = 4;
    held[4] = try Array.fromSlice(u32, &.{
        batches * steps,
        steps,
        0,
        per_batch,
        per_step,
        heads,
        heads * steps,
        if (heads_last) heads else 1,
        if (heads_last) 1 else steps,
        share,
        run,
    }, &.{11});
    count = 5;

    const kernel = try context.body(&table.catalogue.rope);
    defer kernel.deinit();
    var y: [1]Array = undefined;
    try kernel.launch(&.{ x, held[0], held[1], held[2], held[3], held[4] }, .{
        .template = &.{
            .{ .name = "T", .value = .{ .dtype = x.dtype() } },
            .{ .name = "D", .value = .{ .int = @intCast(d) } },
            .{ .name = "TOGETHER", .value = .{ .int = if (heads % 2 == 0) 2 else 1 } },
            .{ .name = "HALF", .value = .{ .int = @intCast(half) } },
            .{ .name = "PAIRS", .value = .{ .int = @intCast(ceil(half, lanes)) } },
            .{ .name = "LANES", .value = .{ .int = @intCast(lanes) } },
            .{ .name = "BLOCK", .value = .{ .int = @intCast(block) } },
            .{ .name = "TRADITIONAL", .value = .{ .bool = options.traditional } },
            .{ .name = "GIVEN", .value = .{ .bool = options.freqs != null } },
            .{
                .name = "FURTHER",
                .value = .{ .int = if (options.freqs != null) 0 else @intCast(half) },
            },
            .{ .name = "COUNTS", .value = .{ .bool = options.positions == null } },
        },
        .grid = .{ lanes, blocks, ceil(heads, @max(share, 1)) },
        .threadgroup = .{ lanes, group, 1 },
        .output_shapes = &.{shape},
        .output_dtypes = &.{x.dtype()},
    }, &y);
    return y[0];
}

fn check(x: Array, options: Options) Error!void {
    const shape = x.shape();
    try arguments.checkFloating("rope", "x", x);
    if (shape.len < 3) return errors.invalid(
        "[rope] 'x' must have shape (B, *, L, D) but got {f}.",
        .{arguments.Shape{ .sizes = shape }},
    );
    const d = shape[shape.len - 1];
    const batches = shape[0];
    const steps = shape[if (options.layout == .BLHD) 1 else shape.len - 2];
    const dims = options.dims orelse d;
    const most = @min(d, table.catalogue.rope_most_dims);
    if (@mod(dims, 2) != 0 or dims < 2 or dims > most) return errors.invalid(
        "[rope] 'dims' must be even and in [2, {d}] but got {d}.",
        .{ most, dims },
    );
    if (options.freqs) |freqs| {
        try arguments.checkShape("rope", "freqs", freqs, &.{@divExact(dims, 2)});
        if (options.base) |base| return errors.invalid(
            "[rope] 'base' must be None where freqs are given but got {f}.",
            .{arguments.number(base)},
        );
    } else if (options.base) |base| try arguments.checkPositive("rope", "base", base);
    if (options.positions) |p| {
        if (options.offset != 0) return errors.invalid(
            "[rope] 'offset' must be 0 where positions are given but got {d}.",
            .{options.offset},
        );
        const dtypes = [_]Dtype{ .int32, .uint32, .int64, .float32 };
        try arguments.checkDtype("rope", "positions", p, &dtypes);
        const s = p.shape();
        const fits = switch (s.len) {
            1 => s[0] == steps,
            2 => (s[0] == batches or s[0] == 1) and s[1] == steps,
            else => false,
        };
        if (!fits) return errors.invalid(
            "[rope] 'positions' must have shape ({d},) or ({d}, {d}) but got {f}.",
            .{ steps, batches, steps, arguments.Shape{ .sizes = s } },
        );
    } else if (options.offset > std.math.maxInt(i64) - @as(i64, steps)) return errors.invalid(
        "[rope] 'offset' must be a position of 64 bits but got {d}.",
        .{options.offset},
    );
    try arguments.checkFinite("rope", "scale", options.scale);
    // Where x is empty, the kernel is given its other axes.
    var rows: u64 = 1;
    for (shape[0 .. shape.len - 1]) |n| rows *|= @intCast(@max(n, 1));
    if (rows >= 1 << 32) return errors.invalid(
        "[rope] 'x' must have fewer than 2^32 rows, with 1 for an axis of 0, but got {f}.",
        .{arguments.Shape{ .sizes = shape }},
    );
}
