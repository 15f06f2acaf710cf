//! rms_norm and layer_norm.

const std = @import("std");
const arguments = @import("../arguments.zig");
const errors = @import("../errors.zig");
const table = @import("table.zig");
const Array = @import("../array.zig").Array;
const Context = @import("../context.zig").Context;
const Error = errors.Error;
const longest_kept_row = @import("../tables.zig").tables.launch.longest_kept_row;

/// A normed array, and what its backward needs of the rows.
pub const Normed = struct {
    y: Array,
    statistics: [3]Array,
    count: usize,

    pub fn deinit(normed: Normed) void {
        normed.y.deinit();
        table.deinitAll(normed.statistics[0..normed.count]);
    }
};

/// Gradients of the arrays that were given.
pub const NormGradients = struct {
    dx: Array,
    dweight: ?Array = null,
    dbias: ?Array = null,

    pub fn deinit(gradients: NormGradients) void {
        gradients.dx.deinit();
        if (gradients.dweight) |a| a.deinit();
        if (gradients.dbias) |a| a.deinit();
    }
};

const Norm = struct {
    op: []const u8,
    /// Statistics of a row.
    count: usize,
    weight: ?Array,
    bias: ?Array = null,

    fn given(norm: Norm, buffer: *[2][]const u8) []const []const u8 {
        var len: usize = 0;
        for ([_]?Array{ norm.weight, norm.bias }, [_][]const u8{ "weight", "bias" }) |a, name| {
            if (a == null) continue;
            buffer[len] = name;
            len += 1;
        }
        return buffer[0..len];
    }

    fn check(norm: Norm, x: Array) Error!void {
        const all = [_]?Array{ x, norm.weight, norm.bias };
        const declared = for (table.catalogue.ops) |op| {
            if (std.mem.eql(u8, op.name, norm.op)) break op.arguments;
        } else unreachable;
        try arguments.check(norm.op, declared, all[0..declared.len]);
    }

    fn run(
        norm: Norm,
        context: *Context,
        part: []const u8,
        x: Array,
        eps: f32,
        outputs: []Array,
    ) Error!void {
        try arguments.checkNotNegative(norm.op, "eps", eps);
        try norm.check(x);
        const eps_array = try Array.scalar(f32, eps);
        defer eps_array.deinit();
        var inputs: table.Inputs = .{};
        for ([_]?Array{ x, norm.weight, norm.bias, eps_array }) |a| inputs.add(a);
        var names: [2][]const u8 = undefined;
        try context.run(table.variant(norm.op, norm.given(&names), part), inputs.items(), outputs);
    }

    fn forward(norm: Norm, context: *Context, x: Array, eps: f32) Error!Array {
        var y: [1]Array = undefined;
        try norm.run(context, "forward", x, eps, &y);
        return y[0];
    }

    fn training(norm: Norm, context: *Context, x: Array, eps: f32) Error!Normed {
        var outputs: [4]Array = undefined;
        try norm.run(context, "training", x, eps, outputs[0 .. 1 + norm.count]);
        return .{ .y = outputs[0], .statistics = outputs[1..4].*, .count = norm.count };
    }

    fn backward(
        norm: Norm,
        context: *Context,
        x: Array,
        normed: Normed,
        dy: Array,
    ) Error!NormGradients {
        try norm.check(x);
        if (normed.count != norm.count) return errors.invalid(
            "[{s}] 'normed' must be what {s} gave but has statistics of another norm.",
            .{ norm.op, norm.op },
        );
        try arguments.checkLike(norm.op, "dy", dy, x);
        const statistics = normed.statistics[0..normed.count];
        var buffer: [2][]const u8 = undefined;
        const names = norm.given(&buffer);
        const together = table.rowLength(x) <= longest_kept_row;

        // Nothing follows the statistics, so their cotangents are zeros.
        const none = try Array.zeros(.float32, x.shape()[0 .. x.ndim() - 1]);
        defer none.deinit();
        var inputs: table.Inputs = .{};
        inputs.add(x);
        inputs.add(norm.weight);
        for (statistics) |s| inputs.add(s);
        inputs.add(dy);
        for (statistics) |_| inputs.add(none);
        var results: [3]Array = undefined;
        var part: [64]u8 = undefined;
        const rows = table.partName(&part, "dx", if (together) names else &.{});
        const count = if (together) names.len else 0;
        const kernel = table.variant(norm.op, names, rows);
        try context.run(kernel, inputs.items(), results[0 .. 1 + count]);
        errdefer results[0].deinit();
        if (!together and names.len > 0) {
            var columns: table.Inputs = .{};
            columns.add(x);
            for (statistics) |s| columns.add(s);
            columns.add(dy);
            const sums = table.partName(&part, "sums", names);
            try context.run(
                table.variant(norm.op, names, sums),
                columns.items(),
                results[1 .. 1 + names.len],
            );
        }
        const partial = results[1 .. 1 + names.len];
        defer table.deinitAll(partial);
        var gradients: NormGradients = .{ .dx = results[0] };
        var next: usize = 0;
        if (norm.weight) |weight| {
            gradients.dweight = try table.sumChunks(context, partial[next], weight);
            next += 1;
        }
        errdefer if (gradients.dweight) |a| a.deinit();
        if (norm.bias) |bias| gradients.dbias = try table.sumChunks(context, partial[next], bias);
        return gradients;
    }
};

/// y = x · rsqrt(mean(x²) + eps) · weight over the last axis.
pub fn rmsNorm(context: *Context, x: Array, weight: ?Array, eps: f32) Error!Array {
    const norm: Norm = .{ .op = "rms_norm", .count = 1, .weight = weight };
    return norm.forward(context, x, eps);
}

pub fn rmsNormTraining(context: *Context, x: Array, weight: ?Array, eps: f32) Error!Normed {
    const norm: Norm = .{ .op = "rms_norm", .count = 1, .weight = weight };
    return norm.training(context, x, eps);
}

/// Gradients of x and weight.
pub fn rmsNormBackward(
    context: *Context,
    x: Array,
    weight: ?Array,
    normed: Normed,
    dy: Array,
) Error!NormGradients {
    const norm: Norm = .{ .op = "rms_norm", .count = 1, .weight = weight };
    return norm.backward(context, x, normed, dy);
}

/// y = (x - mean(x)) · rsqrt(var(x) + eps) · weight + bias over the last axis.
pub fn layerNorm(context: *Context, x: Array, weight: ?Array, bias: ?Array, eps: f32) Error!Array {
    const norm: Norm = .{ .op = "layer_norm", .count = 3, .weight = weight, .bias = bias };
    return norm.forward(context, x, eps);
}

pub fn layerNormTraining(
    context: *Context,
    x: Array,
    weight: ?Array,
    bias: ?Array,
    eps: f32,
) Error!Normed {
    const norm: Norm = .{ .op = "layer_norm", .count = 3, .weight = weight, .bias = bias };
    return norm.training(context, x, eps);
}

/// Gradients of x, weight and bias.
pub fn layerNormBackward(
    context: *Context,
    x: Array,
    weight: ?Array,
    bias: ?Array,
    normed: Normed,
    dy: Array,
) Error!NormGradients {
    const norm: Norm = .{ .op = "layer_norm", .count = 3, .weight = weight, .bias = bias };
    return norm.backward(context, x, normed, dy);
}
