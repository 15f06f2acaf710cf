"""The kernel wrapper."""

import dataclasses
import pickle
import re
from importlib.util import find_spec

import mlx.core as mx
import numpy as np
import pytest

import zmlx
from zmlx import metal, native, strict
from zmlx.launch import geometry
from zmlx.targets import cpu

DOUBLE = {
    "name": "double",
    "input_names": ["x"],
    "output_names": ["y"],
    "source": "uint i = thread_position_in_grid.x; y[i] = x[i] + x[i];",
}


def test_a_kernel_can_be_pickled_once_it_ran():
    x = mx.arange(5.0)
    double = metal.kernel(**DOUBLE)
    assert double(x).tolist() == pickle.loads(pickle.dumps(double))(x).tolist()


def test_the_same_specification_is_the_same_kernel():
    assert metal.kernel(**DOUBLE) is metal.kernel(**DOUBLE)
    assert metal.kernel(**{**DOUBLE, "source": DOUBLE["source"] + " "}) is not metal.kernel(
        **DOUBLE
    )


def test_the_name_hashes_everything():
    spec = metal.kernel(**DOUBLE).spec
    names = {spec.full_name}
    for field, value in {
        "body": "y[0] = 1;",
        "header": "// x",
        "ensure_row_contiguous": False,
        "atomic_outputs": True,
        "math_mode": "fast",
        "input_names": ("z",),
    }.items():
        names.add(dataclasses.replace(spec, **{field: value}).full_name)
    assert len(names) == 7
    assert all(re.fullmatch(r"double_[0-9a-f]{12}", n) for n in names)


def test_defaults_are_one_thread_per_element_and_the_first_input():
    x = mx.arange(1000).astype(mx.float16).reshape(10, 100)
    y = metal.kernel(**DOUBLE)(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert mx.array_equal(y, x + x)


def test_numbers_are_scalars_of_their_type():
    kernel = metal.kernel(
        name="numbers",
        input_names=["a", "b", "c"],
        output_names=["y"],
        source="y[0] = float(a) + b + (c ? 0.5f : 0.0f);",
    )
    y = kernel(2, 0.25, True, output_shapes=[(1,)], output_dtypes=[mx.float32])
    assert y.item() == 2.75
    assert np.signbit(metal.scalar(-0.0).item())
    assert not np.signbit(metal.scalar(0.0).item())
    assert metal.scalar(True).dtype == mx.bool_
    assert metal.scalar(2**40).dtype == mx.int64
    assert metal.scalar(1).dtype == mx.int32
    assert metal.scalar(1.0).dtype == mx.float32
    for n in (-(2**31) - 1, -(2**31), 2**31 - 1, 2**31):
        assert metal.scalar(n).item() == n
        assert metal.scalar(n).dtype == (mx.int32 if -(2**31) <= n < 2**31 else mx.int64)


def test_init_value_template_and_several_outputs():
    kernel = metal.kernel(
        name="several",
        input_names=["x"],
        output_names=["a", "b"],
        source="""
            uint i = thread_position_in_grid.x;
            if (i < N) {
                a[i] = T(x[i]) * T(N);
                b[i] = i;
            }""",
    )
    a, b = kernel(
        mx.ones((8,)),
        template={"T": mx.float16, "N": 3},
        output_shapes=[(8,), (8,)],
        output_dtypes=[mx.float16, mx.int32],
        init_value=7,
    )
    assert a.tolist() == [3, 3, 3, 7, 7, 7, 7, 7]
    assert b.tolist() == [0, 1, 2, 7, 7, 7, 7, 7]


def test_one_and_true_are_different_template_arguments():
    kernel = metal.kernel(**{**DOUBLE, "source": "y[thread_position_in_grid.x] = sizeof(N);"})
    sizes = [kernel(mx.ones((4,)), template={"N": n})[0].item() for n in (1, True, 1, True)]
    assert sizes == [4, 1, 4, 1]


def test_init_values_keep_their_sign_and_are_remembered():
    kernel = metal.kernel(**{**DOUBLE, "source": "if (x[0] > 5) { y[0] = 1; }"})
    values = (0, -0.0, False, 0.0, np.float32(-0.0), np.float32(0), True, 1)
    filled = [kernel(mx.ones((4,)), init_value=v)[0].item() for v in values]
    assert filled == [0, 0, 0, 0, 0, 0, 1, 1]
    assert np.signbit(filled).tolist() == [False, True, False, False, True, False, False, False]
    before = kernel.statistics["configurations"]
    for _ in range(2):
        assert np.isnan(kernel(mx.ones((4,)), init_value=float("nan"))[0].item())
    assert kernel.statistics["configurations"] == before + 1


def test_each_geometry_has_launches_of_its_own():
    """As a target has: what one prepared is nothing for another."""
    kernel, x = metal.kernel(**DOUBLE), mx.ones((12, 12))
    kernel(x)
    before = kernel.statistics["configurations"]
    for kind in ("gpu", "cpu"):
        with geometry(kind):
            kernel(x)
    assert kernel.statistics["configurations"] == before + 2


@pytest.mark.on_cpu
def test_non_contiguous_inputs_are_counted():
    x = mx.arange(12).astype(mx.float32).reshape(3, 4)
    mx.eval(x)
    before = metal.statistics()["contiguous_copies"]
    y = metal.kernel(**DOUBLE)(x.T)
    assert mx.array_equal(y, (x + x).T)
    assert metal.statistics()["contiguous_copies"] == before + 1


def test_text_for_every_target():
    spec = metal.kernel(**DOUBLE).spec
    assert "[[kernel]] void" in spec.source("metal")
    assert "zk_kernel" in spec.source("cpu")
    with pytest.raises(ValueError, match="'target' must be metal, cuda or cpu"):
        spec.source("vulkan")


def test_the_metal_text_needs_no_core(monkeypatch):
    """A Mac has none."""
    monkeypatch.setattr(native, "load", None)
    x = mx.ones((3, 4), dtype=mx.float16)
    text = metal.kernel(**DOUBLE).spec.source("metal", x, output_dtypes=[mx.float16])
    assert "const device float16_t* x" in text


def test_verbose_prints_the_metal_text(capsys):
    metal.kernel(**DOUBLE)(mx.ones((4,)), verbose=True)
    assert "[[kernel]] void" in capsys.readouterr().out


def test_newer_keywords_of_cpp_are_names() -> None:
    """Metal is C++14 or 17."""
    kernel = zmlx.metal.kernel(
        name="concept",
        input_names=["concept", "requires"],
        output_names=["consteval"],
        source="consteval[0] = concept[0] + requires[concept_shape[0] - 1] * constinit;",
    )
    x = mx.array([1.0, 2.0])
    y = kernel(x, x, template={"constinit": 3}, grid=(1, 1, 1), threadgroup=(1, 1, 1),
               output_shapes=[(1,)], output_dtypes=[mx.float32])  # fmt: skip
    assert y.item() == 7


@pytest.mark.parametrize("change, message", [
    ({"name": "a b"}, "'name' must be an identifier"),
    ({"input_names": ["x", "1y"]}, "'input_names' must be identifiers"),
    ({"output_names": ["x"]}, "'output_names' must not repeat"),
    ({"output_names": []}, "'output_names' must name at least one"),
    ({"source": " "}, "'source' must not be empty"),
    ({"source": None}, "'source' must be a str"),
    ({"header": b""}, "'header' must be a str"),
    ({"header": "// \udc80\n"}, "'header' must hold no surrogates but got '\\udc80'"),
    ({"math_mode": "loose"}, "'math_mode' must be one of"),
    ({"name": 3}, "'name' must be an identifier but got 3"),
    ({"input_names": "xs"}, "'input_names' must be a sequence of names but got 'xs'"),
    ({"input_names": ["x", "x"]}, "'input_names' must not repeat a name"),
    ({"input_names": {"x"}}, "'input_names' must be a sequence of names but got {'x'}"),
    ({"input_names": ["wchar_t"]}, "'input_names' must not be words of Metal but got 'wchar_t'"),
    ({"input_names": ["constant"]}, "'input_names' must not be words of Metal but got 'constant'"),
    ({"output_names": ["half"]}, "'output_names' must not be words of Metal but got 'half'"),
    ({"atomic_outputs": "no"}, "'atomic_outputs' must be True or False but got str"),
    ({"vjp": 3}, "'vjp' must be a function but got int"),
    ({"reference": "x"}, "'reference' must be a function but got str"),
])  # fmt: skip
def test_a_bad_specification(change, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        metal.kernel(**{**DOUBLE, **change})


@pytest.mark.parametrize("arguments, message", [
    ({"threadgroup": 1025}, "'threadgroup' must have 1 to 1024 threads"),
    ({"threadgroup": (0, 1, 1)}, "'threadgroup' must have 1 to 1024 threads"),
    ({"grid": (-1,)}, "'grid' must be up to three sizes"),
    ({"output_dtypes": [mx.float32] * 2}, "'output_dtypes' must have 1 entries"),
    ({"grid": "41"}, "'grid' must be up to three sizes"),
    ({"grid": 4.0}, "'grid' must be up to three sizes"),
    ({"grid": ()}, "'grid' must be up to three sizes"),
    ({"grid": 0}, "'grid' must not be empty where an output has elements"),
    ({"output_shapes": (4,)}, "'output_shapes' must be a sequence of shapes"),
    ({"output_shapes": [(-4,)]}, "'output_shapes' must be a sequence of shapes"),
    ({"output_dtypes": mx.float32}, "'output_dtypes' must be a sequence"),
    ({"output_dtypes": ["float32"]}, "'output_dtypes' must hold dtypes of MLX"),
    ({"output_dtypes": [mx.float64]}, "'y' must have a dtype that Metal knows but got float64"),
    ({"template": {"T": 1.5}}, "'template' must hold dtypes, ints and bools"),
    ({"template": "T"}, "'template' must be a dict or pairs"),
    ({"template": {"int": 3}}, "'template' must have names that are neither words of Metal"),
    ({"template": {"x": 3}}, "'template' must have names that are neither words of Metal"),
    ({"template": [("N", 3), ("N", 4)]}, "'template' must not repeat a name"),
    ({"init_value": "1"}, "'init_value' must be a number"),
    ({"init_value": 1.5, "output_dtypes": [mx.int32]}, "'init_value' must be of dtype int32"),
    ({"init_value": 300, "output_dtypes": [mx.uint8]}, "'init_value' must be of dtype uint8"),
    ({"init_value": 2**31 - 1, "output_dtypes": [mx.int32]},
     "'init_value' must be a number that a float32 holds exactly but got 2147483647"),
    ({"init_value": 2**24 + 1, "output_dtypes": [mx.uint32]}, "'init_value' must be a number that"),
    ({"init_value": 2**63 - 1, "output_dtypes": [mx.int64]}, "'init_value' must be a number that"),
    ({"output_shapes": []}, "'output_shapes' must have 1 entries but got 0"),
    ({"output_dtypes": ()}, "'output_dtypes' must have 1 entries but got 0"),
])  # fmt: skip
def test_a_bad_launch(arguments, message):
    with pytest.raises((ValueError, TypeError), match=re.escape("[double] " + message)):
        metal.kernel(**DOUBLE)(mx.ones((4,)), **arguments)


@pytest.mark.on_cpu
@pytest.mark.parametrize("sizes, message", [
    ({"output_shapes": [(2**30, 2**30, 4)]}, "'output_shapes' must take less than 2^63 bytes"),
    ({"grid": (2**30, 2**30, 16)}, "'grid' must hold less than 2^63 threads"),
    ({"threadgroup": (2**30, 2**30, 16)}, "'threadgroup' must hold at most 1024 threads"),
])  # fmt: skip
def test_sizes_whose_product_is_no_number(sizes, message):
    call = {"grid": (4, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(4,)],
            "output_dtypes": [mx.float32]}  # fmt: skip
    with zmlx.install():
        kernel = mx.fast.metal_kernel(**DOUBLE)
        with pytest.raises(ValueError, match=re.escape(message)):
            kernel(inputs=[mx.ones((4,))], **{**call, **sizes})


def test_literals_and_buffers_that_metal_has_not():
    big = metal.kernel(**{**DOUBLE, "source": "y[0] = 1;\ny[1] = 18'446'744'073'709'551'616u;"})
    with pytest.raises(RuntimeError, match=r"line 2 of the source.*does not fit into any integer"):
        big(mx.ones((4,)))
    largest = metal.kernel(**{**DOUBLE, "source": "y[0] = 0xFFFF'FFFF'FFFF'FFFF == ~0ul;"})
    assert largest(mx.ones((4,)))[0].item() == 1
    for inputs, source in ((31, ""), (29, "(void)x0_shape[0]; (void)x0_ndim;")):
        names = [f"x{i}" for i in range(inputs)]
        many = metal.kernel(
            name="many", input_names=names, output_names=["y"], source=source + "y[0] = x0[0];"
        )
        with pytest.raises(RuntimeError, match="takes 32 buffers, more than the 31 that Metal has"):
            many(*[mx.ones((9,))] * inputs, output_shapes=[(1,)])
        if find_spec("ziglang") is not None:
            problems = strict.check(many.spec.source("metal", *[mx.ones((9,))] * inputs))
            assert [p.message for p in problems] == ["Metal has 31 buffers for a kernel"]


def test_wrong_inputs():
    with pytest.raises(ValueError, match=r"\[double\] 'inputs' must be 1 arrays .* but got 2"):
        metal.kernel(**DOUBLE)(mx.ones((4,)), mx.ones((4,)))
    with pytest.raises(
        TypeError, match=r"\[double\] 'x' must be an array or a number but got list"
    ):
        metal.kernel(**DOUBLE)([1, 2])


def test_numbers_of_a_launch_may_come_from_numpy():
    kernel = metal.kernel(
        name="scaled",
        input_names=["x", "s"],
        output_names=["y"],
        source="uint i = thread_position_in_grid.x; y[i] = N * s * x[i];",
    )
    for s in (np.float64(1.5), np.float32(1.5), np.float64(0.0), np.int64(3), np.bool_(True)):
        y = kernel(mx.ones((4,)), s, grid=np.int64(4), template={"N": np.int32(2)})
        assert y.tolist() == [2 * float(s)] * 4
    with pytest.raises(ValueError, match="a number of 64 bits"):
        kernel(mx.ones((4,)), 2**64, template={"N": 2})


def test_an_index_into_an_array_of_no_dimensions_is_explained():
    with pytest.raises(RuntimeError, match=r"`.*x\[i\].*`.*comes as a value, without an index"):
        metal.kernel(**DOUBLE)(mx.array(2.0))


@pytest.mark.on_cpu
@pytest.mark.parametrize("value, message", [
    ("min(uint(x[i]), 3)", r"the call 'min\(unsigned int, int\)' is ambiguous: convert"),
    ("max3(1, x[i] > 0, 2u)", r"'max3\(int, bool, unsigned int\)' is ambiguous: convert"),
    ("clamp(int(x[i]), 0u, 1)", r"'clamp\(int, unsigned int, int\)' is ambiguous: convert"),
    ("atomic_load_explicit(&y[i], memory_order_relaxed)", "atomic with atomic_outputs=True"),
])  # fmt: skip
def test_calls_that_fit_no_overload_are_explained(value, message):
    source = f"uint i = thread_position_in_grid.x;\ny[i] = {value};"
    with pytest.raises(RuntimeError, match=f"line 2 of the source.*{message}"):
        metal.kernel(**{**DOUBLE, "source": source})(mx.ones((4,)))


def test_a_name_may_begin_with_a_digit():
    kernel = metal.kernel(**{**DOUBLE, "name": "2x"})
    assert kernel(mx.ones((2,))).tolist() == [2.0, 2.0]


def test_an_empty_grid_runs_nothing():
    y = metal.kernel(**DOUBLE)(mx.zeros((0, 5)))
    assert y.shape == (0, 5)
    mx.eval(y)


def test_a_compile_error_shows_the_users_line():
    kernel = metal.kernel(**{**DOUBLE, "source": "uint i = 0;\ny[i] = undefined_name;"})
    with pytest.raises(RuntimeError, match=r"line 2 of the source: `y\[i\] = undefined_name;`"):
        kernel(mx.ones((4,)))


def test_a_rule_and_a_reference_of_ones_own():
    kernel = metal.kernel(
        **DOUBLE,
        vjp=lambda primals, cotangents, outputs, wanted: (3 * cotangents[0],),
        reference=lambda x: (x + x,),
    )
    x = mx.arange(4).astype(mx.float32)
    assert mx.grad(lambda x: kernel(x).sum())(x).tolist() == [3.0] * 4
    assert mx.array_equal(mx.vmap(kernel)(x[None]), (x + x)[None])


def test_a_rule_of_the_wrong_shape_is_refused():
    kernel = metal.kernel(**DOUBLE, vjp=lambda p, c, o, w: (mx.zeros((2,)),))
    with pytest.raises(ValueError, match="the vjp rule must return"):
        mx.grad(lambda x: kernel(x).sum())(mx.ones((4,)))


@pytest.mark.on_cpu
def test_an_error_in_a_function_of_the_user_says_where_it_was_raised():
    def rule(primals, cotangents, outputs, wanted):
        return cotangents[0].as_type(mx.float32)

    def reference(x):
        return x + mx.ones((7,))

    kernel = metal.kernel(**DOUBLE, vjp=rule, reference=reference)
    x = mx.ones((4,))
    with pytest.raises(RuntimeError, match=r"^AttributeError: .*'as_type'.*, in rule\)$"):
        mx.grad(lambda x: kernel(x).sum())(x)
    at_reference = r"^\[broadcast_shapes\] .*\(.*\.py, line \d+, in reference\)$"
    with pytest.raises(ValueError, match=at_reference):
        mx.vmap(kernel)(x[None])
    with pytest.raises(ValueError, match=at_reference):
        mx.jvp(kernel, [x], [x])


def test_targets_say_why_they_cannot_run():
    if not mx.metal.is_available():
        with zmlx.target("metal"), pytest.raises(RuntimeError, match="Metal back end"):
            mx.eval(zmlx.kernels.silu(mx.ones((4,))))
    with pytest.raises(ValueError, match=r"\[target\] 'name' must be one of"), zmlx.target("tpu"):
        pass


def test_the_reference_target_cannot_run_raw_kernels():
    with zmlx.target("reference"), pytest.raises(RuntimeError, match="without a reference"):
        metal.kernel(**DOUBLE)(mx.ones((4,)))


@pytest.mark.on_cpu
def test_a_vector_load_from_a_slice():
    """The slice starts 4 bytes into its buffer; a float4 needs 16."""
    kernel = metal.kernel(
        name="float4_copy",
        input_names=["x"],
        output_names=["y"],
        source="""
            uint i = thread_position_in_grid.x;
            *(device float4*)(y + 4 * i) = *(const device float4*)(x + 4 * i) * 2.0f;""",
    )
    x = mx.arange(1, 66).astype(mx.float32)
    mx.eval(x)
    y = kernel(x[1:], grid=16, output_shapes=[(64,)], output_dtypes=[mx.float32])
    assert mx.array_equal(y, 2 * x[1:])


def test_without_the_core_values_are_looked_at_where_mlx_evaluates_them(monkeypatch):
    monkeypatch.setattr(cpu, "_core_if_any", lambda: None)
    seen = []

    def f(x):
        seen.append(cpu.have_values((x,)))
        return x + 1

    x = mx.ones((3,))
    f(x), mx.compile(f)(x), mx.vmap(f)(x), mx.grad(lambda x: f(x).sum())(x)
    assert seen == [True, False, False, True]


def test_without_the_core_the_other_targets_still_run(monkeypatch):
    """As on a Mac, where the CPU core does not exist."""
    from zmlx import native

    def missing():
        raise RuntimeError("no core here")

    monkeypatch.setattr(native, "load", missing)
    cpu._core_if_any.cache_clear()
    try:
        x = mx.arange(6).astype(mx.float32).reshape(2, 3)
        with zmlx.target("reference"):
            assert mx.allclose(zmlx.kernels.softmax(x).sum(-1), mx.ones(2))
        assert cpu.maybe_tracing((x,)) == 1
        assert cpu.signature((x,)) == cpu.signature((x + 1,)) != cpu.signature((x.T,))
        assert "no core here" in cpu.unavailable()
    finally:
        cpu._core_if_any.cache_clear()


SQUARE = {
    **DOUBLE,
    "name": "square",
    "source": "uint i = thread_position_in_grid.x; y[i] = x[i] * x[i];",
}


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: (y,)], ids=["bare", "tuple"])
def test_a_reference_serves_every_transform_and_the_reference_target(wrap):
    kernel = metal.kernel(
        **SQUARE,
        vjp=lambda primals, cotangents, outputs, wanted: wrap(2 * primals[0] * cotangents[0]),
        reference=lambda x: wrap(x * x),
    )
    x = mx.arange(6.0).reshape(2, 3)
    slope = mx.grad(lambda x: kernel(x).sum())
    assert mx.array_equal(slope(x), 2 * x)
    assert mx.array_equal(mx.grad(lambda x: slope(x).sum())(x), mx.full((2, 3), 2.0))
    assert mx.array_equal(mx.vmap(kernel)(x), x * x)
    assert mx.array_equal(mx.jvp(kernel, [x], [x])[1][0], 2 * x * x)
    compiled = mx.compile(lambda x: kernel(x), shapeless=True)
    assert mx.array_equal(compiled(x), x * x)
    assert mx.array_equal(compiled(x[:1, :2]), x[:1, :2] ** 2)
    with zmlx.target("reference"):
        assert mx.array_equal(kernel(x), x * x)
        assert mx.array_equal(slope(x), 2 * x)


@pytest.mark.parametrize("reference, message", [
    (lambda x: x.sum(), r"must return float32 \(3,\) for 'y' but got float32 \(\)"),
    (lambda x: x.astype(mx.float16), r"must return float32 \(3,\) for 'y' but got float16 \(3,\)"),
    (lambda x: (x, x), "must return 1 outputs but got 2"),
    (lambda x: {"y": x}, "must return an mx.array for each output but got dict"),
    (lambda x: (np.ones(3, np.float32),), "must return an mx.array .* but got ndarray"),
    (lambda x: None, "must return an mx.array for each output but got NoneType"),
    (lambda x: 2.0, "must return an mx.array for each output but got float"),
])  # fmt: skip
def test_a_reference_that_is_another_function_is_refused(reference, message):
    kernel = metal.kernel(**SQUARE, reference=reference)
    errors = (ValueError, TypeError, RuntimeError)
    with pytest.raises(errors, match=r"\[square\] the reference " + message):
        mx.eval(mx.vmap(kernel)(mx.ones((2, 3))))


def test_a_reference_may_change_its_inputs_in_place():
    """Not the caller's arrays, nor numbers that are kept for every call."""

    def reference(x, s):
        s *= 2
        x[0] = 9
        return x * s

    spec = {
        **SQUARE, "input_names": ["x", "s"],
        "source": "uint i = thread_position_in_grid.x; y[i] = (i ? x[i] : 9) * s * 2;",
    }  # fmt: skip
    kernel = metal.kernel(**spec, reference=reference)
    same = metal.kernel(**DOUBLE, reference=lambda x: x)
    x = mx.array([1.0, 2.0])
    with zmlx.target("reference"):
        assert kernel(x, 0.7421875).tolist() == [13.359375, 2.96875]
        a, b = same(7.421875), same(x)
        a += 1
        b[0] = 5
        slope = mx.grad(lambda x: kernel(x, 0.7421875).sum())(x)
        assert slope.tolist() == [0, 1.484375]
    assert mx.vmap(kernel, in_axes=(0, None))(x[None], mx.array(3.0)).tolist() == [[54, 12]]
    assert mx.compile(lambda x: kernel(x, 0.7421875), shapeless=True)(x)[1].item() == 2.96875
    assert x.tolist() == [1, 2]
    assert [metal.scalar(v).item() for v in (0.7421875, 7.421875)] == [0.7421875, 7.421875]


def test_a_rule_that_returns_arrays_of_numpy_is_refused():
    kernel = metal.kernel(**SQUARE, vjp=lambda p, c, o, w: (np.ones(4, np.float32),))
    message = "must return an mx.array or None for input 0 but got ndarray"
    with pytest.raises((TypeError, RuntimeError), match=message):
        mx.grad(lambda x: kernel(x).sum())(mx.ones((4,)))


def test_a_rule_that_returns_no_gradients_is_refused():
    kernel = metal.kernel(**SQUARE, vjp=lambda p, c, o, w: {"x": c[0]})
    with pytest.raises((TypeError, RuntimeError), match="must return a tuple of gradients"):
        mx.grad(lambda x: kernel(x).sum())(mx.ones((4,)))


def test_a_reference_is_not_asked_for_the_gradient_of_integers():
    """MLX refuses it of what indices come from, even of those that depend on what is asked for."""
    gather = metal.kernel(
        name="gather", input_names=["x", "i"], output_names=["y"],
        source="uint t = thread_position_in_grid.x; y[t] = x[i[t]];", reference=lambda x, i: x[i],
    )  # fmt: skip
    x = mx.array([3.0, 1.0, 2.0])
    assert mx.grad(lambda x: (x * gather(x, mx.argsort(x))).sum())(x).tolist() == [3, 5, 4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"template": [("N", 2**63)]}, "'template' must be from -2147483648 to 2147483647 but got"),
        ({"grid": (2**63, 1, 1)}, "'grid' must have sizes below 2^31 but got 9223372036854775808"),
        ({"output_shapes": [(2**31,)]}, "'output_shapes' must have sizes below 2^31 but got"),
        ({"output_shapes": [(2**70,)]}, "'output_shapes' must have sizes below 2^31 but got"),
        ({"init_value": 10**400}, "'init_value' must be in float32's range but got 1000"),
        ({"init_value": -1e300}, "'init_value' must be in float32's range but got -1e+300"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        metal.kernel(**DOUBLE)(mx.ones(1), **given)
