//! Launches of pattern kernels on arrays, and what a program keeps for them: what `zmlx/pattern.py`
//! is in Python, without gradients.

const std = @import("std");
const arrays = @import("array.zig");
const content = @import("content.zig");
const errors = @import("errors.zig");
const geometry = @import("launch.zig");
const metal = @import("metal.zig");
const prepared = @import("prepared.zig");
const specs = @import("spec.zig");
const Allocator = std.mem.Allocator;
const Array = arrays.Array;
const Dtype = arrays.Dtype;
const Error = errors.Error;
const PatternKernel = @import("pattern_kernel.zig").PatternKernel;
const Prepared = prepared.Prepared;
const longest_kept_row = @import("tables.zig").tables.launch.longest_kept_row;

/// As many as Python keeps.
const constants_kept = 4096;

/// Constants of one launch that the context does not keep.
const Constants = struct {
    list: [max_constants]Array = undefined,
    len: usize = 0,

    fn add(constants: *Constants, a: Array) void {
        constants.list[constants.len] = a;
        constants.len += 1;
    }

    fn deinit(constants: *Constants) void {
        for (constants.list[0..constants.len]) |a| a.deinit();
    }
};

/// Those of a fold of columns.
const max_constants = 5;

/// Kernels and constants of a program: made once, used by any number of threads.
pub const Context = struct {
    gpa: Allocator,
    kernels: metal.KernelCache,
    /// Tests run the geometry of a GPU on the CPU.
    kind: geometry.Kind,
    mutex: std.Io.Mutex = .init,
    prepared: MapOf(PatternKernel, *Prepared) = .empty,
    recent: [256]?*const Prepared = @splat(null),
    constants: std.AutoHashMapUnmanaged(u64, Array) = .empty,
    bodies: MapOf(specs.KernelSpec, Body) = .empty,

    const Body = struct { arena: std.heap.ArenaAllocator.State, kernel: metal.MetalKernel };

    fn MapOf(Key: type, Value: type) type {
        return std.HashMapUnmanaged(*const Key, Value, content.Context(Key), 80);
    }

    /// `gpa` must be thread-safe if several threads use the context.
    pub fn init(gpa: Allocator, io: std.Io) Context {
        return .{
            .gpa = gpa,
            .kernels = .init(gpa, io),
            .kind = if (arrays.target() == .gpu) .gpu else .cpu,
        };
    }

    pub fn deinit(context: *Context) void {
        var values = context.prepared.valueIterator();
        while (values.next()) |p| p.*.destroy(context.gpa);
        context.prepared.deinit(context.gpa);
        var constants = context.constants.valueIterator();
        while (constants.next()) |a| a.deinit();
        context.constants.deinit(context.gpa);
        var bodies = context.bodies.valueIterator();
        while (bodies.next()) |kept| {
            kept.kernel.deinit();
            kept.arena.promote(context.gpa).deinit();
        }
        context.bodies.deinit(context.gpa);
        context.kernels.deinit();
        context.* = undefined;
    }

    /// Launches `kernel` and fills `outputs`.
    pub fn run(
        context: *Context,
        kernel: *const PatternKernel,
        inputs: []const Array,
        outputs: []Array,
    ) Error!void {
        errdefer |err| errors.note(err);
        try context.runChecked(kernel, inputs, outputs);
    }

    fn runChecked(
        context: *Context,
        kernel: *const PatternKernel,
        inputs: []const Array,
        outputs: []Array,
    ) Error!void {
        const p = try context.preparedOf(kernel);
        if (inputs.len != p.inputs.len) return errors.invalid(
            "[{s}] takes {d} arrays but got {d}.",
            .{ p.op, p.inputs.len, inputs.len },
        );
        try p.check(inputs);
        if (p.hasPoint(inputs)) return context.runLifted(kernel, p, inputs, outputs);
        return context.runPrepared(kernel, p, inputs, outputs);
    }

    /// The launch on arrays that fit.
    fn runPrepared(
        context: *Context,
        kernel: *const PatternKernel,
        p: *const Prepared,
        inputs: []const Array,
        outputs: []Array,
    ) Error!void {
        const pattern = kernel.pattern;
        const op = p.op;
        var fallback = std.heap.stackFallback(4096, context.gpa);
        var arena_state: std.heap.ArenaAllocator = .init(fallback.get());
        defer arena_state.deinit();
        const arena = arena_state.allocator();

        const shape = inputs[p.like].shape();
        const lead = shape[0 .. shape.len - 1];
        const d: u32 = @intCast(@divFloor(shape[lead.len], @as(i64, p.parts)));
        // Others count elements, or along their axes.
        const rows = switch (pattern) {
            .rowwise, .columnwise => try rowCount(op, lead, d),
            .elementwise, .fold, .scan => 1,
        };
        const size = try elementCount(op, lead, d);
        const least: u32 = if (p.drawn) 8 else 1;
        const chosen = if (kernel.chunks > 0)
            geometry.Chunks{
                .count = kernel.chunks,
                .rows = @max(1, std.math.divCeil(u32, rows, kernel.chunks) catch unreachable),
            }
        else
            geometry.rowChunks(rows);

        var launch_inputs: std.ArrayList(Array) = try .initCapacity(
            arena,
            inputs.len + max_constants,
        );
        launch_inputs.appendSliceAssumeCapacity(inputs);
        var rest: Constants = .{};
        defer rest.deinit();
        var chunked = false;
        var folded: ?[]const i32 = null;
        const g = g: switch (pattern) {
            .elementwise => {
                launch_inputs.appendAssumeCapacity(try context.constant(size, &rest));
                break :g geometry.elementwise(context.kind, size, least);
            },
            inline .fold, .scan => |a| {
                const scans = pattern == .scan;
                const along = shape[if (a.columns) 1 else shape.len - 1];
                const cut_for_scan = if (@hasField(@TypeOf(a), "for_scan")) a.for_scan else true;
                const parts: geometry.Chunks = if (a.cut)
                    geometry.axisParts(.{ .columns = a.columns, .scans = cut_for_scan }, shape)
                else
                    .{ .count = 1, .rows = @intCast(along) };
                for (shape) |n| {
                    launch_inputs.appendAssumeCapacity(try context.constant(@intCast(n), &rest));
                }
                launch_inputs.appendAssumeCapacity(try context.constant(parts.count, &rest));
                launch_inputs.appendAssumeCapacity(try context.constant(parts.rows, &rest));
                const items = @as(u64, @intCast(shape[0])) * parts.count;
                if (!scans) {
                    // An output for each part, or one.
                    var sizes: std.ArrayList(i32) = .empty;
                    try sizes.append(arena, shape[0]);
                    if (a.cut) try sizes.append(arena, @intCast(parts.count));
                    if (a.columns) try sizes.append(arena, shape[2]);
                    folded = sizes.items;
                }
                const walk: geometry.Walk = .{
                    .scans = scans,
                    .reverse = @hasField(@TypeOf(a), "reverse") and a.reverse,
                    .narrow = inputs[p.like].dtype().size() == 2,
                    .states = a.monoid().states.len,
                };
                const short = @hasField(@TypeOf(a), "short") and a.short;
                break :g if (short)
                    geometry.shortRows(context.kind, items)
                else if (a.columns)
                    geometry.axisColumns(context.kind, walk, items, @intCast(shape[2]))
                else
                    geometry.axisRows(context.kind, walk, items, parts.rows);
            },
            .rowwise, .columnwise => {
                const capped = pattern == .rowwise and pattern.rowwise.isCapped();
                if (capped and d > longest_kept_row) return errors.invalid(
                    "[{s}] rows must have at most {d} elements where they are kept or summed but " ++
                        "got {d}.",
                    .{ op, longest_kept_row, d },
                );
                launch_inputs.appendAssumeCapacity(try context.constant(rows, &rest));
                launch_inputs.appendAssumeCapacity(try context.constant(d, &rest));
                chunked = pattern == .columnwise or pattern.rowwise.hasColumns();
                if (chunked) {
                    launch_inputs.appendAssumeCapacity(try context.constant(chosen.rows, &rest));
                }
                if (pattern == .columnwise) {
                    break :g geometry.columnwise(context.kind, chosen.count, d);
                }
                if (chunked) break :g geometry.rowwiseChunks(context.kind, chosen.count, d, least);
                break :g geometry.rowwise(context.kind, rows, d, capped, least);
            },
        };

        const shapes = try arena.alloc([]const i32, p.outputs.len);
        const dtypes = try arena.alloc(Dtype, p.outputs.len);
        for (shapes, dtypes, p.firsts, kernel.dtypes) |*to, *dtype, y, rule| {
            dtype.* = p.dtypeOf(rule, inputs);
            if (pattern == .columnwise or y.kind == .column) {
                const count = try axisOf(op, y.arrayName(), chosen.count);
                to.* = try arena.dupe(i32, &.{ count, @intCast(d) });
            } else if (folded) |sizes| {
                to.* = sizes;
            } else if (pattern == .elementwise or pattern == .scan) {
                to.* = shape;
            } else if (y.kind == .per_row) {
                to.* = lead;
            } else {
                const whole = try arena.dupe(i32, shape);
                whole[lead.len] = try axisOf(op, y.arrayName(), @as(u64, d) * y.parts);
                to.* = whole;
            }
        }
        var template: std.ArrayList(metal.TemplateArgument) = .empty;
        for (p.templates) |t| {
            try template.append(arena, .{ .name = t.name, .value = .{ .dtype = dtypes[t.array] } });
        }
        for (g.template()) |c| {
            try template.append(arena, .{ .name = c.name, .value = .{ .int = @intCast(c.value) } });
        }
        var grid: [3]u32 = undefined;
        for (&grid, g.grid) |*to, n| to.* = std.math.cast(u32, n) orelse return errors.invalid(
            "[{s}] 'grid' must be below 2^31 but got {any}.",
            .{ op, g.grid },
        );
        try p.kernel.launchNamed(launch_inputs.items, .{
            .template = template.items,
            .grid = grid,
            .threadgroup = g.threadgroup,
            .output_shapes = shapes,
            .output_dtypes = dtypes,
        }, outputs);
    }

    /// The launch with a leading axis of one.
    fn runLifted(
        context: *Context,
        kernel: *const PatternKernel,
        p: *const Prepared,
        inputs: []const Array,
        outputs: []Array,
    ) Error!void {
        var arena_state: std.heap.ArenaAllocator = .init(context.gpa);
        defer arena_state.deinit();
        const arena = arena_state.allocator();
        const lifted = try arena.alloc(Array, inputs.len);
        var made: usize = 0;
        defer for (lifted[0..made]) |a| a.deinit();
        for (lifted, inputs, p.kinds) |*to, x, kind| {
            to.* = switch (kind) {
                .scalar, .random, .column => try x.clone(),
                else => try x.reshape(try std.mem.concat(arena, i32, &.{ &.{1}, x.shape() })),
            };
            made += 1;
        }
        const raised = try arena.alloc(Array, outputs.len);
        try context.runPrepared(kernel, p, lifted, raised);
        defer for (raised) |a| a.deinit();
        for (outputs, raised, p.firsts, 0..) |*to, y, first, i| {
            errdefer for (outputs[0..i]) |a| a.deinit();
            const sums = kernel.pattern == .columnwise or first.kind == .column;
            // A value a row of no leading axes has none that was added.
            const whole = sums or y.ndim() == 0;
            to.* = if (whole) try y.clone() else try y.reshape(y.shape()[1..]);
        }
    }

    /// The output of a kernel that has one.
    pub fn one(context: *Context, kernel: *const PatternKernel, inputs: []const Array) Error!Array {
        var output: [1]Array = undefined;
        try context.run(kernel, inputs, &output);
        return output[0];
    }

    /// The kernel of a hand-written body: a reference of the caller's, beside the one that the
    /// context keeps.
    pub fn body(context: *Context, spec: *const specs.KernelSpec) Error!metal.MetalKernel {
        errdefer |err| errors.note(err);
        context.mutex.lockUncancelable(context.kernels.io);
        defer context.mutex.unlock(context.kernels.io);
        if (context.bodies.get(spec)) |kept| return kept.kernel.clone();
        var arena: std.heap.ArenaAllocator = .init(context.gpa);
        errdefer arena.deinit();
        const key = try arena.allocator().create(specs.KernelSpec);
        key.* = try content.copy(arena.allocator(), specs.KernelSpec, spec.*);
        const kernel = try context.kernels.get(spec.*);
        errdefer kernel.deinit();
        try context.bodies.put(context.gpa, key, .{ .arena = arena.state, .kernel = kernel });
        return kernel.clone();
    }

    /// A 0-d array: uint32, or uint64 beyond. The context keeps the first ones, and `rest` others.
    fn constant(context: *Context, value: u64, rest: *Constants) Error!Array {
        context.mutex.lockUncancelable(context.kernels.io);
        defer context.mutex.unlock(context.kernels.io);
        if (context.constants.get(value)) |a| return a;
        const a = if (std.math.cast(u32, value)) |small|
            try Array.scalar(u32, small)
        else
            try Array.scalar(u64, value);
        errdefer a.deinit();
        if (context.constants.count() < constants_kept) {
            try context.constants.put(context.gpa, value, a);
        } else {
            rest.add(a);
        }
        return a;
    }

    fn preparedOf(context: *Context, kernel: *const PatternKernel) Error!*const Prepared {
        context.mutex.lockUncancelable(context.kernels.io);
        defer context.mutex.unlock(context.kernels.io);
        // Comparing is cheaper than hashing: what was last at this address is most often there yet.
        const recent = &context.recent[std.hash.int(@intFromPtr(kernel)) % context.recent.len];
        if (recent.*) |p| if (content.equal(PatternKernel, kernel, &p.pattern_kernel)) return p;
        recent.* = context.prepared.get(kernel) orelse try context.prepareNew(kernel);
        return recent.*.?;
    }

    fn prepareNew(context: *Context, kernel: *const PatternKernel) Error!*Prepared {
        const p: *Prepared = try .create(context.gpa, &context.kernels, kernel);
        errdefer p.destroy(context.gpa);
        try context.prepared.put(context.gpa, &p.pattern_kernel, p);
        return p;
    }
};
fn rowCount(op: []const u8, lead: []const i32, d: u32) Error!u32 {
    var rows: u128 = 1;
    for (lead) |n| rows *|= @intCast(n);
    return std.math.cast(u32, rows) orelse errors.invalid(
        "[{s}] rows and row length must be below 2^32 but got {d} and {d}.",
        .{ op, rows, d },
    );
}

/// A size as an axis of an output.
fn axisOf(op: []const u8, name: []const u8, size: u64) Error!i32 {
    return std.math.cast(i32, size) orelse errors.invalid(
        "[{s}] '{s}' must have axes below 2^31 but got {d}.",
        .{ op, name, size },
    );
}

/// How many elements there are; their bytes, in any dtype, are a number of 64 bits.
fn elementCount(op: []const u8, lead: []const i32, d: u32) Error!u64 {
    var size: u64 = d;
    for (lead) |n| size *|= @intCast(n);
    if (size < 1 << 60) return size;
    return errors.invalid(
        "[{s}] arrays must be smaller than 2^60 but got {f}.",
        .{ op, prepared.Expected{ .lead = lead, .last = d } },
    );
}
