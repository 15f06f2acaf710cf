//! Declared arguments of an op, and the one check that all ops share: the errors of
//! `zmlx/arguments.py`.

const std = @import("std");
const Array = @import("array.zig").Array;
const Dtype = @import("array.zig").Dtype;
const errors = @import("errors.zig");
const Error = errors.Error;
const Writer = std.Io.Writer;

/// An axis: a factor times a symbol, or leading axes (`*`, factor 0).
pub const Axis = struct { factor: u32, symbol: []const u8 };

/// An array argument: its symbolic shape, and the dtypes that it may have.
pub const Argument = struct {
    name: []const u8,
    axes: []const Axis,
    dtypes: []const Dtype,
    optional: bool,
};

/// What symbols stand for in a call.
const Bound = struct {
    names: [8][]const u8 = undefined,
    sizes: [8]i32 = undefined,
    len: usize = 0,

    fn find(bound: *const Bound, name: []const u8) ?i32 {
        for (bound.names[0..bound.len], bound.sizes[0..bound.len]) |n, size| {
            if (std.mem.eql(u8, n, name)) return size;
        }
        return null;
    }

    fn put(bound: *Bound, name: []const u8, size: i32) void {
        bound.names[bound.len] = name;
        bound.sizes[bound.len] = size;
        bound.len += 1;
    }
};

/// An error for the first value that does not fit.
pub fn check(op: []const u8, arguments: []const Argument, values: []const ?Array) Error!void {
    var bound: Bound = .{};
    var lead: ?[]const i32 = null;
    for (arguments, values) |argument, maybe| {
        const value = maybe orelse {
            if (argument.optional) continue;
            return errors.invalid("[{s}] '{s}' must be an array.", .{ op, argument.name });
        };
        try checkDtype(op, argument.name, value, argument.dtypes);
        const free = argument.axes.len > 0 and argument.axes[0].factor == 0;
        const fixed = argument.axes[@intFromBool(free)..];
        const shape = value.shape();
        var fits = if (free) shape.len >= fixed.len else shape.len == fixed.len;
        if (fits) {
            const head = shape[0 .. shape.len - fixed.len];
            if (free) if (lead) |known| {
                fits = std.mem.eql(i32, head, known);
            };
            if (fits) for (fixed, shape[head.len..]) |axis, size| {
                const factor: i32 = @intCast(axis.factor);
                if (axis.symbol.len > 0 and bound.find(axis.symbol) == null and
                    @mod(size, factor) == 0) bound.put(axis.symbol, @divExact(size, factor));
                const known = bound.find(axis.symbol);
                fits = fits and size == if (known) |n| factor * n else factor;
            };
            if (free and lead == null and fits) lead = head;
        }
        if (!fits) return errors.invalid("[{s}] '{s}' must have shape {f} but got {f}.", .{
            op,
            argument.name,
            Expected{ .axes = argument.axes, .lead = lead, .bound = &bound },
            Shape{ .sizes = shape },
        });
    }
}

/// An error unless `value` has the shape of `like`, and a floating dtype.
pub fn checkLike(op: []const u8, name: []const u8, value: Array, like: Array) Error!void {
    return checkShape(op, name, value, like.shape());
}

pub fn checkShape(op: []const u8, name: []const u8, value: Array, shape: []const i32) Error!void {
    try checkFloating(op, name, value);
    if (!std.mem.eql(i32, value.shape(), shape)) {
        return errors.invalid("[{s}] '{s}' must have shape {f} but got {f}.", .{
            op, name, Shape{ .sizes = shape }, Shape{ .sizes = value.shape() },
        });
    }
}

pub fn checkFloating(op: []const u8, name: []const u8, value: Array) Error!void {
    return checkDtype(op, name, value, &.{ .float32, .float16, .bfloat16 });
}

pub fn checkDtype(
    op: []const u8,
    name: []const u8,
    value: Array,
    dtypes: []const Dtype,
) Error!void {
    if (std.mem.findScalar(Dtype, dtypes, value.dtype()) != null) return;
    return errors.invalid("[{s}] '{s}' must have dtype {f} but got {s}.", .{
        op, name, OneOf{ .dtypes = dtypes }, @tagName(value.dtype()),
    });
}

/// From here on a number is infinite as a float32.
const too_large = 0x1p128 - 0x1p103;

/// An error unless `value` is at least 0, and finite as a float32.
pub fn checkNotNegative(op: []const u8, name: []const u8, value: anytype) Error!void {
    const wide: f64 = value;
    if (wide >= 0 and wide < too_large) return;
    return errors.invalid("[{s}] '{s}' must be {s} but got {f}.", .{
        op, name, if (wide > 0) "finite" else "at least 0", number(value),
    });
}

/// An error unless `value` is more than 0, and finite, as a float32 too.
pub fn checkPositive(op: []const u8, name: []const u8, value: anytype) Error!void {
    const wide: f64 = value;
    if (wide > 0 and wide < too_large and @as(f32, @floatCast(wide)) > 0) return;
    return errors.invalid(
        "[{s}] '{s}' must be positive and finite but got {f}.",
        .{ op, name, number(value) },
    );
}

/// An error unless `value` is finite as a float32.
pub fn checkFinite(op: []const u8, name: []const u8, value: anytype) Error!void {
    if (@abs(@as(f64, value)) < too_large) return;
    return errors.invalid("[{s}] '{s}' must be finite but got {f}.", .{ op, name, number(value) });
}

/// A number as Python prints it, and a whole one as an int.
pub fn number(value: anytype) Number(@TypeOf(value)) {
    return .{ .value = value };
}

fn Number(T: type) type {
    return struct {
        value: T,

        pub fn format(self: @This(), w: *Writer) Writer.Error!void {
            const size = @abs(self.value);
            if (std.math.isNan(size)) return w.writeAll("nan");
            if (std.math.isInf(size) or size == 0 or (size >= 1e-4 and size < 1e16)) {
                return w.print("{d}", .{self.value});
            }
            var buffer: [64]u8 = undefined;
            const text = std.fmt.bufPrint(&buffer, "{e}", .{self.value}) catch unreachable;
            const digits, const exponent = std.mem.cutScalar(u8, text, 'e').?;
            const power = std.fmt.parseInt(i32, exponent, 10) catch unreachable;
            try w.print("{s}e{c}{d:0>2}", .{
                digits, @as(u8, if (power < 0) '-' else '+'), @abs(power),
            });
        }
    };
}

test "numbers are printed as Python prints them" {
    inline for (.{
        .{ @as(f32, -100), "-100" },
        .{ @as(f32, -1e-5), "-1e-05" },
        .{ @as(f32, 0.1), "0.1" },
        .{ @as(f64, 1.5e300), "1.5e+300" },
        .{ @as(f64, 1e16), "1e+16" },
        .{ -std.math.inf(f64), "-inf" },
        .{ -std.math.nan(f32), "nan" },
    }) |case| {
        var buffer: [64]u8 = undefined;
        const text = try std.fmt.bufPrint(&buffer, "{f}", .{number(case[0])});
        try std.testing.expectEqualStrings(case[1], text);
    }
}

const OneOf = struct {
    dtypes: []const Dtype,

    pub fn format(self: OneOf, w: *Writer) Writer.Error!void {
        for (self.dtypes, 0..) |dtype, i| {
            if (i > 0) try w.writeAll(if (i + 1 < self.dtypes.len) ", " else " or ");
            try w.writeAll(@tagName(dtype));
        }
    }
};

/// A shape as Python prints a tuple.
pub const Shape = struct {
    sizes: []const i32,

    pub fn format(self: Shape, w: *Writer) Writer.Error!void {
        try w.writeByte('(');
        for (self.sizes, 0..) |size, i| {
            try w.print("{s}{d}", .{ if (i > 0) ", " else "", size });
        }
        try w.writeAll(if (self.sizes.len == 1) ",)" else ")");
    }
};

/// The shape that an argument must have, with the symbols that are known as numbers.
const Expected = struct {
    axes: []const Axis,
    lead: ?[]const i32,
    bound: *const Bound,

    pub fn format(self: Expected, w: *Writer) Writer.Error!void {
        var count: usize = 0;
        try w.writeByte('(');
        for (self.axes) |axis| {
            if (axis.factor == 0) if (self.lead) |lead| {
                for (lead) |size| {
                    try w.print("{s}{d}", .{ if (count > 0) ", " else "", size });
                    count += 1;
                }
                continue;
            };
            if (count > 0) try w.writeAll(", ");
            count += 1;
            if (axis.factor == 0) {
                try w.writeAll(axis.symbol);
            } else if (self.bound.find(axis.symbol)) |size| {
                try w.print("{d}", .{@as(i64, axis.factor) * size});
            } else if (axis.factor == 1 and axis.symbol.len > 0) {
                try w.writeAll(axis.symbol);
            } else {
                try w.print("{d}{s}", .{ axis.factor, axis.symbol });
            }
        }
        try w.writeAll(if (count == 1) ",)" else ")");
    }
};
