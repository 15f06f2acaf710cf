//! Softmax regression on a text: the next character from the two before it.

const std = @import("std");
const zmlx = @import("zmlx");
const Array = zmlx.Array;
const Context = zmlx.Context;
const Writer = std.Io.Writer;

const context_length = 2;
const batch = 512;
const steps = 400;
const learning_rate = 4.0;

/// w - lr · g, a kernel like any other; lr is an input, so that a schedule compiles nothing new.
const update: zmlx.PatternKernel = .{
    .name = "descend",
    .pattern = .{ .elementwise = .{
        .inputs = &.{
            .{ .name = "w", .kind = .full },
            .{ .name = "g", .kind = .full },
            .{ .name = "lr", .kind = .scalar },
        },
        .outputs = &.{.{ .name = "next", .expr = "w - lr * g", .kind = .full }},
    } },
    .dtypes = &.{.{ .promotion = &.{"w"} }},
};

/// A text as numbers of its characters.
const Text = struct {
    numbers: []const u16,
    characters: []const u8,

    fn of(arena: std.mem.Allocator, bytes: []const u8) !Text {
        var known: [256]?u16 = @splat(null);
        var characters: std.ArrayList(u8) = .empty;
        const numbers = try arena.alloc(u16, bytes.len);
        for (numbers, bytes) |*number, byte| {
            if (known[byte] == null) {
                known[byte] = @intCast(characters.items.len);
                try characters.append(arena, byte);
            }
            number.* = known[byte].?;
        }
        return .{ .numbers = numbers, .characters = characters.items };
    }

    fn classes(text: Text) usize {
        return text.characters.len;
    }

    /// One-hot rows of the characters before each position, and the characters there.
    fn examples(
        text: Text,
        positions: []const usize,
        rows: []f32,
        targets: []i32,
    ) !struct { Array, Array } {
        const width = context_length * text.classes();
        @memset(rows, 0);
        for (positions, targets, 0..) |at, *target, r| {
            for (0..context_length) |k| {
                rows[r * width + k * text.classes() + text.numbers[at - 1 - k]] = 1;
            }
            target.* = text.numbers[at];
        }
        const count: i32 = @intCast(positions.len);
        const x = try Array.fromSlice(f32, rows, &.{ count, @intCast(width) });
        errdefer x.deinit();
        return .{ x, try Array.fromSlice(i32, targets, &.{count}) };
    }
};

pub fn run(
    init: std.process.Init,
    context: *Context,
    path: []const u8,
    w: *Writer,
) !void {
    const arena = init.arena.allocator();
    const most: std.Io.Limit = .limited(1 << 26);
    const bytes = std.Io.Dir.cwd().readFileAlloc(init.io, path, arena, most) catch |err| {
        try w.print("[demo] cannot read '{s}': {t}\n", .{ path, err });
        try w.flush();
        std.process.exit(2);
    };
    if (bytes.len < 1000) {
        try w.print(
            "[demo] '{s}' must have at least 1000 bytes but got {d}.\n",
            .{ path, bytes.len },
        );
        try w.flush();
        std.process.exit(2);
    }
    const text: Text = try .of(arena, bytes);
    const width = context_length * text.classes();
    // The last tenth is for the test.
    const split = bytes.len - bytes.len / 10;
    try w.print("softmax regression on {s}: {d} characters, {d} different ones\n\n", .{
        path, bytes.len, text.classes(),
    });

    const rows = try arena.alloc(f32, batch * width);
    const targets = try arena.alloc(i32, batch);
    const positions = try arena.alloc(usize, batch);
    var prng: std.Random.DefaultPrng = .init(0);
    const random = prng.random();
    const one = try Array.scalar(f32, 1);
    defer one.deinit();
    var weights = try Array.zeros(.float32, &.{ @intCast(width), @intCast(text.classes()) });
    defer weights.deinit();
    const start = std.Io.Clock.awake.now(init.io);
    for (0..steps + 1) |step| {
        for (positions) |*at| at.* = random.intRangeLessThan(usize, context_length, split);
        const x, const y = try text.examples(positions, rows, targets);
        defer x.deinit();
        defer y.deinit();
        const logits = try x.matmul(weights);
        defer logits.deinit();
        const loss = try zmlx.catalogue.crossEntropyTraining(context, logits, y, .{});
        defer loss.deinit();
        const dlogits = try zmlx.catalogue.crossEntropyBackward(context, logits, y, loss, one, .{});
        defer dlogits.deinit();
        const across = try x.transpose();
        defer across.deinit();
        const gradient = try across.matmul(dlogits);
        defer gradient.deinit();
        const rate = try Array.scalar(f32, learning_rate);
        defer rate.deinit();
        const next = try context.one(&update, &.{ weights, gradient, rate });
        weights.deinit();
        weights = next;
        try zmlx.evalAll(&.{ weights, loss.loss });
        if (step % 50 == 0) {
            const value = try loss.loss.item(f32);
            const bar: usize = @intFromFloat(@max(0, value) * 10);
            try w.print("step {d:4}   loss {d:.4}   ", .{ step, value });
            try w.splatByteAll('#', bar);
            try w.writeByte('\n');
            try w.flush();
        }
    }
    const spent = start.durationTo(std.Io.Clock.awake.now(init.io));
    const each = @as(f64, @floatFromInt(spent.toNanoseconds())) / 1e6 / (steps + 1);
    try w.print("\n{d:.2} ms a step, {d} kernels made\n", .{ each, context.kernels.count() });

    for (positions) |*at| at.* = random.intRangeLessThan(usize, split, bytes.len);
    const x, const y = try text.examples(positions, rows, targets);
    defer x.deinit();
    defer y.deinit();
    const logits = try x.matmul(weights);
    defer logits.deinit();
    const loss = try zmlx.catalogue.crossEntropy(context, logits, y, .{});
    defer loss.deinit();
    try w.print("loss on the rest of the text {d:.4} (a guess: {d:.4})\n", .{
        try loss.item(f32), @log(@as(f64, @floatFromInt(text.classes()))),
    });
    try w.writeAll("\nwhat it would write:\n\n    ");
    const learnt = try weights.toOwnedSlice(arena, f32);
    try write(arena, text, learnt, random, split, w);
    try w.writeAll("\n");
    try w.flush();
}

/// Characters drawn one after the other from what was learnt.
fn write(
    arena: std.mem.Allocator,
    text: Text,
    weights: []const f32,
    random: std.Random,
    from: usize,
    w: *Writer,
) !void {
    const classes = text.classes();
    const chances = try arena.alloc(f32, classes);
    var before: [context_length]u16 = undefined;
    for (&before, 0..) |*b, k| b.* = text.numbers[from - 1 - k];
    for (0..200) |_| {
        @memset(chances, 0);
        for (before, 0..) |b, k| {
            for (chances, weights[(k * classes + b) * classes ..][0..classes]) |*c, v| c.* += v;
        }
        const high = std.mem.max(f32, chances);
        for (chances) |*c| c.* = @exp(c.* - high);
        const drawn: u16 = @intCast(random.weightedIndex(f32, chances));
        std.mem.copyBackwards(u16, before[1..], before[0 .. context_length - 1]);
        before[0] = drawn;
        const byte = text.characters[drawn];
        try w.writeByte(if (std.ascii.isPrint(byte)) byte else ' ');
    }
}
