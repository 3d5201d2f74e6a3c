"""Lightning's metrics and Hugging Face's image models import torchvision, which may lack its compiled part."""

import sys
from importlib.util import find_spec
from pathlib import Path

from opacus_suite.vision import import_torchvision

# ranks of Lightning and Hugging Face run as the others do
sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("distributed", "engine")]

if find_spec("torchvision") is not None:
    import_torchvision()
