//! `zig build` makes everything, `zig build test` tests it, `zig build run -- ARGUMENTS` runs the
//! demo. MLX is the installed Python package; `-Dmlx=DIRECTORY` names another.
//!
//! MLX's library for Linux is built with libstdc++, so the shim and zmlx's core are compiled and
//! linked by the system's compiler, into a shared library of C functions that Zig links.
//!
//! A project that depends on this one installs its programs with `installProgram`, and runs them
//! and its tests with `addRun`: both see to it that the library is found.

const std = @import("std");
const Build = std.Build;
const Step = Build.Step;

const Core = struct { flags: []const []const u8, hot: []const []const u8 };
/// How Python compiles the core.
const core: Core = @import("src/exported/core.zon");

const native = "../zmlx/native";

/// Installs a program of a project that depends on zmlx, and the library where it looks for that.
pub fn installProgram(zmlx: *Build.Dependency, program: *Step.Compile) void {
    const b = program.step.owner;
    b.installArtifact(program);
    b.getInstallStep().dependOn(&installLibrary(program, zmlx.namedLazyPath("library"), .lib).step);
}

/// A run of a program or a test of a project that depends on zmlx, with the library.
pub fn addRun(zmlx: *Build.Dependency, program: *Step.Compile) *Step.Run {
    return runWithLibrary(program, zmlx.namedLazyPath("library"), .lib);
}

fn installLibrary(
    program: *Step.Compile,
    library: Build.LazyPath,
    folder: Build.InstallDir,
) *Step.InstallFile {
    const name = libraryName(program.rootModuleTarget().os.tag);
    return program.step.owner.addInstallFileWithDir(library, folder, name);
}

/// What runs in the cache has no `../lib`, and a path to the cache would stay in what is installed.
fn runWithLibrary(
    program: *Step.Compile,
    library: Build.LazyPath,
    folder: Build.InstallDir,
) *Step.Run {
    const b = program.step.owner;
    const run = b.addRunArtifact(program);
    run.step.dependOn(&installLibrary(program, library, folder).step);
    const mac = program.rootModuleTarget().os.tag == .macos;
    const variable = if (mac) "DYLD_LIBRARY_PATH" else "LD_LIBRARY_PATH";
    const path = b.pathResolve(&.{ b.graph.cache.cwd, b.getInstallPath(folder, "") });
    const given = b.graph.environ_map.get(variable) orelse "";
    run.setEnvironmentVariable(
        variable,
        if (given.len > 0) b.fmt("{s}:{s}", .{ path, given }) else path,
    );
    return run;
}

const Options = struct {
    target: Build.ResolvedTarget,
    optimize: std.builtin.OptimizeMode,
    mlx: []const u8,
    cxx: []const u8,
    sanitize: bool,

    /// What the sanitizer is in stays away from programs that do not expect it.
    fn folder(options: Options, comptime name: []const u8) Build.InstallDir {
        return .{ .custom = if (options.sanitize) "sanitized/" ++ name else name };
    }
};

pub fn build(b: *Build) !void {
    const target = b.standardTargetOptions(.{});
    const options: Options = .{
        .target = target,
        .optimize = b.standardOptimizeOption(.{}),
        .mlx = findMlx(b),
        .cxx = b.option([]const u8, "cxx", "the C++ compiler (default: ZMLX_CXX, or g++)") orelse
            b.graph.environ_map.get("ZMLX_CXX") orelse
            if (target.result.os.tag == .linux) "g++" else "c++",
        .sanitize = b.option(bool, "sanitize", "compile C++ with AddressSanitizer") orelse false,
    };
    const library = try addLibrary(b, options);

    const module = b.addModule("zmlx", moduleOptions(b, options, "src/zmlx.zig"));
    linkShim(module, library);
    b.addNamedLazyPath("library", library);
    b.installFile("shim/shim.h", "include/zmlx/shim.h");

    // Generates texts; it needs no MLX.
    _ = addProgram(b, "zmlx-codegen", "Make the generator of texts", b.createModule(
        moduleOptions(b, options, "src/codegen_main.zig"),
    ), null, options);

    const programs = [_][3][]const u8{
        .{ "zmlx-demo", "src/main.zig", "Make the demo" },
        .{ "zmlx-values", "src/values_main.zig", "Make the program that runs single ops" },
        .{ "zmlx-speed", "src/speed_main.zig", "Make the program that times launches" },
    };
    for (programs) |program| {
        const root = b.createModule(moduleOptions(b, options, program[1]));
        root.addImport("zmlx", module);
        const exe = addProgram(b, program[0], program[2], root, library, options);
        if (std.mem.eql(u8, program[0], "zmlx-demo")) {
            const run = runWithLibrary(exe, library, options.folder("lib"));
            if (b.args) |arguments| run.addArgs(arguments);
            b.step("run", "Run the demo: -- EXPRESSION TEXT_FILE").dependOn(&run.step);
        }
    }

    const test_module = b.createModule(moduleOptions(b, options, "src/tests.zig"));
    test_module.addImport("zmlx", module);
    const filters = b.option([]const []const u8, "test-filter", "only tests named so") orelse &.{};
    const test_step = b.step("test", "Run the tests");
    for ([_]*Build.Module{ module, test_module }) |root| {
        const tests = b.addTest(.{ .root_module = root, .filters = filters });
        const run = runWithLibrary(tests, library, options.folder("lib"));
        if (options.sanitize) {
            // Its run-time library must be the first that is loaded.
            const path = b.run(&.{ options.cxx, "-print-file-name=libasan.so" });
            run.setEnvironmentVariable(
                "ASAN_OPTIONS",
                "use_sigaltstack=0:allocator_may_return_null=1",
            );
            run.setEnvironmentVariable("LD_PRELOAD", std.mem.trim(u8, path, " \r\n"));
        }
        test_step.dependOn(&run.step);
    }
}

fn moduleOptions(b: *Build, options: Options, root: []const u8) Build.Module.CreateOptions {
    return .{
        .root_source_file = b.path(root),
        .target = options.target,
        .optimize = options.optimize,
        .link_libc = true,
    };
}

/// The directory of MLX: `include` and `lib` are in it.
fn findMlx(b: *Build) []const u8 {
    const python = b.option([]const u8, "python", "a Python that has MLX (default: python3)") orelse
        "python3";
    const given = b.option([]const u8, "mlx", "MLX's directory (default: asked of Python)");
    const found = given orelse ask: {
        var code: u8 = undefined;
        const command = [_][]const u8{ python, "-m", "mlx", "--cmake-dir" };
        const out = b.runAllowFail(&command, &code, .ignore) catch fail(
            "'{s} -m mlx --cmake-dir' must print the directory of MLX but failed. Install MLX " ++
                "(pip install 'mlx[cpu]'), or name a Python that has it (-Dpython=…), or the " ++
                "directory (-Dmlx=…).",
            .{python},
        );
        break :ask std.mem.trim(u8, out, " \r\n");
    };
    // The library looks for MLX there, from whatever folder its programs run in.
    const mlx = b.pathResolve(&.{ b.graph.cache.cwd, found });
    const header = b.pathJoin(&.{ mlx, "include", "mlx", "mlx.h" });
    std.Io.Dir.cwd().access(b.graph.io, header, .{}) catch fail(
        "'mlx' must be a directory with include/mlx/mlx.h but got '{s}'.",
        .{mlx},
    );
    return mlx;
}

fn fail(comptime format: []const u8, arguments: anytype) noreturn {
    std.debug.print("[zmlx] " ++ format ++ "\n", arguments);
    std.process.exit(1);
}

fn libraryName(os: std.Target.Os.Tag) []const u8 {
    return if (os == .macos) "libzmlx.dylib" else "libzmlx.so";
}

/// The shim, and on Linux the core, as a shared library.
fn addLibrary(b: *Build, options: Options) !Build.LazyPath {
    const mac = options.target.result.os.tag == .macos;
    const link = b.addSystemCommand(&.{ options.cxx, if (mac) "-dynamiclib" else "-shared" });
    link.setName("link " ++ "the shim");
    if (options.sanitize) link.addArg("-fsanitize=address");
    link.addArg("-o");
    const library = link.addOutputFileArg(libraryName(options.target.result.os.tag));
    for ([_][]const u8{ "shim/shim.cc", "shim/arrays.cc" }) |source| {
        link.addFileArg(compile(b, options, source, !mac));
    }
    if (!mac) for (try coreSources(b)) |source| {
        link.addFileArg(compile(b, options, source, true));
    };
    link.addArgs(&.{
        b.fmt("-L{s}/lib", .{options.mlx}),
        "-lmlx",
        b.fmt("-Wl,-rpath,{s}/lib", .{options.mlx}),
    });
    if (mac) {
        link.addArg("-Wl,-install_name,@rpath/libzmlx.dylib");
    } else {
        // Names are looked up when they are called, so that another MLX can be told by its version.
        link.addArgs(&.{ "-ldl", "-Wl,-z,lazy", "-Wl,-soname,libzmlx.so" });
    }
    return library;
}

/// The core without its binding to Python.
fn coreSources(b: *Build) ![]const []const u8 {
    const io = b.graph.io;
    var folder = try b.build_root.handle.openDir(io, native, .{ .iterate = true });
    defer folder.close(io);
    var names: std.ArrayList([]const u8) = .empty;
    var entries = folder.iterate();
    while (try entries.next(io)) |entry| {
        if (!std.mem.endsWith(u8, entry.name, ".cc")) continue;
        if (std.mem.startsWith(u8, entry.name, "python")) continue;
        try names.append(b.allocator, b.pathJoin(&.{ native, entry.name }));
    }
    std.mem.sort([]const u8, names.items, {}, struct {
        fn less(_: void, x: []const u8, y: []const u8) bool {
            return std.mem.lessThan(u8, x, y);
        }
    }.less);
    return names.items;
}

fn compile(b: *Build, options: Options, source: []const u8, with_core: bool) Build.LazyPath {
    const stem = std.fs.path.stem(source);
    var hot = false;
    for (core.hot) |name| hot = hot or std.mem.eql(u8, name, stem);
    const cc = b.addSystemCommand(&.{ options.cxx, if (hot) "-O2" else "-O1" });
    cc.setName(b.fmt("compile {s}.cc", .{stem}));
    cc.addArgs(core.flags);
    cc.addArg(b.fmt("-I{s}/include", .{options.mlx}));
    if (with_core) {
        cc.addArgs(&.{
            b.fmt("-I{s}", .{b.pathFromRoot(native)}),
            "-DZMLX_CORE",
            b.fmt("-DZMLX_PRELUDE=\"{s}\"", .{b.pathFromRoot(native ++ "/prelude")}),
        });
    }
    if (options.sanitize) cc.addArgs(&.{ "-fsanitize=address", "-fno-omit-frame-pointer", "-g1" });
    cc.addArg("-MMD");
    _ = cc.addPrefixedDepFileOutputArg("-MF", b.fmt("{s}.d", .{stem}));
    cc.addArg("-c");
    cc.addFileArg(b.path(source));
    cc.addArg("-o");
    return cc.addOutputFileArg(b.fmt("{s}.o", .{stem}));
}

/// A program looks for the library beside itself and nowhere else, so it runs from any folder.
fn linkShim(module: *Build.Module, library: Build.LazyPath) void {
    module.addObjectFile(library);
    const mac = module.resolved_target.?.result.os.tag == .macos;
    module.addRPathSpecial(if (mac) "@loader_path/../lib" else "$ORIGIN/../lib");
}

/// A program, with a step of its name that builds and installs it.
fn addProgram(
    b: *Build,
    name: []const u8,
    description: []const u8,
    root: *Build.Module,
    library: ?Build.LazyPath,
    options: Options,
) *Build.Step.Compile {
    const exe = b.addExecutable(.{ .name = name, .root_module = root });
    const install = b.addInstallArtifact(exe, .{
        .dest_dir = .{ .override = options.folder("bin") },
    });
    if (library) |l| install.step.dependOn(&installLibrary(exe, l, options.folder("lib")).step);
    b.getInstallStep().dependOn(&install.step);
    b.step(name, description).dependOn(&install.step);
    return exe;
}
