"""What a page is made of: packed columns, pictures, numbers."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import numpy as np
import pytest

from torchfil.report.examples import as_data_url, overlay, thumbnail
from torchfil.report.formats import number


def test_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for shape in ((5, 7), (5, 7, 3)):
        pixels = rng.integers(256, size=shape, dtype=np.uint8)
        (tmp_path / "x.png").write_bytes(base64.b64decode(as_data_url(pixels).split(",")[1]))
        np.testing.assert_array_equal(np.asarray(image.open(tmp_path / "x.png")), pixels)
    heat = np.array([[1.0, -1.0, 0.0]])
    over = overlay(np.full((1, 3), 255, np.uint8), heat).astype(int)[0]
    assert over[0, 0] > over[0, 2]  # orange
    assert over[1, 2] > over[1, 1]  # purple
    assert over[2].tolist() == [255, 255, 255]  # nothing: the image, paled
    assert thumbnail(np.full((300, 200, 3), 9, np.uint8)).shape == (100, 66, 3)
    assert thumbnail(np.full((30, 20), 9, np.uint8)).shape == (30, 20)


def test_numbers_keep_their_size() -> None:
    for value in (1e-9, 0.000999, 0.00999999, 0.5, 999.9, 99_999.0, 123_456.0):
        text = number(value).replace("\u00a0", " ").replace(",", "")
        match = re.fullmatch(r"(?:([\d.]+)( × )?)?(?:(?<![\d.])10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?", text)
        assert match is not None, text
        power = int((match[3] or "0").translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")))
        assert float(match[1] or 1) * 10.0**power == pytest.approx(value, rel=6e-3)
