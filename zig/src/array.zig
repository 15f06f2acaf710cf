//! MLX's arrays, dtypes and streams.

const std = @import("std");
const shim = @import("shim.zig");
const errors = @import("errors.zig");
const Allocator = std.mem.Allocator;
const Error = errors.Error;
const check = errors.check;

/// The order is that of `zmlx_dtype`.
pub const Dtype = enum(c_int) {
    bool,
    uint8,
    uint16,
    uint32,
    uint64,
    int8,
    int16,
    int32,
    int64,
    float16,
    bfloat16,
    float32,
    float64,
    complex64,

    /// The dtype of elements of a Zig type.
    pub fn of(comptime T: type) Dtype {
        inline for (std.enums.values(Dtype)) |dtype| if (dtype.Element() == T) return dtype;
        @compileError("MLX has no dtype for " ++ @typeName(T));
    }

    /// The Zig type of elements.
    pub fn Element(comptime dtype: Dtype) type {
        return switch (dtype) {
            .bool => bool,
            .uint8 => u8,
            .uint16 => u16,
            .uint32 => u32,
            .uint64 => u64,
            .int8 => i8,
            .int16 => i16,
            .int32 => i32,
            .int64 => i64,
            .float16 => f16,
            .bfloat16 => Bfloat16,
            .float32 => f32,
            .float64 => f64,
            .complex64 => std.math.Complex(f32),
        };
    }

    pub fn size(dtype: Dtype) usize {
        return switch (dtype) {
            .bool, .uint8, .int8 => 1,
            .uint16, .int16, .float16, .bfloat16 => 2,
            .uint32, .int32, .float32 => 4,
            .uint64, .int64, .float64, .complex64 => 8,
        };
    }

    /// The dtype of an operation on both.
    pub fn promote(a: Dtype, b: Dtype) Dtype {
        var dtype: Dtype = undefined;
        check(shim.zmlx_promote(@intFromEnum(a), @intFromEnum(b), @ptrCast(&dtype))) catch
            unreachable; // any two dtypes have a promotion
        return dtype;
    }
};

/// The upper half of a float32.
pub const Bfloat16 = packed struct(u16) {
    bits: u16,

    /// To the nearest, ties to even.
    pub fn fromFloat(x: f32) Bfloat16 {
        const bits: u32 = @bitCast(x);
        if (std.math.isNan(x)) return .{ .bits = @intCast(bits >> 16 | 0x40) };
        return .{ .bits = @intCast((bits + 0x7fff + (bits >> 16 & 1)) >> 16) };
    }

    pub fn toFloat(x: Bfloat16) f32 {
        return @bitCast(@as(u32, x.bits) << 16);
    }
};

pub const Device = enum(c_int) { cpu, gpu };

/// Where kernels run in this process.
pub fn target() Device {
    return @enumFromInt(shim.zmlx_target());
}

pub fn mlxVersion() []const u8 {
    return std.mem.span(shim.zmlx_mlx_version());
}

/// A queue of work; it belongs to the thread that made it.
pub const Stream = struct {
    handle: shim.Stream,

    pub fn default(device: Device) Error!Stream {
        var stream: Stream = undefined;
        try check(shim.zmlx_default_stream(@intFromEnum(device), &stream.handle));
        return stream;
    }

    pub fn new(device: Device) Error!Stream {
        var stream: Stream = undefined;
        try check(shim.zmlx_new_stream(@intFromEnum(device), &stream.handle));
        return stream;
    }

    /// Waits for all that was given to the stream.
    pub fn synchronize(stream: Stream) Error!void {
        try check(shim.zmlx_synchronize(&stream.handle));
    }
};

/// A reference to a lazy, immutable MLX array. Every function that returns one gives the caller a
/// reference of its own, to be let go of with `deinit`.
pub const Array = extern struct {
    handle: *shim.Array,

    /// A copy of row-major elements: bool, an integer, f16, `Bfloat16`, f32, f64 or Complex(f32).
    pub fn fromSlice(comptime T: type, data: []const T, sizes: []const i32) Error!Array {
        if (product(sizes)) |count| {
            if (count == data.len) return fromBytes(Dtype.of(T), std.mem.sliceAsBytes(data), sizes);
        }
        return errors.invalid(
            "[Array] 'data' must have as many elements as the shape {any} but got {d}.",
            .{ sizes, data.len },
        );
    }

    /// A copy of the memory of row-major elements.
    pub fn fromBytes(dtype_: Dtype, data: []const u8, sizes: []const i32) Error!Array {
        const count = product(sizes) orelse return errors.invalid(
            "[Array] 'shape' must not be negative or overflow but got {any}.",
            .{sizes},
        );
        const bytes = std.math.mul(usize, count, dtype_.size()) catch return errors.invalid(
            "[Array] 'shape' must not be negative or overflow but got {any}.",
            .{sizes},
        );
        if (bytes != data.len) return errors.invalid(
            "[Array] 'data' must have {d} bytes but got {d}.",
            .{ bytes, data.len },
        );
        return made(shim.zmlx_array_from_data, .{
            data.ptr, @intFromEnum(dtype_), sizes.ptr, sizes.len,
        });
    }

    /// A 0-d array.
    pub fn scalar(comptime T: type, value: T) Error!Array {
        return fromSlice(T, &.{value}, &.{});
    }

    pub fn zeros(dtype_: Dtype, sizes: []const i32) Error!Array {
        return made(shim.zmlx_array_zeros, .{ @intFromEnum(dtype_), sizes.ptr, sizes.len });
    }

    pub fn deinit(a: Array) void {
        shim.zmlx_array_destroy(a.handle);
    }

    /// Another reference to the same array.
    pub fn clone(a: Array) Error!Array {
        return made(shim.zmlx_array_copy, .{a.handle});
    }

    /// Valid as long as this reference.
    pub fn shape(a: Array) []const i32 {
        return shim.zmlx_array_shape(a.handle)[0..a.ndim()];
    }

    pub fn ndim(a: Array) usize {
        return shim.zmlx_array_ndim(a.handle);
    }

    pub fn size(a: Array) usize {
        return shim.zmlx_array_size(a.handle);
    }

    pub fn dtype(a: Array) Dtype {
        return @enumFromInt(shim.zmlx_array_dtype(a.handle));
    }

    /// Computes the elements, and raises what a kernel reported.
    pub fn eval(a: Array) Error!void {
        return evalAll(&.{a});
    }

    /// Evaluates, and copies the elements in row-major order to `to`.
    pub fn copyTo(a: Array, comptime T: type, to: []T) Error!void {
        if (a.dtype() != Dtype.of(T) or a.size() != to.len) return errors.invalid(
            "[Array] 'to' must hold {d} elements of {s} but got {d} of {s}.",
            .{ a.size(), @tagName(a.dtype()), to.len, @tagName(Dtype.of(T)) },
        );
        return a.copyBytesTo(std.mem.sliceAsBytes(to));
    }

    pub fn copyBytesTo(a: Array, to: []u8) Error!void {
        try check(shim.zmlx_array_to_data(a.handle, to.ptr, to.len));
    }

    /// The elements in row-major order; the caller frees them.
    pub fn toOwnedSlice(a: Array, gpa: Allocator, comptime T: type) Error![]T {
        errdefer |err| errors.note(err);
        const to = try gpa.alloc(T, a.size());
        errdefer gpa.free(to);
        try a.copyTo(T, to);
        return to;
    }

    /// The element of an array that has one.
    pub fn item(a: Array, comptime T: type) Error!T {
        var value: [1]T = undefined;
        try a.copyTo(T, &value);
        return value[0];
    }

    // ---- operations, on the default stream ------------------------------------------------------

    pub fn astype(a: Array, to: Dtype) Error!Array {
        return made(shim.zmlx_array_astype, .{ a.handle, @intFromEnum(to), null });
    }

    pub fn reshape(a: Array, sizes: []const i32) Error!Array {
        return made(shim.zmlx_array_reshape, .{ a.handle, sizes.ptr, sizes.len, null });
    }

    pub fn broadcastTo(a: Array, sizes: []const i32) Error!Array {
        return made(shim.zmlx_array_broadcast_to, .{ a.handle, sizes.ptr, sizes.len, null });
    }

    /// The axes in the opposite order.
    pub fn transpose(a: Array) Error!Array {
        return made(shim.zmlx_array_transpose, .{ a.handle, null });
    }

    /// Over all axes.
    pub fn sum(a: Array) Error!Array {
        return made(shim.zmlx_array_sum, .{ a.handle, null });
    }

    /// Over all axes.
    pub fn mean(a: Array) Error!Array {
        return made(shim.zmlx_array_mean, .{ a.handle, null });
    }

    pub fn multiply(a: Array, b: Array) Error!Array {
        return made(shim.zmlx_array_multiply, .{ a.handle, b.handle, null });
    }

    pub fn divide(a: Array, b: Array) Error!Array {
        return made(shim.zmlx_array_divide, .{ a.handle, b.handle, null });
    }

    pub fn notEqual(a: Array, b: Array) Error!Array {
        return made(shim.zmlx_array_not_equal, .{ a.handle, b.handle, null });
    }

    pub fn matmul(a: Array, b: Array) Error!Array {
        return made(shim.zmlx_array_matmul, .{ a.handle, b.handle, null });
    }
};

/// Computes the elements of all arrays, and raises what a kernel reported.
pub fn evalAll(arrays: []const Array) Error!void {
    comptime std.debug.assert(@sizeOf(Array) == @sizeOf(*shim.Array));
    try check(shim.zmlx_array_eval(@ptrCast(arrays.ptr), arrays.len));
}

/// The number of elements, or null if there is none.
fn product(sizes: []const i32) ?usize {
    for (sizes) |n| if (n < 0) return null;
    if (std.mem.findScalar(i32, sizes, 0) != null) return 0;
    var count: usize = 1;
    for (sizes) |n| count = std.math.mul(usize, count, @intCast(n)) catch return null;
    return count;
}

/// What a function of the shim gives in its last argument.
fn made(function: anytype, arguments: anytype) Error!Array {
    var result: Array = undefined;
    try check(@call(.auto, function, arguments ++ .{&result.handle}));
    return result;
}

test "a size of bytes that overflows does not reach MLX" {
    var a: *shim.Array = undefined;
    const sizes = [_]i32{ 1 << 30, 1 << 30, 4 };
    const status = shim.zmlx_array_from_data("", @intFromEnum(Dtype.float32), &sizes, 3, &a);
    try std.testing.expectEqual(shim.Status.invalid_argument, status);
    try std.testing.expectEqualStrings(
        "[zmlx] 'shape' must not overflow but got a size of 4.",
        errors.lastError(),
    );
    const zeros = shim.zmlx_array_zeros(@intFromEnum(Dtype.float32), &sizes, 3, &a);
    try std.testing.expectEqual(shim.Status.invalid_argument, zeros);
}

test "a dtype that is none is refused" {
    var dtype: c_int = undefined;
    const float32 = @intFromEnum(Dtype.float32);
    try std.testing.expectEqual(
        shim.Status.invalid_argument,
        shim.zmlx_promote(99, float32, &dtype),
    );
    try std.testing.expectEqualStrings(
        "[zmlx] 'dtype' must be a zmlx_dtype but got 99.",
        errors.lastError(),
    );
}
