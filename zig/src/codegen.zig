//! Kernel bodies as text, from patterns: the same bytes as `zmlx/codegen` gives.
//!
//! A pattern is names, integers and text; `source` is the body that `mx.fast.metal_kernel` takes.
//! To add a form, write a file with a struct that has the functions named in `Pattern`, and add it
//! to the union. All memory that a function here returns belongs to the arena it was given.

const std = @import("std");
const python = @import("python.zig");
const tables = @import("tables.zig").tables;
const text = @import("codegen/text.zig");
const Allocator = std.mem.Allocator;
const Error = Allocator.Error;

pub const named = @import("codegen/named.zig");
pub const parts = @import("codegen/parts.zig");
pub const Columnwise = @import("codegen/columnwise.zig").Columnwise;
pub const Fold = @import("codegen/fold.zig").Fold;
pub const Scan = @import("codegen/scan.zig").Scan;
pub const Elementwise = @import("codegen/elementwise.zig").Elementwise;
pub const Rowwise = @import("codegen/rowwise.zig").Rowwise;
pub const Names = text.Names;
pub const isIdentifier = text.isIdentifier;
pub const Words = text.Words;

/// Inputs, outputs, and the body of a kernel that maps one to the other.
///
/// The kernel's parameters are the arrays behind `inputs` (`x_in`), the launch constants, and the
/// arrays behind `outputs` (`y_out`).
pub const Pattern = union(enum) {
    elementwise: Elementwise,
    rowwise: Rowwise,
    columnwise: Columnwise,
    fold: Fold,
    scan: Scan,

    pub fn inputs(pattern: Pattern, arena: Allocator) Error![]const parts.Operand {
        return switch (pattern) {
            inline .fold, .scan => |p| p.operands(arena),
            inline else => |p| p.inputs,
        };
    }

    pub fn outputs(pattern: Pattern) []const parts.Output {
        return switch (pattern) {
            inline else => |p| p.outputs,
        };
    }

    /// What the pattern names.
    pub fn names(pattern: Pattern, arena: Allocator) Error![]const []const u8 {
        var found: Names = .{};
        for (try pattern.inputs(arena)) |x| try found.add(arena, x.name);
        for (pattern.outputs()) |y| try found.add(arena, y.name);
        switch (pattern) {
            inline else => |p| try p.addNames(&found, arena),
        }
        return found.items();
    }

    /// Why this is no pattern, or null.
    pub fn problem(pattern: Pattern, arena: Allocator) Error!?[]const u8 {
        switch (pattern) {
            inline .fold, .scan => |p| if (try p.earlyProblem(arena)) |reason| return reason,
            inline else => {},
        }
        const all = try pattern.names(arena);
        for (all) |name| {
            if (!isIdentifier(name)) return try std.fmt.allocPrint(
                arena,
                "[codegen] 'name' must be an identifier but got {f}.",
                .{python.ascii(name)},
            );
            if (isTaken(name, all)) return try std.fmt.allocPrint(
                arena,
                "[codegen] 'name' must not be a name of the body itself but got {f}.",
                .{python.ascii(name)},
            );
        }
        if (pattern.outputs().len == 0) {
            return "[codegen] 'outputs' must have at least one entry but got ().";
        }
        if (try partsProblem(arena, try pattern.inputs(arena))) |reason| return reason;
        if (try partsProblem(arena, pattern.outputs())) |reason| return reason;
        return switch (pattern) {
            inline else => |p| p.problem(arena),
        };
    }

    /// An expression of it that is nothing but white space, or null.
    pub fn blankExpression(pattern: Pattern) ?[]const u8 {
        if (blank(pattern.outputs())) |e| return e;
        switch (pattern) {
            inline .elementwise, .rowwise, .columnwise => |p| if (blank(p.lets)) |e| return e,
            .fold, .scan => {},
        }
        if (pattern == .rowwise) {
            if (blank(pattern.rowwise.before)) |e| return e;
            for (pattern.rowwise.passes) |pass| {
                if (blank(pass.reductions) orelse blank(pass.then)) |e| return e;
            }
        }
        return null;
    }

    /// The launch constants that follow the inputs.
    pub fn constants(pattern: Pattern) []const []const u8 {
        return switch (pattern) {
            inline else => |p| p.constants(),
        };
    }

    /// Functions that the body calls.
    pub fn header(pattern: Pattern, arena: Allocator) Error![]const u8 {
        return switch (pattern) {
            inline else => |p| p.header(arena),
        };
    }

    /// The arrays behind the inputs, without suffix.
    pub fn inputArrays(pattern: Pattern, arena: Allocator) Error![]const []const u8 {
        var found: Names = .{};
        for (try pattern.inputs(arena)) |x| try found.add(arena, x.arrayName());
        return found.items();
    }

    /// The arrays behind the outputs, without suffix.
    pub fn outputArrays(pattern: Pattern, arena: Allocator) Error![]const []const u8 {
        var found: Names = .{};
        for (pattern.outputs()) |y| try found.add(arena, y.arrayName());
        return found.items();
    }

    /// Parameters of the kernel that are inputs.
    pub fn inputNames(pattern: Pattern, arena: Allocator) Error![]const []const u8 {
        const arrays = try suffixed(arena, try pattern.inputArrays(arena), "_in");
        return std.mem.concat(arena, []const u8, &.{ arrays, pattern.constants() });
    }

    /// Parameters of the kernel that are outputs.
    pub fn outputNames(pattern: Pattern, arena: Allocator) Error![]const []const u8 {
        return suffixed(arena, try pattern.outputArrays(arena), "_out");
    }

    /// The body, of a pattern that has no problem.
    pub fn source(pattern: Pattern, arena: Allocator) Error![]const u8 {
        return switch (pattern) {
            inline else => |p| p.source(arena),
        };
    }
};

/// Why inputs or outputs are no slices of their arrays, or null.
fn partsProblem(arena: Allocator, items: anytype) Error!?[]const u8 {
    for (items, 0..) |x, i| {
        if (x.parts < 1) return "[codegen] 'parts' must be at least 1 but got 0.";
        if (x.part >= x.parts) return try std.fmt.allocPrint(
            arena,
            "[codegen] 'part' must be from 0 to {d} but got {d}.",
            .{ x.parts - 1, x.part },
        );
        for (items[0..i]) |other| {
            if (x.parts == other.parts) continue;
            if (!std.mem.eql(u8, x.arrayName(), other.arrayName())) continue;
            return try std.fmt.allocPrint(
                arena,
                "[codegen] 'parts' must be the same for all of {f} but got {d} and {d}.",
                .{ python.ascii(x.arrayName()), other.parts, x.parts },
            );
        }
    }
    return null;
}

fn blank(items: anytype) ?[]const u8 {
    for (items) |item| if (python.isBlank(item.expr)) return item.expr;
    return null;
}

fn suffixed(
    arena: Allocator,
    names: []const []const u8,
    suffix: []const u8,
) Error![]const []const u8 {
    const result = try arena.alloc([]const u8, names.len);
    for (result, names) |*r, n| r.* = try std.mem.concat(arena, u8, &.{ n, suffix });
    return result;
}

/// Whether a body uses the name itself, or makes it from another name of the pattern.
fn isTaken(name: []const u8, all: []const []const u8) bool {
    for (tables.reserved) |word| if (std.mem.eql(u8, word, name)) return true;
    for (tables.suffixes) |suffix| {
        if (!std.mem.endsWith(u8, name, suffix)) continue;
        for (all) |other| {
            if (std.mem.eql(u8, other, name[0 .. name.len - suffix.len])) return true;
        }
    }
    return false;
}
