"""Pictures of leakage: which pixels, which examples, how many examples.

Pure functions of arrays (numpy or torch, any device) that return a matplotlib figure. They do not
add to pyplot's list of open figures, so nothing needs closing. Notebooks show the figure, and it
has ``savefig``. Needs matplotlib: ``pip install 'torchfil[report]'``.

The pictures show private examples and numbers that depend on them: keep them as confidential as the
examples.
"""

from torchfil.viz.pictures import distribution, gallery, show_map

__all__ = ["distribution", "gallery", "show_map"]
