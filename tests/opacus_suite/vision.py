"""torchvision beside a torch it was not compiled for: Opacus's tests use its Python part only."""

from __future__ import annotations

import importlib

import torch

# What torchvision describes on import whether or not its compiled library could be loaded.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_library: torch.library.Library | None = None  # kept alive: operators go when their library does


def import_torchvision() -> None:
    """Import torchvision.

    Where its compiled library needs CUDA, declare the operators that it would have brought.

    The package index has torchvision for Linux x86_64 compiled against CUDA only. Beside a CPU
    torch that library does not load and the import ends in "operator torchvision::nms does not
    exist"; declared operators let it go on. Models, transforms and data sets need none of them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _forget_torchvision()
        global _library
        _library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            _library.define(schema)
        importlib.import_module("torchvision")


def _forget_torchvision() -> None:
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
