//! The five patterns that most kernels are, as one-line forms of the general ones.

const std = @import("std");
const parts = @import("parts.zig");
const Elementwise = @import("elementwise.zig").Elementwise;
const Rowwise = @import("rowwise.zig").Rowwise;
const Allocator = std.mem.Allocator;
const Error = Allocator.Error;

/// y = expr(x). What it allocates belongs to `arena`, as for all five.
pub fn elementwiseUnary(arena: Allocator, expr: []const u8) Error!Elementwise {
    return .{
        .inputs = &.{.{ .name = "x", .kind = .full }},
        .outputs = try one(arena, parts.Output, .{ .name = "y", .expr = expr, .kind = .full }),
    };
}

/// y = expr(a, b).
pub fn elementwiseBinary(arena: Allocator, expr: []const u8) Error!Elementwise {
    return .{
        .inputs = &.{ .{ .name = "a", .kind = .full }, .{ .name = "b", .kind = .full } },
        .outputs = try one(arena, parts.Output, .{ .name = "y", .expr = expr, .kind = .full }),
    };
}

/// A value per row: y = finalize(total, D), total the reduction `op` of expr(x).
pub fn rowwiseReduction(
    arena: Allocator,
    op: []const u8,
    expr: []const u8,
    finalize: []const u8,
) Error!Rowwise {
    const total = try one(arena, parts.Reduce, .{ .name = "total", .op = op, .expr = expr });
    return rowwiseParallelReduction(arena, total, finalize);
}

/// A value per row from several reductions of one walk: y = finalize(their names, D).
pub fn rowwiseParallelReduction(
    arena: Allocator,
    reductions: []const parts.Reduce,
    finalize: []const u8,
) Error!Rowwise {
    return .{
        .inputs = &.{.{ .name = "x" }},
        .outputs = try one(
            arena,
            parts.Output,
            .{ .name = "y", .expr = finalize, .kind = .per_row },
        ),
        .passes = try one(arena, parts.Pass, .{ .reductions = reductions }),
    };
}

/// Two walks that reduce, the second in terms of the first, and one that writes y = write(x, both
/// names).
pub fn rowwiseMapReduce(
    arena: Allocator,
    first: parts.Reduce,
    second: parts.Reduce,
    write: []const u8,
) Error!Rowwise {
    return .{
        .inputs = &.{.{ .name = "x" }},
        .outputs = try one(arena, parts.Output, .{ .name = "y", .expr = write }),
        .passes = try arena.dupe(parts.Pass, &.{
            .{ .reductions = try one(arena, parts.Reduce, first) },
            .{ .reductions = try one(arena, parts.Reduce, second) },
        }),
    };
}

fn one(arena: Allocator, comptime T: type, item: T) Error![]const T {
    return arena.dupe(T, &.{item});
}
