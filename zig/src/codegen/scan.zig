//! Scans along one axis: running sums, products and linear recurrences.

const std = @import("std");
const fold = @import("fold.zig");
const monoids = @import("monoids.zig");
const parts = @import("parts.zig");
const tables = @import("../tables.zig").tables;
const text = @import("text.zig");
const Allocator = std.mem.Allocator;
const Body = text.Body;
const Error = text.Error;
const Monoid = monoids.Monoid;
const Names = text.Names;

/// out[j] = expr(state), where the state is that of the elements up to j. See `scan.py`.
pub const Scan = struct {
    op: []const u8,
    outputs: []const parts.Output,
    type: []const u8 = "float",
    columns: bool = false,
    reverse: bool = false,
    exclusive: bool = false,
    others: []const []const u8 = &.{},
    lift: []const []const u8 = &.{},
    cut: bool = false,

    pub fn operands(p: Scan, arena: Allocator) Error![]const parts.Operand {
        var list: std.ArrayList(parts.Operand) = .empty;
        try list.append(arena, .{ .name = "x", .type = p.type });
        for (p.others) |name| try list.append(arena, .{ .name = name, .type = p.type });
        if (p.cut) for (p.monoid().states) |state| try list.append(arena, .{
            .name = try std.mem.concat(arena, u8, &.{ state.name, "_of_part" }),
            .type = monoids.typeOf(state, p.type),
        });
        return list.items;
    }

    pub fn addNames(_: Scan, _: *Names, _: Allocator) Error!void {}

    /// What must hold before the operands can be known.
    pub fn earlyProblem(p: Scan, arena: Allocator) Error!?[]const u8 {
        if (try monoids.problem(arena, p.op, p.type)) |reason| return reason;
        const count = @max(p.lift.len, 1);
        const wanted = p.monoid().states.len;
        if (count != wanted) return try std.fmt.allocPrint(
            arena,
            "[codegen] 'lift' must have {d} entries but got {d}.",
            .{ wanted, count },
        );
        return null;
    }

    pub fn problem(_: Scan, _: Allocator) Error!?[]const u8 {
        return null;
    }

    pub fn constants(p: Scan) []const []const u8 {
        return fold.axisConstants(p.columns);
    }

    pub fn header(_: Scan, _: Allocator) Error![]const u8 {
        return tables.step_header;
    }

    pub fn monoid(p: Scan) Monoid {
        return monoids.find(p.op).?;
    }

    pub fn source(p: Scan, arena: Allocator) Error![]const u8 {
        var writer: Writer = .{ .p = p, .m = p.monoid(), .body = .init(arena) };
        if (p.columns) try writer.columns() else try writer.rows();
        return writer.body.text();
    }
};

const Writer = struct {
    p: Scan,
    m: Monoid,
    body: Body,

    fn typeOf(w: *Writer, i: usize) []const u8 {
        return monoids.typeOf(w.m.states[i], w.p.type);
    }

    fn spell(w: *Writer, after: []const u8) Error!monoids.Spelled {
        return monoids.spell(&w.body, w.m, "", after);
    }

    fn merge(w: *Writer, a: monoids.Spelled, b: monoids.Spelled) Error!void {
        return monoids.addMerge(&w.body, w.m, a, b, false);
    }

    /// Sets, or declares, the variables with `suffix` to what a state starts with.
    fn start(w: *Writer, suffix: []const u8, declare: bool) Error!void {
        for (w.m.states, 0..) |s, i| {
            const value = try monoids.started(&w.body, w.m, i, w.p.type, "0");
            if (declare) {
                try w.body.add("{s} {s}{s} = {s};", .{ w.typeOf(i), s.name, suffix, value });
            } else {
                try w.body.add("{s}{s} = {s};", .{ s.name, suffix, value });
            }
        }
    }

    fn addAll(w: *Writer, comptime format: []const u8) Error!void {
        for (w.m.states) |s| try w.body.add(format, .{ s.name, s.name });
    }

    /// A line for each variable, of its type, its name, and its name.
    fn declareAll(w: *Writer, comptime format: []const u8) Error!void {
        for (w.m.states, 0..) |s, i| try w.body.add(format, .{ w.typeOf(i), s.name, s.name });
    }

    /// Declares the operands at `place`, and gives the state of the element.
    fn load(w: *Writer, place: []const u8) Error!monoids.Spelled {
        try w.loadOne("x", place);
        for (w.p.others) |name| try w.loadOne(name, place);
        return if (w.p.lift.len > 0) w.p.lift else &.{"x"};
    }

    fn loadOne(w: *Writer, name: []const u8, place: []const u8) Error!void {
        try w.body.add(
            "const {s} {s} = {s}({s}_in_{s});",
            .{ w.p.type, name, w.p.type, name, place },
        );
    }

    /// Takes the states of the parts before this one into the carry.
    fn before(w: *Writer, place: []const u8, carry: []const u8) Error!void {
        if (!w.p.cut) return;
        const body = &w.body;
        const loop = if (w.p.reverse)
            "uint p_ = parts - 1; p_ > part_; --p_"
        else
            "uint p_ = 0; p_ < part_; ++p_";
        try body.open("for ({s})", .{loop});
        if (w.p.columns) try body.open("for (uint n_ = 0; n_ < width_; ++n_)", .{});
        for (w.m.states, 0..) |s, i| {
            try body.add(
                "const {s} {s}_next = {s}_of_part_in[{s}];",
                .{ w.typeOf(i), s.name, s.name, place },
            );
        }
        try w.merge(try w.spell(carry), try w.spell("_next"));
        if (w.p.columns) try body.close();
        try body.close();
    }

    // ---- rows -----------------------------------------------------------------------------------

    fn rows(w: *Writer) Error!void {
        const body = &w.body;
        for (w.m.states, 0..) |s, i| {
            try body.add("threadgroup {s} {s}_scratch[(TPR + 31) / 32];", .{ w.typeOf(i), s.name });
        }
        try body.add("const uint lane_ = thread_position_in_threadgroup.x % TPR;", .{});
        try body.add("const uint group_ = threadgroup_position_in_grid.x" ++
            " + threadgroup_position_in_grid.y * threadgroups_per_grid.x;", .{});
        try body.add("const uint items_ = rows * parts;", .{});
        try body.open("if (group_ * RPG >= items_)", .{});
        try body.add("return;", .{});
        try body.close();
        try body.add(
            "const uint slot_ = group_ * RPG + thread_position_in_threadgroup.x / TPR;",
            .{},
        );
        try body.add("const bool live_ = RPG == 1 || slot_ < items_;", .{});
        try body.add("const uint item_ = live_ ? slot_ : items_ - 1;", .{});
        try body.add("const uint part_ = item_ % parts;", .{});
        try body.add("const uint first_ = part_ * chunk;", .{});
        try body.add("const uint stop_ = chunk < D - first_ ? first_ + chunk : D;", .{});
        // As many steps for every part, so that all threads reach every simd operation.
        try body.add("const uint steps_ = (chunk + TPR * U - 1) / (TPR * U);", .{});
        try w.pointers("row", "{s}_in", "{s}_out", "size_t(item_ / parts) * D");
        try w.start("_carry", true);
        try w.before("item_ / parts * parts + p_", "_carry");
        try body.open("for (uint t_ = 0; t_ < steps_; ++t_)", .{});
        // A reversed scan visits steps and lanes from the end.
        const step = if (w.p.reverse) "steps_ - 1 - t_" else "t_";
        const lane = if (w.p.reverse) "TPR - 1 - lane_" else "lane_";
        try body.add("const uint i_ = first_ + (({s}) * TPR + ({s})) * U;", .{ step, lane });
        try body.add("const bool full_ = i_ + U <= stop_;", .{});
        // From a pointer, since a sum of indices that may wrap keeps the loops from vectorising.
        try w.pointers("step", "{s}_in_row", "{s}_out_row", "i_");
        try w.declareAll("{s} {s}_part[U], {s}_own[U];");
        // In a loop of its own, which converts whole registers.
        try body.open("if (full_)", .{});
        try w.readStep("x");
        for (w.p.others) |name| try w.readStep(name);
        try w.loadBlock(true);
        try body.closeElse();
        try body.openStep();
        try w.start("_own[u_]", false);
        try body.close();
        try w.loadBlock(false);
        try body.close();
        try w.runs();
        try w.lanes();
        try w.joinRuns();
        try w.rowOutputs();
        for (w.m.states) |s| {
            const n = s.name;
            try body.add("{s}_carry = TPR > 1 ? {s}_after : {s}_before;", .{ n, n, n });
        }
        try body.close();
    }

    /// The loop over the elements of a whole step or of one past the end.
    fn openElements(w: *Writer, whole: bool) Error!void {
        if (whole) return w.body.openStep();
        try w.body.open("for (uint u_ = 0; u_ < U && i_ + u_ < stop_; ++u_)", .{});
    }

    /// Pointers to a place of every operand and output.
    fn pointers(
        w: *Writer,
        comptime name: []const u8,
        comptime input: []const u8,
        comptime output: []const u8,
        comptime place: []const u8,
    ) Error!void {
        const in = "auto {s}_in_" ++ name ++ " = " ++ input ++ " + " ++ place ++ ";";
        const out = "auto {s}_out_" ++ name ++ " = " ++ output ++ " + " ++ place ++ ";";
        try w.body.add(in, .{ "x", "x" });
        for (w.p.others) |n| try w.body.add(in, .{ n, n });
        for (w.p.outputs) |y| try w.body.add(out, .{ y.name, y.name });
    }

    /// A whole step of an operand.
    fn readStep(w: *Writer, name: []const u8) Error!void {
        const x: parts.Operand = .{ .name = name };
        try text.addReadStep(&w.body, x, "U", try w.body.fmt("{s}_in_row + i_", .{name}));
    }

    /// The states of a thread's elements.
    fn loadBlock(w: *Writer, whole: bool) Error!void {
        try w.openElements(whole);
        const lifted = try w.load("step[u_]");
        for (w.m.states, lifted) |s, value| try w.body.add("{s}_own[u_] = {s};", .{ s.name, value });
        try w.body.close();
    }

    /// The elements of a thread: runs of neighbours, which do not wait for each other.
    fn runs(w: *Writer) Error!void {
        const body = &w.body;
        const run = tables.scan_run;
        // Signed, since an index that may wrap keeps the loops from vectorising.
        try body.add("const int run_ = U % {d} == 0 ? {d} : U;", .{ run, run });
        for (w.m.states, 0..) |s, i| try body.add(
            "{s} {s}_run[U % {d} == 0 ? U / {d} : 1];",
            .{ w.typeOf(i), s.name, run, run },
        );
        try body.open("for (int r_ = 0; r_ < int(U) / run_; ++r_)", .{});
        try w.start("", true);
        try body.open("for (int q_ = 0; q_ < run_; ++q_)", .{});
        const place = if (w.p.reverse) "run_ - 1 - q_" else "q_";
        try body.add("const int k_ = r_ * run_ + {s};", .{place});
        if (w.p.exclusive) try w.addAll("{s}_part[k_] = {s};");
        try w.merge(try w.spell(""), try w.spell("_own[k_]"));
        if (!w.p.exclusive) try w.addAll("{s}_part[k_] = {s};");
        try body.close();
        try w.addAll("{s}_run[r_] = {s};");
        try body.close();
    }

    /// Opens a loop over the runs of a thread but the `first` ones, in the order of the scan.
    fn openRuns(w: *Writer, first: u32) Error!void {
        try w.body.open("for (int r_ = {d}; r_ < int(U) / run_; ++r_)", .{first});
        const front = if (w.p.reverse) "int(U) / run_ - 1 - r_" else "r_";
        try w.body.add("const int front_ = {s};", .{front});
    }

    /// Takes `before`, and then each run, into the elements that follow.
    fn joinRuns(w: *Writer) Error!void {
        const body = &w.body;
        try w.openRuns(0);
        try body.open("for (int u_ = 0; u_ < run_; ++u_)", .{});
        try w.declareAll("{s} {s} = {s}_before;");
        try w.merge(try w.spell(""), try w.spell("_part[front_ * run_ + u_]"));
        try w.addAll("{s}_part[front_ * run_ + u_] = {s};");
        try body.close();
        try w.merge(try w.spell("_before"), try w.spell("_run[front_]"));
        try body.close();
    }

    /// `before`: the state before this thread's elements; `after`: that after the step.
    fn lanes(w: *Writer) Error!void {
        const body = &w.body;
        for (w.m.states, 0..) |s, i| {
            try body.add("{s} {s}_before = {s}_carry;", .{ w.typeOf(i), s.name, s.name });
            try body.add("{s} {s}_after = {s}_carry;", .{ w.typeOf(i), s.name, s.name });
        }
        const total = try w.spell("_total");
        const after = try w.spell("_after");
        try body.open("if (TPR > 1)", .{});
        const end = if (w.p.reverse) "int(U) / run_ - 1" else "0";
        for (w.m.states, 0..) |s, i| {
            try body.add("{s} {s}_total = {s}_run[{s}];", .{ w.typeOf(i), s.name, s.name, end });
        }
        try w.openRuns(1);
        try w.merge(total, try w.spell("_run[front_]"));
        try body.close();
        // An inclusive scan of the totals over the lanes of a simdgroup that share a row.
        try body.add("const uint place_ = lane_ % 32;", .{});
        try body.open("for (ushort step_ = 1; step_ < (TPR < 32 ? TPR : 32); step_ *= 2)", .{});
        try w.declareAll("{s} {s}_left = simd_shuffle_up({s}_total, step_);");
        try w.merge(try w.spell("_left"), total);
        for (w.m.states) |s| {
            try body.add(
                "{s}_total = place_ >= step_ ? {s}_left : {s}_total;",
                .{ s.name, s.name, s.name },
            );
        }
        try body.close();
        try w.declareAll("const {s} {s}_next = simd_shuffle_up({s}_total, ushort(1));");
        try body.open("if (TPR > 32)", .{});
        try body.add("threadgroup_barrier(mem_flags::mem_threadgroup);", .{});
        try body.open("if (place_ == 31 || lane_ == TPR - 1)", .{});
        try w.addAll("{s}_scratch[lane_ / 32] = {s}_total;");
        try body.close();
        try body.add("threadgroup_barrier(mem_flags::mem_threadgroup);", .{});
        try w.addAll("{s}_after = {s}_carry;");
        try body.open("for (uint s_ = 0; s_ < (TPR + 31) / 32; ++s_)", .{});
        try body.open("if (s_ == lane_ / 32)", .{});
        try w.addAll("{s}_before = {s}_after;");
        try body.close();
        try w.merge(after, try w.spell("_scratch[s_]"));
        try body.close();
        try body.closeElse();
        try body.add("const uint last_ = thread_index_in_simdgroup - lane_ + TPR - 1;", .{});
        for (w.m.states, 0..) |s, i| {
            try body.add(
                "const {s} {s}_right = simd_shuffle({s}_total, ushort(last_));",
                .{ w.typeOf(i), s.name, s.name },
            );
            try body.add("{s}_after = {s}_carry;", .{ s.name, s.name });
        }
        try w.merge(after, try w.spell("_right"));
        try body.close();
        try body.open("if (place_ > 0)", .{});
        try w.merge(try w.spell("_before"), try w.spell("_next"));
        try body.close();
        try body.close();
    }

    fn rowOutputs(w: *Writer) Error!void {
        const body = &w.body;
        try body.open("if (live_ && full_)", .{});
        for ([_]bool{ true, false }) |whole| {
            if (!whole) {
                body.depth -= 1;
                try body.open("}} else if (live_)", .{});
            } else {
                for (w.p.others) |name| try w.readStep(name);
                for (w.p.outputs) |y| {
                    const pointer = try body.fmt("{s}_out_row + i_", .{y.name});
                    try text.addWriteStep(body, y, "U", pointer, "true");
                }
            }
            try w.openElements(whole);
            try w.declareAll("const {s} {s} = {s}_part[u_];");
            for (w.p.others) |name| try w.loadOne(name, "step[u_]");
            for (w.p.outputs) |y| {
                if (whole) {
                    try text.addSetStep(body, y, "u_");
                } else {
                    try body.add("{s}_out_step[u_] = {s}_t({s});", .{ y.name, y.name, y.expr });
                }
            }
            try body.close();
        }
        try body.close();
    }

    // ---- columns --------------------------------------------------------------------------------

    fn columns(w: *Writer) Error!void {
        const body = &w.body;
        try fold.addColumnPlace(body);
        try body.add("const uint part_ = item_ % parts;", .{});
        try body.add("const uint first_ = part_ * chunk;", .{});
        try body.add("const uint stop_ = chunk < rows - first_ ? first_ + chunk : rows;", .{});
        try body.add("const uint width_ = min(uint(N), D - column_);", .{});
        try body.add("const size_t base_ = size_t(item_ / parts) * rows * D + column_;", .{});
        for (w.m.states, 0..) |s, i| try body.add("{s} {s}_carry[N];", .{ w.typeOf(i), s.name });
        try body.open("for (uint n_ = 0; n_ < width_; ++n_)", .{});
        try w.start("_carry[n_]", false);
        try body.close();
        try w.before("size_t(item_ / parts * parts + p_) * D + column_ + n_", "_carry[n_]");
        try body.add("uint t_ = first_;", .{});
        try body.add("const size_t apart_ = D;", .{});
        // Some rows at a time, so that what they carry is stored once, unless a thread has them whole.
        const count: u32 = if (w.p.others.len > 0) 4 else 8;
        try body.open(
            "for (; D > N && width_ == N && stop_ - t_ >= {d}; t_ += {d})",
            .{ count, count },
        );
        if (w.p.reverse) {
            try body.add("const uint i_ = stop_ - {d} - (t_ - first_);", .{count});
        } else {
            try body.add("const uint i_ = t_;", .{});
        }
        try w.pointers("row", "{s}_in", "{s}_out", "base_ + size_t(i_) * D");
        try body.open("for (uint n_ = 0; n_ < N; ++n_)", .{});
        try w.declareAll("{s} {s} = {s}_carry[n_];");
        try body.openFewRows(count);
        if (w.p.reverse) {
            try body.add("const size_t at_ = ({d} - r_) * apart_ + n_;", .{count - 1});
        } else {
            try body.add("const size_t at_ = r_ * apart_ + n_;", .{});
        }
        try w.columnElement("at_");
        try body.close();
        try w.addAll("{s}_carry[n_] = {s};");
        try body.close();
        try body.close();
        try body.open("for (; t_ < stop_; ++t_)", .{});
        const index = if (w.p.reverse) "stop_ - 1 - (t_ - first_)" else "t_";
        try body.add("const uint i_ = {s};", .{index});
        try w.pointers("row", "{s}_in", "{s}_out", "base_ + size_t(i_) * D");
        try body.open("for (uint n_ = 0; n_ < width_; ++n_)", .{});
        try w.declareAll("{s} {s} = {s}_carry[n_];");
        try w.columnElement("n_");
        try w.addAll("{s}_carry[n_] = {s};");
        try body.close();
        try body.close();
    }

    fn columnElement(w: *Writer, comptime place: []const u8) Error!void {
        const lifted = try w.load("row[" ++ place ++ "]");
        for (w.m.states, lifted, 0..) |s, value, i| {
            try w.body.add("const {s} {s}_next = {s};", .{ w.typeOf(i), s.name, value });
        }
        if (w.p.exclusive) try w.storeColumn(place);
        try w.merge(try w.spell(""), try w.spell("_next"));
        if (!w.p.exclusive) try w.storeColumn(place);
    }

    fn storeColumn(w: *Writer, place: []const u8) Error!void {
        for (w.p.outputs) |y| {
            try w.body.add("{s}_out_row[{s}] = {s}_t({s});", .{ y.name, place, y.name, y.expr });
        }
    }
};
