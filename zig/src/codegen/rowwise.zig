//! Rowwise bodies: reductions over rows, and maps that use them.

const std = @import("std");
const parts = @import("parts.zig");
const random = @import("random.zig");
const reductions = @import("reductions.zig");
const python = @import("../python.zig");
const tables = @import("../tables.zig").tables;
const text = @import("text.zig");
const Body = text.Body;
const Error = text.Error;
const Names = text.Names;
const Allocator = std.mem.Allocator;
const eql = std.mem.eql;

/// Rows longer than this are not asked for ahead: they would leave the cache before their turn.
const longest_ahead = 32768;

/// Any number of reductions over rows of D elements, then any number of outputs.
pub const Rowwise = struct {
    inputs: []const parts.Operand,
    outputs: []const parts.Output,
    passes: []const parts.Pass = &.{},
    lets: []const parts.Let = &.{},
    keep: []const []const u8 = &.{},
    before: []const parts.Let = &.{},
    checks: []const parts.Check = &.{},

    pub fn addNames(p: Rowwise, names: *Names, arena: Allocator) Error!void {
        for (p.before) |let| try names.add(arena, let.name);
        for (p.lets) |let| try names.add(arena, let.name);
        for (p.passes) |pass| for (pass.then) |let| try names.add(arena, let.name);
        for (p.passes) |pass| for (pass.reductions) |r| try names.add(arena, r.name);
        for (p.passes) |pass| for (pass.reductions) |r| {
            if (r.peak.len > 0) try names.add(arena, r.peak);
        };
        for (p.passes) |pass| if (pass.climb) |climb| try names.add(arena, climb.name);
    }

    pub fn problem(p: Rowwise, arena: Allocator) Error!?[]const u8 {
        for (p.outputs) |y| {
            if (y.kind == .full) return try std.fmt.allocPrint(
                arena,
                "[codegen] 'kind' of {f} must be row, per_row or column but got 'full'.",
                .{python.ascii(y.name)},
            );
            var written: std.AutoArrayHashMapUnmanaged(u32, void) = .empty;
            for (p.outputs) |x| {
                if (eql(u8, x.arrayName(), y.arrayName())) try written.put(arena, x.part, {});
            }
            if (written.count() < y.parts) return try std.fmt.allocPrint(
                arena,
                "[codegen] 'outputs' must have all {d} parts of {f} but have {d}.",
                .{ y.parts, python.ascii(y.arrayName()), written.count() },
            );
        }
        for (p.passes) |pass| for (pass.reductions) |r| {
            if (reductions.isKnown(r.op)) continue;
            var known: std.ArrayList(u8) = .empty;
            for (tables.reductions) |rule| try known.print(arena, "{s}, ", .{rule.name});
            return try std.fmt.allocPrint(
                arena,
                "[codegen] 'op' must be one of {s}sum_exp but got {f}.",
                .{ known.items, python.ascii(r.op) },
            );
        };
        for (p.keep) |name| {
            if (p.typeOf(name) == null) return try std.fmt.allocPrint(
                arena,
                "[codegen] 'keep' must name operands or lets of the elements but got {f}.",
                .{python.ascii(name)},
            );
        }
        return null;
    }

    pub fn constants(p: Rowwise) []const []const u8 {
        return if (p.hasColumns()) &.{ "rows", "D", "chunk" } else &.{ "rows", "D" };
    }

    pub fn header(p: Rowwise, arena: Allocator) Error![]const u8 {
        const drawn = try random.header(arena, p.inputs);
        const row = if (p.passes.len > 0) reductions.row_header else "";
        var out: std.ArrayList(u8) = .empty;
        for ([_][]const u8{ tables.step_header, drawn, row }) |part| try out.appendSlice(arena, part);
        var ops: Names = .{};
        for (p.passes) |pass| for (pass.reductions) |r| try ops.add(arena, r.op);
        for (ops.items()) |op| try out.appendSlice(arena, reductions.headerOf(op));
        return out.items;
    }

    /// Whether outputs are summed over rows.
    pub fn hasColumns(p: Rowwise) bool {
        for (p.outputs) |y| if (y.kind == .column) return true;
        return false;
    }

    /// Whether a row must fit in TPR·U·STEPS elements.
    pub fn isCapped(p: Rowwise) bool {
        return p.keep.len > 0 or p.hasColumns();
    }

    pub fn source(p: Rowwise, arena: Allocator) Error![]const u8 {
        var body: Body = .init(arena);
        var types: Names = .{};
        for (p.passes) |pass| for (pass.reductions) |r| try types.add(arena, r.type);
        for (types.items()) |t| {
            try body.add("threadgroup {s} scratch_{s}[(TPR + 31) / 32];", .{ t, t });
        }
        try body.add("const uint lane_ = thread_position_in_threadgroup.x % TPR;", .{});
        try body.add("const uint group_ = threadgroup_position_in_grid.x" ++
            " + threadgroup_position_in_grid.y * threadgroups_per_grid.x;", .{});
        try body.add("const uint whole_ = D / U * U;", .{});
        try text.addWidth(&body, p.inputs, p.outputs);
        for (p.inputs) |x| if (x.kind == .scalar) {
            try text.addScalar(&body, x);
        };
        try random.addKeys(&body, p.inputs);
        for (p.outputs) |y| if (y.kind == .column) {
            try body.add("float {s}_sum[STEPS * U] = {{0}};", .{y.name});
            try body.add("float {s}_sum_tail[(U + TPR - 1) / TPR] = {{0}};", .{y.name});
        };
        if (p.hasColumns()) {
            try body.add("const uint stop_ = uint(min(size_t(rows), (size_t(group_) + 1) * chunk));", .{});
            try body.open("for (uint row = group_ * chunk; row < stop_; ++row)", .{});
            try body.add("const bool live_ = true;", .{});
        } else {
            try body.add(
                "const uint slot_ = group_ * RPG + thread_position_in_threadgroup.x / TPR;",
                .{},
            );
            try body.open("if (group_ * RPG >= rows)", .{});
            try body.add("return;", .{});
            try body.close();
            // A surplus row of the last group repeats the last row and stores nothing, so that
            // every thread reaches every simd operation.
            try body.add("const bool live_ = RPG == 1 || slot_ < rows;", .{});
            try body.add("const uint row = live_ ? slot_ : rows - 1;", .{});
        }
        try p.oneRow(&body);
        if (p.hasColumns()) {
            try body.close();
            try p.storeColumns(&body);
        }
        return body.text();
    }

    fn oneRow(p: Rowwise, body: *Body) Error!void {
        try p.rowPointers(body);
        try random.addRowCounters(body, p.inputs);
        try random.addRest(body, p.inputs);
        for (p.before) |let| try body.declare(let);
        for (p.checks) |check| {
            try body.open("if (lane_ == 0 && live_ && ({s}))", .{check.condition});
            try body.add("ZMLX_FAIL(\"{s}\", {s});", .{ check.argument, check.value });
            try body.close();
        }
        try p.pointersElsewhere(body);
        for (p.inputs) |x| if (x.kind == .at) {
            try body.add("const {s} {s} = {s}({s}_in_row[{s}]);", .{
                x.type, x.name, x.type, x.arrayName(), try text.place(body, x, x.index),
            });
        };
        for (p.keep) |name| {
            const kind = p.typeOf(name).?;
            try body.add("{s} {s}_kept[STEPS * U];", .{ kind, name });
            try body.add("{s} {s}_kept_tail[(U + TPR - 1) / TPR];", .{ kind, name });
        }
        var kept: Names = .{};
        const stored_exprs = try p.stored(body);
        const last = p.passes.len -| @intFromBool(stored_exprs.len == 0);
        for (p.passes, 0..) |pass, index| {
            if (pass.climb) |climb| {
                try body.add("float {s} = {s};", .{ climb.name, climb.start });
                try body.open("for (;;)", .{});
            }
            for (pass.reductions) |r| try reductions.startParts(body, r);
            const later = try p.neededLater(body, index);
            const ahead = index > 0 and index == last and pass.climb == null;
            try p.sweep(body, try reduced(body, &.{pass}), &kept, later, pass.reductions, ahead);
            for (pass.reductions) |r| try reductions.foldParts(body, r);
            if (pass.climb) |climb| try endClimb(body, climb);
            for (pass.then) |let| try body.declare(let);
        }
        try p.sweep(body, stored_exprs, &kept, .{}, &.{}, p.passes.len > 0);
        try p.storePerRow(body);
    }

    fn endClimb(body: *Body, climb: parts.Climb) Error!void {
        const name = climb.name;
        try body.add("const float {s}_next = {s};", .{ name, climb.step });
        try body.add("const bool more_ = {s}_next > {s};", .{ name, name });
        try body.add("{s} = {s}_next <= {s} ? {s} : {s}_next;", .{ name, name, name, name, name });
        // Rows that share a simdgroup climb together: simd operations need all lanes.
        try body.open("if (!simd_any(more_))", .{});
        try body.add("break;", .{});
        try body.close();
        try body.close();
    }

    /// The type of an operand or element-level let: of the last let of that name, else operand.
    fn typeOf(p: Rowwise, name: []const u8) ?[]const u8 {
        var found: ?[]const u8 = null;
        for (p.inputs) |x| {
            if (eql(u8, x.name, name)) found = x.type;
        }
        for (p.lets) |let| {
            if (eql(u8, let.name, name)) found = let.type;
        }
        return found;
    }

    /// The expressions that passes reduce.
    fn reduced(body: *Body, passes: []const parts.Pass) Error![]const []const u8 {
        var exprs: std.ArrayList([]const u8) = .empty;
        for (passes) |pass| for (pass.reductions) |r| try exprs.append(body.arena, r.expr);
        return exprs.items;
    }

    /// The expressions of the last walk.
    fn stored(p: Rowwise, body: *Body) Error![]const []const u8 {
        var exprs: std.ArrayList([]const u8) = .empty;
        for (p.outputs) |y| if (y.kind != .per_row) try exprs.append(body.arena, y.expr);
        return exprs.items;
    }

    /// What the walks after pass `index` need.
    fn neededLater(p: Rowwise, body: *Body, index: usize) Error!Names {
        const exprs = try std.mem.concat(body.arena, []const u8, &.{
            try reduced(body, p.passes[index + 1 ..]), try p.stored(body),
        });
        return text.neededNames(body.arena, exprs, p.lets, .{});
    }

    fn rowPointers(p: Rowwise, body: *Body) Error!void {
        var done: Names = .{};
        for (p.inputs) |x| {
            if ((x.kind != .row and x.kind != .at) or x.isElsewhere()) continue;
            const name = try body.fmt("{s}_in", .{x.arrayName()});
            if (try done.addNew(body.arena, name)) try text.addRowPointer(body, x, name, "row");
        }
        for (p.outputs) |y| {
            if (y.kind != .row) continue;
            const name = try body.fmt("{s}_out", .{y.arrayName()});
            if (try done.addNew(body.arena, name)) try text.addRowPointer(body, y, name, "row");
        }
        for (p.inputs) |x| if (x.kind == .per_row) {
            try body.add(
                "const {s} {s} = {s}({s}_in[row]);",
                .{ x.type, x.name, x.type, x.arrayName() },
            );
        };
    }

    fn pointersElsewhere(p: Rowwise, body: *Body) Error!void {
        // The last operand of an array decides, in the place of the first.
        var last: std.StringArrayHashMapUnmanaged(parts.Operand) = .empty;
        for (p.inputs) |x| {
            if (x.isElsewhere()) try last.put(body.arena, x.arrayName(), x);
        }
        for (last.keys(), last.values()) |array, x| {
            try text.addRowPointer(body, x, try body.fmt("{s}_in", .{array}), x.index);
        }
    }

    /// Where in a sweep an element is: its accumulator, and the names and slot of what is kept.
    const Place = struct { part: []const u8, tail: []const u8, slot: []const u8 };

    /// One walk over the row: whole steps of U elements, then the tail.
    fn sweep(
        p: Rowwise,
        body: *Body,
        exprs: []const []const u8,
        kept: *Names,
        later: Names,
        reducing: []const parts.Reduce,
        ahead: bool,
    ) Error!void {
        if (exprs.len == 0) return;
        const arena = body.arena;
        const needed = try text.neededNames(arena, exprs, p.lets, kept.*);
        var keeping: std.ArrayList([]const u8) = .empty;
        for (p.keep) |n| {
            if (needed.has(n) and !kept.has(n) and later.has(n)) try keeping.append(arena, n);
        }
        if (p.isCapped()) {
            try body.open("for (uint s_ = 0; s_ < STEPS; ++s_)", .{});
            try body.add("const uint i_ = (s_ * TPR + lane_) * U;", .{});
            try body.open("if (i_ >= whole_)", .{});
            try body.add("break;", .{});
            try body.close();
        } else {
            try body.open("for (uint i_ = lane_ * U; i_ < whole_; i_ += TPR * U)", .{});
        }
        if (ahead) try p.prefetch(body);
        for (p.inputs) |x| if (x.kind == .random and needed.has(x.name)) {
            try random.addBlock(body, x, "U", try body.fmt("{s}_first + i_ / 8", .{x.name}));
        };
        for (p.inputs) |x| {
            if (!needed.has(x.name) or (x.kind != .row and x.kind != .column)) continue;
            const pointer = try body.fmt("{s}_in{s} + {s}", .{
                x.arrayName(),
                if (x.kind == .row) "_row" else "",
                try text.place(body, x, "i_"),
            });
            try text.addReadStep(body, x, "U", pointer);
        }
        if (reducing.len == 0) for (p.outputs) |y| if (y.kind == .row) {
            const spot = try text.place(body, y, "i_");
            const pointer = try body.fmt("{s}_out_row + {s}", .{ y.arrayName(), spot });
            try text.addWriteStep(body, y, "U", pointer, "live_");
        };
        try body.openStep();
        try body.add("const uint j = i_ + u_;", .{});
        for (p.inputs) |x| if (x.kind == .random and needed.has(x.name)) {
            try body.add("const float {s} = {s}_drawn[u_];", .{ x.name, x.name });
        };
        const whole: Place = .{ .part = "u_", .tail = "", .slot = "s_ * U + u_" };
        try p.element(body, needed, kept.*, keeping.items, reducing, whole);
        try body.close();
        try body.close();
        try body.open("for (uint k_ = 0; k_ < (U + TPR - 1) / TPR; ++k_)", .{});
        try body.add("const uint j = whole_ + k_ * TPR + lane_;", .{});
        try body.open("if (j < D)", .{});
        for (p.inputs) |x| if (x.kind == .random and needed.has(x.name)) {
            try random.addDrawOfRest(body, x);
        };
        const tail: Place = .{ .part = "0", .tail = "_tail", .slot = "k_" };
        try p.element(body, needed, kept.*, keeping.items, reducing, tail);
        try body.close();
        try body.close();
        for (keeping.items) |n| try kept.add(arena, n);
    }

    /// Asks for the next row, which one thread otherwise waits for in the first sweep while it has
    /// little arithmetic to do. The last sweep has the row itself in the cache.
    fn prefetch(p: Rowwise, body: *Body) Error!void {
        for (p.inputs) |x| {
            if (x.kind == .row and x.index.len == 0) break;
        } else return;
        try body.open("if (TPR == 1 && D <= {d})", .{longest_ahead});
        const ahead = "const uint ahead_ = i_ / U % places_ * (whole_ / U / places_ * U)" ++
            " + i_ / U / places_ * U;";
        try body.add("const uint places_ = ZMLX_PLACES_AHEAD;", .{});
        try body.add(ahead, .{});
        for (p.inputs) |x| {
            if (x.kind != .row or x.index.len != 0) continue;
            const pointer = try body.fmt("{s}_in_row", .{x.arrayName()});
            const width = if (x.parts == 1) "D" else try body.fmt("(D * {d})", .{x.parts});
            const spot = try text.place(body, x, "ahead_");
            try body.open("for (uint p_ = 0; p_ < U; p_ += 64 / sizeof(*{s}))", .{pointer});
            try body.add("ZMLX_PREFETCH_FAR({s} + {s} + {s} + p_);", .{ pointer, width, spot });
            try body.close();
        }
        try body.close();
    }

    fn element(
        p: Rowwise,
        body: *Body,
        needed: Names,
        kept: Names,
        keeping: []const []const u8,
        reducing: []const parts.Reduce,
        at: Place,
    ) Error!void {
        for (p.inputs) |x| {
            if (!needed.has(x.name) or (x.kind != .row and x.kind != .column)) continue;
            const value = if (at.tail.len == 0)
                try text.atStep(body, x, "u_")
            else
                try body.fmt("{s}({s}_in{s}[{s}])", .{
                    x.type,
                    x.arrayName(),
                    if (x.kind == .row) "_row" else "",
                    try text.place(body, x, "j"),
                });
            if (kept.has(x.name)) {
                // One thread has its row in the cache already; a copy would only push it out.
                try body.add(
                    "const {s} {s} = TPR == 1 ? {s} : {s}_kept{s}[{s}];",
                    .{ x.type, x.name, value, x.name, at.tail, at.slot },
                );
            } else {
                try body.add("const {s} {s} = {s};", .{ x.type, x.name, value });
            }
        }
        for (p.lets) |let| {
            if (!needed.has(let.name)) continue;
            if (kept.has(let.name)) {
                try body.add(
                    "const {s} {s} = {s}_kept{s}[{s}];",
                    .{ let.type, let.name, let.name, at.tail, at.slot },
                );
            } else {
                try body.declare(let);
            }
        }
        for (keeping) |name| {
            try body.add("{s}_kept{s}[{s}] = {s};", .{ name, at.tail, at.slot, name });
        }
        for (reducing) |r| try reductions.updatePart(body, r, at.part);
        if (reducing.len == 0) try p.store(body, at);
    }

    fn store(p: Rowwise, body: *Body, at: Place) Error!void {
        var rows = false;
        for (p.outputs) |y| rows = rows or y.kind == .row;
        const guarded = rows and !p.hasColumns();
        if (guarded) try body.open("if (live_)", .{});
        for (p.outputs) |y| if (y.kind == .row) {
            if (at.tail.len == 0) {
                try text.addSetStep(body, y, "u_");
            } else {
                try body.add("{s}_out_row[{s}] = {s}_t({s});", .{
                    y.arrayName(), try text.place(body, y, "j"), y.name, y.expr,
                });
            }
        };
        if (guarded) try body.close();
        for (p.outputs) |y| if (y.kind == .column) {
            try body.add("{s}_sum{s}[{s}] += {s};", .{ y.name, at.tail, at.slot, y.expr });
        };
    }

    fn storePerRow(p: Rowwise, body: *Body) Error!void {
        var any = false;
        for (p.outputs) |y| any = any or y.kind == .per_row;
        if (!any) return;
        try body.open("if (lane_ == 0 && live_)", .{});
        for (p.outputs) |y| if (y.kind == .per_row) {
            try body.add("{s}_out[row] = {s}_t({s});", .{ y.arrayName(), y.name, y.expr });
        };
        try body.close();
    }

    fn storeColumns(p: Rowwise, body: *Body) Error!void {
        try body.open("for (uint s_ = 0; s_ < STEPS; ++s_)", .{});
        try body.add("const uint i_ = (s_ * TPR + lane_) * U;", .{});
        try body.openStep();
        try body.open("if (i_ + u_ < whole_)", .{});
        for (p.outputs) |y| if (y.kind == .column) {
            try body.add(
                "{s}_out[size_t(group_) * D + i_ + u_] = {s}_sum[s_ * U + u_];",
                .{ y.arrayName(), y.name },
            );
        };
        try body.close();
        try body.close();
        try body.close();
        try body.open("for (uint k_ = 0; k_ < (U + TPR - 1) / TPR; ++k_)", .{});
        try body.add("const uint j = whole_ + k_ * TPR + lane_;", .{});
        try body.open("if (j < D)", .{});
        for (p.outputs) |y| if (y.kind == .column) {
            try body.add(
                "{s}_out[size_t(group_) * D + j] = {s}_sum_tail[k_];",
                .{ y.arrayName(), y.name },
            );
        };
        try body.close();
        try body.close();
    }
};
