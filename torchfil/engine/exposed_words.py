"""The most exposed texts word by word: how much of each word's embedding leaks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchfil.accounting.leakage import Leakage
from torchfil.report.saved_run import Texts

__all__ = ["exposed_words"]


def exposed_words(
    leakage: Leakage, texts: Sequence[Sequence[str]], max_length: int | None, fil: np.ndarray, count: int
) -> Texts | None:
    """η_t = sqrt(Σ_j I_jj / w) over the w private coordinates of word t, for the ``count`` most exposed examples.

    Args:
        leakage: The run's sums; the diagonal was tracked.
        texts: Every example's words, in the order of the data set, one for each position of its private tensor.
        max_length: How many positions are laid out; None: the longest text has them all.
        fil: η̄, [n].
        count: Of how many.

    Raises:
        ValueError: The diagonal was not tracked, or texts and coordinates do not fit.
    """
    positions = max_length or max(map(len, texts), default=0)
    if not {"diagonal", "fim"} & leakage.ledger.sums.keys():
        raise ValueError("texts= shows leakage by word, which needs make_private(track=('diagonal',))")
    if len(texts) != len(fil):
        raise ValueError(f"texts has {len(texts)} entries for {len(fil)} examples; give one for each, in order")
    longest = max(map(len, texts))
    if longest > positions or leakage.num_coordinates % max(1, positions):
        raise ValueError(
            f"texts of up to {longest} words do not fit {leakage.num_coordinates} private coordinates in {positions} "
            "positions; give one word for each position of the private embedding, special tokens included"
        )

    # who leaked nothing in this run is not among the most exposed
    rows = np.argsort(-fil, kind="stable")[:count]
    rows = rows[fil[rows] > 0]
    if not len(rows):
        return None
    ids = leakage.ids.all()
    diagonal = leakage.get_attribute_fil([ids[row] for row in rows]).value.double().square().cpu()
    by_word = diagonal.unflatten(1, (positions, -1)).mean(dim=2).sqrt().numpy()
    words = [[str(word) for word in texts[row]] for row in rows]
    for each, own in zip(by_word, words, strict=True):
        each[len(own) :] = np.nan
    return Texts(rows.astype(np.int64), words, by_word.astype(np.float32))
