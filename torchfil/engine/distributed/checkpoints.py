"""Checkpoints as files and as folders: read only if they are complete, and safe to read if they come from others.

A file is what ``torch.save`` writes, with the SHA-256 of all of it at the end, where ``torch.load`` does not look.

A folder is written by ``torch.distributed.checkpoint``: every rank writes and reads its part of each tensor. Its file
``latest`` names a subfolder with a complete checkpoint. A new checkpoint is written next to it; when all ranks are
done, ``latest`` is replaced and the old one removed. If a process is stopped at any time, the last complete checkpoint
therefore remains, and the next write removes the unfinished one. Tensors are stored under their own names, which are
their keys as ``torch.utils._pytree.keystr`` prints them: ``['module_state_dict']['0.weight']``. Everything else, and
small tensors, form one more tensor of bytes. Each file ends with its SHA-256.

Reading cannot run code: tensors and plain values are loaded with ``weights_only=True``, and of a folder's metadata only
the classes of metadata are unpickled.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torchfil.engine.distributed.ranks import Ranks
from torchfil.utils.errors import CheckpointError
from torchfil.utils.files import append_checksum, atomic_write_checked, check_checksum, explain_disk_full, write_bytes

__all__ = ["is_folder", "read_file", "read_folder", "write_file", "write_folder"]

logger = logging.getLogger(__name__)

_LATEST = "latest"
_PREFIX = "checkpoint-"
_REST = "rest"  # the tensor with everything that is small
_SMALL = 4096  # bytes
_PART = "tensor by the name of"  # marks a tensor in the rest
_NO_GROUP = "torch.distributed is disabled"  # torch's warning in a single process
_METADATA_CLASSES = {  # what a folder's metadata may contain, by module
    "torch.distributed.checkpoint.metadata": [
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    ],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.serialization": ["_get_layout"],
    "torch": ["Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))],
    "pathlib": ["PosixPath", "WindowsPath"],
    "pathlib._local": ["PosixPath", "WindowsPath"],
}


# ---------------------------------------------------------------------- files


def write_file(path: str | os.PathLike[str] | IO[bytes], content: dict[str, Any], **options: Any) -> None:
    """``torch.save`` to a file that gets a checksum and replaces an earlier one only when complete.

    Args:
        path: The file, or an open one.
        content: Tensors and plain values.
        **options: Options of ``torch.save``.
    """
    with atomic_write_checked(path) as file:  # our own file, because torch's errors do not mention a full disk
        torch.save(content, file, **options)


def read_file(path: str | os.PathLike[str] | IO[bytes], **options: Any) -> dict[str, Any]:
    """The content that :func:`write_file` has written: only tensors and plain values; safe on files from others.

    Guarantees:
        * A file that was truncated, or in which any bit has changed, is refused; so is one that holds anything but
          tensors and plain values.

    Args:
        path: The file, or an open one.
        **options: Options of ``torch.load``.

    Raises:
        OSError: The file cannot be read.
        CheckpointError: It is damaged, or not a checkpoint.

    Example:
        >>> file = io.BytesIO()
        >>> write_file(file, {"step": 3})
        >>> read_file(io.BytesIO(file.getvalue()))
        {'step': 3}
        >>> read_file(io.BytesIO(file.getvalue()[:-1]))
        Traceback (most recent call last):
        ...
        torchfil.utils.errors.CheckpointError: the checkpoint is damaged or truncated (its checksum is missing)...
    """
    is_named = isinstance(path, (str, os.PathLike))
    with open(path, "rb") if is_named else io.BytesIO(path.read()) as file:  # type: ignore[arg-type,union-attr]
        try:
            check_checksum(file)
            content = torch.load(path if is_named else file, **{"weights_only": True, **options})
            if not isinstance(content, dict):
                raise ValueError(f"it holds a {type(content).__name__}")
        except MemoryError:
            raise
        except Exception as error:  # torch, pickle and zipfile raise many kinds of errors
            unsafe = isinstance(error, pickle.UnpicklingError)  # its text recommends running what the file holds
            reason = "it cannot be unpickled safely" if unsafe else str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"{path if is_named else 'the checkpoint'} is damaged or truncated ({reason}), or it is not a torchfil "
                "checkpoint, which holds only tensors and plain values. Nothing was loaded: copy the file again, or "
                "resume from an earlier checkpoint."
            ) from error
    return content


# ---------------------------------------------------------------------- folders


def is_folder(path: Any) -> bool:
    """Whether a path names a folder: an existing one, or a name that ends with a slash.

    Example:
        >>> is_folder("checkpoints/"), is_folder("checkpoint.pt")
        (True, False)
    """
    if not isinstance(path, str | os.PathLike):
        return False
    return os.fspath(path).endswith(("/", os.sep)) or Path(path).is_dir()


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
    is_first, group = (True, None) if ranks is None else (ranks.rank == 0, ranks.saving_group)
    name = f"{_PREFIX}{uuid.uuid4().hex[:12]}"
    writer = _FolderWriter(Path(path), name if ranks is None else ranks.objects(name)[0])
    tensors: dict[str, Tensor] = {}

    def taken_out(place: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not isinstance(leaf, DTensor) and leaf.nbytes <= _SMALL:
            return leaf.detach().clone()
        key = pytree.keystr(place)
        if is_first or isinstance(leaf, DTensor):
            tensors[key] = leaf.detach()
        return (_PART, key)

    rest = pytree.tree_map_with_path(taken_out, tree)
    if is_first:
        buffer = io.BytesIO()
        torch.save(rest, buffer)
        tensors[_REST] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    content = writer.stage(tensors) if asynchronous else tensors  # a copy on the CPU

    def write() -> None:
        try:
            save(content, storage_writer=writer, process_group=group, no_dist=ranks is None)
        except BaseException as error:
            if is_first and not writer.is_latest:
                shutil.rmtree(writer.path, ignore_errors=True)
            plain = _plain_error(error, path)
            if asynchronous:
                logger.error("the checkpoint in %s was not written: %s", path, plain)
            raise plain from error

    if asynchronous:
        executor = ThreadPoolExecutor(max_workers=1)
        saving = executor.submit(write)
        executor.shutdown(wait=False)
        return saving
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_GROUP)
        write()
    return None


class _FolderWriter(FileSystemWriter):
    """Writes a new checkpoint next to the last one, and makes it the latest when all ranks are done.

    Args:
        folder: The folder of all checkpoints.
        name: The name of the new one.
    """

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / name)
        self._folder, self._name = folder, name
        self.is_latest = False

    def prepare_local_plan(self, plan: Any) -> Any:
        """As in torch; only the owner may read the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / self._name).mkdir(mode=0o700, exist_ok=True)
        return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """As in torch, with checksums; a full disk is an ``OSError`` here, too."""
        with explain_disk_full(self._folder):
            written = super().write_data(plan, planner)
            for name in {result.storage_data.relative_path for result in written.value()}:
                self._append_checksum(name)
        return written

    def finish(self, metadata: Metadata, results: Any) -> None:
        """The last step, on rank 0, after all ranks have written."""
        super().finish(metadata, results)
        self._append_checksum(".metadata")
        write_bytes(self._folder / _LATEST, self._name.encode())
        self.is_latest = True
        for other in self._folder.glob(f"{_PREFIX}*"):
            if other.name != self._name:
                shutil.rmtree(other, ignore_errors=True)

    def _append_checksum(self, name: str) -> None:
        with open(self._folder / self._name / name, "rb+") as file:
            append_checksum(file)
            file.flush()
            os.fsync(file.fileno())


def read_folder(
    path: str | os.PathLike[str],
    like: Callable[[str], Any] = lambda _: None,
    without: tuple[str, ...] = (),
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """The latest checkpoint of a folder; every rank reads the parts it needs (collective).

    Args:
        path: The folder.
        like: Maps a tensor's name to a DTensor with the parts to read; None: the whole tensor is read, to the CPU.
        without: Outermost keys that need not be read.
        ranks: The processes; if one cannot read, none continues.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: There is no complete checkpoint, or it was changed after it was written.
    """
    tree: dict[str, Any] = {}
    problem = None
    try:
        tree = _read(Path(path), like, without)
    except (Exception, CheckpointException) as error:  # which is no Exception
        problem = _plain_error(error, path)
    failed = [] if ranks is None else ranks.objects(problem is not None)
    if problem is not None:
        raise problem
    if any(failed):
        raise CheckpointError(
            f"rank {failed.index(True)} could not read {os.fspath(path)} (its own error says why); nothing was loaded"
        )
    return tree


def _read(folder: Path, like: Callable[[str], Any], without: tuple[str, ...]) -> Any:
    latest = folder / _LATEST
    if not latest.exists():
        raise ValueError("it holds no complete checkpoint: the file 'latest', which names it, is missing")
    name = latest.read_text()
    if not re.fullmatch(f"{_PREFIX}[0-9a-f]+", name):
        raise ValueError(f"its file 'latest' holds {name[:80]!r}, which does not name a checkpoint")

    reader = _FolderReader(folder / name)
    left_out = tuple(f"['{key}']" for key in without)
    kinds = {k: v for k, v in reader.read_metadata().state_dict_metadata.items() if not k.startswith(left_out)}
    values: dict[str, Any] = {}
    for key, kind in kinds.items():
        if not isinstance(kind, TensorStorageMetadata):
            raise ValueError(f"{key!r} is not a tensor")
        part, dtype = like(key), kind.properties.dtype
        is_whole = part is None or part.shape != kind.size
        values[key] = torch.empty(kind.size, dtype=dtype) if is_whole else torch.empty_like(part, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_GROUP)
        load(values, storage_reader=reader, no_dist=True)  # each rank finds what it needs

    rest: dict[str, Any] = torch.load(io.BytesIO(values[_REST].numpy().tobytes()), weights_only=True)
    tree = {key: part for key, part in rest.items() if key not in without}
    return pytree.tree_map(lambda leaf: values[leaf[1]] if _is_part(leaf) else leaf, tree, is_leaf=_is_part)


def _is_part(leaf: Any) -> bool:
    """Whether this stands for a tensor that is stored under its own name."""
    return isinstance(leaf, tuple) and leaf[:1] == (_PART,)


class _FolderReader(FileSystemReader):
    """Reads files after checking their checksums, and metadata without running code from it."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """As in torch, but with an unpickler that knows only the classes of metadata."""
        self._check(".metadata")
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        return metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        """As in torch, with checked files."""
        for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            self._check(name)
        return super().read_data(plan, planner)

    def _check(self, name: str) -> None:
        if Path(name).name != name:
            raise ValueError(f"{name!r} does not lie in the checkpoint's folder")
        with open(Path(self.path) / name, "rb") as file:
            try:
                check_checksum(file)
            except ValueError as error:
                raise ValueError(f"the file {name} is damaged or truncated ({error})") from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuse everything that is not part of a checkpoint's metadata."""
        if name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint")
        return super().find_class(module, name)


def _plain_error(error: BaseException, path: str | os.PathLike[str]) -> BaseException:
    """The error with the user's path; if several ranks failed, the first error."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, os.fspath(path))
    if isinstance(error, Exception):
        return CheckpointError(f"{os.fspath(path)} cannot be used as a checkpoint: {error}")
    return error
