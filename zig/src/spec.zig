//! Everything that determines a kernel's text, and its name.

const std = @import("std");
const python = @import("python.zig");
const tables = @import("tables.zig").tables;
const isIdentifier = @import("codegen/text.zig").isIdentifier;
const Allocator = std.mem.Allocator;
const Sha256 = std.crypto.hash.sha2.Sha256;

pub const Digest = [Sha256.digest_length]u8;

/// `body` is the source of `mx.fast.metal_kernel`: the inside of the kernel function; `header` goes
/// before it. Two specifications with the same fields are the same kernel.
pub const KernelSpec = struct {
    name: []const u8,
    input_names: []const []const u8,
    output_names: []const []const u8,
    body: []const u8,
    header: []const u8 = "",
    ensure_row_contiguous: bool = true,
    atomic_outputs: bool = false,
    math_mode: []const u8 = "safe",

    /// Why this is no specification, or null. The text belongs to `arena`.
    pub fn problem(spec: KernelSpec, arena: Allocator) Allocator.Error!?[]const u8 {
        const print = std.fmt.allocPrint;
        if (!isName(spec.name)) return try print(
            arena,
            "[kernel] 'name' must be an identifier but got {f}.",
            .{python.ascii(spec.name)},
        );
        const both = [_][]const []const u8{ spec.input_names, spec.output_names };
        for ([_][]const u8{ "input_names", "output_names" }, both) |argument, names| {
            for (names) |name| if (!isIdentifier(name)) return try print(
                arena,
                "[kernel] '{s}' must be identifiers but got {f}.",
                .{ argument, python.ascii(name) },
            );
            if (repeats(names)) return try print(
                arena,
                "[kernel] '{s}' must not repeat a name but got {f}.",
                .{ argument, python.AsciiList{ .items = names } },
            );
            for (names) |name| if (isMetalWord(name)) return try print(
                arena,
                "[kernel] '{s}' must not be words of Metal but got {f}.",
                .{ argument, python.ascii(name) },
            );
        }
        const all = try std.mem.concat(arena, []const u8, &both);
        if (repeats(all)) return try print(
            arena,
            "[kernel] 'output_names' must not repeat a name but got {f}.",
            .{python.AsciiList{ .items = all }},
        );
        if (spec.output_names.len == 0) {
            return "[kernel] 'output_names' must name at least one output but got [].";
        }
        if (python.isBlank(spec.body)) return try print(
            arena,
            "[kernel] 'source' must not be empty but got {f}.",
            .{python.ascii(spec.body)},
        );
        for ([_][]const u8{ "safe", "relaxed", "fast" }) |mode| {
            if (std.mem.eql(u8, mode, spec.math_mode)) return null;
        }
        return try print(
            arena,
            "[kernel] 'math_mode' must be one of safe, relaxed, fast but got {f}.",
            .{python.ascii(spec.math_mode)},
        );
    }

    /// The specification as one line of JSON with sorted keys, as Python writes it.
    pub fn writeCanonical(spec: KernelSpec, w: *std.Io.Writer) std.Io.Writer.Error!void {
        try w.print("{{\"atomic_outputs\":{},\"body\":", .{spec.atomic_outputs});
        try python.writeJsonString(w, spec.body);
        try w.print(",\"ensure_row_contiguous\":{},\"header\":", .{spec.ensure_row_contiguous});
        try python.writeJsonString(w, spec.header);
        try w.writeAll(",\"input_names\":");
        try writeNames(w, spec.input_names);
        try w.writeAll(",\"math_mode\":");
        try python.writeJsonString(w, spec.math_mode);
        try w.writeAll(",\"name\":");
        try python.writeJsonString(w, spec.name);
        try w.writeAll(",\"output_names\":");
        try writeNames(w, spec.output_names);
        try w.writeByte('}');
    }

    /// The SHA-256 of the canonical specification.
    pub fn digest(spec: KernelSpec) Digest {
        var buffer: [1024]u8 = undefined;
        var hashing: std.Io.Writer.Hashing(Sha256) = .init(&buffer);
        spec.writeCanonical(&hashing.writer) catch unreachable; // a hash takes everything
        hashing.writer.flush() catch unreachable;
        var result: Digest = undefined;
        hashing.hasher.final(&result);
        return result;
    }

    /// The name with the first 12 hex digits of the digest.
    pub fn fullName(spec: KernelSpec, gpa: Allocator) Allocator.Error![]const u8 {
        const hex = std.fmt.bytesToHex(spec.digest(), .lower);
        return std.fmt.allocPrint(gpa, "{s}_{s}", .{ spec.name, hex[0..12] });
    }
};

/// An identifier or its end: MLX puts a word before the name of a kernel.
fn isName(name: []const u8) bool {
    for (name) |c| if (!std.ascii.isAlphanumeric(c) and c != '_') return false;
    return name.len > 0;
}

pub fn repeats(names: []const []const u8) bool {
    for (names, 0..) |name, i| for (names[0..i]) |other| {
        if (std.mem.eql(u8, name, other)) return true;
    };
    return false;
}

pub fn isMetalWord(name: []const u8) bool {
    return metal_words.has(name);
}

const metal_words: std.StaticStringMap(void) = .initComptime(entries: {
    var entries: [tables.metal_words.len]struct { []const u8 } = undefined;
    for (&entries, tables.metal_words) |*entry, word| entry.* = .{word};
    break :entries entries;
});

fn writeNames(w: *std.Io.Writer, names: []const []const u8) std.Io.Writer.Error!void {
    try w.writeByte('[');
    for (names, 0..) |name, i| {
        if (i > 0) try w.writeByte(',');
        try python.writeJsonString(w, name);
    }
    try w.writeByte(']');
}
