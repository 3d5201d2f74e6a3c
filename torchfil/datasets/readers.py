"""The data sets for an example: the real ones if their files are on this machine, else small stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from torchfil.datasets import pictures, stand_ins, tables
from torchfil.datasets.files import DataNotFoundError, Folder, data_folder, source
from torchfil.datasets.pictures import BinaryTask
from torchfil.datasets.tables import TabularTask

Images = Callable[..., tuple[Tensor, Tensor]]

# a data set is present if one of its paths exists
_MARKS = {
    "mnist": ("MNIST/raw/train-images-idx3-ubyte", "MNIST/raw/train-images-idx3-ubyte.gz"),
    "cifar10": ("cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar10/train.npz"),
    "pneumoniamnist": ("pneumoniamnist/pneumoniamnist.npz", "pneumoniamnist.npz"),
    "adult": ("adult/adult.data", "adult/adult.data.gz"),
    "iwpc": ("iwpc/iwpc-scaled.csv", "iwpc/iwpc-scaled.csv.gz", "iwpc/PS206767-553247439.csv"),
}
_REAL: dict[str, tuple[Any, ...]] = {
    "mnist": (pictures.mnist, pictures.mnist_zero_one),
    "cifar10": (pictures.cifar10, pictures.cifar_plane_car),
    "pneumoniamnist": (pictures.chest_xrays,),
    "adult": (tables.adult,),
    "iwpc": (tables.iwpc,),
}


@dataclass(frozen=True)
class Readers:
    """The functions of :mod:`torchfil.datasets`; each reads the real data or makes its stand-in.

    Attributes:
        made: The names of the data sets that are stand-ins.
    """

    mnist: Images
    mnist_zero_one: Callable[..., BinaryTask]
    cifar10: Images
    cifar_plane_car: Callable[..., BinaryTask]
    chest_xrays: Images
    adult: Callable[..., TabularTask]
    iwpc: Callable[..., TabularTask]
    made: frozenset[str]


def is_at_hand(name: str, folder: Folder = None) -> bool:
    """Whether the data folder has a data set's files, or at least some of them."""
    source(name)  # raises an error for an unknown name
    try:
        root = data_folder(folder)
    except DataNotFoundError:
        return False
    return any((root / mark).exists() for mark in _MARKS[name])


def real_or_stand_in(*names: str, folder: Folder = None, say: Callable[[str], None] = print) -> Readers:
    """Readers of these data sets; one printed line for each says which data it is.

    Args:
        names: Keys of :data:`torchfil.datasets.SOURCES`.
        folder: As for :func:`torchfil.datasets.data_folder`.
        say: A function that prints a line.

    Example:
        >>> data = real_or_stand_in("iwpc", folder="/nowhere")
        Data: a stand-in for IWPC (warfarin doses): 1,000 patients made up by rule. ...
        >>> data.iwpc().train_inputs.shape
        (800, 14)
    """
    made = frozenset(name for name in names if not is_at_hand(name, folder))
    functions = {}
    for name in _REAL:
        for function in _REAL[name]:
            stand_in = getattr(stand_ins, function.__name__)
            functions[function.__name__] = stand_in if name in made else partial(function, folder=folder)

    for name in names:
        origin = source(name)
        if name in made:
            say(
                f"Data: a stand-in for {origin.name}: {stand_ins.DESCRIPTIONS[name]}. Results will differ from the "
                f"papers'. For the real data, get the files from {origin.page} and set TORCHFIL_DATA."
            )
        else:
            say(f"Data: {origin.name}, from {data_folder(folder)}.")
    return Readers(**functions, made=made)
