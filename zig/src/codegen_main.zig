//! `zmlx-codegen`: specifications as lines of JSON in, texts as lines of JSON out.
//!
//!     {"pattern": {"elementwise": {"inputs": […], "outputs": […]}}}
//!     -> {"source": "…", "header": "…", "input_names": […], "output_names": […]}
//!
//! The other requests are the other variants of `Request`. What is no pattern or no specification
//! gives {"reason": "…"}, and a line that is no request ends the program.

const std = @import("std");
const codegen = @import("codegen.zig");
const launch = @import("launch.zig");
const msl = @import("msl.zig");
const KernelSpec = @import("spec.zig").KernelSpec;
const Allocator = std.mem.Allocator;

const Named = union(enum) {
    elementwise_unary: struct { expr: []const u8 },
    elementwise_binary: struct { expr: []const u8 },
    rowwise_reduction: struct { op: []const u8, expr: []const u8, finalize: []const u8 },
    rowwise_parallel_reduction: struct {
        reductions: []const codegen.parts.Reduce,
        finalize: []const u8,
    },
    rowwise_map_reduce: struct {
        first: codegen.parts.Reduce,
        second: codegen.parts.Reduce,
        write: []const u8,
    },

    fn pattern(named: Named, arena: Allocator) !codegen.Pattern {
        const make = codegen.named;
        return switch (named) {
            .elementwise_unary => |n| .{ .elementwise = try make.elementwiseUnary(arena, n.expr) },
            .elementwise_binary => |n| .{
                .elementwise = try make.elementwiseBinary(arena, n.expr),
            },
            .rowwise_reduction => |n| .{
                .rowwise = try make.rowwiseReduction(arena, n.op, n.expr, n.finalize),
            },
            .rowwise_parallel_reduction => |n| .{
                .rowwise = try make.rowwiseParallelReduction(arena, n.reductions, n.finalize),
            },
            .rowwise_map_reduce => |n| .{
                .rowwise = try make.rowwiseMapReduce(arena, n.first, n.second, n.write),
            },
        };
    }
};

/// A function of `launch` and its arguments.
const Geometry = union(enum) {
    elementwise: struct { kind: launch.Kind, size: u64, least: u32 },
    rowwise: struct { kind: launch.Kind, rows: u32, d: u32, capped: bool, least: u32 },
    rowwise_chunks: struct { kind: launch.Kind, rows: u32, d: u32, least: u32 },
    columnwise: struct { kind: launch.Kind, rows: u32, d: u32 },
    /// Of the parts of an axis, which are the items.
    axis: struct {
        kind: launch.Kind,
        columns: bool,
        scans: bool,
        reverse: bool,
        narrow: bool,
        short: bool,
        states: u32,
        shape: []const i32,
    },

    fn find(geometry: Geometry) launch.Geometry {
        return switch (geometry) {
            .elementwise => |g| launch.elementwise(g.kind, g.size, g.least),
            .rowwise => |g| launch.rowwise(g.kind, g.rows, g.d, g.capped, g.least),
            .rowwise_chunks => |g| launch.rowwiseChunks(
                g.kind,
                launch.rowChunks(g.rows).count,
                g.d,
                g.least,
            ),
            .columnwise => |g| launch.columnwise(g.kind, launch.rowChunks(g.rows).count, g.d),
            .axis => |g| {
                const parts = launch.axisParts(
                    .{ .columns = g.columns, .scans = g.scans },
                    g.shape,
                );
                const items = @as(u64, @intCast(g.shape[0])) * parts.count;
                const walk: launch.Walk = .{
                    .scans = g.scans,
                    .reverse = g.reverse,
                    .narrow = g.narrow,
                    .states = g.states,
                };
                if (g.short) return launch.shortRows(g.kind, items);
                if (!g.columns) return launch.axisRows(g.kind, walk, items, parts.rows);
                return launch.axisColumns(g.kind, walk, items, @intCast(g.shape[2]));
            },
        };
    }
};

const Request = union(enum) {
    pattern: codegen.Pattern,
    named: Named,
    header_for: []const u8,
    spec: KernelSpec,
    geometry: Geometry,
};

fn answer(request: Request, arena: Allocator, json: *std.json.Stringify) !void {
    switch (request) {
        .pattern => |p| try answerPattern(p, arena, json),
        .named => |n| try answerPattern(try n.pattern(arena), arena, json),
        .header_for => |text| try json.write(.{ .header = try msl.headerFor(arena, text) }),
        .spec => |spec| {
            if (try spec.problem(arena)) |reason| return json.write(.{ .reason = reason });
            var text: std.Io.Writer.Allocating = .init(arena);
            try spec.writeCanonical(&text.writer);
            try json.write(.{
                .canonical = text.written(),
                .full_name = try spec.fullName(arena),
            });
        },
        .geometry => |geometry| {
            const g = geometry.find();
            try json.write(.{
                .template = g.template(),
                .grid = g.grid,
                .threadgroup = g.threadgroup,
            });
        },
    }
}

fn answerPattern(p: codegen.Pattern, arena: Allocator, json: *std.json.Stringify) !void {
    if (try p.problem(arena)) |reason| return json.write(.{ .reason = reason });
    try json.write(.{
        .source = try p.source(arena),
        .header = try p.header(arena),
        .input_names = try p.inputNames(arena),
        .output_names = try p.outputNames(arena),
    });
}

pub fn main(init: std.process.Init) !void {
    const io = init.io;
    var out_buffer: [1 << 16]u8 = undefined;
    var out: std.Io.File.Writer = .initStreaming(.stdout(), io, &out_buffer);
    const in_buffer = try init.gpa.alloc(u8, 1 << 22); // the longest line
    defer init.gpa.free(in_buffer);
    var in: std.Io.File.Reader = .initStreaming(.stdin(), io, in_buffer);
    var arena: std.heap.ArenaAllocator = .init(init.gpa);
    defer arena.deinit();
    while (try in.interface.takeDelimiter('\n')) |line| {
        _ = arena.reset(.retain_capacity);
        const request = try std.json.parseFromSliceLeaky(Request, arena.allocator(), line, .{});
        var json: std.json.Stringify = .{ .writer = &out.interface };
        try answer(request, arena.allocator(), &json);
        try out.interface.writeByte('\n');
        if (in.interface.bufferedLen() == 0) try out.interface.flush(); // the peer may wait for it
    }
    try out.interface.flush();
}
