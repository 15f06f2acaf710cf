//! A codegen pattern with a name, dtypes and helpers: what `context.zig` launches.

const std = @import("std");
const codegen = @import("codegen.zig");
const errors = @import("errors.zig");
const specs = @import("spec.zig");
const Allocator = std.mem.Allocator;
const Dtype = @import("array.zig").Dtype;
const Error = errors.Error;

/// The dtype of an output array: fixed, or the promotion of those of some inputs.
pub const DtypeRule = union(enum) { dtype: Dtype, promotion: []const []const u8 };

/// A pattern with a name, dtypes, and functions that its expressions call.
pub const PatternKernel = struct {
    /// The part before "__" names the op in errors.
    name: []const u8,
    pattern: codegen.Pattern,
    /// A rule per output array.
    dtypes: []const DtypeRule,
    header: []const u8 = "",
    /// A fixed number of row chunks of column outputs, or 0 for the number that fits the rows.
    chunks: u32 = 0,

    /// The specification; its texts belong to `arena`.
    pub fn spec(kernel: PatternKernel, arena: Allocator) Error!specs.KernelSpec {
        errdefer |err| errors.note(err);
        return try kernel.specChecked(arena);
    }

    fn specChecked(kernel: PatternKernel, arena: Allocator) Error!specs.KernelSpec {
        const pattern = kernel.pattern;
        if (try pattern.problem(arena)) |reason| return errors.invalid("{s}", .{reason});
        if (pattern.blankExpression()) |text| {
            const line = text[0 .. std.mem.indexOfScalar(u8, text, '\n') orelse text.len];
            return errors.invalid(
                "[expression] an empty expression at column 1.\n  {s}\n  ^",
                .{std.mem.trimEnd(u8, line, "\r")},
            );
        }
        return .{
            .name = kernel.name,
            .input_names = try pattern.inputNames(arena),
            .output_names = try pattern.outputNames(arena),
            .body = try pattern.source(arena),
            .header = try std.mem.concat(
                arena,
                u8,
                &.{ kernel.header, try pattern.header(arena) },
            ),
        };
    }
};
