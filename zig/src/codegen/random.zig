//! Random operands: how a body draws their numbers.

const std = @import("std");
const msl = @import("../msl.zig");
const tables = @import("../tables.zig").tables;
const Operand = @import("parts.zig").Operand;
const text = @import("text.zig");
const Body = text.Body;
const Error = text.Error;

pub fn anyDrawn(inputs: []const Operand) bool {
    for (inputs) |x| if (x.kind == .random) return true;
    return false;
}

/// The functions that draws call.
pub fn header(arena: std.mem.Allocator, inputs: []const Operand) Error![]const u8 {
    if (!anyDrawn(inputs)) return "";
    const one = try msl.headerFor(arena, "zmlx_draw");
    return std.mem.concat(arena, u8, &.{ one, tables.block_header });
}

/// The key of every random operand.
pub fn addKeys(body: *Body, inputs: []const Operand) Error!void {
    for (inputs) |x| if (x.kind == .random) {
        try body.add("const uint64_t {s}_key = uint64_t({s}_in);", .{ x.name, x.arrayName() });
    };
}

/// The counter of element 0 of a row.
pub fn addRowCounters(body: *Body, inputs: []const Operand) Error!void {
    for (inputs) |x| if (x.kind == .random) {
        try body.add(
            "const uint64_t {s}_first = {s} + uint64_t(row) * ((D + 7) / 8);",
            .{ x.name, x.index },
        );
    };
}

/// Numbers for `width` elements, a multiple of eight, from counter `first` on.
pub fn addBlock(body: *Body, x: Operand, width: []const u8, first: []const u8) Error!void {
    try body.add("float {s}_drawn[{s}];", .{ x.name, width });
    try body.add(
        "ZMLX_UNIFORMS({s}_drawn, {s}, {s}, {s}_key);",
        .{ x.name, width, first, x.name },
    );
}

/// Numbers for what is left of a row after whole steps, where one thread has all of it.
pub fn addRest(body: *Body, inputs: []const Operand) Error!void {
    for (inputs) |x| if (x.kind == .random) {
        try body.add("float {s}_rest[TPR == 1 ? U : 1];", .{x.name});
        try body.open("if (TPR == 1 && whole_ < D)", .{});
        try body.add(
            "ZMLX_UNIFORMS({s}_rest, U, {s}_first + whole_ / 8, {s}_key);",
            .{ x.name, x.name, x.name },
        );
        try body.close();
    };
}

/// The number of element j of that rest.
pub fn addDrawOfRest(body: *Body, x: Operand) Error!void {
    try body.add(
        "const float {s} = TPR == 1 ? {s}_rest[j - whole_] : zmlx_draw({s}_first, j, {s}_key);",
        .{ x.name, x.name, x.name, x.name },
    );
}

/// The number of one element, where no block is.
pub fn addDraw(body: *Body, x: Operand, first: []const u8, index: []const u8) Error!void {
    try body.add(
        "const float {s} = zmlx_draw({s}, {s}, {s}_key);",
        .{ x.name, first, index, x.name },
    );
}
