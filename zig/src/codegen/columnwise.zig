//! Sums over rows.

const std = @import("std");
const parts = @import("parts.zig");
const random = @import("random.zig");
const text = @import("text.zig");
const Body = text.Body;
const Error = text.Error;
const Names = text.Names;
const Allocator = std.mem.Allocator;

/// Sums over rows: out[c, j] = Σ of expr over the rows of chunk c, in float.
pub const Columnwise = struct {
    inputs: []const parts.Operand,
    outputs: []const parts.Output,
    lets: []const parts.Let = &.{},

    pub fn addNames(p: Columnwise, names: *Names, arena: Allocator) Error!void {
        for (p.lets) |let| try names.add(arena, let.name);
    }

    pub fn problem(_: Columnwise, _: Allocator) Error!?[]const u8 {
        return null;
    }

    pub fn constants(_: Columnwise) []const []const u8 {
        return &.{ "rows", "D", "chunk" };
    }

    pub fn header(p: Columnwise, arena: Allocator) Error![]const u8 {
        return random.header(arena, p.inputs);
    }

    pub fn source(p: Columnwise, arena: Allocator) Error![]const u8 {
        var body: Body = .init(arena);
        try body.add("const uint first_ = thread_position_in_grid.x * N;", .{});
        try body.add("const uint part_ = thread_position_in_grid.y;", .{});
        try body.add("const uint stop_ = uint(min(size_t(rows), (size_t(part_) + 1) * chunk));", .{});
        try text.addWidth(&body, p.inputs, &.{});
        for (p.inputs) |x| if (x.kind == .scalar) {
            try text.addScalar(&body, x);
        };
        try random.addKeys(&body, p.inputs);
        for (p.outputs) |y| try body.add("float {s}_sum[N] = {{0}};", .{y.name});
        try body.open("for (uint row = part_ * chunk; row < stop_; ++row)", .{});
        var done: Names = .{};
        for (p.inputs) |x| {
            const name = try body.fmt("{s}_in", .{x.arrayName()});
            if (x.kind == .row and try done.addNew(arena, name)) {
                try text.addRowPointer(&body, x, name, "row");
            } else if (x.kind == .per_row) {
                try body.add("const {s} {s} = {s}({s}[row]);", .{ x.type, x.name, x.type, name });
            }
        }
        try random.addRowCounters(&body, p.inputs);
        const exprs = try text.expressions(arena, p.outputs);
        const needed = try text.neededNames(arena, exprs, p.lets, .{});
        try body.open("if (first_ + N <= D)", .{});
        try body.open("for (uint n_ = 0; n_ < N; ++n_)", .{});
        try p.element(&body, needed);
        try body.close();
        try body.closeElse();
        try body.open("for (uint n_ = 0; n_ < N && first_ + n_ < D; ++n_)", .{});
        try p.element(&body, needed);
        try body.close();
        try body.close();
        try body.close();
        try body.open("for (uint n_ = 0; n_ < N && first_ + n_ < D; ++n_)", .{});
        for (p.outputs) |y| {
            try body.add(
                "{s}_out[size_t(part_) * D + first_ + n_] = {s}_t({s}_sum[n_]);",
                .{ y.arrayName(), y.name, y.name },
            );
        }
        try body.close();
        return body.text();
    }

    fn element(p: Columnwise, body: *Body, needed: Names) Error!void {
        try body.add("const uint j = first_ + n_;", .{});
        for (p.inputs) |x| {
            if (!needed.has(x.name)) continue;
            switch (x.kind) {
                .row, .column => try body.add("const {s} {s} = {s}({s}_in{s}[{s}]);", .{
                    x.type,                             x.name,
                    x.type,                             x.arrayName(),
                    if (x.kind == .row) "_row" else "", try text.place(body, x, "j"),
                }),
                .random => try random.addDraw(body, x, try body.fmt("{s}_first", .{x.name}), "j"),
                else => {},
            }
        }
        for (p.lets) |let| if (needed.has(let.name)) try body.declare(let);
        for (p.outputs) |y| try body.add("{s}_sum[n_] += {s};", .{ y.name, y.expr });
    }
};
