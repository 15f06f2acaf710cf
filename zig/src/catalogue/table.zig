//! The kernels that Python exports, and what the ops share.

const std = @import("std");
const arguments = @import("../arguments.zig");
const Array = @import("../array.zig").Array;
const Context = @import("../context.zig").Context;
const Error = @import("../errors.zig").Error;
const KernelSpec = @import("../spec.zig").KernelSpec;
const PatternKernel = @import("../pattern_kernel.zig").PatternKernel;

/// A kernel of the catalogue, under "op+given/part", where `given` are the optional arguments.
pub const Entry = struct {
    key: []const u8,
    /// The name with a hash, as Python computes it.
    full_name: []const u8,
    kernel: PatternKernel,
};
pub const Op = struct { name: []const u8, arguments: []const arguments.Argument };
const Catalogue = struct {
    ops: []const Op,
    kernels: []const Entry,
    /// A body that is written by hand.
    rope: KernelSpec,
    rope_full_name: []const u8,
    rope_most_dims: i32,
};

pub const catalogue: Catalogue = @import("../exported/catalogue.zon");

/// The kernel of a key; a caller has checked that there is one.
pub fn find(key: []const u8) *const PatternKernel {
    const index = by_key.get(key) orelse
        std.debug.panic("the catalogue has no kernel '{s}'", .{key});
    return &catalogue.kernels[index].kernel;
}

const by_key: std.StaticStringMap(usize) = .initComptime(entries: {
    var entries: [catalogue.kernels.len]struct { []const u8, usize } = undefined;
    for (&entries, catalogue.kernels, 0..) |*to, entry, i| to.* = .{ entry.key, i };
    break :entries entries;
});

/// The kernel of an op for the optional arguments that are given.
pub fn variant(op: []const u8, given: []const []const u8, part: []const u8) *const PatternKernel {
    var buffer: [128]u8 = undefined;
    var w: std.Io.Writer = .fixed(&buffer);
    w.writeAll(op) catch unreachable;
    for (given) |name| w.print("+{s}", .{name}) catch unreachable;
    w.print("/{s}", .{part}) catch unreachable;
    return find(w.buffered());
}

pub fn check(op: []const u8, values: []const ?Array) Error!void {
    for (catalogue.ops) |known| if (std.mem.eql(u8, known.name, op)) {
        return arguments.check(op, known.arguments, values);
    };
    unreachable;
}

pub fn rowLength(x: Array) u32 {
    return @intCast(x.shape()[x.ndim() - 1]);
}

/// The arrays that are there, in order.
pub const Inputs = struct {
    list: [12]Array = undefined,
    len: usize = 0,

    pub fn add(inputs: *Inputs, maybe: ?Array) void {
        inputs.list[inputs.len] = maybe orelse return;
        inputs.len += 1;
    }

    pub fn items(inputs: *const Inputs) []const Array {
        return inputs.list[0..inputs.len];
    }
};

pub fn deinitAll(list: []const Array) void {
    for (list) |a| a.deinit();
}

/// The second launch of a sum over rows: (chunks, D) partial sums to the shape and dtype of the
/// parameter whose gradient they are.
pub fn sumChunks(context: *Context, partial: Array, like: Array) Error!Array {
    const sums = try context.one(find("sum_chunks"), &.{partial});
    defer sums.deinit();
    const shaped = try sums.reshape(like.shape());
    defer shaped.deinit();
    return shaped.astype(like.dtype());
}

/// "dx", or "dx_dweight_dbias" and so on.
pub fn partName(buffer: *[64]u8, first: []const u8, names: []const []const u8) []const u8 {
    var w: std.Io.Writer = .fixed(buffer);
    w.writeAll(first) catch unreachable;
    for (names) |name| w.print("_d{s}", .{name}) catch unreachable;
    return w.buffered();
}
