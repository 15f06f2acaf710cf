//! Expressions of Metal in float64: what the demo checks a kernel by.

const std = @import("std");
const Allocator = std.mem.Allocator;

pub const Error = error{Syntax} || Allocator.Error;

const Unary = enum {
    negate,
    abs,
    fabs,
    ceil,
    cos,
    cosh,
    exp,
    exp2,
    floor,
    log,
    log1p,
    log2,
    rsqrt,
    sin,
    sinh,
    sqrt,
    tan,
    tanh,
    zmlx_cube,
    zmlx_erf,
    zmlx_expm1,
    zmlx_gelu,
    zmlx_gelu_tanh,
    zmlx_log_sigmoid,
    zmlx_mish,
    zmlx_ndtr,
    zmlx_sigmoid,
    zmlx_silu,
    zmlx_softplus,
    zmlx_square,

    fn of(op: Unary, x: f64) f64 {
        return switch (op) {
            .negate => -x,
            .abs, .fabs => @abs(x),
            .ceil => @ceil(x),
            .cos => @cos(x),
            .cosh => std.math.cosh(x),
            .zmlx_erf => erf(x),
            .exp => @exp(x),
            .exp2 => @exp2(x),
            .floor => @floor(x),
            .log => @log(x),
            .log1p => std.math.log1p(x),
            .log2 => @log2(x),
            .rsqrt => 1 / @sqrt(x),
            .zmlx_sigmoid => 1 / (1 + @exp(-x)),
            .sin => @sin(x),
            .sinh => std.math.sinh(x),
            .sqrt => @sqrt(x),
            .tan => @tan(x),
            .tanh => std.math.tanh(x),
            .zmlx_cube => x * x * x,
            .zmlx_expm1 => std.math.expm1(x),
            .zmlx_gelu => x * (1 + erf(x * std.math.sqrt1_2)) / 2,
            .zmlx_gelu_tanh => x * (1 + std.math.tanh(
                @sqrt(2.0 / std.math.pi) * (x + 0.044715 * x * x * x),
            )) / 2,
            .zmlx_log_sigmoid => -softplus(-x),
            .zmlx_mish => x * std.math.tanh(softplus(x)),
            .zmlx_ndtr => (1 + erf(x * std.math.sqrt1_2)) / 2,
            .zmlx_silu => x / (1 + @exp(-x)),
            .zmlx_softplus => softplus(x),
            .zmlx_square => x * x,
        };
    }
};

extern fn erf(f64) f64;

fn softplus(x: f64) f64 {
    return @max(x, 0) + std.math.log1p(@exp(-@abs(x)));
}

const Binary = enum {
    add,
    subtract,
    multiply,
    divide,
    less,
    less_equal,
    greater,
    greater_equal,
    equal,
    not_equal,
    fmax,
    fmin,
    max,
    min,
    pow,
    zmlx_maximum,
    zmlx_minimum,

    fn of(op: Binary, a: f64, b: f64) f64 {
        return switch (op) {
            .add => a + b,
            .subtract => a - b,
            .multiply => a * b,
            .divide => a / b,
            .less => @floatFromInt(@intFromBool(a < b)),
            .less_equal => @floatFromInt(@intFromBool(a <= b)),
            .greater => @floatFromInt(@intFromBool(a > b)),
            .greater_equal => @floatFromInt(@intFromBool(a >= b)),
            .equal => @floatFromInt(@intFromBool(a == b)),
            .not_equal => @floatFromInt(@intFromBool(a != b)),
            .fmax, .max => @max(a, b),
            .fmin, .min => @min(a, b),
            .pow => std.math.pow(f64, a, b),
            // NaN if either is, where @max and @min give the other.
            .zmlx_maximum => if (std.math.isNan(b)) b else if (a <= b) b else a,
            .zmlx_minimum => if (std.math.isNan(b)) b else if (a >= b) b else a,
        };
    }
};

/// Operations in each other, at most: what a stack holds.
const deepest = 500;

pub const Expression = struct {
    kind: Kind,
    depth: u32,
    /// Whether Metal computes it in integers.
    whole: bool,

    const Kind = union(enum) {
        number: struct { value: f64, whole: bool },
        x,
        unary: struct { op: Unary, a: *const Expression },
        binary: struct { op: Binary, a: *const Expression, b: *const Expression },
        choose: struct { condition: *const Expression, a: *const Expression, b: *const Expression },
    };

    pub fn at(e: Expression, x: f64) f64 {
        return switch (e.kind) {
            .number => |n| n.value,
            .x => x,
            .unary => |u| u.op.of(u.a.at(x)),
            .binary => |b| b.op.of(b.a.at(x), b.b.at(x)),
            .choose => |c| if (c.condition.at(x) != 0) c.a.at(x) else c.b.at(x),
        };
    }
};

/// A parser; after an error `reason` says what is wrong. Nodes belong to `arena`.
pub const Parser = struct {
    arena: Allocator,
    text: []const u8,
    position: usize = 0,
    /// Parentheses, signs and arms that are open.
    open: u32 = 0,
    reason: []const u8 = "",

    pub fn parse(p: *Parser) Error!*const Expression {
        const e = try p.choice();
        if (p.peek() != 0) return p.fail("an operator");
        return e;
    }

    fn fail(p: *Parser, expected: []const u8) Error {
        p.reason = try std.fmt.allocPrint(
            p.arena,
            "'expression' must have {s} at position {d} but got '{s}'",
            .{ expected, p.position, p.text[p.position..] },
        );
        return error.Syntax;
    }

    fn tooDeep(p: *Parser) Error {
        p.reason = try std.fmt.allocPrint(
            p.arena,
            "'expression' must be at most {d} operations in each other but is nested too deeply " ++
                "at position {d}",
            .{ deepest, p.position },
        );
        return error.Syntax;
    }

    fn make(p: *Parser, kind: Expression.Kind) Error!*const Expression {
        const depth = switch (kind) {
            .number, .x => 0,
            .unary => |u| 1 + u.a.depth,
            .binary => |b| 1 + @max(b.a.depth, b.b.depth),
            .choose => |c| 1 + @max(c.condition.depth, c.a.depth, c.b.depth),
        };
        if (depth > deepest) return p.tooDeep();
        const whole = switch (kind) {
            .number => |n| n.whole,
            .x => false,
            .unary => |u| u.a.whole and (u.op == .negate or u.op == .abs),
            .binary => |b| switch (b.op) {
                .less, .less_equal, .greater, .greater_equal, .equal, .not_equal => true,
                .fmax, .fmin, .pow, .zmlx_maximum, .zmlx_minimum => false,
                .add, .subtract, .multiply, .max, .min, .divide => b.a.whole and b.b.whole,
            },
            .choose => |c| c.a.whole and c.b.whole,
        };
        if (whole and kind == .binary and kind.binary.op == .divide) {
            p.reason = try std.fmt.allocPrint(
                p.arena,
                "'expression' must have a floating operand of '/' before position {d} but both " ++
                    "are integers, which Metal divides with truncation",
                .{p.position},
            );
            return error.Syntax;
        }
        if (kind == .binary and (kind.binary.op == .max or kind.binary.op == .min) and
            kind.binary.a.whole != kind.binary.b.whole)
        {
            p.reason = try std.fmt.allocPrint(
                p.arena,
                "'expression' must have operands of '{t}' before position {d} that are both " ++
                    "floating or both integers but got one of each, which Metal refuses",
                .{ kind.binary.op, p.position },
            );
            return error.Syntax;
        }
        const node = try p.arena.create(Expression);
        node.* = .{ .kind = kind, .depth = depth, .whole = whole };
        return node;
    }

    /// The next character that is not a space, or 0.
    fn peek(p: *Parser) u8 {
        while (p.position < p.text.len) : (p.position += 1) {
            if (!std.ascii.isWhitespace(p.text[p.position])) return p.text[p.position];
        }
        return 0;
    }

    fn take(p: *Parser, token: []const u8) bool {
        _ = p.peek();
        if (!std.mem.startsWith(u8, p.text[p.position..], token)) return false;
        p.position += token.len;
        return true;
    }

    fn expect(p: *Parser, token: []const u8) Error!void {
        if (!p.take(token)) return p.fail(token);
    }

    fn choice(p: *Parser) Error!*const Expression {
        p.open += 1;
        defer p.open -= 1;
        if (p.open > deepest) return p.tooDeep();
        const condition = try p.comparison();
        if (!p.take("?")) return condition;
        const a = try p.choice();
        try p.expect(":");
        return p.make(.{ .choose = .{ .condition = condition, .a = a, .b = try p.choice() } });
    }

    fn comparison(p: *Parser) Error!*const Expression {
        const a = try p.sum();
        const tokens = [_][]const u8{ "<=", ">=", "==", "!=", "<", ">" };
        const kinds = [_]Binary{
            .less_equal, .greater_equal, .equal, .not_equal, .less, .greater,
        };
        for (tokens, kinds) |token, op| if (p.take(token)) {
            return p.make(.{ .binary = .{ .op = op, .a = a, .b = try p.sum() } });
        };
        return a;
    }

    fn sum(p: *Parser) Error!*const Expression {
        var a = try p.term();
        while (true) {
            const op: Binary = if (p.take("+")) .add else if (p.take("-")) .subtract else return a;
            a = try p.make(.{ .binary = .{ .op = op, .a = a, .b = try p.term() } });
        }
    }

    fn term(p: *Parser) Error!*const Expression {
        var a = try p.factor();
        while (true) {
            const op: Binary =
                if (p.take("*")) .multiply else if (p.take("/")) .divide else return a;
            a = try p.make(.{ .binary = .{ .op = op, .a = a, .b = try p.factor() } });
        }
    }

    fn factor(p: *Parser) Error!*const Expression {
        if (p.take("-")) {
            p.open += 1;
            defer p.open -= 1;
            if (p.open > deepest) return p.tooDeep();
            return p.make(.{ .unary = .{ .op = .negate, .a = try p.factor() } });
        }
        if (p.take("(")) {
            const e = try p.choice();
            try p.expect(")");
            return e;
        }
        const c = p.peek();
        if (std.ascii.isDigit(c) or c == '.') return p.number();
        if (std.ascii.isAlphabetic(c) or c == '_') return p.name();
        return p.fail("a number, x, a function or (");
    }

    fn number(p: *Parser) Error!*const Expression {
        const start = p.position;
        while (p.position < p.text.len) : (p.position += 1) {
            const c = p.text[p.position];
            // The first character is a digit or a dot.
            const sign = (c == '+' or c == '-') and p.text[p.position - 1] == 'e';
            if (!std.ascii.isDigit(c) and c != '.' and c != 'e' and !sign) break;
        }
        const digits = p.text[start..p.position];
        const whole = std.mem.findAny(u8, digits, ".e") == null;
        const float = p.position < p.text.len and p.text[p.position] == 'f';
        const exact = std.fmt.parseFloat(f64, digits) catch null;
        // To Metal 010 is 8, and 1f is nothing.
        if (exact == null or (whole and (float or digits.len > 1 and digits[0] == '0'))) {
            p.position = start;
            return p.fail("a number");
        }
        if (float) p.position += 1;
        const value = if (float) @as(f32, @floatCast(exact.?)) else exact.?;
        return p.make(.{ .number = .{ .value = value, .whole = whole } });
    }

    fn name(p: *Parser) Error!*const Expression {
        const start = p.position;
        while (p.position < p.text.len and
            (std.ascii.isAlphanumeric(p.text[p.position]) or p.text[p.position] == '_'))
        {
            p.position += 1;
        }
        const word = p.text[start..p.position];
        if (std.mem.eql(u8, word, "x")) return p.make(.x);
        const negate = std.mem.eql(u8, word, "negate");
        if (!negate) if (std.meta.stringToEnum(Unary, word)) |op| {
            try p.expect("(");
            const a = try p.choice();
            try p.expect(")");
            return p.make(.{ .unary = .{ .op = op, .a = a } });
        };
        const functions = [_]Binary{ .fmax, .fmin, .max, .min, .pow, .zmlx_maximum, .zmlx_minimum };
        for (functions) |op| if (std.mem.eql(u8, word, @tagName(op))) {
            try p.expect("(");
            const a = try p.choice();
            try p.expect(",");
            const b = try p.choice();
            try p.expect(")");
            return p.make(.{ .binary = .{ .op = op, .a = a, .b = b } });
        };
        p.position = start;
        return p.fail("x or a function that the demo knows");
    }
};

test "expressions have C's precedence" {
    var arena: std.heap.ArenaAllocator = .init(std.testing.allocator);
    defer arena.deinit();
    const cases = .{
        .{ "1 + 2 * x", 7.0 },
        .{ "-(x - 1) / 2", -1.0 },
        .{ "x > 2 ? max(x, 4.0f) : 1e-3", 4.0 },
        .{ "x < 2.5e0f ? 1 : pow(x, 2)", 9.0 },
        .{ "zmlx_square(x) - zmlx_cube(x)", -18.0 },
    };
    inline for (cases) |case| {
        var parser: Parser = .{ .arena = arena.allocator(), .text = case[0] };
        try std.testing.expectApproxEqAbs(case[1], (try parser.parse()).at(3), 1e-12);
    }
    for ([_][]const u8{
        "", "1 +", "y", "exp x", "(x", "1 2", "max(x)", "erf(x)", "1f", "010",
    }) |text| {
        var parser: Parser = .{ .arena = arena.allocator(), .text = text };
        try std.testing.expectError(error.Syntax, parser.parse());
        try std.testing.expect(parser.reason.len > 0);
    }
}

test "the larger and the smaller of NaN and a number are NaN" {
    var arena: std.heap.ArenaAllocator = .init(std.testing.allocator);
    defer arena.deinit();
    for ([_][]const u8{
        "zmlx_maximum(sqrt(x), 0.5f)", "zmlx_maximum(0.5f, sqrt(x))",
        "zmlx_minimum(sqrt(x), 0.5f)", "zmlx_minimum(0.5f, sqrt(x))",
    }, [_]f64{ 3, 3, 0.5, 0.5 }) |text, want| {
        var parser: Parser = .{ .arena = arena.allocator(), .text = text };
        const e = try parser.parse();
        try std.testing.expectEqual(want, e.at(9));
        try std.testing.expect(std.math.isNan(e.at(-9)));
    }
}

test "a quotient of integers is refused, and a floating one is not" {
    var arena: std.heap.ArenaAllocator = .init(std.testing.allocator);
    defer arena.deinit();
    for ([_][]const u8{
        "x * (1/2)", "x * (-(1 + 3) / abs(2))", "(x > 0) / 2", "x + 3/2*x",
    }) |text| {
        var parser: Parser = .{ .arena = arena.allocator(), .text = text };
        try std.testing.expectError(error.Syntax, parser.parse());
        try std.testing.expect(std.mem.find(u8, parser.reason, "truncation") != null);
    }
    for ([_][]const u8{ "1/x", "x * (1.0f/2)", "1/2.0", "1e0/2", "zmlx_cube(1)/2" }) |text| {
        var parser: Parser = .{ .arena = arena.allocator(), .text = text };
        _ = try parser.parse();
    }
}

test "the larger of an integer and a floating number is refused" {
    var arena: std.heap.ArenaAllocator = .init(std.testing.allocator);
    defer arena.deinit();
    for ([_][]const u8{ "max(x, 4)", "min(-1, x)" }) |text| {
        var parser: Parser = .{ .arena = arena.allocator(), .text = text };
        try std.testing.expectError(error.Syntax, parser.parse());
        try std.testing.expect(std.mem.find(u8, parser.reason, "one of each") != null);
    }
    for ([_][]const u8{ "max(x, 4.0f)", "x * max(1, 4)", "zmlx_maximum(x, 4)" }) |text| {
        var parser: Parser = .{ .arena = arena.allocator(), .text = text };
        _ = try parser.parse();
    }
}

test "an expression that is nested too deeply is refused, a deep one is not" {
    var arena: std.heap.ArenaAllocator = .init(std.testing.allocator);
    defer arena.deinit();
    const many = 100_000;
    for ([_][]const u8{
        "(" ** many,
        "-" ** many,
        "abs(" ** many,
        "x?" ** many,
        "x" ++ "+x" ** many,
    }) |text| {
        var parser: Parser = .{ .arena = arena.allocator(), .text = text };
        try std.testing.expectError(error.Syntax, parser.parse());
        try std.testing.expect(std.mem.find(u8, parser.reason, "nested too deeply") != null);
    }
    for ([_][]const u8{
        "(" ** 400 ++ "x" ++ ")" ** 400,
        "-" ** 400 ++ "x",
        "x" ++ "+x" ** 400,
    }) |text| {
        var parser: Parser = .{ .arena = arena.allocator(), .text = text };
        _ = (try parser.parse()).at(3);
    }
}
