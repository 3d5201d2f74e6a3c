"""Modules that need a package that is not everywhere are not collected where it is not installed."""

from importlib.util import find_spec

collect_ignore: list[str] = []
if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    collect_ignore += ["torchfil/integrations/lightning.py"]
if find_spec("transformers") is None or find_spec("accelerate") is None:
    collect_ignore += ["torchfil/integrations/huggingface.py"]
if find_spec("triton") is None:
    collect_ignore += ["torchfil/fisher/rules/kernels.py"]
