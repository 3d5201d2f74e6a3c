"""Lightning's metrics and Hugging Face's image models import torchvision, which may lack its compiled part."""

from importlib.util import find_spec

from tests.opacus_suite.vision import import_torchvision

if find_spec("torchvision") is not None:
    import_torchvision()
