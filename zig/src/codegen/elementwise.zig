//! Elementwise bodies.

const std = @import("std");
const parts = @import("parts.zig");
const random = @import("random.zig");
const tables = @import("../tables.zig").tables;
const text = @import("text.zig");
const Body = text.Body;
const Error = text.Error;
const Names = text.Names;
const Allocator = std.mem.Allocator;

/// out[i] = expr(inputs[i], …) for `size` elements; inputs are "full", "scalar" or "random".
pub const Elementwise = struct {
    inputs: []const parts.Operand,
    outputs: []const parts.Output,
    lets: []const parts.Let = &.{},

    pub fn addNames(p: Elementwise, names: *Names, arena: Allocator) Error!void {
        for (p.lets) |let| try names.add(arena, let.name);
    }

    pub fn problem(_: Elementwise, _: Allocator) Error!?[]const u8 {
        return null;
    }

    pub fn constants(_: Elementwise) []const []const u8 {
        return &.{"size"};
    }

    pub fn header(p: Elementwise, arena: Allocator) Error![]const u8 {
        const drawn = try random.header(arena, p.inputs);
        return std.mem.concat(arena, u8, &.{ tables.step_header, drawn });
    }

    pub fn source(p: Elementwise, arena: Allocator) Error![]const u8 {
        var body: Body = .init(arena);
        const exprs = try text.expressions(arena, p.outputs);
        var needed = try text.neededNames(arena, exprs, p.lets, .{});
        for (p.inputs) |x| if (x.kind == .random) try needed.add(arena, x.index);
        for (p.inputs) |x| if (x.kind == .scalar and needed.has(x.name)) {
            try text.addScalar(&body, x);
        };
        try random.addKeys(&body, p.inputs);
        try body.add("const size_t start_ = size_t(thread_position_in_grid.x) * N;", .{});
        try body.open("if (start_ + N <= size_t(size))", .{});
        const few = tables.draw_block;
        // Numbers of 32 bits are not converted, and were a little slower in short steps.
        const short = if (random.anyDrawn(p.inputs))
            ""
        else
            try body.fmt(" && sizeof(*{s}_out) < 4", .{p.outputs[0].arrayName()});
        try body.add("const uint block_ = N % {d} == 0{s} ? {d} : N;", .{ few, short, few });
        try body.open("for (uint b_ = 0; b_ < N; b_ += block_)", .{});
        for (p.inputs) |x| if (x.kind == .random) {
            const first = try body.fmt("{s} + (start_ + b_) / 8", .{x.index});
            try random.addBlock(&body, x, "block_", first);
        };
        for (p.inputs) |x| if (x.kind == .full and needed.has(x.name)) {
            const pointer = try body.fmt("{s}_in + start_ + b_", .{x.arrayName()});
            try text.addReadStep(&body, x, "block_", pointer);
        };
        for (p.outputs) |y| {
            const pointer = try body.fmt("{s}_out + start_ + b_", .{y.arrayName()});
            try text.addWriteStep(&body, y, "block_", pointer, "true");
        }
        try body.open("for (uint k_ = 0; k_ < block_; ++k_)", .{});
        for (p.inputs) |x| if (x.kind == .random) {
            try body.add("const float {s} = {s}_drawn[k_];", .{ x.name, x.name });
        };
        try p.element(&body, needed, "k_");
        try body.close();
        try body.close();
        try body.closeElse();
        try body.open("for (size_t i_ = start_; i_ < size_t(size); ++i_)", .{});
        for (p.inputs) |x| if (x.kind == .random) try random.addDraw(&body, x, x.index, "i_");
        try p.element(&body, needed, null);
        try body.close();
        try body.close();
        return body.text();
    }

    /// Element `step` of a step, or element i_.
    fn element(p: Elementwise, body: *Body, needed: Names, step: ?[]const u8) Error!void {
        for (p.inputs) |x| if (x.kind == .full and needed.has(x.name)) {
            const value = if (step) |index|
                try text.atStep(body, x, index)
            else
                try body.fmt("{s}({s}_in[i_])", .{ x.type, x.arrayName() });
            try body.add("const {s} {s} = {s};", .{ x.type, x.name, value });
        };
        for (p.lets) |let| if (needed.has(let.name)) try body.declare(let);
        for (p.outputs) |y| {
            if (step) |index| {
                try text.addSetStep(body, y, index);
            } else {
                try body.add("{s}_out[i_] = {s}_t({s});", .{ y.arrayName(), y.name, y.expr });
            }
        }
    }
};
