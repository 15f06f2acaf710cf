//! What launches of a pattern kernel share: found once, checked against arrays each time.

const std = @import("std");
const arguments = @import("arguments.zig");
const arrays = @import("array.zig");
const codegen = @import("codegen.zig");
const content = @import("content.zig");
const errors = @import("errors.zig");
const geometry = @import("launch.zig");
const metal = @import("metal.zig");
const pattern_kernel = @import("pattern_kernel.zig");
const Allocator = std.mem.Allocator;
const Array = arrays.Array;
const Dtype = arrays.Dtype;
const DtypeRule = pattern_kernel.DtypeRule;
const Error = errors.Error;
const PatternKernel = pattern_kernel.PatternKernel;

/// What a pattern kernel needs at every launch, found once.
pub const Prepared = struct {
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
    /// How many of them are no states of the parts of a cut scan, which come last.
    whole: usize,
    /// For each array of the inputs: what its last operand is.
    kinds: []const codegen.parts.Operand.Kind,

    /// `destroy` undoes it.
    pub fn create(
        gpa: Allocator,
        kernels: *metal.KernelCache,
        given: *const PatternKernel,
    ) Error!*Prepared {
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
            if ((x.kind == .row or x.kind == .full) and x.index.len == 0) break x;
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
        for (try pattern.inputs(arena)) |x| if (!isSingle(x.kind)) {
            for (try pattern.inputs(arena)) |other| {
                if (!isSingle(other.kind)) continue;
                if (std.mem.eql(u8, x.arrayName(), other.arrayName())) return errors.invalid(
                    "[{s}] '{s}' must be a scalar or have elements but got operands of both kinds.",
                    .{ p.op, x.arrayName() },
                );
            }
        };
        for (try pattern.inputs(arena)) |x| {
            const array = indexOf(p.inputs, x.arrayName()).?;
            try operands.append(arena, .{ .operand = x, .array = array });
            kinds[array] = x.kind;
            p.drawn = p.drawn or x.kind == .random;
        }
        p.operands = operands.items;
        p.whole = operands.items.len - switch (pattern) {
            .scan => |a| if (a.cut) a.monoid().states.len else 0,
            else => 0,
        };
        p.kinds = kinds;
        p.kernel = try kernels.get(spec);
        errdefer p.kernel.deinit();
        const named = try scratch.allocator().alloc(metal.TemplateArgument, p.templates.len);
        // Those of the geometry are names that no pattern has.
        for (named, p.templates) |*to, t| to.* = .{ .name = t.name, .value = .{ .bool = true } };
        try p.kernel.checkTemplate(named);
        return p;
    }

    pub fn destroy(p: *Prepared, gpa: Allocator) void {
        p.kernel.deinit();
        p.arena.deinit();
        gpa.destroy(p);
    }

    /// An error for the first array that has not the shape that its operand must have.
    pub fn check(p: *const Prepared, inputs: []const Array) Error!void {
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
        var of_parts: [3]i32 = undefined;
        for (p.operands, 0..) |x, i| {
            const width = d * x.operand.parts;
            const elsewhere = x.operand.isElsewhere();
            const expected: Expected = switch (x.operand.kind) {
                .full => .{ .lead = like },
                .per_row => .{ .lead = lead },
                .column => .{ .last = width },
                .scalar, .random => .{},
                .row, .at => if (i >= p.whole)
                    .{ .lead = statesShape(p.pattern_kernel.pattern.scan, like, &of_parts) }
                else if (like.len == 0 and width == 1 and !elsewhere)
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
    pub fn hasPoint(p: *const Prepared, inputs: []const Array) bool {
        for (p.kinds, inputs) |kind, x| {
            if (!isSingle(kind) and x.ndim() == 0) return true;
        }
        return false;
    }

    pub fn dtypeOf(p: *const Prepared, rule: DtypeRule, inputs: []const Array) Dtype {
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
pub const Expected = struct {
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

/// The shape of the states of the parts of an array like x: one for each part of each row.
fn statesShape(scan: codegen.Scan, like: []const i32, buffer: *[3]i32) []const i32 {
    const parts = geometry.axisParts(.{ .columns = scan.columns, .scans = true }, like);
    buffer.* = .{ like[0], @intCast(parts.count), like[like.len - 1] };
    return buffer[0..like.len];
}

/// Whether the array of such an operand is 0-d.
fn isSingle(kind: codegen.parts.Operand.Kind) bool {
    return kind == .scalar or kind == .random;
}

fn indexOf(names: []const []const u8, name: []const u8) ?usize {
    for (names, 0..) |n, i| if (std.mem.eql(u8, n, name)) return i;
    return null;
}
