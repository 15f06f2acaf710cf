//! The demo: `zig build run -- EXPRESSION TEXT_FILE`.
//!
//! Makes a kernel of an expression in x, shows its Metal source, runs, checks and times it. Then it
//! learns to continue a text: softmax regression of the next character on the two before it.

const std = @import("std");
const zmlx = @import("zmlx");
const expression = @import("expression.zig");
const regression = @import("regression.zig");
const Allocator = std.mem.Allocator;
const Array = zmlx.Array;
const Writer = std.Io.Writer;

const usage =
    \\usage: zmlx-demo [EXPRESSION [TEXT_FILE]]
    \\
    \\  EXPRESSION  in x, as Metal has it: "x * tanh(zmlx_softplus(x))", "x > 0.0f ? x : 0.1f * x"
    \\  TEXT_FILE   to learn from
    \\
;

pub fn main(init: std.process.Init) !void {
    var buffer: [4096]u8 = undefined;
    var out: std.Io.File.Writer = .initStreaming(.stdout(), init.io, &buffer);
    const w = &out.interface;
    const arena = init.arena.allocator();
    const arguments = try init.minimal.args.toSlice(arena);
    const first = if (arguments.len > 1) arguments[1] else "";
    const asked = std.mem.eql(u8, first, "-h") or std.mem.eql(u8, first, "--help");
    if (asked or arguments.len > 3 or std.mem.startsWith(u8, first, "--")) {
        try w.writeAll(usage);
        try w.flush();
        std.process.exit(if (asked) 0 else 2);
    }
    const text = if (arguments.len > 1) arguments[1] else "x * tanh(zmlx_softplus(x))";

    var parser: expression.Parser = .{ .arena = arena, .text = text };
    const checked = parser.parse() catch |err| {
        if (err == error.Syntax) try w.print("[demo] {s}.\n", .{parser.reason});
        try w.flush();
        std.process.exit(2);
    };
    var context: zmlx.Context = .init(init.gpa, init.io);
    defer context.deinit();
    try w.print("zmlx in Zig, on MLX {s}, target {t}\n\n", .{ zmlx.mlxVersion(), zmlx.target() });
    const done = demo: {
        showKernel(init, &context, text, checked, w) catch |err| break :demo err;
        if (arguments.len > 2) {
            regression.run(init, &context, arguments[2], w) catch |err| break :demo err;
        } else {
            try w.writeAll("Name a text file as second argument to see it learn from that.\n");
        }
    };
    done catch |err| {
        try w.print("\n[demo] {t}: {s}\n", .{ err, zmlx.lastError() });
        try w.flush();
        std.process.exit(1);
    };
    try w.flush();
}

fn seconds(io: std.Io, start: std.Io.Timestamp) f64 {
    const spent = start.durationTo(std.Io.Clock.awake.now(io));
    return @as(f64, @floatFromInt(spent.toNanoseconds())) / 1e9;
}

/// Makes a kernel, shows it, and holds it against a plain loop.
fn showKernel(
    init: std.process.Init,
    context: *zmlx.Context,
    text: []const u8,
    checked: *const expression.Expression,
    w: *Writer,
) !void {
    const io = init.io;
    const arena = init.arena.allocator();
    const kernel: zmlx.PatternKernel = .{
        .name = "demo",
        .pattern = .{ .elementwise = try zmlx.codegen.named.elementwiseUnary(arena, text) },
        .dtypes = &.{.{ .promotion = &.{"x"} }},
        .header = try zmlx.msl.headerFor(arena, text),
    };
    const spec = try kernel.spec(arena);
    try w.print("y = {s}\n\n{s}// {s}({s}) -> {s}\n{s}\n", .{
        text,
        spec.header,
        try spec.fullName(arena),
        try std.mem.join(arena, ", ", spec.input_names),
        try std.mem.join(arena, ", ", spec.output_names),
        spec.body,
    });
    try w.flush();

    const count = 1 << 20;
    const data = try arena.alloc(f32, count);
    for (data, 0..) |*x, i| x.* = 16 * (@as(f32, @floatFromInt(i)) / count) - 8;
    const x = try Array.fromSlice(f32, data, &.{count});
    defer x.deinit();
    var start = std.Io.Clock.awake.now(io);
    const first = try context.one(&kernel, &.{x});
    defer first.deinit();
    try first.eval();
    try w.print("first launch, compiler included   {d:9.3} ms\n", .{1e3 * seconds(io, start)});

    var times: [31]f64 = undefined;
    for (&times) |*time| {
        start = std.Io.Clock.awake.now(io);
        const y = try context.one(&kernel, &.{x});
        defer y.deinit();
        try y.eval();
        time.* = seconds(io, start);
    }
    std.mem.sort(f64, &times, {}, std.sort.asc(f64));
    const median = times[times.len / 2];
    try w.print("launch, {d} elements          {d:9.3} ms  {d:.1} GB/s\n", .{
        count, 1e3 * median, 8 * count / median / 1e9,
    });

    const y = try first.toOwnedSlice(arena, f32);
    start = std.Io.Clock.awake.now(io);
    var worst: f64 = 0;
    var at: f64 = 0;
    var differing: usize = 0;
    for (data, y) |from, to| {
        const want = checked.at(from);
        if (std.math.isFinite(want) != std.math.isFinite(to)) differing += 1;
        const difference = @abs(want - to) / @max(1, @abs(want));
        if (difference > worst) {
            worst = difference;
            at = from;
        }
    }
    try w.print("a plain loop in float64           {d:9.3} ms\n", .{1e3 * seconds(io, start)});
    try w.print("largest difference                {e:9.2}     at x = {d:.4}\n", .{ worst, at });
    if (differing > 0) {
        try w.print("{d} elements are finite in one and not in the other\n", .{differing});
    }
    try w.writeByte('\n');
    try w.flush();
}
