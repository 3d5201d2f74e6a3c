"""The most exposed texts, token by token: FIL and PLIS. Never part of a redacted report.

A token's colour is as strong as its share of what leaks about its text. The share is told without colour too: by the
line under the token, by numbers at the three largest (which keyboards reach), and in a table.
"""

from __future__ import annotations

import numpy as np

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, number, percent, table, tag
from torchfil.report.page.wording import origin

__all__ = ["render", "shares_of"]

NUMBERED = 3  # tokens of a text, by their share
LINES = ((0.3, 3), (0.15, 2), (0.05, 1))  # from this share on, so many pixels of a line under the token


def render(report: Report) -> Markup | None:
    """Each text with its tokens shaded by their share of its FIL, and of its PLIS; None where none were saved."""
    texts = report.run.texts if report.run is not None else None
    if report.run is None or texts is None:
        return None

    blocks = []
    for place, (row, words) in enumerate(zip(texts.rows, texts.words, strict=True)):
        fil = np.asarray(texts.fil[place][: len(words)], dtype=np.float64)
        plis = None if texts.plis is None else np.asarray(texts.plis[place][: len(words)], dtype=np.float64)
        blocks.append(_text(str(report.run.ids[row]), words, fil, plis))

    # who is bound by the one number, and that the other binds nobody
    return join(
        paragraph(
            "The colour of a token is the stronger, and the line under it the thicker, the larger its share of what "
            "leaks about its text; the three largest are numbered. FIL, of the whole training: the Fisher information "
            "of the token’s embedding over that of all tokens. An unbiased attacker who sees every noisy gradient and "
            "knows all other tokens of the text, its label and all other examples guesses the embedding with a mean "
            "squared error per coordinate of at least 1/η², on average over repeated trainings. Somebody who knows "
            f"which words are usual can guess better, with bias. The number is {origin(report)}."
        ),
        None
        if texts.plis is None
        else paragraph(
            "PLIS is the size of the derivative of the example’s privacy loss by the token’s embedding, at the weights "
            "when the run was saved: what drives the loss, no bound on anybody."
        ),
        blocks,
    )


def shares_of(sizes: np.ndarray) -> np.ndarray:
    """s_t² / Σ s², [T]: of Fisher information for η_t, of ‖PLIS‖² for PLIS; 0 where nothing is known.

    Example:
        >>> shares_of(np.array([3.0, 4.0, np.nan])).tolist()
        [0.36, 0.64, 0.0]
    """
    squares = np.nan_to_num(np.asarray(sizes, dtype=np.float64)) ** 2
    total = squares.sum()
    return squares / total if total > 0 else squares


def _text(name: str, words: list[str], fil: np.ndarray, plis: np.ndarray | None) -> Markup:
    """One text: by FIL, by PLIS where it is known, and as a table."""
    maps = [("FIL", "η", fil), *([("PLIS", "‖PLIS‖", plis)] if plis is not None else [])]
    lines = [
        tag("p", tag("span", f"{title} ", class_="note"), _shaded(words, sizes, symbol), class_="text")
        for title, symbol, sizes in maps
    ]
    return join(
        tag("h3", name),
        lines,
        tag("details", tag("summary", "The numbers, by token"), _numbers(words, maps)),
    )


def _shaded(words: list[str], sizes: np.ndarray, symbol: str) -> list[list[Markup | str]]:
    shares = shares_of(sizes)
    largest = float(shares.max(initial=0.0)) or 1.0
    numbered = [int(place) for place in np.argsort(-shares, kind="stable")[:NUMBERED] if shares[place] > 0]
    return [[_token(words, place, shares, largest, sizes, symbol, numbered), " "] for place in range(len(words))]


def _token(
    words: list[str],
    place: int,
    shares: np.ndarray,
    largest: float,
    sizes: np.ndarray,
    symbol: str,
    numbered: list[int],
) -> Markup:
    """A token on a ground as strong as its share over the text's largest; those that are numbered take the focus."""
    share = float(shares[place])
    told = f"{_percent(share)} of the text, {symbol} = {number(float(sizes[place]))}"
    line = next((width for least, width in LINES if share >= least), 0)
    style = f"--share: {100 * share / largest:.0f}%" + (f"; border-bottom: {line}px solid" if line else "")
    rank = numbered.index(place) + 1 if place in numbered else None
    return tag(
        "span",
        _visible(words[place]),
        tag("sup", str(rank)) if rank else None,
        class_="word",
        style=style,
        title=told,
        tabindex=0 if rank else None,
        role="img" if rank else None,
        aria_label=f"{_visible(words[place])}: {told}" if rank else None,
        data_told=told if rank else None,
    )


def _numbers(words: list[str], maps: list[tuple[str, str, np.ndarray]]) -> Markup:
    head = ["Token", *(cell for title, symbol, _ in maps for cell in (f"share of {title}", symbol))]
    shares = [shares_of(sizes) for _, _, sizes in maps]
    rows = [
        [
            f"{place + 1}. {_visible(word)}",
            *(
                cell
                for own, (_, _, sizes) in zip(shares, maps, strict=True)
                for cell in (_percent(float(own[place])), number(float(sizes[place])))
            ),
        ]
        for place, word in enumerate(words)
    ]
    return table(head, rows)


def _visible(word: str) -> str:
    """A token as it can be seen: without the blanks around it, and a sign for one that is nothing else."""
    return word.strip() or "␣"


def _percent(share: float) -> str:
    return "0 %" if share == 0 else percent(share)
