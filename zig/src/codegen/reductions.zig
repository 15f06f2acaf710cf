//! Reductions over a row: how an accumulator starts, takes a value and is folded.

const std = @import("std");
const tables = @import("../tables.zig").tables;
const Reduce = @import("parts.zig").Reduce;
const text = @import("text.zig");
const Body = text.Body;
const Error = text.Error;

/// Header of every kernel that reduces over a row.
pub const row_header = tables.row_header;

pub fn isSumExp(r: Reduce) bool {
    return std.mem.eql(u8, r.op, "sum_exp");
}

/// The row of the table; `op` was checked to be in it.
fn rule(op: []const u8) @TypeOf(tables.reductions[0]) {
    for (tables.reductions) |r| if (std.mem.eql(u8, r.name, op)) return r;
    unreachable;
}

pub fn isKnown(op: []const u8) bool {
    for (tables.reductions) |r| if (std.mem.eql(u8, r.name, op)) return true;
    return std.mem.eql(u8, op, "sum_exp");
}

/// What a reduction calls beyond the header of rows.
pub fn headerOf(op: []const u8) []const u8 {
    return if (std.mem.eql(u8, op, "sum_exp")) "" else rule(op).header;
}

/// `update` of a rule, of an accumulator and a value.
fn updated(body: *Body, update: []const u8, a: []const u8, v: []const u8) Error![]const u8 {
    var out: std.ArrayList(u8) = .empty;
    var rest = update;
    while (std.mem.findScalar(u8, rest, '{')) |at| {
        try out.appendSlice(body.arena, rest[0..at]);
        try out.appendSlice(body.arena, if (rest[at + 1] == 'a') a else v);
        rest = rest[at + 3 ..];
    }
    try out.appendSlice(body.arena, rest);
    return out.items;
}

/// Declares the accumulators of a thread.
pub fn startParts(body: *Body, r: Reduce) Error!void {
    try body.add("{s} {s}_part[U];", .{ r.type, r.name });
    if (isSumExp(r)) {
        try body.add("{s} {s}_part[U];", .{ r.type, r.peak });
        try body.openStep();
        try body.add("{s}_part[u_] = 0.0f;", .{r.name});
        try body.add("{s}_part[u_] = -FLT_MAX;", .{r.peak});
    } else {
        try body.openStep();
        try body.add("{s}_part[u_] = {s}({s});", .{ r.name, r.type, rule(r.op).identity });
    }
    try body.close();
}

/// Takes an element into accumulator `part`.
pub fn updatePart(body: *Body, r: Reduce, part: []const u8) Error!void {
    const a = try body.fmt("{s}_part[{s}]", .{ r.name, part });
    if (!isSumExp(r)) {
        const v = try body.fmt("({s})", .{r.expr});
        try body.add("{s} = {s};", .{ a, try updated(body, rule(r.op).update, a, v) });
        return;
    }
    const peak = try body.fmt("{s}_part[{s}]", .{ r.peak, part });
    try body.add("{{", .{});
    body.depth += 1;
    try body.add("const float v_ = {s};", .{r.expr});
    try body.add("const float d_ = v_ == {s} ? 0.0f : v_ - {s};", .{ peak, peak });
    try body.add("const float e_ = ZMLX_EXP_BOUNDED(-fabs(d_));", .{});
    try body.add("{s} = d_ > 0.0f ? {s} * e_ + 1.0f : {s} + e_;", .{ a, a, a });
    try body.add("{s} = max({s}, v_);", .{ peak, peak });
    try body.close();
}

/// Declares the result: the accumulators of all threads of the row, folded.
pub fn foldParts(body: *Body, r: Reduce) Error!void {
    if (!isSumExp(r)) {
        return fold(body, r.name, r.op, r.type, try body.fmt("{s}_part", .{r.name}));
    }
    try body.add("float {s}_most[U];", .{r.peak});
    try body.openStep();
    try body.add("{s}_most[u_] = {s}_part[u_];", .{ r.peak, r.peak });
    try body.close();
    try fold(body, r.peak, "max", "float", try body.fmt("{s}_most", .{r.peak}));
    try body.openStep();
    const old = try body.fmt("{s}_part[u_]", .{r.peak});
    try body.add(
        "{s}_part[u_] *= {s} == {s} ? 1.0f : exp({s} - {s});",
        .{ r.name, old, r.peak, old, r.peak },
    );
    try body.close();
    try fold(body, r.name, "sum", "float", try body.fmt("{s}_part", .{r.name}));
}

fn fold(
    body: *Body,
    name: []const u8,
    op: []const u8,
    type_name: []const u8,
    list: []const u8,
) Error!void {
    const how = rule(op);
    try body.open("for (uint w_ = U / 2; w_ > 0; w_ /= 2)", .{});
    try body.openStepOf("w_");
    const a = try body.fmt("{s}[u_]", .{list});
    const v = try body.fmt("{s}[u_ + w_]", .{list});
    try body.add("{s} = {s};", .{ a, try updated(body, how.update, a, v) });
    try body.close();
    try body.close();
    try body.add(
        "const {s} {s} = zmlx_row_reduce<TPR, {s}>({s}[0], scratch_{s}, lane_);",
        .{ type_name, name, how.fold, list, type_name },
    );
}
