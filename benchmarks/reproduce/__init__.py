"""Every table and figure of the four papers, measured here: ``python -m benchmarks.reproduce``."""

import sys
from pathlib import Path

_EXAMPLES = str(Path(__file__).parents[2] / "examples")
if _EXAMPLES not in sys.path:  # the examples compute most of the figures; they are scripts, not a package
    sys.path.append(_EXAMPLES)
