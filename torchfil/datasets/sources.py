"""Where each data set comes from: its page, its licence, its citation, and its files with their checksums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["SOURCES", "Source", "SourceFile", "source"]


@dataclass(frozen=True)
class SourceFile:
    """A file as its publisher offers it.

    Attributes:
        path: Its place in the data folder.
        url: Its download address; ``None`` if you must get it by hand from the source's page.
        checksum: ``"sha256:…"`` or ``"md5:…"``; ``None`` if no checksum is certain: it is then never downloaded.
        checksum_of: Whether the checksum is of the file itself or of a gzip file's content, which does not depend on
            how it was packed.
    """

    path: str
    url: str | None = None
    checksum: str | None = None
    checksum_of: Literal["file", "content"] = "file"


@dataclass(frozen=True)
class Source:
    """A data set's publisher.

    Attributes:
        name: The data set's name, as its publisher writes it.
        page: The publisher's page; read it before you use the data.
        licence: The licence, as the publisher states it; ``"see page"`` if we are not sure.
        citation: The work to cite.
        files: The files for the data folder.
        note: Anything else that you need to know.
    """

    name: str
    page: str
    licence: str
    citation: str
    files: tuple[SourceFile, ...]
    note: str = ""

    @property
    def downloadable(self) -> bool:
        """Whether every file has an address and a checksum."""
        return all(file.url is not None and file.checksum is not None for file in self.files)


def _mnist_file(name: str, sha256: str) -> SourceFile:
    url = f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz"
    return SourceFile(f"MNIST/raw/{name}.gz", url, f"sha256:{sha256}", "content")


_ADULT = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"

SOURCES: dict[str, Source] = {
    "mnist": Source(
        name="MNIST",
        page="http://yann.lecun.com/exdb/mnist/",
        licence="see page",
        citation="LeCun, Bottou, Bengio & Haffner: Gradient-based learning applied to document recognition. "
        "Proceedings of the IEEE 86(11), 1998",
        files=(
            _mnist_file("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
            _mnist_file("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
            _mnist_file("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
            _mnist_file("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
        ),
        note="the same folder as torchvision.datasets.MNIST's",
    ),
    "cifar10": Source(
        name="CIFAR-10",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="see page",
        citation="Krizhevsky: Learning multiple layers of features from tiny images. Technical report, 2009",
        files=(
            SourceFile(
                "cifar-10-python.tar.gz",
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                "md5:c58f30108f718f92721af3b95e74349a",  # that of torchvision
            ),
        ),
        note="read from the archive, packed as it is, or from torchvision's folder cifar-10-batches-py",
    ),
    "pneumoniamnist": Source(
        name="PneumoniaMNIST (MedMNIST)",
        page="https://medmnist.com",
        licence="CC BY 4.0",
        citation="Yang et al.: MedMNIST v2 – a large-scale lightweight benchmark for 2D and 3D biomedical image "
        "classification. Scientific Data 10, 2023",
        files=(
            SourceFile(
                "pneumoniamnist/pneumoniamnist.npz",
                "https://zenodo.org/record/6496656/files/pneumoniamnist.npz?download=1",
                "md5:28209eda62fecd6e6a2d98b1501bb15f",  # that of the package medmnist
            ),
        ),
    ),
    "adult": Source(
        name="Adult (UCI)",
        page="https://archive.ics.uci.edu/dataset/2/adult",
        licence="see page",
        citation="Becker & Kohavi: Adult. UCI Machine Learning Repository, 1996",
        files=(
            SourceFile(
                "adult/adult.data",
                f"{_ADULT}/adult.data",
                "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            ),
            SourceFile(
                "adult/adult.test",
                f"{_ADULT}/adult.test",
                "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
            ),
        ),
    ),
    "iwpc": Source(
        name="IWPC (warfarin doses)",
        page="https://www.clinpgx.org/downloads",
        licence="see page",
        citation="International Warfarin Pharmacogenetics Consortium: Estimation of the warfarin dose with clinical "
        "and pharmacogenetic data. New England Journal of Medicine 360, 2009",
        files=(SourceFile("iwpc/PS206767-553247439.xls"),),
        note="the consortium's spreadsheet, or iwpc/iwpc-scaled.csv of Yeom et al. 2018 (MIT licence), by hand",
    ),
}


def source(name: str) -> Source:
    """The source of a data set.

    Args:
        name: A key of :data:`SOURCES`.

    Raises:
        ValueError: There is no such data set.

    Example:
        >>> source("pneumoniamnist").licence
        'CC BY 4.0'
        >>> source("iwpc").downloadable
        False
    """
    if name not in SOURCES:
        raise ValueError(f"no data set {name!r}; there are {', '.join(SOURCES)}")
    return SOURCES[name]
