//! Texts as Python writes them: `ascii()` for error messages, and JSON as `json.dumps` gives it.

const std = @import("std");
const Writer = std.Io.Writer;

/// A value that prints like Python's `ascii(text)`.
pub fn ascii(text: []const u8) Ascii {
    return .{ .text = text };
}

pub const Ascii = struct {
    text: []const u8,

    pub fn format(self: Ascii, w: *Writer) Writer.Error!void {
        const has = std.mem.findScalar;
        const quote: u8 =
            if (has(u8, self.text, '\'') != null and has(u8, self.text, '"') == null) '"' else '\'';
        try w.writeByte(quote);
        if (!std.unicode.utf8ValidateSlice(self.text)) {
            for (self.text) |c| try w.print("\\x{x:0>2}", .{c});
            return w.writeByte(quote);
        }
        var view = std.unicode.Utf8View.initUnchecked(self.text).iterator();
        while (view.nextCodepoint()) |c| switch (c) {
            '\n' => try w.writeAll("\\n"),
            '\r' => try w.writeAll("\\r"),
            '\t' => try w.writeAll("\\t"),
            '\\' => try w.writeAll("\\\\"),
            0...0x08, 0x0b, 0x0c, 0x0e...0x1f, 0x7f...0xff => try w.print("\\x{x:0>2}", .{c}),
            0x100...0xffff => try w.print("\\u{x:0>4}", .{c}),
            0x10000...0x10ffff => try w.print("\\U{x:0>8}", .{c}),
            else => {
                if (c == quote) try w.writeByte('\\');
                try w.writeByte(@intCast(c));
            },
        };
        try w.writeByte(quote);
    }
};

/// A value that prints like Python's `ascii(list of strings)`.
pub const AsciiList = struct {
    items: []const []const u8,

    pub fn format(self: AsciiList, w: *Writer) Writer.Error!void {
        try w.writeByte('[');
        for (self.items, 0..) |item, i| {
            if (i > 0) try w.writeAll(", ");
            try ascii(item).format(w);
        }
        try w.writeByte(']');
    }
};

/// A JSON string as `json.dumps(text, ensure_ascii=False)` writes it.
pub fn writeJsonString(w: *Writer, text: []const u8) Writer.Error!void {
    try w.writeByte('"');
    for (text) |c| switch (c) {
        '"' => try w.writeAll("\\\""),
        '\\' => try w.writeAll("\\\\"),
        '\n' => try w.writeAll("\\n"),
        '\r' => try w.writeAll("\\r"),
        '\t' => try w.writeAll("\\t"),
        0x08 => try w.writeAll("\\b"),
        0x0c => try w.writeAll("\\f"),
        0...0x07, 0x0b, 0x0e...0x1f => try w.print("\\u{x:0>4}", .{c}),
        else => try w.writeByte(c),
    };
    try w.writeByte('"');
}

/// Whether `text.strip()` is empty: nothing but Unicode's white space.
pub fn isBlank(text: []const u8) bool {
    if (!std.unicode.utf8ValidateSlice(text)) return false;
    var view = std.unicode.Utf8View.initUnchecked(text).iterator();
    while (view.nextCodepoint()) |c| switch (c) {
        0x09...0x0d, 0x1c...0x20, 0x85, 0xa0, 0x1680, 0x2000...0x200a => {},
        0x2028, 0x2029, 0x202f, 0x205f, 0x3000 => {},
        else => return false,
    };
    return true;
}

test "ascii quotes as Python does" {
    const cases = [_][2][]const u8{
        .{ "a'b", "\"a'b\"" },
        .{ "a'b\"c", "'a\\'b\"c'" },
        .{ "é\n\x00\u{1f600}", "'\\xe9\\n\\x00\\U0001f600'" },
    };
    for (cases) |case| {
        var buffer: [64]u8 = undefined;
        try std.testing.expectEqualStrings(
            case[1],
            try std.fmt.bufPrint(&buffer, "{f}", .{ascii(case[0])}),
        );
    }
}
