//! softmax.

const arguments = @import("../arguments.zig");
const table = @import("table.zig");
const Array = @import("../array.zig").Array;
const Context = @import("../context.zig").Context;
const Error = @import("../errors.zig").Error;
const longest_kept_row = @import("../tables.zig").tables.launch.longest_kept_row;

/// y = exp(x - max x) / Σ exp(x - max x) over the last axis.
pub fn softmax(context: *Context, x: Array) Error!Array {
    try table.check("softmax", &.{x});
    const part = if (table.rowLength(x) > longest_kept_row) "long" else "forward";
    return context.one(table.variant("softmax", &.{}, part), &.{x});
}

/// The gradient of x, from the result y and its cotangent.
pub fn softmaxBackward(context: *Context, y: Array, dy: Array) Error!Array {
    try table.check("softmax", &.{y});
    try arguments.checkLike("softmax", "dy", dy, y);
    return context.one(table.variant("softmax", &.{}, "dx"), &.{ y, dy });
}
