//! In which geometry a kernel runs: what `zmlx/launch.py` chooses, for the same constants.

const std = @import("std");
const constants = @import("tables.zig").tables.launch;

pub const Kind = enum { gpu, cpu };

/// A template constant of a body.
pub const Constant = struct { name: []const u8, value: u32 };

/// Template constants, grid in threads and threadgroup of one launch.
pub const Geometry = struct {
    list: [4]Constant = undefined,
    len: usize = 0,
    grid: [3]u64,
    threadgroup: [3]u32,

    pub fn template(g: *const Geometry) []const Constant {
        return g.list[0..g.len];
    }

    fn push(g: *Geometry, name: []const u8, value: u32) void {
        g.list[g.len] = .{ .name = name, .value = value };
        g.len += 1;
    }
};

fn ceilDiv(a: u64, b: u64) u64 {
    return (a + b - 1) / b;
}

/// The least power of two that is at least n.
fn powerOfTwo(n: u64) u64 {
    return std.math.ceilPowerOfTwoAssert(u64, @max(n, 1));
}

/// Elements that one thread takes at a time from a row of d.
fn step(d: u64, steps: []const [2]u64) u64 {
    for (steps) |pair| {
        if (d < pair[0]) return @min(pair[1], powerOfTwo((d + 2) / 2));
    }
    unreachable;
}

/// One thread per N elements, a multiple of `least`.
pub fn elementwise(kind: Kind, size: u64, least: u32) Geometry {
    var n: u64 = if (kind == .cpu) constants.cpu_elements else constants.gpu_vector;
    while (ceilDiv(size, n) >= 1 << 31) n *= 2;
    n = ceilDiv(n, least) * least;
    const threads: u32 = @intCast(ceilDiv(size, n));
    const group = if (kind == .cpu) 1 else @min(constants.gpu_group, @max(threads, 1));
    var g: Geometry = .{ .grid = .{ threads, 1, 1 }, .threadgroup = .{ group, 1, 1 } };
    g.push("N", @intCast(n));
    return g;
}

/// TPR·RPG threads for RPG rows of d elements; U is at least `least`. A capped kernel has STEPS.
pub fn rowwise(kind: Kind, rows: u64, d: u32, capped: bool, least: u32) Geometry {
    var tpr: u64 = 1;
    var rpg: u64 = 1;
    var u: u64 = constants.gpu_vector;
    if (kind == .cpu) {
        u = step(d, if (least == 1) constants.row_steps else constants.random_steps);
    } else {
        const simdgroup = 32 * constants.gpu_vector;
        tpr = @min(powerOfTwo(ceilDiv(d, constants.gpu_vector)), 32);
        if (d > simdgroup) {
            tpr = @min(1024, ceilDiv(d, simdgroup) * 32);
            if (!capped) tpr = @min(tpr, constants.gpu_group);
        }
        rpg = if (tpr <= 32) @max(1, constants.gpu_group / 2 / tpr) else 1;
    }
    u = @max(u, least);
    // Groups as x·y, where x alone would make the grid overflow 31 bits.
    const groups = ceilDiv(rows, rpg);
    const x = @min(groups, 1 << 20);
    const y = if (x > 0) ceilDiv(groups, x) else 0;
    const threads: u32 = @intCast(tpr * rpg);
    var g: Geometry = .{
        .grid = .{ x * threads, y, 1 },
        .threadgroup = .{ threads, 1, 1 },
    };
    g.push("TPR", @intCast(tpr));
    g.push("RPG", @intCast(rpg));
    g.push("U", @intCast(u));
    if (capped) g.push("STEPS", @intCast(powerOfTwo(ceilDiv(d, tpr * u))));
    return g;
}

/// Chunks of rows and rows per chunk of a sum over rows. They depend on nothing but `rows`, so that
/// the result is the same on every machine.
pub const Chunks = struct { count: u32, rows: u32 };

pub fn rowChunks(rows: u32) Chunks {
    const chunk: u32 = @intCast(@max(1, ceilDiv(rows, constants.column_chunks)));
    return .{ .count = @intCast(@max(1, ceilDiv(rows, chunk))), .rows = chunk };
}

/// A rowwise kernel with column outputs: a group per chunk of rows.
pub fn rowwiseChunks(kind: Kind, chunks: u32, d: u32, least: u32) Geometry {
    var g = rowwise(kind, 1, d, true, least);
    const tpr = g.list[0].value;
    g.list[1].value = 1;
    g.grid = .{ @as(u64, chunks) * tpr, 1, 1 };
    g.threadgroup = .{ tpr, 1, 1 };
    return g;
}

/// One thread per N columns and chunk of rows.
pub fn columnwise(kind: Kind, chunks: u32, d: u32) Geometry {
    const n: u64 = if (kind == .cpu) @min(constants.cpu_columns, powerOfTwo(d)) else 1;
    const threads: u32 = @intCast(ceilDiv(d, n));
    const group = if (kind == .cpu) 1 else @min(constants.gpu_group, @max(threads, 1));
    var g: Geometry = .{ .grid = .{ threads, chunks, 1 }, .threadgroup = .{ group, 1, 1 } };
    g.push("N", @intCast(n));
    return g;
}

/// The axis that a fold or a scan goes along, cut into `count` parts of `rows` elements.
pub const Axis = struct { columns: bool, scans: bool };

/// Parts only where there are few long rows, or few columns. They depend on nothing but the shape.
pub fn axisParts(axis: Axis, shape: []const i32) Chunks {
    var n: [3]u64 = @splat(1);
    for (n[0..shape.len], shape) |*to, size| to.* = @intCast(size);
    if (!axis.columns) {
        const rows, const d = n[0..2].*;
        const wanted = @max(1, @min(constants.parts / @max(rows, 1), d / constants.least_part));
        const chunk = @max(1, ceilDiv(ceilDiv(d, wanted), 128) * 128);
        return .{ .count = @intCast(@max(1, ceilDiv(d, chunk))), .rows = @intCast(chunk) };
    }
    const batches, const rows, const d = n;
    const least: u64 = if (axis.scans) constants.scan_parts else constants.fold_parts;
    const wanted = @max(1, @min(
        constants.column_chunks,
        least / @max(batches * d, 1),
        rows / 16,
    ));
    const chunk = @max(1, ceilDiv(rows, wanted));
    return .{ .count = @intCast(@max(1, ceilDiv(rows, chunk))), .rows = @intCast(chunk) };
}

/// What goes along an axis: a fold of so many `states` a column, or a scan.
pub const Walk = struct {
    scans: bool,
    reverse: bool = false,
    /// Whether elements have 16 bits.
    narrow: bool = false,
    states: usize = 1,
};

/// TPR·RPG threads for RPG of `items` rows, or parts of rows, of d elements. On the CPU a scan has
/// the longest block of elements that is not mostly past the end, and a reversed one the shortest
/// unless elements are narrow; a row shorter than that is one block.
pub fn axisRows(kind: Kind, walk: Walk, items: u64, d: u32) Geometry {
    if (kind == .gpu) return rowwise(kind, items, d, false, 1);
    const u = if (walk.scans)
        scanBlock(walk.reverse and !walk.narrow, d)
    else
        step(d, constants.fold_steps);
    const x = @min(items, 1 << 20);
    const y = if (x > 0) ceilDiv(items, x) else 0;
    var g: Geometry = .{ .grid = .{ x, y, 1 }, .threadgroup = .{ 1, 1, 1 } };
    g.push("TPR", 1);
    g.push("RPG", 1);
    g.push("U", @intCast(u));
    return g;
}

fn scanBlock(shortest: bool, d: u64) u64 {
    const blocks = constants.scan_blocks;
    if (!shortest) for (blocks) |u| if (8 * (ceilDiv(d, u) * u - d) <= d) return u;
    return @min(blocks[blocks.len - 1], powerOfTwo(d));
}

/// G threads per group, each for N short rows.
pub fn shortRows(kind: Kind, rows: u64) Geometry {
    const n: u64 = if (kind == .cpu) @min(constants.short_rows, powerOfTwo(rows)) else 1;
    const threads = ceilDiv(rows, n);
    const most_threads = if (kind == .cpu) 1 else constants.gpu_group;
    return inGroups(n, threads, @intCast(@min(most_threads, @max(threads, 1))), 1);
}

/// G threads per group, each for N of d columns of one of `items` parts; fewer columns where there
/// are several states a column, or threads for a scan would be too few.
pub fn axisColumns(kind: Kind, walk: Walk, items: u64, d: u32) Geometry {
    const most = constants.most_columns / @as(u64, if (walk.states == 1) 1 else 2);
    var n: u64 = if (kind == .cpu) @min(most, powerOfTwo(d)) else 1;
    if (walk.scans) {
        while (n > constants.scan_columns and items * ceilDiv(d, n) < constants.scan_threads) n /= 2;
    }
    const threads = ceilDiv(d, n);
    const most_threads = if (kind == .cpu) 1 else constants.gpu_group;
    return inGroups(n, threads, @intCast(@min(most_threads, @max(threads, 1))), items);
}

/// Groups of so many of `threads`, for each of `items`; a thread has n columns or rows.
fn inGroups(n: u64, threads: u64, group: u32, items: u64) Geometry {
    const groups = items * ceilDiv(threads, group);
    const x = @min(groups, 1 << 20);
    const y = if (x > 0) ceilDiv(groups, x) else 0;
    var g: Geometry = .{
        .grid = .{ x * group, y, 1 },
        .threadgroup = .{ group, 1, 1 },
    };
    g.push("N", @intCast(n));
    g.push("G", group);
    return g;
}
