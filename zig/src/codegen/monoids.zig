//! What folds and scans combine: the states of `zmlx/codegen/monoids.py`, and their merge.

const std = @import("std");
const tables = @import("../tables.zig");
const text = @import("text.zig");
const Body = text.Body;
const Error = text.Error;

pub const Monoid = tables.Monoid;

pub fn find(op: []const u8) ?Monoid {
    for (tables.tables.monoids) |m| if (std.mem.eql(u8, m.name, op)) return m;
    return null;
}

pub fn range(element: []const u8) ?tables.Range {
    for (tables.tables.ranges) |r| if (std.mem.eql(u8, r.type, element)) return r;
    return null;
}

/// The type of a variable for elements of a type.
pub fn typeOf(state: tables.State, element: []const u8) []const u8 {
    return if (std.mem.eql(u8, state.type, "T")) element else state.type;
}

/// The value that variable `i` starts with.
pub fn started(
    body: *Body,
    m: Monoid,
    i: usize,
    element: []const u8,
    front: []const u8,
) Error![]const u8 {
    const start = m.start[i];
    if (std.mem.eql(u8, start, "front")) return front;
    if (std.mem.eql(u8, start, "lowest")) return range(element).?.lowest;
    if (std.mem.eql(u8, start, "highest")) return range(element).?.highest;
    return body.fmt("{s}({s})", .{ typeOf(m.states[i], element), start });
}

/// A state's variables, each as it is written in the text.
pub const Spelled = []const []const u8;

/// Every variable as `before` name `after`.
pub fn spell(body: *Body, m: Monoid, before: []const u8, after: []const u8) Error!Spelled {
    const result = try body.arena.alloc([]const u8, m.states.len);
    for (result, m.states) |*r, state| {
        r.* = try std.mem.concat(body.arena, u8, &.{ before, state.name, after });
    }
    return result;
}

/// `template` with its variables spelled out: `{m}` of the earlier state, `{m2}` of the later one.
pub fn fill(
    body: *Body,
    m: Monoid,
    template: []const u8,
    own: Spelled,
    other: Spelled,
) Error![]const u8 {
    var out: std.ArrayList(u8) = .empty;
    var rest = template;
    while (std.mem.findScalar(u8, rest, '{')) |at| {
        const end = std.mem.findScalarPos(u8, rest, at, '}').?;
        try out.appendSlice(body.arena, rest[0..at]);
        try out.appendSlice(body.arena, spelled(m, rest[at + 1 .. end], own, other));
        rest = rest[end + 1 ..];
    }
    try out.appendSlice(body.arena, rest);
    return out.items;
}

fn spelled(m: Monoid, name: []const u8, own: Spelled, other: Spelled) []const u8 {
    if (other.len > 0 and name[name.len - 1] == '2') for (m.states, other) |state, to| {
        if (std.mem.eql(u8, state.name, name[0 .. name.len - 1])) return to;
    };
    for (m.states, own) |state, to| if (std.mem.eql(u8, state.name, name)) return to;
    unreachable; // the tables are Python's
}

/// Merges the state `other` into `own`; if it is `quick` it is that of an element in a walk.
pub fn addMerge(body: *Body, m: Monoid, own: Spelled, other: Spelled, quick: bool) Error!void {
    const lines = if (quick and m.update.len > 0) m.update else m.merge;
    if (lines.len > 1) {
        try body.add("{{", .{});
        body.depth += 1;
    }
    for (lines) |line| try body.add("{s}", .{try fill(body, m, line, own, other)});
    if (lines.len > 1) try body.close();
}

/// Why `op` and `element` make no state, or null.
pub fn problem(arena: std.mem.Allocator, op: []const u8, element: []const u8) Error!?[]const u8 {
    const python = @import("../python.zig");
    if (find(op) == null) {
        var known: std.ArrayList(u8) = .empty;
        for (tables.tables.monoids, 0..) |m, i| {
            try known.print(arena, "{s}{s}", .{ if (i > 0) ", " else "", m.name });
        }
        return try std.fmt.allocPrint(
            arena,
            "[codegen] 'op' must be one of {s} but got {f}.",
            .{ known.items, python.ascii(op) },
        );
    }
    if (range(element) == null) {
        var known: std.ArrayList(u8) = .empty;
        for (tables.tables.ranges, 0..) |r, i| {
            try known.print(arena, "{s}{s}", .{ if (i > 0) ", " else "", r.type });
        }
        return try std.fmt.allocPrint(
            arena,
            "[codegen] 'type' must be one of {s} but got {f}.",
            .{ known.items, python.ascii(element) },
        );
    }
    return null;
}
