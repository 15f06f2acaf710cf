//! What patterns are made of: names, kinds and expressions. See `zmlx/codegen/parts.py`, whose
//! fields these are.

/// An input. `kind` says which element of the array belongs to element j of row r.
pub const Operand = struct {
    name: []const u8,
    kind: Kind = .row,
    type: []const u8 = "float",
    array: []const u8 = "",
    part: u32 = 0,
    parts: u32 = 1,
    index: []const u8 = "",

    pub const Kind = enum { full, row, column, per_row, at, scalar, random };

    /// The parameter behind the operand, without its suffix.
    pub fn arrayName(x: Operand) []const u8 {
        return if (x.array.len > 0) x.array else x.name;
    }

    /// Whether its row is not the row of the outputs.
    pub fn isElsewhere(x: Operand) bool {
        return x.kind == .row and x.index.len > 0;
    }
};

/// `type name = expr;`, rounded to the dtype of the output `rounded` if that is named.
pub const Let = struct {
    name: []const u8,
    expr: []const u8,
    type: []const u8 = "float",
    rounded: []const u8 = "",
};

/// `name` = the reduction `op` of `expr` over the elements of a row; "sum_exp" brings its `peak`.
pub const Reduce = struct {
    name: []const u8,
    op: []const u8,
    expr: []const u8,
    type: []const u8 = "float",
    peak: []const u8 = "",
    shift: bool = false,
};

/// `name` starts at `start` and becomes `step` for as long as that is larger.
pub const Climb = struct {
    name: []const u8,
    start: []const u8,
    step: []const u8,
};

/// One sweep over a row: its reductions, then lets of the whole row.
pub const Pass = struct {
    reductions: []const Reduce,
    then: []const Let = &.{},
    climb: ?Climb = null,
};

/// Reports that `argument` holds the bad integer `value` in a row where `condition` is true.
pub const Check = struct {
    condition: []const u8,
    argument: []const u8,
    value: []const u8,
};

/// An output: an element each, a value a row, or a sum over a chunk of rows.
pub const Output = struct {
    name: []const u8,
    expr: []const u8,
    kind: Kind = .row,
    array: []const u8 = "",
    part: u32 = 0,
    parts: u32 = 1,

    pub const Kind = enum { full, row, per_row, column };

    /// The parameter behind the output, without its suffix.
    pub fn arrayName(y: Output) []const u8 {
        return if (y.array.len > 0) y.array else y.name;
    }
};
