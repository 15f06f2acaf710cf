//! A codegen pattern as a function of arrays: what `zmlx/pattern.py` is in Python, without
//! gradients.

const std = @import("std");
const arguments = @import("arguments.zig");
const arrays = @import("array.zig");
const codegen = @import("codegen.zig");
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
    parts: i32,
    drawn: bool,
    /// Each operand, and the array of the inputs that has it.
    operands: []const struct { operand: codegen.parts.Operand, array: usize },
    /// For each array of the inputs: what its last operand is.
    kinds: []const codegen.parts.Operand.Kind,

    /// An error for the first array that has not the shape that its operand must have.
    fn check(p: *const Prepared, inputs: []const Array) Error!void {
        const like = inputs[p.like].shape();
        const lead = like[0..like.len -| 1];
        if (like.len > 0 and @mod(like[lead.len], p.parts) != 0) return errors.invalid(
            "[{s}] '{s}' must have a last axis divisible by {d} but got {f}.",
            .{ p.op, p.inputs[p.like], p.parts, arguments.Shape{ .sizes = like } },
        );
        const d = if (like.len > 0) @divExact(like[lead.len], p.parts) else 1;
        for (p.operands) |x| {
            const width = d * @as(i32, @intCast(x.operand.parts));
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
    last: ?i32 = null,

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

/// Kernels and constants of a program: made once, used by any number of threads.
pub const Context = struct {
    gpa: Allocator,
    kernels: metal.KernelCache,
    /// Tests run the geometry of a GPU on the CPU.
    kind: geometry.Kind,
    mutex: std.Io.Mutex = .init,
    prepared: std.AutoHashMapUnmanaged(*const PatternKernel, *Prepared) = .empty,
    constants: std.AutoHashMapUnmanaged(u64, Array) = .empty,
    bodies: std.AutoHashMapUnmanaged(*const specs.KernelSpec, metal.MetalKernel) = .empty,

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
        while (bodies.next()) |kernel| kernel.deinit();
        context.bodies.deinit(context.gpa);
        context.kernels.deinit();
        context.* = undefined;
    }

    /// Launches `kernel`, which must live as long as the context, and fills `outputs`.
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
        const d: u32 = @intCast(@divFloor(shape[lead.len], p.parts));
        // An elementwise kernel counts its elements instead.
        const rows = if (pattern == .elementwise) 1 else try rowCount(op, lead);
        const least: u32 = if (p.drawn) 8 else 1;
        const chosen = if (kernel.chunks > 0)
            geometry.Chunks{ .count = kernel.chunks, .rows = @max(1, ceil(rows, kernel.chunks)) }
        else
            geometry.rowChunks(rows);

        var launch_inputs: std.ArrayList(Array) = try .initCapacity(arena, inputs.len + 5);
        launch_inputs.appendSliceAssumeCapacity(inputs);
        var chunked = false;
        var folded: ?[]const i32 = null;
        const g = g: switch (pattern) {
            .elementwise => {
                const size = inputs[p.like].size();
                launch_inputs.appendAssumeCapacity(try context.constant(size));
                break :g geometry.elementwise(context.kind, size, least);
            },
            inline .fold, .scan => |a| {
                if (shape.len != @as(usize, if (a.columns) 3 else 2)) return errors.invalid(
                    "[{s}] '{s}' must have {d} axes but got {d}.",
                    .{ op, p.inputs[p.like], @as(usize, if (a.columns) 3 else 2), shape.len },
                );
                const scans = pattern == .scan;
                const along = shape[if (a.columns) 1 else shape.len - 1];
                const cut_for_scan = if (@hasField(@TypeOf(a), "for_scan")) a.for_scan else true;
                const parts: geometry.Chunks = if (a.cut)
                    geometry.axisParts(.{ .columns = a.columns, .scans = cut_for_scan }, shape)
                else
                    .{ .count = 1, .rows = @intCast(along) };
                for (shape) |n| {
                    launch_inputs.appendAssumeCapacity(try context.constant(@intCast(n)));
                }
                launch_inputs.appendAssumeCapacity(try context.constant(parts.count));
                launch_inputs.appendAssumeCapacity(try context.constant(parts.rows));
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
                launch_inputs.appendAssumeCapacity(try context.constant(rows));
                launch_inputs.appendAssumeCapacity(try context.constant(d));
                chunked = pattern == .columnwise or pattern.rowwise.hasColumns();
                if (chunked) launch_inputs.appendAssumeCapacity(try context.constant(chosen.rows));
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
                to.* = try arena.dupe(i32, &.{ @intCast(chosen.count), @intCast(d) });
            } else if (folded) |sizes| {
                to.* = sizes;
            } else if (pattern == .elementwise or pattern == .scan) {
                to.* = shape;
            } else if (y.kind == .per_row) {
                to.* = lead;
            } else {
                const whole = try arena.dupe(i32, shape);
                whole[lead.len] = @intCast(d * y.parts);
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
        try p.kernel.launch(launch_inputs.items, .{
            .template = template.items,
            .grid = g.grid,
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
            to.* = if (sums) try y.clone() else try y.reshape(y.shape()[1..]);
        }
    }

    /// The output of a kernel that has one.
    pub fn one(context: *Context, kernel: *const PatternKernel, inputs: []const Array) Error!Array {
        var output: [1]Array = undefined;
        try context.run(kernel, inputs, &output);
        return output[0];
    }

    /// The kernel of a hand-written body, which must live as long as the context. The context keeps
    /// it.
    pub fn body(context: *Context, spec: *const specs.KernelSpec) Error!metal.MetalKernel {
        errdefer |err| errors.note(err);
        context.mutex.lockUncancelable(context.kernels.io);
        defer context.mutex.unlock(context.kernels.io);
        if (context.bodies.get(spec)) |kernel| return kernel;
        const kernel = try context.kernels.get(spec.*);
        errdefer kernel.deinit();
        try context.bodies.put(context.gpa, spec, kernel);
        return kernel;
    }

    /// A 0-d array that is made once: uint32, or uint64 beyond.
    fn constant(context: *Context, value: u64) Error!Array {
        context.mutex.lockUncancelable(context.kernels.io);
        defer context.mutex.unlock(context.kernels.io);
        if (context.constants.get(value)) |a| return a;
        const a = if (std.math.cast(u32, value)) |small|
            try Array.scalar(u32, small)
        else
            try Array.scalar(u64, value);
        errdefer a.deinit();
        try context.constants.put(context.gpa, value, a);
        return a;
    }

    fn preparedOf(context: *Context, kernel: *const PatternKernel) Error!*const Prepared {
        context.mutex.lockUncancelable(context.kernels.io);
        defer context.mutex.unlock(context.kernels.io);
        if (context.prepared.get(kernel)) |p| return p;
        const p = try prepare(context, kernel);
        errdefer {
            p.kernel.deinit();
            p.arena.deinit();
            context.gpa.destroy(p);
        }
        try context.prepared.put(context.gpa, kernel, p);
        return p;
    }
};

fn prepare(context: *Context, kernel: *const PatternKernel) Error!*Prepared {
    const gpa = context.gpa;
    const pattern = kernel.pattern;
    const p = try gpa.create(Prepared);
    errdefer gpa.destroy(p);
    p.arena = .init(gpa);
    errdefer p.arena.deinit();
    const arena = p.arena.allocator();
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
    p.parts = @intCast(like.parts);
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
    return p;
}

fn indexOf(names: []const []const u8, name: []const u8) ?usize {
    for (names, 0..) |n, i| if (std.mem.eql(u8, n, name)) return i;
    return null;
}

fn ceil(a: u32, b: u32) u32 {
    return (a + b - 1) / b;
}

fn rowCount(op: []const u8, lead: []const i32) Error!u32 {
    var rows: u64 = 1;
    for (lead) |n| rows *|= @intCast(n);
    return std.math.cast(u32, rows) orelse errors.invalid(
        "[{s}] rows must be below 2^32 but got {d}.",
        .{ op, rows },
    );
}
