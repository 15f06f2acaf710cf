//! Kernels from Metal source: what `zmlx.metal` is in Python.

const std = @import("std");
const arrays = @import("array.zig");
const content = @import("content.zig");
const errors = @import("errors.zig");
const python = @import("python.zig");
const shim = @import("shim.zig");
const specs = @import("spec.zig");
const isIdentifier = @import("codegen/text.zig").isIdentifier;
const Shape = @import("arguments.zig").Shape;
const number = @import("arguments.zig").number;
const Allocator = std.mem.Allocator;
const Array = arrays.Array;
const Dtype = arrays.Dtype;
const Error = errors.Error;
const KernelSpec = specs.KernelSpec;

/// A template argument: its name, and a dtype, an integer or a truth value.
pub const TemplateArgument = struct {
    name: []const u8,
    value: union(enum) { int: i32, bool: bool, dtype: Dtype },

    fn toC(argument: TemplateArgument) shim.TemplateArgument {
        return .{
            .name = .of(argument.name),
            .kind = @intFromEnum(argument.value),
            .value = switch (argument.value) {
                .int => |n| n,
                .bool => |truth| @intFromBool(truth),
                .dtype => |dtype| @intFromEnum(dtype),
            },
        };
    }
};

/// Everything about a launch but its arrays.
pub const Launch = struct {
    template: []const TemplateArgument = &.{},
    /// Threads per dimension.
    grid: [3]u32,
    /// Threads per group.
    threadgroup: [3]u32 = .{ 256, 1, 1 },
    output_shapes: []const []const i32,
    output_dtypes: []const Dtype,
    /// What every output is filled with before the launch.
    init_value: ?f32 = null,
    /// Default: the default stream of the device that kernels run on.
    stream: ?arrays.Stream = null,
};

/// A kernel: a counted reference, so that it stays valid for whoever holds one, on any thread,
/// whatever becomes of the cache that it came from.
pub const MetalKernel = struct {
    shared: *Shared,

    const Shared = struct {
        gpa: Allocator,
        references: std.atomic.Value(usize),
        handle: *shim.Kernel,
        texts: std.heap.ArenaAllocator.State,
        full_name: []const u8,
        /// Its name in errors.
        op: []const u8,
        inputs: []const []const u8,
        outputs: []const []const u8,
    };

    /// A kernel of its own. The specification is copied.
    pub fn create(gpa: Allocator, spec: KernelSpec) Error!MetalKernel {
        errdefer |err| errors.note(err);
        return try createChecked(gpa, spec);
    }

    fn createChecked(gpa: Allocator, spec: KernelSpec) Error!MetalKernel {
        var arena_state: std.heap.ArenaAllocator = .init(gpa);
        defer arena_state.deinit();
        const arena = arena_state.allocator();
        if (try spec.problem(arena)) |reason| return errors.invalid("{s}", .{reason});

        var kept: std.heap.ArenaAllocator = .init(gpa);
        errdefer kept.deinit();
        const shared = try gpa.create(Shared);
        errdefer gpa.destroy(shared);
        shared.* = .{
            .gpa = gpa,
            .references = .init(1),
            .handle = undefined,
            .texts = undefined,
            .full_name = try spec.fullName(kept.allocator()),
            .op = try kept.allocator().dupe(u8, spec.name),
            .inputs = try content.copy(kept.allocator(), []const []const u8, spec.input_names),
            .outputs = try content.copy(kept.allocator(), []const []const u8, spec.output_names),
        };
        shared.texts = kept.state;
        const c_spec: shim.KernelSpec = .{
            .name = .of(shared.full_name),
            .input_names = try texts(arena, spec.input_names),
            .input_count = spec.input_names.len,
            .output_names = try texts(arena, spec.output_names),
            .output_count = spec.output_names.len,
            .source = .of(spec.body),
            .header = .of(spec.header),
            .ensure_row_contiguous = spec.ensure_row_contiguous,
            .atomic_outputs = spec.atomic_outputs,
            .math_mode = .of(spec.math_mode),
        };
        try errors.check(shim.zmlx_metal_kernel_create(&c_spec, &shared.handle));
        return .{ .shared = shared };
    }

    /// Another reference to the same kernel.
    pub fn clone(kernel: MetalKernel) MetalKernel {
        _ = kernel.shared.references.fetchAdd(1, .monotonic);
        return kernel;
    }

    /// Lets go of this reference; with the last one the kernel goes. Launches that have not run yet
    /// still will.
    pub fn deinit(kernel: MetalKernel) void {
        const shared = kernel.shared;
        if (shared.references.fetchSub(1, .acq_rel) > 1) return;
        shim.zmlx_metal_kernel_destroy(shared.handle);
        shared.texts.promote(shared.gpa).deinit();
        shared.gpa.destroy(shared);
    }

    /// The name with a hash of the specification; valid as long as this reference.
    pub fn fullName(kernel: MetalKernel) []const u8 {
        return kernel.shared.full_name;
    }

    /// A lazy launch, which compiles at the first of its kind: one array for each output.
    pub fn launch(
        kernel: MetalKernel,
        inputs: []const Array,
        how: Launch,
        outputs: []Array,
    ) Error!void {
        errdefer |err| errors.note(err);
        try kernel.checkTemplate(how.template);
        try kernel.launchNamed(inputs, how, outputs);
    }

    /// An error for names of template arguments that no compiler would take.
    pub fn checkTemplate(kernel: MetalKernel, template: []const TemplateArgument) Error!void {
        const shared = kernel.shared;
        for (template) |t| if (!isIdentifier(t.name)) return errors.invalid(
            "[{s}] 'template' must be identifiers but got {f}.",
            .{ shared.op, python.ascii(t.name) },
        );
        for (template, 0..) |t, i| for (template[0..i]) |other| {
            if (std.mem.eql(u8, t.name, other.name)) return errors.invalid(
                "[{s}] 'template' must not repeat a name but got {f}.",
                .{ shared.op, TemplateNames{ .template = template } },
            );
        };
        for (template) |t| if (specs.isMetalWord(t.name) or
            has(shared.inputs, t.name) or has(shared.outputs, t.name))
        {
            return errors.invalid(
                "[{s}] 'template' must have names that are neither words of Metal nor " ++
                    "inputs or outputs but got {f}.",
                .{ shared.op, python.ascii(t.name) },
            );
        };
    }

    /// A launch whose template arguments have names that were checked.
    pub fn launchNamed(
        kernel: MetalKernel,
        inputs: []const Array,
        how: Launch,
        outputs: []Array,
    ) Error!void {
        const shared = kernel.shared;
        const op = shared.op;
        if (inputs.len != shared.inputs.len) return errors.invalid(
            "[{s}] 'inputs' must be {d} arrays but got {d}.",
            .{ op, shared.inputs.len, inputs.len },
        );
        for (
            [_][]const u8{ "outputs", "output_shapes", "output_dtypes" },
            [_]usize{ outputs.len, how.output_shapes.len, how.output_dtypes.len },
        ) |argument, count| if (count != shared.outputs.len) return errors.invalid(
            "[{s}] '{s}' must have {d} entries but got {d}.",
            .{ op, argument, shared.outputs.len, count },
        );
        for (shared.inputs, inputs) |name, x| try checkKnown(op, name, x.dtype());
        for (shared.outputs, how.output_dtypes) |name, dtype| try checkKnown(op, name, dtype);
        for (how.output_shapes) |shape| for (shape) |n| if (n < 0) return errors.invalid(
            "[{s}] 'output_shapes' must have sizes of at least 0 but got {f}.",
            .{ op, Shape{ .sizes = shape } },
        );
        try checkThreadgroup(op, how.threadgroup);
        if (how.init_value) |value| {
            for (how.output_dtypes) |dtype| try checkInitValue(op, value, dtype);
        } else if (empty(u32, &how.grid)) {
            for (how.output_shapes) |shape| if (!empty(i32, shape)) return errors.invalid(
                "[{s}] 'grid' must not be empty where an output has elements, unless " ++
                    "'init_value' says what they are, but got ({d}, {d}, {d}).",
                .{ op, how.grid[0], how.grid[1], how.grid[2] },
            );
        }
        // What usual kernels need fits on the stack.
        var fallback = std.heap.stackFallback(2048, shared.gpa);
        const gpa = fallback.get();
        const template = try gpa.alloc(shim.TemplateArgument, how.template.len);
        defer gpa.free(template);
        for (template, how.template) |*to, argument| to.* = argument.toC();
        const shapes = try gpa.alloc([*]const i32, shared.outputs.len);
        defer gpa.free(shapes);
        const ndims = try gpa.alloc(usize, shared.outputs.len);
        defer gpa.free(ndims);
        for (shapes, ndims, how.output_shapes) |*shape, *ndim, given| {
            shape.* = given.ptr;
            ndim.* = given.len;
        }
        const call: shim.KernelCall = .{
            .inputs = @ptrCast(inputs.ptr),
            .input_count = inputs.len,
            .template_arguments = template.ptr,
            .template_count = template.len,
            .grid = try gridOf(op, how.grid),
            .threadgroup = @bitCast(how.threadgroup),
            .output_shapes = shapes.ptr,
            .output_ndims = ndims.ptr,
            .output_dtypes = @ptrCast(how.output_dtypes.ptr),
            .output_count = shared.outputs.len,
            .init_value = if (how.init_value) |*value| value else null,
            .stream = if (how.stream) |*stream| &stream.handle else null,
        };
        try errors.check(shim.zmlx_metal_kernel_call(
            shared.handle,
            &call,
            @ptrCast(outputs.ptr),
        ));
    }
};

/// The names of template arguments as Python prints a list.
const TemplateNames = struct {
    template: []const TemplateArgument,

    pub fn format(names: TemplateNames, w: *std.Io.Writer) std.Io.Writer.Error!void {
        for (names.template, 0..) |t, i| {
            try w.print("{s}{f}", .{ if (i > 0) ", " else "[", python.ascii(t.name) });
        }
        try w.writeByte(']');
    }
};

fn has(names: []const []const u8, name: []const u8) bool {
    for (names) |n| if (std.mem.eql(u8, n, name)) return true;
    return false;
}

fn texts(arena: Allocator, names: []const []const u8) Error![*]const shim.Text {
    const result = try arena.alloc(shim.Text, names.len);
    for (result, names) |*text, name| text.* = .of(name);
    return result.ptr;
}

fn checkKnown(op: []const u8, name: []const u8, dtype: Dtype) Error!void {
    if (dtype == .float64) return errors.invalid(
        "[{s}] '{s}' must have a dtype that Metal knows but got float64.",
        .{ op, name },
    );
}

/// Metal's own limit for any pipeline.
const most_threads = 1024;

fn checkThreadgroup(op: []const u8, sizes: [3]u32) Error!void {
    var threads: u64 = 1;
    for (sizes) |n| threads *= @min(n, most_threads + 1);
    if (threads >= 1 and threads <= most_threads) return;
    return errors.invalid(
        "[{s}] 'threadgroup' must have 1 to {d} threads but got ({d}, {d}, {d}).",
        .{ op, most_threads, sizes[0], sizes[1], sizes[2] },
    );
}

fn checkInitValue(op: []const u8, value: f32, dtype: Dtype) Error!void {
    const lowest: i128, const highest: i128 = switch (dtype) {
        inline .uint8, .uint16, .uint32, .uint64, .int8, .int16, .int32, .int64 => |d| limits: {
            const Int = d.Element();
            break :limits .{ std.math.minInt(Int), std.math.maxInt(Int) };
        },
        else => return,
    };
    if (@abs(value) < 0x1p64 and @trunc(value) == value) {
        const whole: i128 = @intFromFloat(value);
        if (whole >= lowest and whole <= highest) return;
    }
    const message = "[{s}] 'init_value' must be of dtype {t} but got {f}.";
    // The fewest digits that a float32 is told by are not all of a large one's.
    if (@trunc(value) == value) {
        return errors.invalid(message, .{ op, dtype, number(@as(f64, value)) });
    }
    return errors.invalid(message, .{ op, dtype, number(value) });
}

fn empty(T: type, sizes: []const T) bool {
    return std.mem.indexOfScalar(T, sizes, 0) != null;
}

fn gridOf(op: []const u8, sizes: [3]u32) Error![3]i32 {
    var result: [3]i32 = undefined;
    for (&result, sizes) |*to, n| to.* = std.math.cast(i32, n) orelse return errors.invalid(
        "[{s}] 'grid' must be below 2^31 but got ({d}, {d}, {d}).",
        .{ op, sizes[0], sizes[1], sizes[2] },
    );
    return result;
}

/// Kernels by the SHA-256 of their canonical specification, for any number of threads.
pub const KernelCache = struct {
    gpa: Allocator,
    io: std.Io,
    mutex: std.Io.Mutex = .init,
    kernels: std.AutoHashMapUnmanaged(specs.Digest, MetalKernel) = .empty,

    /// `gpa` must be thread-safe if the cache is used by several threads.
    pub fn init(gpa: Allocator, io: std.Io) KernelCache {
        return .{ .gpa = gpa, .io = io };
    }

    /// Lets go of every kernel. References that were given out stay valid.
    pub fn deinit(cache: *KernelCache) void {
        var kernels = cache.kernels.valueIterator();
        while (kernels.next()) |kernel| kernel.deinit();
        cache.kernels.deinit(cache.gpa);
        cache.* = undefined;
    }

    /// The one kernel of a specification, made at the first call; the caller lets go of it.
    pub fn get(cache: *KernelCache, spec: KernelSpec) Error!MetalKernel {
        errdefer |err| errors.note(err);
        const key = spec.digest();
        cache.mutex.lockUncancelable(cache.io);
        defer cache.mutex.unlock(cache.io);
        if (cache.kernels.get(key)) |kernel| return kernel.clone();
        const kernel = try MetalKernel.create(cache.gpa, spec);
        errdefer kernel.deinit();
        try cache.kernels.put(cache.gpa, key, kernel);
        return kernel.clone();
    }

    pub fn count(cache: *KernelCache) usize {
        cache.mutex.lockUncancelable(cache.io);
        defer cache.mutex.unlock(cache.io);
        return cache.kernels.count();
    }
};

test "a kind of template argument that is none is refused" {
    const kernel = try MetalKernel.create(std.testing.allocator, .{
        .name = "one",
        .input_names = &.{},
        .output_names = &.{"y"},
        .body = "y[0] = T;",
    });
    defer kernel.deinit();
    const template = [_]shim.TemplateArgument{.{ .name = .of("T"), .kind = 99, .value = 1 }};
    const shape = [_]i32{1};
    const shapes = [_][*]const i32{&shape};
    var y: *shim.Array = undefined;
    const status = shim.zmlx_metal_kernel_call(kernel.shared.handle, &.{
        .inputs = undefined,
        .input_count = 0,
        .template_arguments = &template,
        .template_count = 1,
        .grid = .{ 1, 1, 1 },
        .threadgroup = .{ 1, 1, 1 },
        .output_shapes = &shapes,
        .output_ndims = &.{1},
        .output_dtypes = &.{@intFromEnum(Dtype.float32)},
        .output_count = 1,
        .init_value = null,
        .stream = null,
    }, @ptrCast(&y));
    try std.testing.expectEqual(shim.Status.invalid_argument, status);
    try std.testing.expectEqualStrings(
        "[zmlx] 'kind' must be a zmlx_template_kind but got 99.",
        errors.lastError(),
    );
}
