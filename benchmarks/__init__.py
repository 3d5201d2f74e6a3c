"""What the accounting costs: ``python -m benchmarks``.

The papers' figures: ``python -m reproduction``.
"""

import sys
from pathlib import Path

_EXAMPLES = str(Path(__file__).parents[1] / "examples")
# benchmarks share the examples' data and networks; those are scripts, not a package
if _EXAMPLES not in sys.path:
    sys.path.append(_EXAMPLES)
