//! Errors of MLX and of what calls it: a code, and a text that says what was wrong.

const std = @import("std");
const shim = @import("shim.zig");

pub const Error = error{
    /// An argument that cannot be; nothing was launched.
    InvalidArgument,
    OutOfMemory,
    /// A kernel did not compile, or failed while it ran, or MLX did.
    MlxFailure,
};

/// What went wrong in the last call on this thread that failed. Valid until the next one.
pub fn lastError() []const u8 {
    return std.mem.span(shim.zmlx_error_message());
}

/// Sets the text of an error that comes from a Zig allocator; others have set theirs.
pub fn note(err: Error) void {
    if (err == error.OutOfMemory) shim.zmlx_set_error_message(.of("[zmlx] out of memory"));
}

/// The status of a C function as an error.
pub fn check(status: shim.Status) Error!void {
    return switch (status) {
        .ok => {},
        .invalid_argument => error.InvalidArgument,
        .out_of_memory => error.OutOfMemory,
        else => error.MlxFailure,
    };
}

/// Sets the text, and gives the error.
pub fn invalid(comptime format: []const u8, arguments: anytype) Error {
    @branchHint(.cold);
    // A message has names and lists in it that may be of any length.
    var fallback = std.heap.stackFallback(1024, std.heap.smp_allocator);
    const gpa = fallback.get();
    const text = std.fmt.allocPrint(gpa, format, arguments) catch return outOfMemory();
    defer gpa.free(text);
    shim.zmlx_set_error_message(.of(text));
    return error.InvalidArgument;
}

fn outOfMemory() Error {
    note(error.OutOfMemory);
    return error.OutOfMemory;
}
