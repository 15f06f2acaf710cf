//! Values by what they hold, behind slices too: to find one that was seen before, and to keep it.

const std = @import("std");
const Allocator = std.mem.Allocator;

/// What a hash map of pointers needs to look behind them.
pub fn Context(T: type) type {
    return struct {
        pub fn hash(_: @This(), value: *const T) u64 {
            return hashed(0, T, value);
        }

        pub fn eql(_: @This(), a: *const T, b: *const T) bool {
            return equal(T, a, b);
        }
    };
}

fn hashed(seed: u64, T: type, value: *const T) u64 {
    var h = seed;
    switch (@typeInfo(T)) {
        .pointer => |p| if (p.child == u8) {
            // Texts that begin alike for longer are told apart when they are compared.
            h = std.hash.Wyhash.hash(mixed(h, value.len), value.*[0..@min(value.len, 64)]);
        } else {
            h = mixed(h, value.len);
            for (value.*) |*item| h = hashed(h, p.child, item);
        },
        .@"struct" => |s| inline for (s.fields) |f| {
            h = hashed(h, f.type, &@field(value, f.name));
        },
        .@"union" => {
            h = mixed(h, @intFromEnum(value.*));
            switch (value.*) {
                inline else => |*v| h = hashed(h, @TypeOf(v.*), v),
            }
        },
        .optional => |o| {
            h = mixed(h, @intFromBool(value.* != null));
            if (value.*) |*v| h = hashed(h, o.child, v);
        },
        .@"enum" => h = mixed(h, @intCast(@intFromEnum(value.*))),
        .bool => h = mixed(h, @intFromBool(value.*)),
        .int => h = mixed(h, value.*),
        else => comptime unreachable,
    }
    return h;
}

fn mixed(h: u64, n: u64) u64 {
    return std.math.rotl(u64, (h ^ n) *% 0x9e3779b97f4a7c15, 32);
}

pub fn equal(T: type, a: *const T, b: *const T) bool {
    switch (@typeInfo(T)) {
        .pointer => |p| {
            if (p.child == u8) return std.mem.eql(u8, a.*, b.*);
            if (a.len != b.len) return false;
            for (a.*, b.*) |*x, *y| if (!equal(p.child, x, y)) return false;
        },
        .@"struct" => |s| inline for (s.fields) |f| {
            if (!equal(f.type, &@field(a, f.name), &@field(b, f.name))) return false;
        },
        .@"union" => {
            if (std.meta.activeTag(a.*) != b.*) return false;
            switch (a.*) {
                inline else => |*v, tag| return equal(@TypeOf(v.*), v, &@field(b, @tagName(tag))),
            }
        },
        .optional => |o| {
            if (a.* == null or b.* == null) return a.* == null and b.* == null;
            return equal(o.child, &a.*.?, &b.*.?);
        },
        else => return a.* == b.*,
    }
    return true;
}

/// The same in memory of `arena`.
pub fn copy(arena: Allocator, T: type, value: T) Allocator.Error!T {
    switch (@typeInfo(T)) {
        .pointer => |p| {
            const to = try arena.alloc(p.child, value.len);
            for (to, value) |*item, from| item.* = try copy(arena, p.child, from);
            return to;
        },
        .@"struct" => |s| {
            var to: T = undefined;
            inline for (s.fields) |f| {
                @field(to, f.name) = try copy(arena, f.type, @field(value, f.name));
            }
            return to;
        },
        .@"union" => switch (value) {
            inline else => |v, tag| {
                return @unionInit(T, @tagName(tag), try copy(arena, @TypeOf(v), v));
            },
        },
        .optional => |o| return if (value) |v| try copy(arena, o.child, v) else null,
        else => return value,
    }
}

test "values are told apart by what they hold, and a copy keeps it" {
    const Leaf = struct { text: []const u8, list: []const []const u8 = &.{}, n: u32 = 0 };
    const Tree = union(enum) { leaf: Leaf, maybe: ?Leaf, flag: bool };
    const context: Context(Tree) = .{};
    var arena: std.heap.ArenaAllocator = .init(std.testing.allocator);
    defer arena.deinit();
    const different = [_]Tree{
        .{ .leaf = .{ .text = "ab" } },
        .{ .leaf = .{ .text = "a", .list = &.{"b"} } },
        .{ .leaf = .{ .text = "a", .list = &.{ "b", "" } } },
        .{ .leaf = .{ .text = "a", .list = &.{ "", "b" } } },
        .{ .leaf = .{ .text = "ab", .n = 1 } },
        .{ .maybe = .{ .text = "ab" } },
        .{ .maybe = null },
        .{ .flag = false },
        .{ .flag = true },
    };
    for (different, 0..) |a, i| for (different, 0..) |b, k| {
        const kept = try copy(arena.allocator(), Tree, b);
        try std.testing.expectEqual(i == k, context.eql(&a, &kept));
        try std.testing.expectEqual(i == k, context.hash(&a) == context.hash(&kept));
    };
}
