//! The C interface of `shim/shim.h`.

pub const Array = opaque {};
pub const Kernel = opaque {};
pub const Status = enum(c_int) { ok, invalid_argument, out_of_memory, failure, _ };

pub const Stream = extern struct { index: i32, device: i32, device_index: i32 };
pub const Text = extern struct {
    data: [*]const u8,
    size: usize,

    pub fn of(text: []const u8) Text {
        return .{ .data = text.ptr, .size = text.len };
    }
};

pub const KernelSpec = extern struct {
    name: Text,
    input_names: [*]const Text,
    input_count: usize,
    output_names: [*]const Text,
    output_count: usize,
    source: Text,
    header: Text,
    ensure_row_contiguous: bool,
    atomic_outputs: bool,
    math_mode: Text,
};

pub const TemplateArgument = extern struct { name: Text, kind: i32, value: i32 };

pub const KernelCall = extern struct {
    inputs: [*]const *const Array,
    input_count: usize,
    template_arguments: [*]const TemplateArgument,
    template_count: usize,
    grid: [3]i32,
    threadgroup: [3]i32,
    output_shapes: [*]const [*]const i32,
    output_ndims: [*]const usize,
    output_dtypes: [*]const c_int,
    output_count: usize,
    init_value: ?*const f32,
    stream: ?*const Stream,
};

pub extern fn zmlx_error_message() [*:0]const u8;
pub extern fn zmlx_set_error_message(Text) void;
pub extern fn zmlx_mlx_version() [*:0]const u8;
pub extern fn zmlx_target() c_int;

pub extern fn zmlx_default_stream(device: c_int, out: *Stream) Status;
pub extern fn zmlx_new_stream(device: c_int, out: *Stream) Status;
pub extern fn zmlx_synchronize(*const Stream) Status;

pub extern fn zmlx_array_from_data(
    data: *const anyopaque,
    dtype: c_int,
    shape: [*]const i32,
    ndim: usize,
    out: **Array,
) Status;
pub extern fn zmlx_array_zeros(c_int, [*]const i32, usize, **Array) Status;
pub extern fn zmlx_array_copy(*const Array, **Array) Status;
pub extern fn zmlx_array_destroy(?*Array) void;
pub extern fn zmlx_array_ndim(*const Array) usize;
pub extern fn zmlx_array_shape(*const Array) [*]const i32;
pub extern fn zmlx_array_size(*const Array) usize;
pub extern fn zmlx_array_dtype(*const Array) c_int;
pub extern fn zmlx_promote(c_int, c_int, out: *c_int) Status;
pub extern fn zmlx_array_eval([*]const *Array, usize) Status;
pub extern fn zmlx_array_to_data(*Array, *anyopaque, usize) Status;

pub extern fn zmlx_array_astype(*const Array, c_int, ?*const Stream, **Array) Status;
pub extern fn zmlx_array_reshape(*const Array, [*]const i32, usize, ?*const Stream, **Array) Status;
pub extern fn zmlx_array_broadcast_to(
    *const Array,
    [*]const i32,
    usize,
    ?*const Stream,
    **Array,
) Status;
pub extern fn zmlx_array_transpose(*const Array, ?*const Stream, **Array) Status;
pub extern fn zmlx_array_sum(*const Array, ?*const Stream, **Array) Status;
pub extern fn zmlx_array_mean(*const Array, ?*const Stream, **Array) Status;
pub extern fn zmlx_array_multiply(*const Array, *const Array, ?*const Stream, **Array) Status;
pub extern fn zmlx_array_divide(*const Array, *const Array, ?*const Stream, **Array) Status;
pub extern fn zmlx_array_not_equal(*const Array, *const Array, ?*const Stream, **Array) Status;
pub extern fn zmlx_array_matmul(*const Array, *const Array, ?*const Stream, **Array) Status;

pub extern fn zmlx_metal_kernel_create(*const KernelSpec, **Kernel) Status;
pub extern fn zmlx_metal_kernel_call(*Kernel, *const KernelCall, [*]*Array) Status;
pub extern fn zmlx_metal_kernel_destroy(?*Kernel) void;
