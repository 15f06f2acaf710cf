//! zmlx in Zig: Metal kernels as text, and their launches on MLX's arrays.

const arrays = @import("array.zig");

pub const catalogue = @import("catalogue.zig");
pub const codegen = @import("codegen.zig");
pub const launch = @import("launch.zig");
pub const metal = @import("metal.zig");
pub const msl = @import("msl.zig");
pub const tables = @import("tables.zig").tables;

pub const Array = arrays.Array;
pub const Bfloat16 = arrays.Bfloat16;
pub const Context = @import("context.zig").Context;
pub const Device = arrays.Device;
pub const Dtype = arrays.Dtype;
pub const Error = @import("errors.zig").Error;
pub const KernelCache = metal.KernelCache;
pub const KernelSpec = @import("spec.zig").KernelSpec;
pub const Launch = metal.Launch;
pub const MetalKernel = metal.MetalKernel;
pub const PatternKernel = @import("pattern_kernel.zig").PatternKernel;
pub const Stream = arrays.Stream;

pub const evalAll = arrays.evalAll;
pub const lastError = @import("errors.zig").lastError;
pub const mlxVersion = arrays.mlxVersion;
pub const target = arrays.target;

test {
    _ = @import("arguments.zig");
    _ = @import("array.zig");
    _ = @import("content.zig");
    _ = @import("metal.zig");
    _ = @import("python.zig");
}
