"""Pictures of leakage: which pixels, which examples, which columns, how many examples.

Pure functions of arrays (numpy or torch, any device) that return a matplotlib figure; pyplot's list of open figures is
not touched, so nothing needs closing. The figure shows in notebooks and has ``savefig``. Needs matplotlib:
``pip install 'torchfil[report]'``.

The pictures show private examples and numbers that depend on them, and are confidential like those.
"""

from torchfil.viz.charts import bar_chart, distribution
from torchfil.viz.images import gallery, show_map

__all__ = ["bar_chart", "distribution", "gallery", "show_map"]
