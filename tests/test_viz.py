"""Pictures, by what their artists hold."""

import io
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from torchfil.viz import bar_chart, distribution, gallery, show_map
from torchfil.viz.common import wrapped


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def rendered(figure):
    """Draws the figure, so that what matplotlib finds out only then is tested too."""
    figure.savefig(io.BytesIO(), format="png", dpi=20)
    return figure


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def bar_of(figure):
    bars = [axis for axis in figure.axes if axis.get_label() == "colour bar"]
    return bars[0] if bars else None


# show_map


@pytest.mark.parametrize("mode", ["absolute", "signed"])
@pytest.mark.parametrize("shape", [(6, 7), (1, 6, 7), (3, 6, 7), (6, 7, 1), (6, 7, 3)])
def test_map_and_overlay_hold_the_attribution_clipped_to_the_limits(mode, shape):
    heat = noise(*shape)
    figure = show_map(noise(*shape, seed=1), heat, mode=mode, outlier_percentile=10)
    axis = {(3, 6, 7): 0, (1, 6, 7): 0, (6, 7, 3): 2, (6, 7, 1): 2}.get(shape)
    expected = heat if axis is None else heat.sum(axis) if mode == "signed" else np.sqrt((heat**2).sum(axis))
    expected = np.abs(expected) if mode == "absolute" else expected
    limit = np.sort(np.abs(expected).ravel())[int(np.ceil(0.9 * 41))]
    expected = np.clip(expected, -limit, limit)
    image, heat_map, overlay = figure.axes[:3]
    for artist in (heat_map.images[0], overlay.images[1]):
        np.testing.assert_allclose(artist.get_array(), expected, rtol=1e-12)
        assert artist.get_clim() == pytest.approx((-limit if mode == "signed" else 0, limit))
    assert len(image.images) == 1
    assert np.sum(np.abs(expected) == limit) == 5  # 10 % of 42 pixels


def test_the_overlay_is_transparent_where_nothing_leaks_and_alpha_where_most_does():
    overlay = show_map(np.zeros((2, 2)), [[0.0, 4.0], [1.0, -4.0]], mode="signed", views=["overlay"], alpha=0.5).axes[0]
    np.testing.assert_allclose(overlay.images[1].get_alpha(), [[0, 0.5], [0.25, 0.5]])


@pytest.mark.parametrize(
    ("heat", "extend"), [([-1, 1, 5], "max"), ([-5, 1, 1], "min"), ([-5, 1, 5], "both"), ([-1, 0, 1], "neither")]
)
def test_the_colour_bar_is_pointed_where_values_saturate(heat, extend):
    figure = show_map(np.zeros((1, 3)), np.array([heat]), mode="signed", limit=2)
    bar = bar_of(figure)
    assert bar._colorbar.extend == extend
    assert bar.get_ylabel() == "PLIS"
    assert bar.get_ylim() == (-2, 2)


def test_one_outlier_saturates_and_few_pixels_do_not():
    heat = np.ones((10, 10))
    heat[0, 0] = 1000
    assert show_map(heat, heat).axes[1].images[0].get_clim() == (0, 1)
    sparse = np.zeros((10, 10))
    sparse[0, :3] = 1, 2, 1000
    assert show_map(heat, sparse).axes[1].images[0].get_clim() == (0, 1000)
    assert show_map(heat, heat, outlier_percentile=0).axes[1].images[0].get_clim() == (0, 1000)


@pytest.mark.parametrize("mode", ["absolute", "signed"])
@pytest.mark.parametrize("value", [0.0, 3.0, 1e-300])
def test_constant_maps(mode, value):
    figure = rendered(show_map(np.full((4, 4), 7.0), np.full((4, 4), value), mode=mode))
    assert (figure.axes[1].images[0].get_array() == value).all()
    bar = bar_of(figure)
    if value == 0:
        assert list(bar.get_yticks()) == [0]
        assert "zero everywhere" in bar.get_ylabel()
    else:
        assert figure.axes[1].images[0].get_clim()[1] == value


def test_signs_have_the_documented_colours():
    artist = show_map(np.zeros((1, 2)), [[1.0, -1.0]], mode="signed", views=["map"]).axes[0].images[0]
    positive, negative = artist.cmap(artist.norm(0.7))[:3], artist.cmap(artist.norm(-0.7))[:3]
    assert positive[0] > positive[2]  # orange: red above blue
    assert negative[2] > negative[0]  # purple
    assert min(artist.cmap(artist.norm(0.0))[:3]) > 0.95


def test_absolute_colours_darken_steadily():
    artist = show_map(np.zeros((1, 1)), [[1.0]], views=["map"]).axes[0].images[0]
    lightness = artist.cmap(np.linspace(0, 1, 50))[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(lightness) < 0).all()


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (np.array([[0, 255]], np.uint8), [[0, 1]]),
        (np.array([[0.2, 0.6]]), [[0.2, 0.6]]),
        (np.array([[-1.0, 0.0, 3.0]]), [[0, 0.25, 1]]),
        (np.array([[0, 51, 255]]), [[0, 0.2, 1]]),
        (np.array([[5.0, 5.0]]), [[0.5, 0.5]]),
    ],
)
def test_images_of_any_range_are_scaled_for_display(image, expected):
    artist = show_map(image, np.ones(image.shape), views=["image"]).axes[0].images[0]
    np.testing.assert_allclose(artist.get_array(), expected)


def test_colour_images_keep_their_colours_and_three_by_three_channels_come_first():
    image = np.random.default_rng(0).random((3, 5, 3))
    figure = rendered(show_map(image, np.ones((5, 3))))
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), np.moveaxis(image, 0, -1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_that_require_grad(dtype):
    image = torch.rand(1, 4, 4, dtype=dtype, requires_grad=True)
    heat = (image * 3).sum(0)
    figure = show_map(image, heat)
    np.testing.assert_allclose(figure.axes[1].images[0].get_array(), heat.detach().double().clamp(max=10))
    assert image.grad is None


@pytest.mark.parametrize("mode", ["absolute", "signed"])
def test_what_is_not_private_is_left_blank(mode):
    heat = np.array([[[3.0, np.nan]], [[4.0, np.nan]], [[np.nan, np.nan]]])  # [C, H, W]
    figure = show_map(np.full((3, 1, 2), 0.5), heat, mode=mode, views=["map", "overlay"], outlier_percentile=0)
    drawn = figure.axes[0].images[-1].get_array()
    assert drawn[0, 0] == pytest.approx(5.0 if mode == "absolute" else 7.0)
    assert np.ma.getmaskarray(drawn).tolist() == [[False, True]]
    assert np.asarray(figure.axes[1].images[-1].get_alpha())[0, 1] == 0


def test_views_titles_and_given_axes():
    figure = show_map(
        np.ones((2, 2)), np.ones((2, 2)), views=["overlay", "map"], title="digit", label="η", colour_bar=False
    )
    assert [axis.get_title() for axis in figure.axes] == ["overlay", "|η|"]
    assert figure.get_suptitle() == "digit"
    own = Figure()
    axes = own.subplots(1, 2)
    assert show_map(np.ones((2, 2)), np.ones((2, 2)), views=["image", "map"], axes=axes, title="one") is own
    assert [axis.get_title() for axis in axes] == ["one", "|PLIS|"]
    assert show_map(np.ones((2, 2)), np.ones((2, 2)), views=["map"], axes=axes[1]) is own
    parts = own.subfigures(1, 2)
    assert show_map(np.ones((2, 2)), np.ones((2, 2)), views=["map"], axes=parts[0].subplots(), colour_bar=False) is own
    with pytest.raises(ValueError, match=r"axes has 2 axes for 3 views"):
        show_map(np.ones((2, 2)), np.ones((2, 2)), axes=axes)
    assert bar_of(show_map(np.ones((2, 2)), np.ones((2, 2)), views=["image"])) is None


@pytest.mark.parametrize(
    ("image", "heat", "message"),
    [
        (np.ones((8, 1, 4, 4)), np.ones((8, 1, 4, 4)), r"\[8, 1, 4, 4\], a batch; .*take image\[i\], or gallery"),
        (np.ones((2, 4, 4)), np.ones((4, 4)), r"\[2, 4, 4\].*1 or 3 channels: choose the channels"),
        (np.ones(4), np.ones(4), r"shape \[4\]"),
        (np.ones((0, 4)), np.ones((0, 4)), r"\[0, 4\], which holds no pixels"),
        (np.ones((3, 4, 5)), np.ones((5, 4)), r"attribution has shape \[5, 4\] and image \[3, 4, 5\].*or \[4, 5\]"),
        (np.ones((3, 4, 5)), np.ones((4, 5, 3)), r"attribution has shape \[4, 5, 3\] and image \[3, 4, 5\]"),
        (np.ones((2, 2)), np.full((2, 2), np.nan), r"attribution holds nan at \[0, 0\] \(4 of 4 values"),
        (np.ones((2, 2)), [[0, 1], [0, np.inf]], r"attribution holds inf at \[1, 1\].*drop"),
        ([[0, np.nan]], np.ones((1, 2)), r"image holds nan at \[0, 1\]"),
    ],
)
def test_wrong_arrays_are_refused_by_shape_reason_and_remedy(image, heat, message):
    with pytest.raises(ValueError, match=message):
        show_map(image, heat)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "positive"}, "mode='positive'"),
        ({"views": []}, r"views=\[\]"),
        ({"views": ["heat"]}, "views=.*heat"),
        ({"alpha": 0}, "alpha=0"),
        ({"limit": 0}, "limit=0 .*leave it out"),
        ({"outlier_percentile": 100}, "outlier_percentile=100"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        show_map(np.ones((2, 2)), np.ones((2, 2)), **options)


# gallery


def shown(figure, mark="xlabel"):
    return [getattr(axis, f"get_{mark}")() for axis in figure.axes if axis.images and getattr(axis, f"get_{mark}")()]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("maps", [False, True])
def test_a_gallery_shows_the_extremes_and_none_twice(n, count, maps):
    scores = np.random.default_rng(n).permutation(n).astype(float)
    images = noise(n, 1, 3, 3)
    figure = gallery(images, scores, count=count, attributions=images if maps else None)
    order = [str(i) for i in np.argsort(-scores)]
    most = min(count, (n + 1) // 2)
    least = min(count, n - most)
    assert shown(figure) == order[:most] + order[::-1][:least]
    assert shown(figure, "title") == [str(int(scores[int(i)])) for i in shown(figure)]
    rows = ["most exposed"] + ["least exposed"] * (n > 1)
    assert [text for text in shown(figure, "ylabel") if "exposed" in text] == rows
    assert sum(len(axis.images) == 2 for axis in figure.axes) == maps * (most + least)


def test_a_bound_is_low_for_the_most_exposed_and_may_be_infinite():
    figure = rendered(
        gallery(
            torch.rand(3, 4, 4), [np.inf, 0.5, 2.0], ids=["a$b$", "_x", "patient_000123_scan_2"], higher="less exposed"
        )
    )
    assert shown(figure) == ["_x", "patient_000123_\nscan_2", "a$b$"]
    assert shown(figure, "title") == ["0.5", "2", "∞"]


def test_a_gallery_of_tensors_and_of_lists_of_different_sizes():
    scores = torch.tensor([1.0, 2.0], requires_grad=True)
    images = [torch.rand(3, 4, 4, requires_grad=True), torch.rand(1, 6, 5)]
    figure = rendered(gallery(images, scores, attributions=images, mode="signed"))
    assert shown(figure) == ["1", "0"]


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (3, {}, "images has 2 entries for 3 scores"),
        (2, {"ids": ["a"]}, "ids has 1 entries for 2 scores"),
        (2, {"attributions": np.ones((1, 3, 3))}, "attributions has 1 entries"),
        (2, {"count": 0}, "count=0"),
        (2, {"higher": "better"}, "higher='better'"),
        (2, {"mode": "x"}, "mode='x'"),
        (0, {}, r"scores must be .*got shape \[0\]"),
    ],
)
def test_a_gallery_refuses_what_does_not_match(n, options, message):
    with pytest.raises(ValueError, match=message):
        gallery(np.ones((2, 3, 3)), np.ones(n), **options)


def test_a_gallery_refuses_scores_without_an_order():
    with pytest.raises(ValueError, match=r"scores holds NaN at \[1\]; drop"):
        gallery(np.ones((2, 3, 3)), [1.0, np.nan])


# bar_chart


def bars(figure):
    return [bar.get_width() for bar in figure.axes[0].patches]


def ticks(figure):
    return [text.get_text() for text in figure.axes[0].get_yticklabels()]


def test_bars_are_sorted_by_magnitude_with_a_note_for_the_rest():
    figure = rendered(bar_chart([1.0, -3.0, 0.5, 2.0, -0.25], list("abcde"), top=3, unit="1/year", title="columns"))
    assert bars(figure) == [-3, 2, 1]
    assert ticks(figure) == ["b", "d", "a", "… 2 more, each within ±0.5"]
    assert figure.axes[0].get_xlabel() == "PLIS (1/year)"
    low, high = figure.axes[0].get_ylim()
    assert low > high  # the first on top
    colours = [bar.get_facecolor() for bar in figure.axes[0].patches]
    assert colours[1] == colours[2] != colours[0]


def test_bars_in_the_order_given():
    figure = bar_chart(torch.tensor([1.0, 3.0, 2.0]), ["a", "b", "c"], top=2, sort=False)
    assert bars(figure) == [1, 3]
    assert ticks(figure)[-1] == "… 1 more, each at most 2"


def test_long_names_stay_inside_the_figure():
    names = ["x" * 100, "education: some college, no degree, or an associate vocational programme", "$a$_b", "_c"]
    figure = bar_chart([4, 3, 2, 1], names)
    figure.draw_without_rendering()
    edge = figure.bbox
    for text, name in zip(figure.axes[0].get_yticklabels(), names, strict=True):
        box = text.get_window_extent()
        assert box.x0 >= edge.x0 - 1
        assert box.x1 <= edge.x1 + 1
        assert text.get_text().replace("\n", "").replace(" ", "") == name.replace(" ", "")
    boxes = [text.get_window_extent() for text in figure.axes[0].get_yticklabels()]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def whisker_ends(figure):
    (lines,) = [c for c in figure.axes[0].collections if hasattr(c, "get_segments")]
    return [sorted(point[0] for point in segment) for segment in lines.get_segments()]


def test_whiskers():
    figure = rendered(bar_chart([1.0, -2.0], ["a", "b"], errors=[0.5, 0.25]))
    assert whisker_ends(figure) == [[-2.25, -1.75], [0.5, 1.5]]
    figure = rendered(bar_chart([1.0, -2.0], ["a", "b"], intervals=[[0, 1.5], [-4, -2]]))
    assert whisker_ends(figure) == [[-4, -2], [0, 1.5]]


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [1e-12], [-5.0]])
def test_few_or_zero_bars(values):
    figure = rendered(bar_chart(values, range(len(values))))
    assert bars(figure) == values


@pytest.mark.parametrize(
    ("values", "names", "options", "message"),
    [
        ([1.0], ["a", "b"], {}, "names has 2 entries for 1 values"),
        ([], [], {}, r"values must be .*got shape \[0\]"),
        ([[1.0]], ["a"], {}, r"got shape \[1, 1\]"),
        ([np.nan], ["a"], {}, "values holds nan"),
        ([1.0], ["a"], {"top": 0}, "top=0"),
        ([1.0], ["a"], {"errors": [-1.0]}, "errors must be ≥ 0, got -1"),
        ([1.0], ["a"], {"errors": [1.0, 2.0]}, "errors has 2 entries for 1"),
        ([1.0], ["a"], {"errors": [1.0], "intervals": [[0, 2]]}, "pass one of them"),
        ([1.0], ["a"], {"intervals": [[2, 3]]}, r"values\[0\]=1 lies outside its interval \[2, 3\]"),
        ([1.0], ["a"], {"intervals": [1.0]}, r"intervals must have shape \[1, 2\]"),
    ],
)
def test_bars_refuse_what_does_not_match(values, names, options, message):
    with pytest.raises(ValueError, match=message):
        bar_chart(values, names, **options)


# distribution


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_curve_is_the_empirical_distribution():
    figure = rendered(distribution(torch.tensor([3.0, 1.0, 2.0, 2.0]), threshold=2.0, threshold_label="guess"))
    axis = figure.axes[0]
    assert axis.get_xscale() == "log"
    x, y = axis.lines[0].get_data()
    np.testing.assert_allclose(x, [1, 1, 2, 2, 3, 3])
    np.testing.assert_allclose(y, [0, 0.25, 0.5, 0.75, 1, 1])
    assert legend(figure) == ["all (n = 4)", "guess 2 (75 % at or below)"]


def test_what_has_no_place_on_the_axis_is_counted():
    figure = rendered(distribution([0.0, 1.0, np.inf, np.inf]))
    x, y = figure.axes[0].lines[0].get_data()
    assert list(y) == [0.25, 0.5, 0.5]
    assert np.isfinite(x).all()
    assert legend(figure) == ["all (n = 4, 1 at zero, 2 at ∞)"]
    assert legend(distribution([0.0, 1.0], log=False)) == ["all (n = 2)"]


def test_groups_differ_in_colour_and_line_style():
    groups = ["b", "_a", "b", "$c$"]
    figure = rendered(distribution([1.0, 2.0, 3.0, np.inf], groups=groups))
    assert legend(figure) == ["$c$ (n = 1, 1 at ∞)", "_a (n = 1)", "b (n = 2)"]
    lines = figure.axes[0].lines
    assert len({line.get_color() for line in lines}) == len({line.get_linestyle() for line in lines}) == 3
    many = rendered(distribution(np.arange(1.0, 29.0), groups=[*range(27), "mixed"])).axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in many}) == 28


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([-1.0, 1.0], {}, "values holds -1, .*log=False"),
        ([1.0], {"threshold": 0.0}, "threshold=0.0 .*log=False"),
        ([0.0, np.inf], {}, "1 of 2 are zero and 1 infinite; pass log=False"),
        ([np.nan], {}, r"values holds NaN at \[0\]"),
        ([1.0], {"groups": ["a", "b"]}, "groups has 2 entries for 1 values"),
        (range(1, 31), {"groups": range(30)}, "30 groups cannot be drawn in distinct styles; merge them into 28"),
    ],
)
def test_distributions_refuse_what_cannot_be_drawn(values, options, message):
    with pytest.raises(ValueError, match=message):
        distribution(values, **options)


# all


def test_wrapped_text_keeps_every_character():
    assert wrapped("a b", 3) == "a b"
    assert wrapped("aaaa bbbb", 4) == "aaaa\nbbbb"
    assert wrapped("abcdefgh", 3) == "abc\ndef\ngh"
    assert wrapped("", 3) == ""


def test_figures_show_in_notebooks_and_are_unknown_to_pyplot():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = pyplot.get_fignums()
    figures = [
        show_map(np.ones((2, 2)), np.ones((2, 2))),
        gallery(np.ones((1, 2, 2)), [1.0]),
        bar_chart([1.0], ["a"]),
        distribution([1.0]),
    ]
    assert pyplot.get_fignums() == before
    assert all(isinstance(figure, Figure) and figure._repr_png_().startswith(b"\x89PNG") for figure in figures)


def test_importing_needs_no_matplotlib_drawing_says_how_to_get_it_and_leaves_pyplot_alone():
    code = """
import sys
sys.modules["matplotlib"] = None
from torchfil import viz
for draw in (lambda: viz.bar_chart([1.0], ["a"]), lambda: viz.show_map([[1.0]], [[1.0]])):
    try:
        draw()
    except ImportError as error:
        assert "pip install 'torchfil[report]'" in str(error), error
    else:
        raise AssertionError("drawn without matplotlib")
del sys.modules["matplotlib"]
viz.show_map([[1.0]], [[1.0]])._repr_png_()
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
