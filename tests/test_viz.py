"""Pictures, by what their artists hold."""

import io
import sys
import warnings

import numpy as np
import pytest
import torch

from tests.refused import all_refused
from torchfil.viz import common, distribution, gallery, show_map

ONES = np.ones((2, 2))


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def rendered(figure):
    """Draws the figure, so that what matplotlib finds out only then is tested too."""
    figure.savefig(io.BytesIO(), format="png", dpi=20)
    return figure


@pytest.mark.parametrize(("mode", "shape"), [("absolute", (3, 6, 7)), ("signed", (6, 7, 3))])
def test_map_and_overlay_hold_the_attribution_clipped_to_the_limits(mode, shape):
    heat, image = np.random.default_rng(0).normal(size=(2, *shape))
    figure = rendered(show_map(torch.tensor(image, requires_grad=True), heat, mode=mode))
    expected = heat.sum(2) if mode == "signed" else np.sqrt((heat**2).sum(0))
    limit = np.sort(np.abs(expected).ravel())[int(np.ceil(0.98 * 41))]
    for artist in (figure.axes[1].images[0], figure.axes[2].images[1]):
        np.testing.assert_allclose(artist.get_array(), np.clip(expected, -limit, limit), rtol=1e-12)
        assert artist.get_clim() == pytest.approx((-limit if mode == "signed" else 0, limit))
    assert figure.axes[3].get_ylabel() == ("|PLIS|" if mode == "absolute" else "PLIS")


def test_blanks_and_scales():
    hidden = np.array([[[3.0, np.nan]], [[4.0, np.nan]], [[np.nan, np.nan]]])  # not private
    drawn = show_map(np.full((3, 1, 2), 0.5), hidden).axes[1].images[-1].get_array()
    assert drawn[0, 0] == pytest.approx(5.0)
    assert np.ma.getmaskarray(drawn).tolist() == [[False, True]]
    scaled = show_map(np.array([[-1.0, 0.0, 3.0]]), np.ones((1, 3))).axes[0].images[0]
    np.testing.assert_allclose(scaled.get_array(), [[0, 0.25, 1]])


def shown(figure):
    return [axis.get_xlabel() for axis in figure.axes if axis.images and axis.get_xlabel()]


@pytest.mark.parametrize(("n", "count"), [(3, 1), (5, 4)])
def test_a_gallery_shows_the_extremes_and_none_twice(n, count):
    scores = np.random.default_rng(n).permutation(n).astype(float)
    images = np.random.default_rng(0).normal(size=(n, 1, 3, 3))
    figure = rendered(gallery(images, scores, count=count, attributions=images))
    order = [str(i) for i in np.argsort(-scores)]
    most = min(count, (n + 1) // 2)
    assert shown(figure) == order[:most] + order[::-1][: min(count, n - most)]
    bound = gallery(
        torch.rand(3, 4, 4), [np.inf, 0.5, 2.0], ids=["a$b$", "_x", "c"], higher="less exposed"
    )
    assert shown(bound) == ["_x", "c", "a$b$"]


def test_the_curve_is_the_empirical_distribution():
    def legend(figure):
        return [text.get_text() for text in figure.legends[0].get_texts()]

    figure = distribution(
        torch.tensor([3.0, 1.0, 2.0, 2.0]), threshold=2.0, threshold_label="guess"
    )
    x, y = figure.axes[0].lines[0].get_data()
    np.testing.assert_allclose(x, [1, 1, 2, 2, 3, 3])
    np.testing.assert_allclose(y, [0, 0.25, 0.5, 0.75, 1, 1])
    assert legend(figure) == ["all (n = 4)", "guess 2 (75 % at or below)"]
    figure = distribution([0.0, 1.0, np.inf, np.inf], groups=["b", "$c$", "b", "b"])
    assert legend(rendered(figure)) == ["$c$ (n = 1)", "b (n = 3, 1 at zero, 2 at ∞)"]


def test_what_cannot_be_drawn_is_refused():
    refused = {
        "gallery takes several": lambda: show_map(np.ones((8, 1, 4, 4)), np.ones((8, 1, 4, 4))),
        "attribution is not finite": lambda: show_map(ONES, [[0, 1], [0, np.inf]]),
        "values holds -1": lambda: distribution([-1.0, 1.0]),
    }
    all_refused(refused)


def test_drawing_says_how_to_get_matplotlib_and_leaves_pyplot_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    assert show_map([[1.0]], [[1.0]])._repr_png_().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    common._figure_class.cache_clear()
    with pytest.raises(ImportError, match="pip install"):
        distribution([1.0])
