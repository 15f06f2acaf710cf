//! swiglu.

const arguments = @import("../arguments.zig");
const table = @import("table.zig");
const Array = @import("../array.zig").Array;
const Context = @import("../context.zig").Context;
const Error = @import("../errors.zig").Error;
const longest_kept_row = @import("../tables.zig").tables.launch.longest_kept_row;

/// What swiglu takes: gate and up (*, D), and biases (D,) that are added to them first.
pub const Gated = struct {
    gate: Array,
    up: Array,
    gate_bias: ?Array = null,
    up_bias: ?Array = null,

    fn inputs(g: Gated) table.Inputs {
        var list: table.Inputs = .{};
        for ([_]?Array{ g.gate, g.up, g.gate_bias, g.up_bias }) |a| list.add(a);
        return list;
    }

    fn biases(g: Gated, buffer: *[2][]const u8) []const []const u8 {
        var len: usize = 0;
        const names = [_][]const u8{ "gate_bias", "up_bias" };
        for ([_]?Array{ g.gate_bias, g.up_bias }, names) |a, name| {
            if (a == null) continue;
            buffer[len] = name;
            len += 1;
        }
        return buffer[0..len];
    }
};

pub const GatedGradients = struct {
    gate: Array,
    up: Array,
    gate_bias: ?Array = null,
    up_bias: ?Array = null,

    pub fn deinit(g: GatedGradients) void {
        g.gate.deinit();
        g.up.deinit();
        if (g.gate_bias) |a| a.deinit();
        if (g.up_bias) |a| a.deinit();
    }
};

/// y = gate · sigmoid(gate) · up.
pub fn swiglu(context: *Context, g: Gated) Error!Array {
    try table.check("swiglu", &.{ g.gate, g.up, g.gate_bias, g.up_bias });
    var buffer: [2][]const u8 = undefined;
    return context.one(table.variant("swiglu", g.biases(&buffer), "forward"), g.inputs().items());
}

/// Gradients of the arrays that were given.
pub fn swigluBackward(context: *Context, g: Gated, dy: Array) Error!GatedGradients {
    try table.check("swiglu", &.{ g.gate, g.up, g.gate_bias, g.up_bias });
    try arguments.checkLike("swiglu", "dy", dy, g.gate);
    var inputs = g.inputs();
    inputs.add(dy);
    var buffer: [2][]const u8 = undefined;
    const biases = g.biases(&buffer);
    // What does not fit together is two launches.
    const apart = biases.len > 0 and table.rowLength(g.gate) > longest_kept_row;
    var part: [64]u8 = undefined;
    const first = table.partName(&part, "dgate_dup", if (apart) &.{} else biases);
    var results: [4]Array = undefined;
    const count = 2 + if (apart) 0 else biases.len;
    try context.run(table.variant("swiglu", biases, first), inputs.items(), results[0..count]);
    errdefer table.deinitAll(results[0..2]);
    if (apart) {
        const sums = table.partName(&part, "", biases)[1..];
        try context.run(
            table.variant("swiglu", biases, sums),
            inputs.items(),
            results[2 .. 2 + biases.len],
        );
    }
    const partial = results[2 .. 2 + biases.len];
    defer table.deinitAll(partial);
    var gradients: GatedGradients = .{ .gate = results[0], .up = results[1] };
    var next: usize = 0;
    if (g.gate_bias) |bias| {
        gradients.gate_bias = try table.sumChunks(context, partial[next], bias);
        next += 1;
    }
    errdefer if (gradients.gate_bias) |a| a.deinit();
    if (g.up_bias) |bias| gradients.up_bias = try table.sumChunks(context, partial[next], bias);
    return gradients;
}
