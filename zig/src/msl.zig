//! The Metal functions that zmlx kernels share: the sections of one header, embedded from the
//! Python package's export.

const std = @import("std");
const tables = @import("tables.zig").tables;
const Words = @import("codegen/text.zig").Words;
const Allocator = std.mem.Allocator;

const sections = tables.sections;
const Set = std.StaticBitSet(sections.len);

fn named(text: []const u8) Set {
    var found: Set = .initEmpty();
    var words: Words = .{ .text = text };
    while (words.next()) |word| {
        for (sections, 0..) |section, i| {
            if (std.mem.eql(u8, section.name, word)) found.set(i);
        }
    }
    return found;
}

/// The sections that `text` names, with what they need themselves, in the header's order. The
/// result belongs to the caller's arena.
pub fn headerFor(arena: Allocator, text: []const u8) Allocator.Error![]const u8 {
    var needed = named(text);
    var i = sections.len;
    while (i > 0) {
        i -= 1;
        if (needed.isSet(i)) needed.setUnion(named(sections[i].text));
    }
    var out: std.ArrayList(u8) = .empty;
    for (sections, 0..) |section, n| {
        if (!needed.isSet(n)) continue;
        if (out.items.len > 0) try out.appendSlice(arena, "\n\n");
        try out.appendSlice(arena, section.text);
    }
    if (out.items.len > 0) try out.append(arena, '\n');
    return out.items;
}
