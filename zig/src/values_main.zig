//! `zmlx-values`: runs ops of the catalogue on arrays that come as lines of JSON, for tests that
//! compare the results with Python's, bit for bit.
//!
//!     {"op": "softmax", "arrays": {"x": {"dtype": "float32", "shape": [2], "data": "BASE64"}},
//!      "cotangent": …}
//!     -> {"y": {"dtype": …, …}, "x": the gradient of x}
//!
//! What fails gives {"error": "the text"}.

const std = @import("std");
const zmlx = @import("zmlx");
const Allocator = std.mem.Allocator;
const Array = zmlx.Array;
const ops = zmlx.catalogue;

const Data = struct { dtype: zmlx.Dtype, shape: []const i32, data: []const u8 };
const Arrays = std.json.ArrayHashMap(Data);
const Request = struct {
    op: enum { softmax, rms_norm, layer_norm, swiglu, cross_entropy, rope },
    arrays: Arrays,
    cotangent: ?Data = null,
    eps: f32 = 1e-5,
    ignore_index: ?i32 = null,
    reduction: ops.Reduction = .mean,
    dims: ?i32 = null,
    traditional: bool = false,
    base: ?f64 = null,
    scale: f32 = 1,
    offset: i64 = 0,
    layout: @FieldType(ops.RopeOptions, "layout") = .BHLD,
    geometry: ?zmlx.launch.Kind = null,
};

/// One request: its arrays go with it.
const Call = struct {
    arena: Allocator,
    context: *zmlx.Context,
    request: Request,
    held: std.ArrayList(Array) = .empty,
    answer: Arrays = .{},

    fn array(call: *Call, data: Data) !Array {
        const decoder = std.base64.standard.Decoder;
        const bytes = try call.arena.alloc(u8, try decoder.calcSizeForSlice(data.data));
        try decoder.decode(bytes, data.data);
        const a = try Array.fromBytes(data.dtype, bytes, data.shape);
        try call.held.append(call.arena, a);
        return a;
    }

    fn maybe(call: *Call, name: []const u8) !?Array {
        return try call.array(call.request.arrays.map.get(name) orelse return null);
    }

    fn get(call: *Call, name: []const u8) !Array {
        return (try call.maybe(name)) orelse error.MissingArray;
    }

    /// Takes over `a`.
    fn put(call: *Call, name: []const u8, a: Array) !void {
        try call.held.append(call.arena, a);
        const bytes = try call.arena.alloc(u8, a.size() * a.dtype().size());
        try a.copyBytesTo(bytes);
        const encoder = std.base64.standard.Encoder;
        const text = try call.arena.alloc(u8, encoder.calcSize(bytes.len));
        try call.answer.map.put(call.arena, name, .{
            .dtype = a.dtype(),
            .shape = try call.arena.dupe(i32, a.shape()),
            .data = encoder.encode(text, bytes),
        });
    }

    fn run(call: *Call) !void {
        const context = call.context;
        const request = call.request;
        const cotangent = if (request.cotangent) |data| try call.array(data) else null;
        switch (request.op) {
            .softmax => {
                const y = try ops.softmax(context, try call.get("x"));
                try call.put("y", y);
                if (cotangent) |dy| try call.put("x", try ops.softmaxBackward(context, y, dy));
            },
            .rms_norm => {
                const x, const weight = .{ try call.get("x"), try call.maybe("weight") };
                try call.put("y", try ops.rmsNorm(context, x, weight, request.eps));
                const dy = cotangent orelse return;
                const normed = try ops.rmsNormTraining(context, x, weight, request.eps);
                defer normed.deinit();
                try call.putNorm(try ops.rmsNormBackward(context, x, weight, normed, dy));
            },
            .layer_norm => {
                const x, const weight = .{ try call.get("x"), try call.maybe("weight") };
                const bias = try call.maybe("bias");
                try call.put("y", try ops.layerNorm(context, x, weight, bias, request.eps));
                const dy = cotangent orelse return;
                const normed = try ops.layerNormTraining(context, x, weight, bias, request.eps);
                defer normed.deinit();
                try call.putNorm(try ops.layerNormBackward(context, x, weight, bias, normed, dy));
            },
            .swiglu => {
                const g: ops.Gated = .{
                    .gate = try call.get("gate"),
                    .up = try call.get("up"),
                    .gate_bias = try call.maybe("gate_bias"),
                    .up_bias = try call.maybe("up_bias"),
                };
                try call.put("y", try ops.swiglu(context, g));
                const gradients = try ops.swigluBackward(context, g, cotangent orelse return);
                try call.put("gate", gradients.gate);
                try call.put("up", gradients.up);
                if (gradients.gate_bias) |a| try call.put("gate_bias", a);
                if (gradients.up_bias) |a| try call.put("up_bias", a);
            },
            .cross_entropy => {
                const logits, const targets = .{ try call.get("logits"), try call.get("targets") };
                const options: ops.CrossEntropyOptions = .{
                    .ignore_index = request.ignore_index,
                    .reduction = request.reduction,
                };
                try call.put("y", try ops.crossEntropy(context, logits, targets, options));
                const dloss = cotangent orelse return;
                const loss = try ops.crossEntropyTraining(context, logits, targets, options);
                defer loss.deinit();
                try call.put("logits", try ops.crossEntropyBackward(
                    context,
                    logits,
                    targets,
                    loss,
                    dloss,
                    options,
                ));
            },
            .rope => {
                const options: ops.RopeOptions = .{
                    .dims = request.dims,
                    .traditional = request.traditional,
                    .base = request.base,
                    .scale = request.scale,
                    .offset = request.offset,
                    .freqs = try call.maybe("freqs"),
                    .positions = try call.maybe("positions"),
                    .layout = request.layout,
                };
                try call.put("y", try ops.rope(context, try call.get("x"), options));
                const dy = cotangent orelse return;
                try call.put("x", try ops.ropeBackward(context, dy, options));
            },
        }
    }

    fn putNorm(call: *Call, gradients: ops.NormGradients) !void {
        try call.put("x", gradients.dx);
        if (gradients.dweight) |a| try call.put("weight", a);
        if (gradients.dbias) |a| try call.put("bias", a);
    }
};

pub fn main(init: std.process.Init) !void {
    const io = init.io;
    var out_buffer: [1 << 16]u8 = undefined;
    var out: std.Io.File.Writer = .initStreaming(.stdout(), io, &out_buffer);
    const in_buffer = try init.gpa.alloc(u8, 1 << 24); // the longest line
    defer init.gpa.free(in_buffer);
    var in: std.Io.File.Reader = .initStreaming(.stdin(), io, in_buffer);
    var arena_state: std.heap.ArenaAllocator = .init(init.gpa);
    defer arena_state.deinit();
    var context: zmlx.Context = .init(init.gpa, io);
    defer context.deinit();
    const own = context.kind;
    while (try in.interface.takeDelimiter('\n')) |line| {
        _ = arena_state.reset(.retain_capacity);
        const arena = arena_state.allocator();
        const request = try std.json.parseFromSliceLeaky(Request, arena, line, .{});
        context.kind = request.geometry orelse own;
        var call: Call = .{ .arena = arena, .context = &context, .request = request };
        defer for (call.held.items) |a| a.deinit();
        var json: std.json.Stringify = .{ .writer = &out.interface };
        if (call.run()) {
            try json.write(call.answer);
        } else |err| switch (err) {
            error.InvalidArgument, error.MlxFailure => {
                try json.write(.{ .@"error" = zmlx.lastError() });
            },
            else => return err,
        }
        try out.interface.writeByte('\n');
        try out.interface.flush();
    }
}
