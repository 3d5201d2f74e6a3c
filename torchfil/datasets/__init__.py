"""The papers' data sets from their publishers' own files, and small stand-ins if there are none.

Nothing is downloaded unless you pass ``download=True``. :func:`data_folder` describes where files are looked for,
:data:`SOURCES` where each data set comes from and under what licence.
"""

from torchfil.datasets.files import (
    SOURCES,
    DataFormatError,
    DataNotFoundError,
    Source,
    SourceFile,
    data_folder,
    download,
    source,
)
from torchfil.datasets.pickles import load_plain_pickle
from torchfil.datasets.pictures import (
    BinaryTask,
    ResidentDataset,
    chest_xrays,
    cifar10,
    cifar_plane_car,
    mnist,
    mnist_zero_one,
    read_idx,
)
from torchfil.datasets.readers import Readers, is_at_hand, real_or_stand_in
from torchfil.datasets.tables import TabularTask, adult, iwpc

__all__ = [
    "SOURCES",
    "BinaryTask",
    "DataFormatError",
    "DataNotFoundError",
    "Readers",
    "ResidentDataset",
    "Source",
    "SourceFile",
    "TabularTask",
    "adult",
    "chest_xrays",
    "cifar10",
    "cifar_plane_car",
    "data_folder",
    "download",
    "is_at_hand",
    "iwpc",
    "load_plain_pickle",
    "mnist",
    "mnist_zero_one",
    "read_idx",
    "real_or_stand_in",
    "source",
]
