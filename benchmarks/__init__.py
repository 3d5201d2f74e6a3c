"""What the accounting costs: ``python -m benchmarks``; the papers' figures: ``python -m reproduction``."""

import sys
from pathlib import Path

_EXAMPLES = str(Path(__file__).parents[1] / "examples")
if _EXAMPLES not in sys.path:  # benchmarks share the examples' data and networks; those are scripts, not a package
    sys.path.append(_EXAMPLES)
