"""Checkpoints as folders, by ``torch.distributed.checkpoint``: every rank writes and reads its part of each tensor.

A folder holds the file ``latest``, which names a subfolder with a complete checkpoint. A new checkpoint is written next
to it; when all ranks are done, ``latest`` is replaced and the old one removed. If a process is stopped at any time, the
last complete checkpoint therefore remains, and the next write removes the unfinished one. Tensors are stored under
their own names; everything else, and small tensors, form one more tensor of bytes. Reading cannot run code: only the
classes of metadata are unpickled.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import shutil
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from torchfil.engine.distributed.ranks import Ranks
from torchfil.engine.distributed.whole_file import check_stored
from torchfil.utils.files import lack_of_space_told, write_bytes

__all__ = ["is_folder", "read_folder", "write_folder"]

logger = logging.getLogger(__name__)

_LATEST = "latest"
_PREFIX = "checkpoint-"
_REST = "rest"  # the tensor with everything that is small
_SMALL = 4096  # bytes
_SUMS = ".crc32"  # the suffix of the file with another file's checksum
_PART = "tensor by the name of"  # marks a tensor in the rest
_KINDS = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
_OF_METADATA = {  # the classes it may contain, by module
    "torch.distributed.checkpoint.metadata": [
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    ],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.serialization": ["_get_layout"],
    "torch": ["Size", *_KINDS],
    "pathlib": ["PosixPath", "WindowsPath"],
    "pathlib._local": ["PosixPath", "WindowsPath"],
}


def is_folder(path: Any) -> bool:
    """Whether a path names a folder: an existing one, or a name that ends with a slash.

    Example:
        >>> is_folder("checkpoints/"), is_folder("checkpoint.pt")
        (True, False)
    """
    if not isinstance(path, str | os.PathLike):
        return False
    return os.fspath(path).endswith(("/", os.sep)) or Path(path).is_dir()


# ---------------------------------------------------------------------- writing


def write_folder(
    path: str | os.PathLike[str], tree: Mapping[str, Any], ranks: Ranks | None, *, asynchronous: bool
) -> Future[None] | None:
    """Write a tree of tensors and plain values as a folder's latest checkpoint (collective).

    Args:
        path: The folder.
        tree: Nested dicts and lists; values that are not sharded (a DTensor is) are written from rank 0.
        ranks: The processes; None: a single one.
        asynchronous: Whether to write while the caller continues; the tree may change as soon as this returns.

    Returns:
        A future that ends when the checkpoint is complete on the disk, and raises any error; None if it is complete.
    """
    name = f"{_PREFIX}{uuid.uuid4().hex[:12]}"
    name = name if ranks is None else ranks.objects(name)[0]
    writes_rest = ranks is None or ranks.rank == 0
    tensors: dict[str, Tensor] = {}
    rest = _taken_apart(tree, "", tensors)
    tensors = {key: value for key, value in tensors.items() if writes_rest or isinstance(value, DTensor)}
    if writes_rest:
        buffer = io.BytesIO()
        torch.save(rest, buffer)
        tensors[_REST] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    writer = _FolderWriter(Path(path), name, removes=writes_rest)
    options: dict[str, Any] = {"storage_writer": writer, "no_dist": ranks is None}
    options["process_group"] = None if ranks is None else ranks.saving_group
    if asynchronous:
        copies = {key: value.detach().clone() for key, value in tensors.items()}
        saved: Any = async_save(copies, **options)
        return writer.ended(getattr(saved, "upload_completion", saved))
    try:
        with _without_a_group_said():
            save(tensors, **options)
    except BaseException as error:
        writer.remove()
        raise _as_plain(error, path) from error
    return None


class _FolderWriter(FileSystemWriter):
    """Writes a new checkpoint next to the last one, and makes it the latest when all ranks are done.

    Args:
        folder: The folder of all checkpoints.
        name: The name of the new one.
        removes: Whether this process removes the files if writing fails.
    """

    def __init__(self, folder: Path, name: str, *, removes: bool) -> None:
        super().__init__(folder / name)
        self._folder, self._name, self._removes = folder, name, removes

    def prepare_local_plan(self, plan: Any) -> Any:
        """As in torch; only the owner may read the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / self._name).mkdir(mode=0o700, exist_ok=True)
        return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """As in torch, with checksums of the written files; a full disk is an ``OSError`` here, too."""
        with lack_of_space_told(self._folder):
            written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.value()}:
            file = self._folder / self._name / name
            Path(f"{file}{_SUMS}").write_text(str(_checksum(file)))
        return written

    def finish(self, metadata: Metadata, results: Any) -> None:
        """The last step, on rank 0, after all ranks have written."""
        super().finish(metadata, results)
        file = self._folder / self._name / ".metadata"
        write_bytes(f"{file}{_SUMS}", str(_checksum(file)).encode())
        write_bytes(self._folder / _LATEST, json.dumps({"checkpoint": self._name}).encode())
        self._removes = False
        for other in self._folder.glob(f"{_PREFIX}*"):
            if other.name != self._name:
                shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Remove the files of a checkpoint that cannot be completed."""
        if self._removes:
            shutil.rmtree(self._folder / self._name, ignore_errors=True)

    def ended(self, saved: Future[Any]) -> Future[None]:
        """Ends when a checkpoint is written or given up; if given up, its files are removed, and the log says so."""
        told: Future[None] = Future()

        def tell(saved: Future[Any]) -> None:
            error = saved.exception()
            if error is None:
                told.set_result(None)
                return
            self.remove()
            logger.error("the checkpoint in %s was not written: %s", self._folder, _as_plain(error, self._folder))
            told.set_exception(_as_plain(error, self._folder))

        saved.add_done_callback(tell)
        return told


def _taken_apart(tree: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with marks in place of its larger tensors, which are collected by name."""
    if isinstance(tree, Tensor):
        if not isinstance(tree, DTensor) and tree.numel() * tree.element_size() <= _SMALL:
            return tree.detach().clone()
        tensors[key] = tree.detach()
        return (_PART, key)
    if isinstance(tree, Mapping):
        return {name: _taken_apart(part, f"{key}/{name}", tensors) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_taken_apart(part, f"{key}/{place}", tensors) for place, part in enumerate(tree)])
    return tree


def _checksum(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while piece := stream.read(2**22):
            value = zlib.crc32(piece, value)
    return value


# ---------------------------------------------------------------------- reading


def read_folder(
    path: str | os.PathLike[str],
    like: Callable[[str], Tensor | None] = lambda _: None,
    without: tuple[str, ...] = (),
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """The latest checkpoint of a folder; every rank reads the parts it needs (collective).

    Args:
        path: The folder.
        like: Maps a tensor's name (its keys from the outermost on, with / before each) to a DTensor with the parts to
            read; None: the whole tensor is read, to the CPU.
        without: Outermost keys that need not be read.
        ranks: The processes; if one cannot read, none continues.

    Raises:
        ValueError: There is no complete checkpoint, or it was changed after it was written.
    """
    tree, problem = None, None
    try:
        tree = _read(Path(path), like, without)
    except (Exception, CheckpointException) as error:  # which is no Exception
        problem = _as_plain(error, path)
    told = [None if problem is None else str(problem)] if ranks is None else ranks.objects(problem and str(problem))
    if problem is not None:
        raise problem
    others = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if others or tree is None:
        raise ValueError(f"another rank could not read {os.fspath(path)} ({'; '.join(others)}); nothing was loaded")
    return tree


def _read(folder: Path, like: Callable[[str], Tensor | None], without: tuple[str, ...]) -> dict[str, Any]:
    name = _latest(folder)
    if name is None:
        raise ValueError("it holds no complete checkpoint: the file 'latest', which names it, is missing")
    reader = _FolderReader(folder / name)
    kinds = reader.read_metadata().state_dict_metadata
    on_disk = sum(file.stat().st_size for file in (folder / name).iterdir())

    def read(keys: list[str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key in keys:
            kind = kinds[key]
            if not isinstance(kind, TensorStorageMetadata):
                raise ValueError(f"{key!r} is not a tensor")
            part, dtype = like(key), kind.properties.dtype
            if kind.size.numel() * dtype.itemsize > on_disk:
                raise ValueError(f"{key!r} is said to be {list(kind.size)}, more than its files hold")
            if part is None or part.shape != kind.size:
                values[key] = torch.empty(kind.size, dtype=dtype)
            else:
                values[key] = torch.empty_like(part, dtype=dtype)
        with _without_a_group_said():
            load(values, storage_reader=reader, no_dist=True)  # each rank finds what it needs
        return values

    rest = read([_REST])[_REST]
    content = io.BytesIO(rest.numpy().tobytes())
    check_stored(content)
    tree: dict[str, Any] = torch.load(content, weights_only=True)
    for key in without:
        tree.pop(key, None)
    names: list[str] = []
    _put_together(tree, lambda key: names.append(key))
    values = read(names)
    whole: dict[str, Any] = _put_together(tree, values.__getitem__)
    return whole


def _put_together(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """The inverse of :func:`_taken_apart`."""
    if isinstance(tree, tuple) and len(tree) == 2 and tree[0] == _PART:
        return tensor(tree[1])
    if isinstance(tree, dict):
        return {name: _put_together(part, tensor) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_put_together(part, tensor) for part in tree])
    return tree


def _latest(folder: Path) -> str | None:
    """The name of the complete checkpoint."""
    file = folder / _LATEST
    if not file.exists():
        return None
    content = file.read_bytes()
    try:
        name = json.loads(content)["checkpoint"]
    except (ValueError, KeyError, TypeError):
        name = None
    if not isinstance(name, str) or not name.startswith(_PREFIX) or Path(name).name != name:
        raise ValueError(f"its file 'latest' is {content[:80]!r}, which does not name a checkpoint")
    return name


class _FolderReader(FileSystemReader):
    """Reads files after checking their checksums, and metadata without running code from it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._checked: set[str] = set()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """As in torch, but with an unpickler that knows only the classes of metadata."""
        self._check(".metadata")
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        return metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        """As in torch, with checked files."""
        for item in plan.items:
            self._check(self.storage_data[item.storage_index].relative_path)
        return super().read_data(plan, planner)

    def _check(self, name: str) -> None:
        file = Path(self.path) / name
        if name in self._checked:
            return
        if file.parent != Path(self.path) or str(_checksum(file)) != Path(f"{file}{_SUMS}").read_text():
            raise ValueError(f"the file {file.name} was changed after it was written, or is incomplete")
        self._checked.add(name)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuse everything that is not part of a checkpoint's metadata."""
        if name not in _OF_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint")
        return super().find_class(module, name)


@contextlib.contextmanager
def _without_a_group_said() -> Iterator[None]:
    """Inside, torch does not warn that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _as_plain(error: BaseException, path: str | os.PathLike[str]) -> BaseException:
    """The error with the user's path; if several ranks failed, the first error."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, os.fspath(path))
    if isinstance(error, Exception):
        return ValueError(f"{os.fspath(path)} cannot be used as a checkpoint: {error}")
    return error
