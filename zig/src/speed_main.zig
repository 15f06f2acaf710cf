//! `zmlx-speed`: what launches cost from Zig, as a line of JSON for the benchmark.

const std = @import("std");
const zmlx = @import("zmlx");
const Array = zmlx.Array;

const rounds = 41;
const calls = 500;

fn since(io: std.Io, start: std.Io.Timestamp) f64 {
    const spent = start.durationTo(std.Io.Clock.awake.now(io));
    return @as(f64, @floatFromInt(spent.toNanoseconds())) / 1e9;
}

fn median(times: []f64) f64 {
    std.mem.sort(f64, times, {}, std.sort.asc(f64));
    return times[times.len / 2];
}

pub fn main(init: std.process.Init) !void {
    const io = init.io;
    var context: zmlx.Context = .init(std.heap.smp_allocator, io);
    defer context.deinit();
    var times: [rounds]f64 = undefined;

    // A small kernel, made and launched, and evaluated too.
    const kernel = try zmlx.MetalKernel.create(std.heap.smp_allocator, .{
        .name = "double",
        .input_names = &.{"x"},
        .output_names = &.{"y"},
        .body = "uint i = thread_position_in_grid.x; y[i] = x[i] + x[i];",
    });
    defer kernel.deinit();
    const small = try Array.zeros(.float32, &.{64});
    defer small.deinit();
    try small.eval();
    var result: [4]f64 = undefined;
    for ([_]bool{ false, true }, result[0..2]) |evaluated, *seconds| {
        for (&times) |*time| {
            const start = std.Io.Clock.awake.now(io);
            for (0..calls) |_| {
                var y: [1]Array = undefined;
                try kernel.launch(&.{small}, .{
                    .grid = .{ 64, 1, 1 },
                    .threadgroup = .{ 1, 1, 1 },
                    .output_shapes = &.{&.{64}},
                    .output_dtypes = &.{.float32},
                }, &y);
                defer y[0].deinit();
                if (evaluated) try y[0].eval();
            }
            time.* = since(io, start) / calls;
        }
        seconds.* = median(&times);
    }

    const data = try init.gpa.alloc(f32, 2048 * 4096);
    defer init.gpa.free(data);
    var prng: std.Random.DefaultPrng = .init(0);
    for (data) |*v| v.* = prng.random().floatNorm(f32);
    const x = try Array.fromSlice(f32, data, &.{ 2048, 4096 });
    defer x.deinit();
    const weight = try Array.fromSlice(f32, data[0..4096], &.{4096});
    defer weight.deinit();
    for (&times) |*time| {
        const start = std.Io.Clock.awake.now(io);
        const y = try zmlx.catalogue.rmsNorm(&context, x, weight, 1e-5);
        defer y.deinit();
        try y.eval();
        time.* = since(io, start);
    }
    result[2] = median(&times);

    // The text of its body.
    const pattern = for (zmlx.catalogue.catalogue.kernels) |entry| {
        if (std.mem.eql(u8, entry.key, "rms_norm+weight/forward")) break entry.kernel.pattern;
    } else unreachable;
    var arena: std.heap.ArenaAllocator = .init(std.heap.smp_allocator);
    defer arena.deinit();
    for (&times) |*time| {
        const start = std.Io.Clock.awake.now(io);
        for (0..calls) |_| {
            _ = arena.reset(.retain_capacity);
            std.mem.doNotOptimizeAway(try pattern.source(arena.allocator()));
        }
        time.* = since(io, start) / calls;
    }
    result[3] = median(&times);

    var buffer: [256]u8 = undefined;
    var out: std.Io.File.Writer = .initStreaming(.stdout(), io, &buffer);
    try std.json.Stringify.value(.{
        .launch = result[0],
        .launch_evaluated = result[1],
        .rms_norm = result[2],
        .source = result[3],
    }, .{}, &out.interface);
    try out.interface.writeByte('\n');
    try out.interface.flush();
}
