"""Where each data set comes from, where its files are on this machine, and downloads checked against checksums."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


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
        files=(SourceFile("iwpc/PS206767-553247439.csv"),),
        note="iwpc/iwpc-scaled.csv of Yeom et al. 2018 (MIT licence), or the sheet Subject Data of the consortium's "
        "spreadsheet as CSV; by hand",
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


Folder = str | os.PathLike[str] | None


class DataNotFoundError(FileNotFoundError):
    """The data set's files were not found."""


class DataFormatError(ValueError):
    """A file is not in its publisher's format: it is truncated, damaged, or another file."""


def data_folder(folder: Folder = None, *, create: bool = False) -> Path:
    """The given folder; without one, that of ``TORCHFIL_DATA``, ``../shared/data`` if it exists, or the user's cache.

    The cache is ``$XDG_CACHE_HOME/torchfil`` or ``~/.cache/torchfil``.

    Args:
        folder: The folder; None: as above.
        create: Whether to create it if it does not exist, for a download.

    Raises:
        DataNotFoundError: It does not exist, and ``create`` is false.
    """
    shared = Path("../shared/data")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchfil"
    named = folder if folder is not None else os.environ.get("TORCHFIL_DATA")
    path = Path(named) if named is not None else shared if shared.is_dir() else cache
    if create:
        path.mkdir(parents=True, exist_ok=True)

    if path.is_dir():
        return path
    raise DataNotFoundError(
        f"no data folder {path}: pass it, set the environment variable TORCHFIL_DATA to the folder that holds "
        "MNIST/raw, pneumoniamnist, cifar10, adult and iwpc, or pass download=True if this machine may download"
    )


def not_found(name: str, looked_for: Sequence[Path]) -> DataNotFoundError:
    """The error that names the missing files and the page they come from."""
    origin = source(name)
    listed = " nor ".join(str(path) for path in looked_for)
    sentence = f"neither {listed} exists" if len(looked_for) > 1 else f"{listed} does not exist"
    remedy = "pass download=True, or get it" if origin.downloadable else "get it"
    return DataNotFoundError(f"{sentence}: {remedy} from {origin.page} ({origin.name}, licence: {origin.licence})")


def first_existing(name: str, candidates: Sequence[Path]) -> Path:
    """The first of these paths that exists; raises :class:`DataNotFoundError` if none does."""
    for path in candidates:
        if path.exists():
            return path
    raise not_found(name, candidates)


def content(name: str, path: Path) -> bytes:
    """The content of the file, or of the same file with ``.gz`` at the end of its name, unpacked.

    Args:
        name: The data set's name, for the error.
        path: The path without ``.gz``.

    Raises:
        DataNotFoundError: Neither file exists.
        DataFormatError: The gzip file is damaged.
    """
    existing = first_existing(name, (path, path.with_name(f"{path.name}.gz")))
    return existing.read_bytes() if existing == path else unpacked(existing)


def unpacked(path: Path) -> bytes:
    """The content of a gzip file.

    Raises:
        DataFormatError: The file is damaged.
    """
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataFormatError(f"{path} is not a complete gzip file ({error}); copy or download it again") from error


def download(name: str, folder: Folder = None, *, progress: bool = False) -> Path:
    """Download the missing files of a data set into the data folder; needs pooch.

    Args:
        name: One of :data:`torchfil.datasets.SOURCES`.
        folder: As for :func:`torchfil.datasets.data_folder`; created if it does not exist.
        progress: Whether to show a progress bar for each file.

    Returns:
        The data folder.

    Raises:
        ValueError: A file has no known address or no certain checksum; the message names the page.
        DataFormatError: A downloaded file does not match its checksum; it is removed.
        ImportError: pooch is not installed.
    """
    origin = source(name)
    if not origin.downloadable:
        raise ValueError(
            f"{origin.name} cannot be downloaded automatically: get {', '.join(file.path for file in origin.files)} "
            f"from {origin.page} into {folder if folder is not None else 'the data folder'} ({origin.note})"
        )
    root = data_folder(folder, create=True)
    for file in origin.files:
        if not (root / file.path).exists():
            _download_file(file, root, progress)
    return root


def _download_file(file: SourceFile, root: Path, progress: bool) -> None:
    """Download a file next to its place, and move it there if the checksum is right: a wrong file is never used."""
    try:
        import pooch
    except ImportError as error:
        raise ImportError("downloads need pooch, which is not installed: pip install 'torchfil[data]'") from error
    target = root / file.path
    arriving = target.with_name(f"{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    arriving.unlink(missing_ok=True)  # left by an interrupted download
    try:
        pooch.retrieve(file.url, known_hash=None, fname=arriving.name, path=arriving.parent, progressbar=progress)
        arrived = checksum_of(arriving, file)
        if arrived != file.checksum:
            raise DataFormatError(
                f"{file.url} returned a file with {arrived}, not {file.checksum}: it changed in transit or its "
                "publisher changed it, so it was not kept"
            )
        arriving.replace(target)
    finally:
        arriving.unlink(missing_ok=True)


def checksum_of(path: Path, file: SourceFile) -> str:
    """The checksum of the file at ``path``, of the same kind as that of ``file`` (sha256 if it has none)."""
    kind = "sha256" if file.checksum is None else file.checksum.partition(":")[0]
    digest = hashlib.new(kind, unpacked(path) if file.checksum_of == "content" else path.read_bytes())
    return f"{kind}:{digest.hexdigest()}"
