"""The most exposed texts, word by word. Never part of a redacted report."""

from __future__ import annotations

import math

import numpy as np

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, number, table, tag

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """Each text with its words shaded by their η; None where words were not saved."""
    texts = report.run.texts if report.run is not None else None
    if report.run is None or texts is None:
        return None
    highest = float(np.nanmax(texts.fil)) or 1.0
    rows = []
    for row, words, fil in zip(texts.rows, texts.words, texts.fil, strict=True):
        worst = int(np.nanargmax(fil[: len(words)]))
        shaded = [[_shaded(word, float(value), highest), " "] for word, value in zip(words, fil, strict=False)]
        rows.append([str(report.run.ids[row]), tag("span", shaded, class_="text"), _named(words[worst], fil[worst])])
    return join(
        paragraph(
            "The darker a word, the more of its embedding leaks. An unbiased attacker who sees every noisy gradient "
            "and knows all other words of the text, its label and all other examples guesses the embedding with a mean "
            "squared error per coordinate of at least 1/η², on average over the noise. Somebody who knows which words "
            "are usual can guess better, with bias. Estimates from one run."
        ),
        table(["Example", "its words", "the most exposed word"], rows),
        paragraph(f"The darkest word of the table has η = {number(highest)}.", class_="note"),
    )


def _shaded(word: str, fil: float, highest: float) -> Markup:
    """A word on a ground that is as dark as its η is large."""
    share = 0.0 if math.isnan(fil) else fil / highest
    return tag("span", word, class_="word", style=f"--share: {100 * share:.0f}%", title=f"η = {number(fil)}")


def _named(word: str, fil: float) -> str:
    return f"{word}: η = {number(float(fil))}"
