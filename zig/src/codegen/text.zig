//! Tools for writing a body: indentation, names, and which lets an expression reaches.

const std = @import("std");
const parts = @import("parts.zig");
const Allocator = std.mem.Allocator;

pub const Error = Allocator.Error;

/// Lines of Metal at a running indentation. What it allocates belongs to `arena`.
pub const Body = struct {
    arena: Allocator,
    buffer: std.ArrayList(u8) = .empty,
    depth: usize = 1,

    pub fn init(arena: Allocator) Body {
        return .{ .arena = arena };
    }

    /// A line at the current depth.
    pub fn add(body: *Body, comptime format: []const u8, arguments: anytype) Error!void {
        try body.buffer.appendNTimes(body.arena, ' ', 4 * body.depth);
        try body.buffer.print(body.arena, format ++ "\n", arguments);
    }

    /// A line that opens a block.
    pub fn open(body: *Body, comptime format: []const u8, arguments: anytype) Error!void {
        try body.add(format ++ " {{", arguments);
        body.depth += 1;
    }

    /// The loop over the elements `u_` of a step; it needs `step_header`.
    pub fn openStep(body: *Body) Error!void {
        try body.openStepOf("U");
    }

    /// The same over `count` of them.
    pub fn openStepOf(body: *Body, comptime count: []const u8) Error!void {
        try body.add("ZMLX_STEP_LOOP", .{});
        try body.open("for (uint u_ = 0; u_ < " ++ count ++ "; ++u_)", .{});
    }

    /// The loop over the rows `r_` that are taken at a time, in one over their columns; it needs
    /// `step_header`.
    pub fn openFewRows(body: *Body, count: u32) Error!void {
        try body.add("ZMLX_ROWS_LOOP", .{});
        try body.open("for (uint r_ = 0; r_ < {d}; ++r_)", .{count});
    }

    /// The end of a block.
    pub fn close(body: *Body) Error!void {
        body.depth -= 1;
        try body.add("}}", .{});
    }

    /// The end of a block that another follows.
    pub fn closeElse(body: *Body) Error!void {
        body.depth -= 1;
        try body.open("}} else", .{});
    }

    pub fn declare(body: *Body, let: parts.Let) Error!void {
        if (let.rounded.len > 0) {
            try body.add("const {s} {s} = {s}({s}_t({s}));", .{
                let.type, let.name, let.type, let.rounded, let.expr,
            });
        } else {
            try body.add("const {s} {s} = {s};", .{ let.type, let.name, let.expr });
        }
    }

    /// Text that lives as long as the body.
    pub fn fmt(body: *Body, comptime format: []const u8, arguments: anytype) Error![]const u8 {
        return std.fmt.allocPrint(body.arena, format, arguments);
    }

    pub fn text(body: *Body) []const u8 {
        return body.buffer.items;
    }
};

/// Names in the order in which they were first added, without repeats.
pub const Names = struct {
    set: std.StringArrayHashMapUnmanaged(void) = .empty,

    pub fn add(names: *Names, arena: Allocator, name: []const u8) Error!void {
        try names.set.put(arena, name, {});
    }

    /// True the first time that `name` is added.
    pub fn addNew(names: *Names, arena: Allocator, name: []const u8) Error!bool {
        return !(try names.set.getOrPut(arena, name)).found_existing;
    }

    pub fn has(names: Names, name: []const u8) bool {
        return names.set.contains(name);
    }

    pub fn items(names: Names) []const []const u8 {
        return names.set.keys();
    }
};

fn isWord(c: u8) bool {
    return std.ascii.isAlphanumeric(c) or c == '_';
}

pub fn isIdentifier(name: []const u8) bool {
    if (name.len == 0 or std.ascii.isDigit(name[0])) return false;
    for (name) |c| if (!isWord(c)) return false;
    return true;
}

/// The maximal runs of word characters, with whatever starts them.
pub const Words = struct {
    text: []const u8,
    at: usize = 0,

    pub fn next(words: *Words) ?[]const u8 {
        while (words.at < words.text.len and !isWord(words.text[words.at])) words.at += 1;
        if (words.at == words.text.len) return null;
        const start = words.at;
        while (words.at < words.text.len and isWord(words.text[words.at])) words.at += 1;
        return words.text[start..words.at];
    }
};

/// Adds the identifiers that `text` names: not members after a dot, not suffixes of numbers.
pub fn addIdentifiers(names: *Names, arena: Allocator, text: []const u8) Error!void {
    var words: Words = .{ .text = text };
    while (words.next()) |word| {
        const start = words.at - word.len;
        if (start > 0 and text[start - 1] == '.') continue;
        if (isIdentifier(word)) try names.add(arena, word);
    }
}

/// Names that `exprs` reach through `lets`, not looking behind the names in `known`.
pub fn neededNames(
    arena: Allocator,
    exprs: []const []const u8,
    lets: []const parts.Let,
    known: Names,
) Error!Names {
    var found: Names = .{};
    for (exprs) |expr| try addIdentifiers(&found, arena, expr);
    // What is found is appended, so that it is looked behind in its turn.
    var i: usize = 0;
    while (i < found.items().len) : (i += 1) {
        const name = found.items()[i];
        if (known.has(name)) continue;
        var last: ?parts.Let = null;
        for (lets) |let| {
            if (std.mem.eql(u8, let.name, name)) last = let;
        }
        if (last) |let| try addIdentifiers(&found, arena, let.expr);
    }
    return found;
}

/// Where element `index` of the slice of an operand or output lies in its row.
pub fn place(body: *Body, item: anytype, index: []const u8) Error![]const u8 {
    if (item.part == 0) return index;
    if (item.part == 1) return body.fmt("D_ + {s}", .{index});
    return body.fmt("D_ * {d} + {s}", .{ item.part, index });
}

/// D as `place` names it: a copy, since for the compiler a store may change D itself, and in 64
/// bits, since a sum that may wrap in 32 keeps a loop from vectorising.
pub fn addWidth(
    body: *Body,
    inputs: []const parts.Operand,
    outputs: []const parts.Output,
) Error!void {
    var any = false;
    for (inputs) |x| any = any or x.part > 0;
    for (outputs) |y| any = any or y.part > 0;
    if (any) try body.add("const size_t D_ = D;", .{});
}

/// The declaration of a scalar operand.
pub fn addScalar(body: *Body, x: parts.Operand) Error!void {
    const array = x.arrayName();
    try body.add("const {s} {s} = {s}({s}_in);", .{ x.type, x.name, x.type, array });
}

/// The declaration of a pointer to a row of the array `name`.
pub fn addRowPointer(body: *Body, item: anytype, name: []const u8, row: []const u8) Error!void {
    const width = if (item.parts == 1) "D" else try body.fmt("(D * {d})", .{item.parts});
    try body.add("auto {s}_row = {s} + size_t({s}) * {s};", .{ name, name, row, width });
}

/// Declares the elements that `atStep` reads.
pub fn addReadStep(body: *Body, x: parts.Operand, count: []const u8, pointer: []const u8) Error!void {
    try body.add(
        "const auto {s}_in_step = ZMLX_READ_STEP({s}, {s});",
        .{ x.name, count, pointer },
    );
}

/// Declares the elements that `addSetStep` sets.
pub fn addWriteStep(
    body: *Body,
    y: parts.Output,
    count: []const u8,
    pointer: []const u8,
    live: []const u8,
) Error!void {
    try body.add(
        "auto {s}_out_step = ZMLX_WRITE_STEP({s}, {s}, {s});",
        .{ y.name, count, pointer, live },
    );
}

/// An element of a step.
pub fn atStep(body: *Body, x: parts.Operand, index: []const u8) Error![]const u8 {
    return body.fmt("{s}({s}_in_step[{s}])", .{ x.type, x.name, index });
}

/// Sets an element of a step.
pub fn addSetStep(body: *Body, y: parts.Output, index: []const u8) Error!void {
    try body.add("ZMLX_SET({s}_out_step, {s}, {s}_t, {s});", .{ y.name, index, y.name, y.expr });
}

/// The expressions of outputs.
pub fn expressions(arena: Allocator, outputs: []const parts.Output) Error![]const []const u8 {
    const exprs = try arena.alloc([]const u8, outputs.len);
    for (exprs, outputs) |*expr, y| expr.* = y.expr;
    return exprs;
}
