//! Cross entropy of class indices.

const std = @import("std");
const arguments = @import("../arguments.zig");
const table = @import("table.zig");
const arrays = @import("../array.zig");
const errors = @import("../errors.zig");
const Array = arrays.Array;
const Context = @import("../context.zig").Context;
const Error = errors.Error;
const PatternKernel = @import("../pattern_kernel.zig").PatternKernel;

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
    /// By how much the log-sum-exp was rounded.
    lse_low: Array,

    pub fn deinit(l: Loss) void {
        l.loss.deinit();
        l.lse.deinit();
        l.lse_low.deinit();
    }
};

/// Stands for "no index is ignored", as in Python.
fn ignored(options: CrossEntropyOptions) Error!Array {
    if (options.ignore_index) |index| return Array.scalar(i32, index);
    return Array.scalar(i64, std.math.minInt(i64));
}

/// Losses that are reduced lie in one list, whose axis is an i32.
fn check(logits: Array, targets: Array, options: CrossEntropyOptions) Error!void {
    try table.check("cross_entropy", &.{ logits, targets, null });
    if (options.reduction == .none or targets.size() < 1 << 31) return;
    return errors.invalid(
        "[cross_entropy] 'targets' must be fewer than 2^31 where losses are reduced but got {f}.",
        .{arguments.Shape{ .sizes = targets.shape() }},
    );
}

/// loss = log Σ exp(logits) - logits[target] over the last axis, reduced, in the dtype of the
/// logits.
pub fn crossEntropy(
    context: *Context,
    logits: Array,
    targets: Array,
    options: CrossEntropyOptions,
) Error!Array {
    try check(logits, targets, options);
    const ignore = try ignored(options);
    defer ignore.deinit();
    const rows = try context.one(entropy("forward"), &.{ logits, targets, ignore });
    defer rows.deinit();
    return reduced(context, rows, logits, targets, ignore, options);
}

pub fn crossEntropyTraining(
    context: *Context,
    logits: Array,
    targets: Array,
    options: CrossEntropyOptions,
) Error!Loss {
    try check(logits, targets, options);
    const ignore = try ignored(options);
    defer ignore.deinit();
    var outputs: [3]Array = undefined;
    try context.run(entropy("training"), &.{ logits, targets, ignore }, &outputs);
    defer outputs[0].deinit();
    errdefer for (outputs[1..]) |output| output.deinit();
    return .{
        .loss = try reduced(context, outputs[0], logits, targets, ignore, options),
        .lse = outputs[1],
        .lse_low = outputs[2],
    };
}

/// The kernel of this target: on the CPU another one is faster.
fn entropy(part: []const u8) *const PatternKernel {
    const cpu = arrays.target() == .cpu;
    return table.variant(if (cpu) "cross_entropy@cpu" else "cross_entropy", &.{}, part);
}

/// 1 for each row that counts, else 0, as one list.
fn counting(targets: Array, ignore: Array) Error!Array {
    const differs = try targets.notEqual(ignore);
    defer differs.deinit();
    const weights = try differs.astype(.float32);
    defer weights.deinit();
    return weights.reshape(&.{@intCast(targets.size())});
}

/// The reduction of the losses of rows, in the dtype of the logits.
fn reduced(
    context: *Context,
    rows: Array,
    logits: Array,
    targets: Array,
    ignore: Array,
    options: CrossEntropyOptions,
) Error!Array {
    if (options.reduction == .none) return rows.astype(logits.dtype());
    const flat = try rows.reshape(&.{@intCast(rows.size())});
    defer flat.deinit();
    const value = value: {
        if (options.reduction == .sum or options.ignore_index == null) {
            const key = if (options.reduction == .sum) "loss_sum" else "loss_mean";
            break :value try context.one(table.find(key), &.{flat});
        }
        const weights = try counting(targets, ignore);
        defer weights.deinit();
        break :value try context.one(table.find("loss_weighted_mean"), &.{ flat, weights });
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
    try check(logits, targets, options);
    const lead = logits.shape()[0 .. logits.ndim() - 1];
    const shape: []const i32 = if (options.reduction == .none) lead else &.{};
    try arguments.checkShape("cross_entropy", "dloss", dloss, shape);
    const ignore = try ignored(options);
    defer ignore.deinit();
    const rows = try spread(context, dloss, lead, targets, ignore, options);
    defer rows.deinit();
    const none = try Array.zeros(.float32, lead);
    defer none.deinit();
    return context.one(
        entropy("dlogits"),
        &.{ logits, targets, ignore, loss.lse, loss.lse_low, rows, none },
    );
}

/// The cotangents of the losses of the rows.
fn spread(
    context: *Context,
    dloss: Array,
    lead: []const i32,
    targets: Array,
    ignore: Array,
    options: CrossEntropyOptions,
) Error!Array {
    const wide = try dloss.astype(.float32);
    defer wide.deinit();
    if (options.reduction != .mean) return wide.broadcastTo(lead);
    const count = count: {
        if (options.ignore_index == null) {
            break :count try Array.scalar(f32, @floatFromInt(targets.size()));
        }
        const weights = try counting(targets, ignore);
        defer weights.deinit();
        break :count try context.one(table.find("loss_sum"), &.{weights});
    };
    defer count.deinit();
    const part = try wide.divide(count);
    defer part.deinit();
    return part.broadcastTo(lead);
}
