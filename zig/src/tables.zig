//! What Python exports (`python zig/export.py`), as constants.

pub const Section = struct { name: []const u8, text: []const u8 };
pub const Reduction = struct {
    name: []const u8,
    identity: []const u8,
    update: []const u8,
    fold: []const u8,
    /// What it calls beyond the header of rows.
    header: []const u8,
};
/// A kind of state of folds and scans, see `codegen/monoids.zig`.
pub const Monoid = struct {
    name: []const u8,
    states: []const State,
    start: []const []const u8,
    lift: []const []const u8,
    merge: []const []const u8,
    step: []const u8 = "",
    update: []const []const u8 = &.{},
    after: []const []const u8 = &.{},
    blocked: bool = false,
    shifted: bool = false,
};
/// A variable of a state; "T" is the type of the elements.
pub const State = struct { name: []const u8, type: []const u8 };
/// The ends of the range of a type.
pub const Range = struct { type: []const u8, lowest: []const u8, highest: []const u8 };
pub const Tables = struct {
    /// Sections of the shared header, with the function that each defines.
    sections: []const Section,
    /// Header of kernels that take steps of elements.
    step_header: []const u8,
    /// Header of kernels that reduce over rows.
    row_header: []const u8,
    prefetch_header: []const u8,
    block_header: []const u8,
    reductions: []const Reduction,
    monoids: []const Monoid,
    ranges: []const Range,
    /// Elements of a step of an elementwise body.
    draw_block: u32,
    /// Steps that a fold sums before their sum is added to the total.
    fold_block: u32,
    /// Neighbours that a thread of a scan takes one after another.
    scan_run: u32,
    /// Names that bodies use themselves, and suffixes that they add to the names of a pattern.
    reserved: []const []const u8,
    metal_words: []const []const u8,
    suffixes: []const []const u8,
    launch: Launch,
};
/// Constants of the geometry, see `launch.zig`.
pub const Launch = struct {
    longest_kept_row: u32,
    gpu_group: u32,
    gpu_vector: u32,
    cpu_elements: u32,
    cpu_columns: u32,
    column_chunks: u32,
    row_steps: []const [2]u64,
    fold_steps: []const [2]u64,
    random_steps: []const [2]u64,
    most_columns: u32,
    fold_parts: u32,
    short_rows: u32,
    scan_columns: u32,
    scan_threads: u32,
    scan_parts: u32,
    scan_blocks: []const u32,
    least_part: u32,
    parts: u32,
};

pub const tables: Tables = @import("exported/tables.zon");
