//! A codegen pattern as a function of arrays: what `zmlx/pattern.py` is in Python, without
//! gradients.

const std = @import("std");
const arguments = @import("arguments.zig");
const arrays = @import("array.zig");
const codegen = @import("codegen.zig");
const content = @import("content.zig");
const errors = @import("errors.zig");
const geometry = @import("launch.zig");
const metal = @import("metal.zig");
const specs = @import("spec.zig");
const Allocator = std.mem.Allocator;
const Array = arrays.Array;
const Dtype = arrays.Dtype;
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

/// What a pattern kernel needs at every launch, found once.
const Prepared = struct {
    arena: std.heap.ArenaAllocator,
    /// A copy of what it was made from: the caller's may become another at the same address.
    pattern_kernel: PatternKernel,
    kernel: metal.MetalKernel,
    /// Its name in errors.
    op: []const u8,
    inputs: []const []const u8,
    outputs: []const []const u8,
    /// For each output of the pattern: the name of its dtype, and the array that has it.
    templates: []const struct { name: []const u8, array: usize },
    /// The first output of each array.
    firsts: []const codegen.parts.Output,
    /// The array that gives rows and row length, and what its rows are divided by.
    like: usize,
    parts: u32,
    /// How many axes that array must have; null for any.
    axes: ?usize,
    drawn: bool,
    /// Each operand, and the array of the inputs that has it.
    operands: []const struct { operand: codegen.parts.Operand, array: usize },
    /// For each array of the inputs: what its last operand is.
    kinds: []const codegen.parts.Operand.Kind,

    /// An error for the first array that has not the shape that its operand must have.
    fn check(p: *const Prepared, inputs: []const Array) Error!void {
        const like = inputs[p.like].shape();
        if (p.axes) |axes| if (like.len != axes) return errors.invalid(
            "[{s}] '{s}' must have {d} axes but got {d}.",
            .{ p.op, p.inputs[p.like], axes, like.len },
        );
        const lead = like[0..like.len -| 1];
        const parts: i64 = p.parts;
        if (like.len > 0 and @mod(like[lead.len], parts) != 0) return errors.invalid(
            "[{s}] '{s}' must have a last axis divisible by {d} but got {f}.",
            .{ p.op, p.inputs[p.like], parts, arguments.Shape{ .sizes = like } },
        );
        const d: i64 = if (like.len > 0) @divExact(like[lead.len], parts) else 1;
        for (p.operands) |x| {
            const width = d * x.operand.parts;
            const elsewhere = x.operand.isElsewhere();
            const expected: Expected = switch (x.operand.kind) {
                .full => .{ .lead = like },
                .per_row => .{ .lead = lead },
                .column => .{ .last = width },
                .scalar, .random => .{},
                .row, .at => if (like.len == 0 and width == 1 and !elsewhere)
                    .{}
                else
                    .{ .lead = if (elsewhere) null else lead, .last = width },
            };
            const shape = inputs[x.array].shape();
            if (!expected.fits(shape)) return errors.invalid(
                "[{s}] '{s}' must have shape {f} but got {f}.",
                .{ p.op, p.inputs[x.array], expected, arguments.Shape{ .sizes = shape } },
            );
        }
    }

    /// Whether elements lie in a 0-d array. Metal gets that by reference, and the body indexes it.
    fn hasPoint(p: *const Prepared, inputs: []const Array) bool {
        for (p.kinds, inputs) |kind, x| {
            if (kind != .scalar and kind != .random and x.ndim() == 0) return true;
        }
        return false;
    }

    fn dtypeOf(p: *const Prepared, rule: DtypeRule, inputs: []const Array) Dtype {
        switch (rule) {
            .dtype => |dtype| return dtype,
            .promotion => |names| {
                var dtype = inputs[indexOf(p.inputs, names[0]).?].dtype();
                for (names[1..]) |n| dtype = dtype.promote(inputs[indexOf(p.inputs, n).?].dtype());
                return dtype;
            },
        }
    }
};

/// The shape of an operand: leading axes, null for any, and a last one.
const Expected = struct {
    lead: ?[]const i32 = &.{},
    last: ?i64 = null,

    fn fits(expected: Expected, shape: []const i32) bool {
        const own = @intFromBool(expected.last != null);
        if (shape.len < own) return false;
        const split = shape.len - own;
        if (expected.last) |n| if (shape[split] != n) return false;
        return std.mem.eql(i32, expected.lead orelse shape[0..split], shape[0..split]);
    }

    pub fn format(expected: Expected, w: *std.Io.Writer) std.Io.Writer.Error!void {
        const last = expected.last orelse
            return w.print("{f}", .{arguments.Shape{ .sizes = expected.lead.? }});
        const lead = expected.lead orelse return w.print("(*, {d})", .{last});
        try w.writeByte('(');
        for (lead) |n| try w.print("{d}, ", .{n});
        try w.print("{d}{s}", .{ last, if (lead.len == 0) ",)" else ")" });
    }
};

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
        while (values.next()) |p| {
            p.*.kernel.deinit();
            p.*.arena.deinit();
            context.gpa.destroy(p.*);
        }
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
        // An elementwise kernel counts its elements instead.
        const rows = if (pattern == .elementwise) 1 else try rowCount(op, lead, d);
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
                const size = try elementCount(op, lead, d);
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
                const items = @as(u32, @intCast(shape[0])) * parts.count;
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
                break :g if (a.columns)
                    geometry.axisColumns(context.kind, walk, items, @intCast(shape[2]))
                else
                    geometry.axisRows(context.kind, walk, items, parts.rows);
            },
            .rowwise, .columnwise => {
                _ = try elementCount(op, lead, d);
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
                break :g geometry.rowwise(context.kind, rows, d, pattern.rowwise.isCapped(), least);
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

    /// The kernel of a hand-written body. The context keeps it.
    pub fn body(context: *Context, spec: *const specs.KernelSpec) Error!metal.MetalKernel {
        errdefer |err| errors.note(err);
        context.mutex.lockUncancelable(context.kernels.io);
        defer context.mutex.unlock(context.kernels.io);
        if (context.bodies.get(spec)) |kept| return kept.kernel;
        var arena: std.heap.ArenaAllocator = .init(context.gpa);
        errdefer arena.deinit();
        const key = try arena.allocator().create(specs.KernelSpec);
        key.* = try content.copy(arena.allocator(), specs.KernelSpec, spec.*);
        const kernel = try context.kernels.get(spec.*);
        errdefer kernel.deinit();
        try context.bodies.put(context.gpa, key, .{ .arena = arena.state, .kernel = kernel });
        return kernel;
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
        const p = try prepare(context, kernel);
        errdefer {
            p.kernel.deinit();
            p.arena.deinit();
            context.gpa.destroy(p);
        }
        try context.prepared.put(context.gpa, &p.pattern_kernel, p);
        return p;
    }
};

fn prepare(context: *Context, given: *const PatternKernel) Error!*Prepared {
    const gpa = context.gpa;
    const p = try gpa.create(Prepared);
    errdefer gpa.destroy(p);
    p.arena = .init(gpa);
    errdefer p.arena.deinit();
    const arena = p.arena.allocator();
    p.pattern_kernel = try content.copy(arena, PatternKernel, given.*);
    const kernel = &p.pattern_kernel;
    const pattern = kernel.pattern;
    // The texts are copied by the kernel.
    var scratch: std.heap.ArenaAllocator = .init(gpa);
    defer scratch.deinit();
    const spec = try kernel.spec(scratch.allocator());

    p.op = kernel.name[0 .. std.mem.find(u8, kernel.name, "__") orelse kernel.name.len];
    p.inputs = try pattern.inputArrays(arena);
    p.outputs = try pattern.outputArrays(arena);
    const firsts = try arena.alloc(codegen.parts.Output, p.outputs.len);
    for (firsts, p.outputs) |*first, name| first.* = for (pattern.outputs()) |y| {
        if (std.mem.eql(u8, y.arrayName(), name)) break y;
    } else unreachable;
    p.firsts = firsts;
    if (kernel.dtypes.len != firsts.len) return errors.invalid(
        "[{s}] 'dtypes' must have {d} entries but got {d}.",
        .{ kernel.name, firsts.len, kernel.dtypes.len },
    );
    for (kernel.dtypes) |rule| switch (rule) {
        .dtype => {},
        .promotion => |names| {
            if (names.len == 0) return errors.invalid(
                "[{s}] 'dtypes' must name inputs but got none.",
                .{kernel.name},
            );
            for (names) |name| if (indexOf(p.inputs, name) == null) return errors.invalid(
                "[{s}] 'dtypes' must name inputs but got '{s}'.",
                .{ kernel.name, name },
            );
        },
    };
    const Template = @typeInfo(@TypeOf(p.templates)).pointer.child;
    var templates: std.ArrayList(Template) = .empty;
    for (pattern.outputs()) |y| {
        if (y.kind == .column and pattern != .columnwise) continue;
        try templates.append(arena, .{
            .name = try std.mem.concat(arena, u8, &.{ y.name, "_t" }),
            .array = indexOf(p.outputs, y.arrayName()).?,
        });
    }
    p.templates = templates.items;
    const like = for (try pattern.inputs(arena)) |x| {
        if (x.kind == .row or x.kind == .full) break x;
    } else return errors.invalid(
        "[{s}] the pattern must have a row or full operand but has none.",
        .{kernel.name},
    );
    p.like = indexOf(p.inputs, like.arrayName()).?;
    p.parts = like.parts;
    p.axes = switch (pattern) {
        inline .fold, .scan => |a| if (a.columns) 3 else 2,
        else => null,
    };
    const kinds = try arena.alloc(codegen.parts.Operand.Kind, p.inputs.len);
    const Placed = @typeInfo(@TypeOf(p.operands)).pointer.child;
    var operands: std.ArrayList(Placed) = .empty;
    p.drawn = false;
    for (try pattern.inputs(arena)) |x| {
        const array = indexOf(p.inputs, x.arrayName()).?;
        try operands.append(arena, .{ .operand = x, .array = array });
        kinds[array] = x.kind;
        p.drawn = p.drawn or x.kind == .random;
    }
    p.operands = operands.items;
    p.kinds = kinds;
    p.kernel = try context.kernels.get(spec);
    errdefer p.kernel.deinit();
    const named = try scratch.allocator().alloc(metal.TemplateArgument, p.templates.len);
    // Those of the geometry are names that no pattern has.
    for (named, p.templates) |*to, t| to.* = .{ .name = t.name, .value = .{ .bool = true } };
    try p.kernel.checkTemplate(named);
    return p;
}

fn indexOf(names: []const []const u8, name: []const u8) ?usize {
    for (names, 0..) |n, i| if (std.mem.eql(u8, n, name)) return i;
    return null;
}

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
        .{ op, Expected{ .lead = lead, .last = d } },
    );
}
