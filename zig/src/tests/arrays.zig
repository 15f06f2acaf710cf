//! Arrays.

const builtin = @import("builtin");
const std = @import("std");
const zmlx = @import("zmlx");
const Array = zmlx.Array;
const Dtype = zmlx.Dtype;
const testing = std.testing;
const gpa = testing.allocator;

test "elements of every dtype come back as they went in" {
    inline for (.{ bool, u8, u16, u32, u64, i8, i16, i32, i64, f16, f32, f64 }) |T| {
        var data: [6]T = undefined;
        for (&data, 0..) |*x, i| x.* = switch (@typeInfo(T)) {
            .bool => i % 2 == 1,
            .int => if (i == 5) std.math.maxInt(T) else @intCast(i),
            else => @as(T, @floatFromInt(i)) - 2.5,
        };
        const a = try Array.fromSlice(T, &data, &.{ 2, 3 });
        defer a.deinit();
        try testing.expectEqual(Dtype.of(T), a.dtype());
        try testing.expectEqualSlices(i32, &.{ 2, 3 }, a.shape());
        const back = try a.toOwnedSlice(gpa, T);
        defer gpa.free(back);
        try testing.expectEqualSlices(T, &data, back);
    }
}

test "bfloat16 rounds to the nearest even as MLX does" {
    const values = [_]f32{ 0, -0.0, 1, 1.00390625, 1.01171875, 3.4e38, 1e-40, std.math.inf(f32) };
    const a = try Array.fromSlice(f32, &values, &.{values.len});
    defer a.deinit();
    const b = try a.astype(.bfloat16);
    defer b.deinit();
    var theirs: [values.len]zmlx.Bfloat16 = undefined;
    try b.copyTo(zmlx.Bfloat16, &theirs);
    for (values, theirs) |x, t| try testing.expectEqual(t, zmlx.Bfloat16.fromFloat(x));
    try testing.expect(std.math.isNan(zmlx.Bfloat16.fromFloat(std.math.nan(f32)).toFloat()));
}

test "a 0-d and an empty array" {
    const one = try Array.scalar(i64, -7);
    defer one.deinit();
    try testing.expectEqual(0, one.ndim());
    try testing.expectEqual(-7, try one.item(i64));
    const none = try Array.fromSlice(f32, &.{}, &.{ 0, 3 });
    defer none.deinit();
    try none.eval();
    try testing.expectEqual(0, none.size());
}

test "an array of nothing may have any other axes, and no array more than can be counted" {
    const large: [4]i32 = .{ 1 << 30, 1 << 30, 1 << 30, 0 };
    for ([_]Array{
        try .zeros(.float32, &large),
        try .fromSlice(f32, &.{}, &large),
        try .fromBytes(.bool, &.{}, &large),
    }) |none| {
        defer none.deinit();
        try testing.expectEqualSlices(i32, &large, none.shape());
        const reshaped = try none.reshape(&.{ 0, 1 << 30, 1 << 30, 1 << 30 });
        reshaped.deinit();
        // Their number would be a multiple of 2^64, which is none as well.
        try testing.expectError(error.InvalidArgument, none.reshape(large[0..3]));
    }
    const one = try Array.scalar(f32, 1);
    defer one.deinit();
    try testing.expectError(error.InvalidArgument, one.broadcastTo(large[0..3]));
    try testing.expectEqualStrings(
        "[zmlx] 'shape' must not overflow but got a size of 1073741824.",
        zmlx.lastError(),
    );
}

test "data that does not fit its shape is refused" {
    try testing.expectError(error.InvalidArgument, Array.fromSlice(f32, &.{ 1, 2 }, &.{3}));
    try testing.expectEqualStrings(
        "[Array] 'data' must have as many elements as the shape { 3 } but got 2.",
        zmlx.lastError(),
    );
    try testing.expectError(error.InvalidArgument, Array.fromSlice(f32, &.{}, &.{-1}));
    const large: [4]i32 = @splat(1 << 30);
    try testing.expectError(error.InvalidArgument, Array.fromSlice(f32, &.{}, &large));
    const bytes = [_]i32{ 1 << 30, 1 << 30, 4 };
    try testing.expectError(error.InvalidArgument, Array.fromBytes(.float32, &.{}, &bytes));
    const a = try Array.scalar(f32, 1);
    defer a.deinit();
    try testing.expectError(error.InvalidArgument, a.item(i32));
}

test "memory that an allocator refuses is what the last error says" {
    const a = try Array.scalar(f32, 1);
    defer a.deinit();
    try testing.expectError(error.InvalidArgument, a.item(i32));
    try testing.expectError(error.OutOfMemory, a.toOwnedSlice(testing.failing_allocator, f32));
    try testing.expectEqualStrings("[zmlx] out of memory", zmlx.lastError());

    try testing.expectError(error.InvalidArgument, a.item(i32));
    const kernel = zmlx.catalogue.catalogue.kernels[0].kernel;
    try testing.expectError(error.OutOfMemory, kernel.spec(testing.failing_allocator));
    try testing.expectEqualStrings("[zmlx] out of memory", zmlx.lastError());

    var context: zmlx.Context = .init(testing.failing_allocator, testing.io);
    defer context.deinit();
    const x = try Array.zeros(.float32, &.{ 2, 3, 4 });
    defer x.deinit();
    const ops = zmlx.catalogue;
    inline for (.{
        .{ ops.softmax, .{ &context, x } },
        .{ ops.rope, .{ &context, x, ops.RopeOptions{} } },
        .{ zmlx.KernelCache.get, .{ &context.kernels, zmlx.KernelSpec{
            .name = "double",
            .input_names = &.{"x"},
            .output_names = &.{"y"},
            .body = "y[0] = x[0] + x[0];",
        } } },
    }) |call| {
        try testing.expectError(error.InvalidArgument, a.item(i32));
        try testing.expectError(error.OutOfMemory, @call(.auto, call[0], call[1]));
        try testing.expectEqualStrings("[zmlx] out of memory", zmlx.lastError());
    }
}

test "data that there is no memory for is an error" {
    if (builtin.os.tag != .linux) return; // others set no limit
    const size = 1 << 28;
    const data = try std.heap.page_allocator.alloc(u8, size);
    defer std.heap.page_allocator.free(data);
    const before = try std.posix.getrlimit(.AS);
    var buffer: [64]u8 = undefined;
    const text = try std.Io.Dir.cwd().readFile(testing.io, "/proc/self/statm", &buffer);
    const pages = try std.fmt.parseInt(usize, std.mem.sliceTo(text, ' '), 10);
    var little = before;
    little.cur = pages * std.heap.pageSize() + size / 2;
    try std.posix.setrlimit(.AS, little);
    defer std.posix.setrlimit(.AS, before) catch unreachable;
    try testing.expectError(error.OutOfMemory, Array.fromSlice(u8, data, &.{size}));
    try testing.expectEqualStrings("[zmlx] out of memory", zmlx.lastError());
}

test "a device that is none is refused" {
    const none: zmlx.Stream = .{ .handle = .{ .index = 0, .device = 9, .device_index = 0 } };
    try testing.expectError(error.InvalidArgument, none.synchronize());
    try testing.expectEqualStrings(
        "[zmlx] 'device' must be a zmlx_device but got 9.",
        zmlx.lastError(),
    );
}

test "a clone outlives what it was made of, and a view is read in row-major order" {
    const a = try Array.fromSlice(i32, &.{ 1, 2, 3, 4, 5, 6 }, &.{ 2, 3 });
    const b = try a.clone();
    a.deinit();
    defer b.deinit();
    const t = try b.transpose();
    defer t.deinit();
    var data: [6]i32 = undefined;
    try t.copyTo(i32, &data);
    try testing.expectEqualSlices(i32, &.{ 1, 4, 2, 5, 3, 6 }, &data);
}

test "an operation that cannot be is an error with MLX's text" {
    const a = try Array.zeros(.float32, &.{ 2, 3 });
    defer a.deinit();
    try testing.expectError(error.InvalidArgument, a.matmul(a));
    try testing.expect(std.mem.find(u8, zmlx.lastError(), "matmul") != null);
    try testing.expectError(error.InvalidArgument, a.reshape(&.{7}));
}
