//! Ops of the catalogue, forward and backward, from the kernels that Python exports.
//!
//! Every array that a function returns belongs to the caller. A forward that a backward follows is
//! its `…Training` form, which also keeps the statistics of the rows. Errors are those of Python.

const std = @import("std");
const arguments = @import("arguments.zig");
const arrays = @import("array.zig");
const errors = @import("errors.zig");
const metal = @import("metal.zig");
const pattern_kernel = @import("pattern_kernel.zig");
const longest_kept_row = @import("tables.zig").tables.launch.longest_kept_row;
const Array = arrays.Array;
const Context = pattern_kernel.Context;
const Error = errors.Error;
const PatternKernel = pattern_kernel.PatternKernel;

/// A kernel of the catalogue, under "op+given/part", where `given` are the optional arguments.
pub const Entry = struct {
    key: []const u8,
    /// The name with a hash, as Python computes it.
    full_name: []const u8,
    kernel: PatternKernel,
};
pub const Op = struct { name: []const u8, arguments: []const arguments.Argument };
const Catalogue = struct { ops: []const Op, kernels: []const Entry };

pub const catalogue: Catalogue = @import("exported/catalogue.zon");

/// The kernel of a key; a caller has checked that there is one.
fn find(key: []const u8) *const PatternKernel {
    for (catalogue.kernels) |*entry| if (std.mem.eql(u8, entry.key, key)) return &entry.kernel;
    std.debug.panic("the catalogue has no kernel '{s}'", .{key});
}

/// The kernel of an op for the optional arguments that are given.
fn variant(op: []const u8, given: []const []const u8, part: []const u8) *const PatternKernel {
    var buffer: [128]u8 = undefined;
    var w: std.Io.Writer = .fixed(&buffer);
    w.writeAll(op) catch unreachable;
    for (given) |name| w.print("+{s}", .{name}) catch unreachable;
    w.print("/{s}", .{part}) catch unreachable;
    return find(w.buffered());
}

fn check(op: []const u8, values: []const ?Array) Error!void {
    for (catalogue.ops) |known| if (std.mem.eql(u8, known.name, op)) {
        return arguments.check(op, known.arguments, values);
    };
    unreachable;
}

fn rowLength(x: Array) u32 {
    return @intCast(x.shape()[x.ndim() - 1]);
}

/// The arrays that are there, in order.
const Inputs = struct {
    list: [12]Array = undefined,
    len: usize = 0,

    fn add(inputs: *Inputs, maybe: ?Array) void {
        inputs.list[inputs.len] = maybe orelse return;
        inputs.len += 1;
    }

    fn items(inputs: *const Inputs) []const Array {
        return inputs.list[0..inputs.len];
    }
};

fn deinitAll(list: []const Array) void {
    for (list) |a| a.deinit();
}

/// The second launch of a sum over rows: (chunks, D) partial sums to the shape and dtype of the
/// parameter whose gradient they are.
fn sumChunks(context: *Context, partial: Array, like: Array) Error!Array {
    const sums = try context.one(find("sum_chunks"), &.{partial});
    defer sums.deinit();
    const shaped = try sums.reshape(like.shape());
    defer shaped.deinit();
    return shaped.astype(like.dtype());
}

// ---- softmax ------------------------------------------------------------------------------------

/// y = exp(x - max x) / Σ exp(x - max x) over the last axis.
pub fn softmax(context: *Context, x: Array) Error!Array {
    try check("softmax", &.{x});
    const part = if (rowLength(x) > longest_kept_row) "long" else "forward";
    return context.one(variant("softmax", &.{}, part), &.{x});
}

/// The gradient of x, from the result y and its cotangent.
pub fn softmaxBackward(context: *Context, y: Array, dy: Array) Error!Array {
    try check("softmax", &.{y});
    try arguments.checkLike("softmax", "dy", dy, y);
    return context.one(variant("softmax", &.{}, "dx"), &.{ y, dy });
}

// ---- norms --------------------------------------------------------------------------------------

/// A normed array, and what its backward needs of the rows.
pub const Normed = struct {
    y: Array,
    statistics: [3]Array,
    count: usize,

    pub fn deinit(normed: Normed) void {
        normed.y.deinit();
        deinitAll(normed.statistics[0..normed.count]);
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
        const declared = for (catalogue.ops) |op| {
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
        try norm.check(x);
        const eps_array = try Array.scalar(f32, eps);
        defer eps_array.deinit();
        var inputs: Inputs = .{};
        for ([_]?Array{ x, norm.weight, norm.bias, eps_array }) |a| inputs.add(a);
        var names: [2][]const u8 = undefined;
        try context.run(variant(norm.op, norm.given(&names), part), inputs.items(), outputs);
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
        try arguments.checkLike(norm.op, "dy", dy, x);
        const statistics = normed.statistics[0..normed.count];
        var buffer: [2][]const u8 = undefined;
        const names = norm.given(&buffer);
        const together = rowLength(x) <= longest_kept_row;

        // Nothing follows the statistics, so their cotangents are zeros.
        const none = try Array.zeros(.float32, x.shape()[0 .. x.ndim() - 1]);
        defer none.deinit();
        var inputs: Inputs = .{};
        inputs.add(x);
        inputs.add(norm.weight);
        for (statistics) |s| inputs.add(s);
        inputs.add(dy);
        for (statistics) |_| inputs.add(none);
        var results: [3]Array = undefined;
        var part: [64]u8 = undefined;
        const rows = rowsPart(&part, "dx", if (together) names else &.{});
        const count = if (together) names.len else 0;
        try context.run(variant(norm.op, names, rows), inputs.items(), results[0 .. 1 + count]);
        errdefer results[0].deinit();
        if (!together and names.len > 0) {
            var columns: Inputs = .{};
            columns.add(x);
            for (statistics) |s| columns.add(s);
            columns.add(dy);
            const sums = rowsPart(&part, "sums", names);
            try context.run(
                variant(norm.op, names, sums),
                columns.items(),
                results[1 .. 1 + names.len],
            );
        }
        const partial = results[1 .. 1 + names.len];
        defer deinitAll(partial);
        var gradients: NormGradients = .{ .dx = results[0] };
        var next: usize = 0;
        if (norm.weight) |weight| {
            gradients.dweight = try sumChunks(context, partial[next], weight);
            next += 1;
        }
        errdefer if (gradients.dweight) |a| a.deinit();
        if (norm.bias) |bias| gradients.dbias = try sumChunks(context, partial[next], bias);
        return gradients;
    }
};

/// "dx", or "dx_dweight_dbias" and so on.
fn rowsPart(buffer: *[64]u8, first: []const u8, names: []const []const u8) []const u8 {
    var w: std.Io.Writer = .fixed(buffer);
    w.writeAll(first) catch unreachable;
    for (names) |name| w.print("_d{s}", .{name}) catch unreachable;
    return w.buffered();
}

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

// ---- swiglu -------------------------------------------------------------------------------------

/// What swiglu takes: gate and up (*, D), and biases (D,) that are added to them first.
pub const Gated = struct {
    gate: Array,
    up: Array,
    gate_bias: ?Array = null,
    up_bias: ?Array = null,

    fn inputs(g: Gated) Inputs {
        var list: Inputs = .{};
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
    try check("swiglu", &.{ g.gate, g.up, g.gate_bias, g.up_bias });
    var buffer: [2][]const u8 = undefined;
    return context.one(variant("swiglu", g.biases(&buffer), "forward"), g.inputs().items());
}

/// Gradients of the arrays that were given.
pub fn swigluBackward(context: *Context, g: Gated, dy: Array) Error!GatedGradients {
    try check("swiglu", &.{ g.gate, g.up, g.gate_bias, g.up_bias });
    try arguments.checkLike("swiglu", "dy", dy, g.gate);
    var inputs = g.inputs();
    inputs.add(dy);
    var buffer: [2][]const u8 = undefined;
    const biases = g.biases(&buffer);
    // What does not fit together is two launches.
    const apart = biases.len > 0 and rowLength(g.gate) > longest_kept_row;
    var part: [64]u8 = undefined;
    const first = rowsPart(&part, "dgate_dup", if (apart) &.{} else biases);
    var results: [4]Array = undefined;
    const count = 2 + if (apart) 0 else biases.len;
    try context.run(variant("swiglu", biases, first), inputs.items(), results[0..count]);
    errdefer deinitAll(results[0..2]);
    if (apart) {
        const sums = rowsPart(&part, "", biases)[1..];
        try context.run(
            variant("swiglu", biases, sums),
            inputs.items(),
            results[2 .. 2 + biases.len],
        );
    }
    const partial = results[2 .. 2 + biases.len];
    defer deinitAll(partial);
    var gradients: GatedGradients = .{ .gate = results[0], .up = results[1] };
    var next: usize = 0;
    if (g.gate_bias) |bias| {
        gradients.gate_bias = try sumChunks(context, partial[next], bias);
        next += 1;
    }
    errdefer if (gradients.gate_bias) |a| a.deinit();
    if (g.up_bias) |bias| gradients.up_bias = try sumChunks(context, partial[next], bias);
    return gradients;
}

// ---- cross entropy ------------------------------------------------------------------------------

pub const Reduction = enum { none, mean, sum };
pub const CrossEntropyOptions = struct {
    /// Rows with this target have loss and gradient 0 and do not count in the mean.
    ignore_index: ?i32 = null,
    reduction: Reduction = .mean,
};

/// A loss, and what its backward needs of the rows.
pub const Loss = struct {
    loss: Array,
    lse: Array,

    pub fn deinit(l: Loss) void {
        l.loss.deinit();
        l.lse.deinit();
    }
};

/// Stands for "no index is ignored", as in Python.
fn ignored(options: CrossEntropyOptions) Error!Array {
    if (options.ignore_index) |index| return Array.scalar(i32, index);
    return Array.scalar(i64, std.math.minInt(i64));
}

/// loss = log Σ exp(logits) - logits[target] over the last axis, reduced, in the dtype of the
/// logits.
pub fn crossEntropy(
    context: *Context,
    logits: Array,
    targets: Array,
    options: CrossEntropyOptions,
) Error!Array {
    try check("cross_entropy", &.{ logits, targets });
    const ignore = try ignored(options);
    defer ignore.deinit();
    const kernel = variant("cross_entropy", &.{}, "forward");
    const rows = try context.one(kernel, &.{ logits, targets, ignore });
    defer rows.deinit();
    return reduced(rows, logits, targets, ignore, options);
}

pub fn crossEntropyTraining(
    context: *Context,
    logits: Array,
    targets: Array,
    options: CrossEntropyOptions,
) Error!Loss {
    try check("cross_entropy", &.{ logits, targets });
    const ignore = try ignored(options);
    defer ignore.deinit();
    var outputs: [2]Array = undefined;
    const kernel = variant("cross_entropy", &.{}, "training");
    try context.run(kernel, &.{ logits, targets, ignore }, &outputs);
    defer outputs[0].deinit();
    errdefer outputs[1].deinit();
    return .{
        .loss = try reduced(outputs[0], logits, targets, ignore, options),
        .lse = outputs[1],
    };
}

/// The number of rows that count, in float32.
fn counted(targets: Array, ignore: Array) Error!Array {
    const differs = try targets.notEqual(ignore);
    defer differs.deinit();
    return differs.sum();
}

fn reduced(
    rows: Array,
    logits: Array,
    targets: Array,
    ignore: Array,
    options: CrossEntropyOptions,
) Error!Array {
    const value = value: switch (options.reduction) {
        .none => break :value try rows.clone(),
        .sum => break :value try rows.sum(),
        .mean => {
            if (options.ignore_index == null) break :value try rows.mean();
            const total = try rows.sum();
            defer total.deinit();
            const count = try counted(targets, ignore);
            defer count.deinit();
            break :value try total.divide(count);
        },
    };
    defer value.deinit();
    return value.astype(logits.dtype());
}

/// The gradient of the logits, from the cotangent of the reduced loss.
pub fn crossEntropyBackward(
    context: *Context,
    logits: Array,
    targets: Array,
    loss: Loss,
    dloss: Array,
    options: CrossEntropyOptions,
) Error!Array {
    try check("cross_entropy", &.{ logits, targets });
    const lead = logits.shape()[0 .. logits.ndim() - 1];
    const shape: []const i32 = if (options.reduction == .none) lead else &.{};
    try arguments.checkShape("cross_entropy", "dloss", dloss, shape);
    const ignore = try ignored(options);
    defer ignore.deinit();
    const rows = try spread(dloss, lead, targets, ignore, options);
    defer rows.deinit();
    const none = try Array.zeros(.float32, lead);
    defer none.deinit();
    return context.one(
        variant("cross_entropy", &.{}, "dlogits"),
        &.{ logits, targets, ignore, loss.lse, rows, none },
    );
}

/// The cotangents of the losses of the rows.
fn spread(
    dloss: Array,
    lead: []const i32,
    targets: Array,
    ignore: Array,
    options: CrossEntropyOptions,
) Error!Array {
    const wide = try dloss.astype(.float32);
    defer wide.deinit();
    const scaled = scaled: {
        if (options.reduction != .mean) break :scaled try wide.clone();
        if (options.ignore_index != null) {
            const count = try counted(targets, ignore);
            defer count.deinit();
            break :scaled try wide.divide(count);
        }
        const part = try Array.scalar(f32, @floatCast(
            1.0 / @as(f64, @floatFromInt(targets.size())),
        ));
        defer part.deinit();
        break :scaled try wide.multiply(part);
    };
    defer scaled.deinit();
    return scaled.broadcastTo(lead);
}
