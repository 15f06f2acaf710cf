//! What Python exports (`python zig/export.py`), as constants.

pub const Section = struct { name: []const u8, text: []const u8 };
pub const Reduction = struct {
    name: []const u8,
    identity: []const u8,
    update: []const u8,
    fold: []const u8,
};
pub const Tables = struct {
    /// Sections of the shared header, with the function that each defines.
    sections: []const Section,
    /// Header of kernels that reduce over rows.
    row_header: []const u8,
    reductions: []const Reduction,
    /// Names that bodies use themselves, and suffixes that they add to the names of a pattern.
    reserved: []const []const u8,
    suffixes: []const []const u8,
    launch: Launch,
};
/// Constants of the geometry, see `launch.zig`.
pub const Launch = struct {
    longest_kept_row: u32,
    gpu_group: u32,
    gpu_vector: u32,
    cpu_elements: u32,
    cpu_accumulators: u32,
    cpu_columns: u32,
    column_chunks: u32,
};

pub const tables: Tables = @import("exported/tables.zon");
