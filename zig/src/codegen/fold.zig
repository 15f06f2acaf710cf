//! Reductions of one axis to a state: sums, extremes, their positions, moments.

const std = @import("std");
const monoids = @import("monoids.zig");
const parts = @import("parts.zig");
const tables = @import("../tables.zig").tables;
const text = @import("text.zig");
const Allocator = std.mem.Allocator;
const Body = text.Body;
const Error = text.Error;
const Monoid = monoids.Monoid;
const Names = text.Names;

/// out = expr(state), where the state is that of the elements along one axis. See `fold.py`.
pub const Fold = struct {
    op: []const u8,
    outputs: []const parts.Output,
    type: []const u8 = "float",
    columns: bool = false,
    merges: bool = false,
    cut: bool = false,
    for_scan: bool = false,
    short: bool = false,
    scalars: []const parts.Operand = &.{},

    pub fn operands(p: Fold, arena: Allocator) Error![]const parts.Operand {
        return std.mem.concat(arena, parts.Operand, &.{ try p.elements(arena), p.scalars });
    }

    fn elements(p: Fold, arena: Allocator) Error![]const parts.Operand {
        if (!p.merges) return arena.dupe(parts.Operand, &.{.{ .name = "x", .type = p.type }});
        const m = p.monoid();
        const list = try arena.alloc(parts.Operand, m.states.len);
        for (list, m.states) |*x, state| {
            x.* = .{ .name = state.name, .type = monoids.typeOf(state, p.type) };
        }
        return list;
    }

    pub fn addNames(_: Fold, _: *Names, _: Allocator) Error!void {}

    /// What must hold before the operands can be known.
    pub fn earlyProblem(p: Fold, arena: Allocator) Error!?[]const u8 {
        if (try monoids.problem(arena, p.op, p.type)) |message| return message;
        if (p.short and (p.columns or p.merges or p.cut)) {
            return "[codegen] 'short' must be False with columns, merges or cut but got True.";
        }
        for (p.scalars) |x| if (x.kind != .scalar) return try std.fmt.allocPrint(
            arena,
            "[codegen] 'scalars' must be of kind scalar but got {t}.",
            .{x.kind},
        );
        return null;
    }

    pub fn problem(_: Fold, _: Allocator) Error!?[]const u8 {
        return null;
    }

    pub fn constants(p: Fold) []const []const u8 {
        return axisConstants(p.columns);
    }

    pub fn header(p: Fold, _: Allocator) Error![]const u8 {
        if (p.short) return "";
        if (!p.merges) return tables.step_header ++ tables.prefetch_header;
        return if (p.columns) "" else tables.step_header;
    }

    pub fn monoid(p: Fold) Monoid {
        return monoids.find(p.op).?;
    }

    pub fn source(p: Fold, arena: Allocator) Error![]const u8 {
        var writer: Writer = .{
            .p = p,
            .m = p.monoid(),
            .body = .init(arena),
            .elements = try p.elements(arena),
        };
        if (p.columns)
            try writer.columns()
        else if (p.short)
            try writer.shortRows()
        else
            try writer.rows();
        return writer.body.text();
    }
};

pub fn axisConstants(columns: bool) []const []const u8 {
    return if (columns)
        &.{ "batches", "rows", "D", "parts", "chunk" }
    else
        &.{ "rows", "D", "parts", "chunk" };
}

/// Rows that are folded at a time along columns.
const together = 8;
/// Of which the next are asked for at a time.
const columns_ahead = 64;

const Writer = struct {
    p: Fold,
    m: Monoid,
    body: Body,
    elements: []const parts.Operand,

    fn typeOf(w: *Writer, i: usize) []const u8 {
        return monoids.typeOf(w.m.states[i], w.p.type);
    }

    fn spell(w: *Writer, before: []const u8, after: []const u8) Error!monoids.Spelled {
        return monoids.spell(&w.body, w.m, before, after);
    }

    /// The state of an accumulator.
    fn own(w: *Writer, index: []const u8, suffix: []const u8) Error!monoids.Spelled {
        return w.spell("", try w.body.fmt("{s}[{s}]", .{ suffix, index }));
    }

    fn merge(w: *Writer, a: monoids.Spelled, b: monoids.Spelled, quick: bool) Error!void {
        return monoids.addMerge(&w.body, w.m, a, b, quick);
    }

    fn shifted(w: *Writer) bool {
        return w.m.shifted and !w.p.merges;
    }

    // ---- rows -----------------------------------------------------------------------------------

    fn rows(w: *Writer) Error!void {
        const body = &w.body;
        for (w.m.states, 0..) |state, i| {
            try body.add(
                "threadgroup {s} {s}_scratch[TPR % 32 == 0 ? TPR / 32 : TPR];",
                .{ w.typeOf(i), state.name },
            );
        }
        try body.add("const uint lane_ = thread_position_in_threadgroup.x % TPR;", .{});
        try body.add("const uint group_ = threadgroup_position_in_grid.x" ++
            " + threadgroup_position_in_grid.y * threadgroups_per_grid.x;", .{});
        try body.add("const uint items_ = rows * parts;", .{});
        try body.open("if (group_ * RPG >= items_)", .{});
        try body.add("return;", .{});
        try body.close();
        // A surplus item of the last group repeats the last one and stores nothing, so that every
        // thread reaches every simd operation.
        try body.add(
            "const uint slot_ = group_ * RPG + thread_position_in_threadgroup.x / TPR;",
            .{},
        );
        try body.add("const bool live_ = RPG == 1 || slot_ < items_;", .{});
        try body.add("const uint item_ = live_ ? slot_ : items_ - 1;", .{});
        try body.add("const uint first_ = item_ % parts * chunk;", .{});
        try body.add("const uint stop_ = chunk < D - first_ ? first_ + chunk : D;", .{});
        try body.add("const uint whole_ = first_ + (stop_ - first_) / U * U;", .{});
        for (w.elements) |x| {
            try body.add(
                "auto {s}_in_row = {s}_in + size_t(item_ / parts) * D;",
                .{ x.name, x.name },
            );
        }
        if (w.shifted()) {
            const value = try w.last("D", "x_in_row[D - 1]");
            try body.add("const {s} shift_ = {s};", .{ w.p.type, value });
        }
        try w.walk("U", "u_", "TPR * U", "first_ + lane_ * U", "whole_", rowStep);
        const tail = "for (uint k_ = 0; whole_ < stop_ && k_ < (U + TPR - 1) / TPR; ++k_)";
        try body.open(tail, .{});
        try body.add("const uint j = whole_ + k_ * TPR + lane_;", .{});
        try body.open("if (j < stop_)", .{});
        const other = try w.load("row[j]", "j");
        try w.merge(try w.own("k_", "_part"), other, false);
        try body.close();
        try body.close();
        try w.foldRow();
        try body.open("if (lane_ == 0 && live_)", .{});
        try w.store("[item_]");
        try body.close();
    }

    fn rowStep(w: *Writer, suffix: []const u8) Error!void {
        const body = &w.body;
        if (!w.p.merges) try prefetch(body);
        // From a pointer, since a sum of indices that may wrap keeps the loop from vectorising.
        for (w.elements) |x| {
            try text.addReadStep(body, x, "U", try body.fmt("{s}_in_row + i_", .{x.name}));
        }
        try body.openStep();
        try body.add("const uint j = i_ + u_;", .{});
        const other = try w.load("step[u_]", "j");
        try w.merge(try w.own("u_", suffix), other, !w.p.merges);
        try body.close();
    }

    /// Asks for what one thread reads a page of 4096 bytes later: a processor's own fetching ahead
    /// ends with a page.
    fn prefetch(body: *Body) Error!void {
        const turn = "const uint turn_ = (i_ - first_) / U % ((places_ * page_ - 1) / U + 1);";
        const ahead = "const uint ahead_ = (places_ + turn_ % places_) * page_" ++
            " + turn_ / places_ * U - turn_ * U;";
        try body.add("const uint page_ = 4096 / sizeof(*x_in);", .{});
        try body.add("const uint places_ = ZMLX_PLACES_AHEAD;", .{});
        try body.add(turn, .{});
        try body.add(ahead, .{});
        const count = "for (uint p_ = 0; TPR == 1 && p_ < U; p_ += 64 / sizeof(*x_in))";
        try body.open(count, .{});
        try body.add("ZMLX_PREFETCH_WALK_FAR(x_in_row + i_ + ahead_ + p_);", .{});
        try body.close();
    }

    /// The accumulators of a thread, then the threads of a row.
    fn foldRow(w: *Writer) Error!void {
        const body = &w.body;
        const states = w.m.states;
        try body.open("for (uint w_ = U / 2; w_ > 0; w_ /= 2)", .{});
        try body.openStepOf("w_");
        try w.merge(try w.own("u_", "_part"), try w.own("u_ + w_", "_part"), false);
        try body.close();
        try body.close();
        for (states, 0..) |s, i| {
            try body.add("{s} {s} = {s}_part[0];", .{ w.typeOf(i), s.name, s.name });
        }
        const state = try w.spell("", "");
        const other = try w.spell("", "_next");
        try body.add(
            "const uint width_ = TPR % 32 == 0 ? 32 : (TPR & (TPR - 1)) == 0 ? TPR : 1;",
            .{},
        );
        try body.open("for (ushort step_ = ushort(width_ / 2); step_ > 0; step_ /= 2)", .{});
        for (states, 0..) |s, i| {
            const next = try across(body, s.name, w.typeOf(i));
            try body.add("const {s} {s}_next = {s};", .{ w.typeOf(i), s.name, next });
        }
        try w.merge(state, other, false);
        try body.close();
        try body.open("if (TPR > width_)", .{});
        try body.open("if (lane_ % width_ == 0)", .{});
        for (states) |s| try body.add("{s}_scratch[lane_ / width_] = {s};", .{ s.name, s.name });
        try body.close();
        try body.add("threadgroup_barrier(mem_flags::mem_threadgroup);", .{});
        for (states) |s| try body.add("{s} = {s}_scratch[0];", .{ s.name, s.name });
        try body.open("for (uint s_ = 1; s_ < TPR / width_; ++s_)", .{});
        for (states, 0..) |s, i| {
            try body.add("const {s} {s}_next = {s}_scratch[s_];", .{ w.typeOf(i), s.name, s.name });
        }
        try w.merge(state, other, false);
        try body.close();
        try body.close();
    }

    /// The variable of the lane `step_` away; of 64 bits Metal and MLX have no `simd_shuffle_xor`.
    fn across(body: *Body, name: []const u8, type_: []const u8) Error![]const u8 {
        if (std.mem.eql(u8, type_, "int64_t") or std.mem.eql(u8, type_, "uint64_t")) {
            return body.fmt("simd_shuffle({s}, ushort(thread_index_in_simdgroup ^ step_))", .{name});
        }
        return body.fmt("simd_shuffle_xor({s}, step_)", .{name});
    }

    // ---- short rows -----------------------------------------------------------------------------

    fn shortRows(w: *Writer) Error!void {
        const body = &w.body;
        try body.add("const uint group_ = threadgroup_position_in_grid.x" ++
            " + threadgroup_position_in_grid.y * threadgroups_per_grid.x;", .{});
        try body.add(
            "const uint item_ = (group_ * G + thread_position_in_threadgroup.x) * N;",
            .{},
        );
        try body.open("if (item_ >= rows)", .{});
        try body.add("return;", .{});
        try body.close();
        try body.add("const uint first_ = 0, width_ = min(uint(N), rows - item_);", .{});
        // From a pointer and a constant, so that loops over the rows are vectorised.
        try body.add("auto x_in_first = x_in + size_t(item_) * D;", .{});
        try body.add("const size_t apart_ = D;", .{});
        if (w.m.shifted) {
            try body.add("{s} shift_[N];", .{w.p.type});
            try body.open("for (uint n_ = 0; n_ < width_; ++n_)", .{});
            const value = try w.last("D", "x_in_first[n_ * apart_ + (apart_ - 1)]");
            try body.add("shift_[n_] = {s};", .{value});
            try body.close();
        }
        try w.start("N", "n_", "_part");
        if (w.m.step.len > 0) try body.add("uint steps_ = 0;", .{});
        try body.open("for (uint i_ = 0; i_ < D; ++i_)", .{});
        if (w.m.step.len > 0) try body.add("{s}", .{w.m.step});
        try body.add("auto x_in_at = x_in_first + i_;", .{});
        try body.open("if (width_ == N)", .{});
        for ([_][]const u8{ "n_ < N", "n_ < width_" }, 0..) |loop, i| {
            if (i > 0) try body.closeElse();
            try body.open("for (uint n_ = 0; {s}; ++n_)", .{loop});
            const other = try w.load("at[n_ * apart_]", "i_");
            try w.merge(try w.own("n_", "_part"), other, true);
            try body.close();
        }
        try body.close();
        try body.close();
        try w.finish("n_");
        for (w.p.outputs) |y| {
            try body.add("auto {s}_out_first = {s}_out + item_;", .{ y.name, y.name });
        }
        try w.storeAll();
    }

    // ---- columns --------------------------------------------------------------------------------

    fn columns(w: *Writer) Error!void {
        const body = &w.body;
        try addColumnPlace(body);
        try body.add("const uint first_ = item_ % parts * chunk;", .{});
        try body.add("const uint stop_ = chunk < rows - first_ ? first_ + chunk : rows;", .{});
        try body.add("const uint width_ = min(uint(N), D - column_);", .{});
        for (w.elements) |x| {
            try body.add(
                "auto {s}_in_first = {s}_in + size_t(item_ / parts) * rows * D + column_;",
                .{ x.name, x.name },
            );
        }
        if (w.shifted()) {
            try body.add("{s} shift_[N];", .{w.p.type});
            try body.open("for (uint n_ = 0; n_ < width_; ++n_)", .{});
            const value = try w.last("rows", "x_in_first[size_t(rows - 1) * D + n_]");
            try body.add("shift_[n_] = {s};", .{value});
            try body.close();
        }
        try w.walk("N", "n_", "1", "first_", "stop_", columnStep);
        // From a pointer, as a loop that reads D again after every store is not vectorised.
        for (w.p.outputs) |y| {
            try body.add(
                "auto {s}_out_first = {s}_out + size_t(item_) * D + column_;",
                .{ y.name, y.name },
            );
        }
        try w.storeAll();
    }

    fn columnStep(w: *Writer, suffix: []const u8) Error!void {
        const body = &w.body;
        for (w.elements) |x| {
            try body.add("auto {s}_in_row = {s}_in_first + size_t(i_) * D;", .{ x.name, x.name });
        }
        try body.open("if (width_ == N)", .{});
        for ([_][]const u8{ "n_ < N", "n_ < width_" }, 0..) |loop, i| {
            if (i > 0) try body.closeElse();
            try body.open("for (uint n_ = 0; {s}; ++n_)", .{loop});
            const other = try w.load("row[n_]", "i_");
            try w.merge(try w.own("n_", suffix), other, !w.p.merges);
            try body.close();
        }
        try body.close();
    }

    /// Some rows at a time, whose states are loaded and stored once; those after them are asked for
    /// meanwhile.
    fn columnsTogether(w: *Writer, stop: []const u8, suffix: []const u8) Error!void {
        const body = &w.body;
        try body.open("for (; width_ == N && {s} - i_ >= {d}; i_ += {d})", .{ stop, together, together });
        try body.add("auto x_in_rows = x_in_first + size_t(i_) * D;", .{});
        try body.add("const size_t apart_ = D;", .{});
        try body.add("const uint some_ = N % {d} == 0 ? {d} : N;", .{ columns_ahead, columns_ahead });
        try body.open("for (uint m_ = 0; m_ < N; m_ += some_)", .{});
        try body.open("for (uint q_ = 0; q_ < {d}; ++q_)", .{together});
        try body.open("for (uint p_ = 0; p_ < some_; p_ += 64 / sizeof(*x_in))", .{});
        const ahead = "ZMLX_PREFETCH_FAR(x_in_rows + (q_ + {d}) * apart_ + m_ + p_);";
        try body.add(ahead, .{together});
        try body.close();
        try body.close();
        try body.open("for (uint n_ = m_; n_ < m_ + some_; ++n_)", .{});
        for (w.m.states, 0..) |s, i| {
            try body.add("{s} {s} = {s}{s}[n_];", .{ w.typeOf(i), s.name, s.name, suffix });
        }
        try body.openFewRows(together);
        if (w.m.step.len > 0) {
            const step = try std.mem.replaceOwned(u8, body.arena, w.m.step, "++steps_", "steps_ + r_ + 1");
            try body.add("{s}", .{step});
        }
        const other = try w.load("rows[r_ * apart_ + n_]", "(i_ + r_)");
        try w.merge(try w.spell("", ""), other, true);
        try body.close();
        for (w.m.states) |s| try body.add("{s}{s}[n_] = {s};", .{ s.name, suffix, s.name });
        try body.close();
        try body.close();
        if (w.m.step.len > 0) try body.add("steps_ += {d};", .{together});
        try body.close();
    }

    // ---- all ------------------------------------------------------------------------------------

    /// Whether a thread folds N columns or rows side by side.
    fn isWide(w: *Writer) bool {
        return w.p.columns or w.p.short;
    }

    /// Stores the states of all of them.
    fn storeAll(w: *Writer) Error!void {
        const body = &w.body;
        try body.open("for (uint n_ = 0; n_ < width_; ++n_)", .{});
        for (w.m.states, 0..) |s, i| {
            try body.add("const {s} {s} = {s}_part[n_];", .{ w.typeOf(i), s.name, s.name });
        }
        try w.store("_first[n_]");
        try body.close();
    }

    /// The last of `count` elements, or 0 where there are none.
    fn last(w: *Writer, count: []const u8, element: []const u8) Error![]const u8 {
        return w.body.fmt("{s} > 0 ? {s}({s}) : {s}(0)", .{ count, w.p.type, element, w.p.type });
    }

    /// Declares the element at `place`, and gives its state.
    fn load(w: *Writer, place: []const u8, index: []const u8) Error!monoids.Spelled {
        const body = &w.body;
        if (w.p.merges) {
            for (w.elements) |x| {
                try body.add(
                    "const {s} {s}_next = {s}({s}_in_{s});",
                    .{ x.type, x.name, x.type, x.name, place },
                );
            }
            return w.spell("", "_next");
        }
        const shift = if (!w.m.shifted) "" else if (w.isWide()) " - shift_[n_]" else " - shift_";
        try body.add("const {s} v_ = {s}(x_in_{s}){s};", .{ w.p.type, w.p.type, place, shift });
        const result = try body.arena.alloc([]const u8, w.m.lift.len);
        for (result, w.m.lift) |*to, lift| {
            to.* = try std.mem.replaceOwned(u8, body.arena, lift, "j", index);
        }
        return result;
    }

    /// The loop over the accumulators.
    fn openLoop(w: *Writer) Error!void {
        if (!w.isWide()) return w.body.openStep();
        try w.body.open("for (uint n_ = 0; n_ < width_; ++n_)", .{});
    }

    /// Declares accumulators.
    fn start(w: *Writer, count: []const u8, index: []const u8, suffix: []const u8) Error!void {
        const body = &w.body;
        for (w.m.states, 0..) |s, i| {
            try body.add("{s} {s}{s}[{s}];", .{ w.typeOf(i), s.name, suffix, count });
        }
        try w.openLoop();
        const state = try w.own(index, suffix);
        // Merging takes the lower of equal positions, so that no position is the highest.
        const front = if (w.p.merges) monoids.range("uint").?.highest else "first_";
        for (state, 0..) |name, i| {
            const value = try monoids.started(body, w.m, i, w.p.type, front);
            try body.add("{s} = {s};", .{ name, value });
        }
        try body.close();
    }

    /// All whole steps from `from` to `to`.
    fn walk(
        w: *Writer,
        count: []const u8,
        index: []const u8,
        step: []const u8,
        from: []const u8,
        to: []const u8,
        comptime take: fn (*Writer, []const u8) Error!void,
    ) Error!void {
        const body = &w.body;
        const counts = w.m.step.len > 0 and !w.p.merges;
        const plain = w.p.merges or !w.m.blocked;
        var first = from;
        var stop = to;
        try w.start(count, index, "_part");
        if (!plain) {
            try body.open(
                "for (uint b_ = {s}; b_ < {s}; b_ += {d} * {s})",
                .{ first, stop, tables.fold_block, step },
            );
            try w.start(count, index, "_block");
            try body.add(
                "const uint end_ = min({s}, b_ + {d} * {s});",
                .{ stop, tables.fold_block, step },
            );
            first = "b_";
            stop = "end_";
        }
        if (counts) try body.add("uint steps_ = 0;", .{});
        if (w.p.columns and !w.p.merges) {
            try body.add("uint i_ = {s};", .{first});
            try w.columnsTogether(stop, if (plain) "_part" else "_block");
            try body.open("for (; i_ < {s}; i_ += {s})", .{ stop, step });
        } else {
            try body.open("for (uint i_ = {s}; i_ < {s}; i_ += {s})", .{ first, stop, step });
        }
        if (counts) try body.add("{s}", .{w.m.step});
        try take(w, if (plain) "_part" else "_block");
        try body.close();
        if (!plain) {
            try w.openLoop();
            try w.merge(try w.own(index, "_part"), try w.own(index, "_block"), false);
            try body.close();
            try body.close();
        }
        if (!w.p.merges) try w.finish(index);
    }

    /// What follows the last step, for each accumulator.
    fn finish(w: *Writer, index: []const u8) Error!void {
        if (w.m.after.len == 0) return;
        try w.openLoop();
        const state = try w.own(index, "_part");
        for (w.m.after) |line| {
            try w.body.add("{s}", .{try monoids.fill(&w.body, w.m, line, state, &.{})});
        }
        try w.body.close();
    }

    /// Stores the results at `place`, which follows the name of an output array.
    fn store(w: *Writer, place: []const u8) Error!void {
        for (w.p.scalars) |x| {
            try w.body.add("const {s} {s} = {s}({s}_in);", .{ x.type, x.name, x.type, x.name });
        }
        for (w.p.outputs) |y| {
            try w.body.add("{s}_out{s} = {s}_t({s});", .{ y.name, place, y.name, y.expr });
        }
    }
};

/// Which columns of which part a thread has.
pub fn addColumnPlace(body: *Body) Error!void {
    try body.add("const uint group_ = threadgroup_position_in_grid.x" ++
        " + threadgroup_position_in_grid.y * threadgroups_per_grid.x;", .{});
    try body.add("const uint blocks_ = (D + N * G - 1) / (N * G);", .{});
    try body.add("const uint item_ = group_ / blocks_;", .{});
    try body.add(
        "const uint place_ = group_ % blocks_ * G + thread_position_in_threadgroup.x;",
        .{},
    );
    try body.add("const uint column_ = place_ * N;", .{});
    try body.open("if (item_ >= batches * parts || column_ >= D)", .{});
    try body.add("return;", .{});
    try body.close();
}
