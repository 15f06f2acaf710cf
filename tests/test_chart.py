"""Charts are valid SVG whose axes enclose their data."""

import math
from xml.etree import ElementTree

import pytest

from zmlx.chart import PALETTE, Panel, Series, figure

SVG = "{http://www.w3.org/2000/svg}"


def draw(xs, ys, **panel):
    series = Series("a < b", xs, ys, PALETTE[0])
    return ElementTree.fromstring(figure("title & more", [Panel([series], "x", "y", **panel)]))


def points(root):
    return [
        tuple(float(value) for value in point.split(","))
        for point in root.find(f".//{SVG}polyline").get("points").split()
    ]


def test_text_is_escaped():
    texts = [element.text for element in draw([1, 2], [3, 4]).iter(f"{SVG}text")]
    assert {"title & more", "a < b", "x", "y"} <= set(texts)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("low", "high"), [(1, 1), (0.37, 0.38), (1.9, 5.74), (3e-9, 4e-9), (7, 123456)]
)
def test_every_point_lies_within_the_axes(low, high, log):
    root = draw([low, high], [high, low], x_log=log, y_log=log)
    assert all(0 <= x <= 420 and 0 <= y <= 260 for x, y in points(root))


def test_larger_values_are_drawn_higher_and_further_right():
    (x1, y1), (x2, y2) = points(draw([1, 2], [3, 4]))
    assert x2 > x1
    assert y2 < y1


def test_a_logarithmic_axis_spaces_decades_equally():
    (x1, _), (x2, _), (x3, _) = points(draw([1, 10, 100], [0, 1, 2], x_log=True))
    assert x2 - x1 == pytest.approx(x3 - x2)


def test_points_that_are_not_finite_are_left_out():
    assert len(points(draw([1, 2, 3], [1.0, math.nan, 2.0]))) == 2


def test_a_logarithmic_axis_refuses_zero():
    with pytest.raises(ValueError, match="must be positive but got 0"):
        draw([0, 1], [1, 2], x_log=True)


def test_a_panel_without_points_is_an_error():
    with pytest.raises(ValueError, match="must each hold a finite point"):
        draw([], [])
