"""The papers' data sets from their publishers' own files, and small stand-ins if there are none.

Nothing is downloaded unless you pass ``download=True``. :func:`data_folder` describes where files are looked for,
:data:`SOURCES` where each data set comes from and under what licence.
"""

from torchfil.datasets.census import adult
from torchfil.datasets.digits import mnist, mnist_zero_one, read_idx
from torchfil.datasets.downloads import download
from torchfil.datasets.folders import DataFormatError, DataNotFoundError, data_folder
from torchfil.datasets.photographs import cifar10, cifar_plane_car
from torchfil.datasets.pickles import load_plain_pickle
from torchfil.datasets.readers import Readers, is_at_hand, real_or_stand_in
from torchfil.datasets.resident import ResidentDataset
from torchfil.datasets.sources import SOURCES, Source, SourceFile, source
from torchfil.datasets.tasks import BinaryTask, TabularTask
from torchfil.datasets.warfarin import iwpc
from torchfil.datasets.xrays import chest_xrays

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
