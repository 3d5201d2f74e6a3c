"""Saving a run's state and resuming from it: the sums continue, the noise is always new.

Checkpoints are files or folders. They are read only if they are complete, and safe to read if they come from others.

A file is what ``torch.save`` writes, with the SHA-256 of all of it at the end, where ``torch.load`` does not look.

A folder is written by ``torch.distributed.checkpoint``: every rank writes and reads its part of each tensor. Its file
``latest`` names a subfolder with a complete checkpoint. A new checkpoint is written next to it; when all ranks are
done, ``latest`` is replaced and the old one removed. If a process is stopped at any time, the last complete checkpoint
therefore remains, and the next write removes the unfinished one. Tensors are stored under their own names, which are
their keys as ``torch.utils._pytree.keystr`` prints them: ``['module_state_dict']['0.weight']``. Everything else
forms one more tensor of bytes. Each file ends with its SHA-256.

Reading cannot run code: tensors and plain values are loaded with ``weights_only=True``, and of a folder's metadata only
the classes of metadata are unpickled.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import pickle
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from opacus.accountants import IAccountant
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torchfil.accounting.ids import GrowingIds
from torchfil.engine.assembly import PrivateTraining
from torchfil.engine.distributed.ranks import Ranks
from torchfil.engine.distributed.shards import in_parts, is_sharded
from torchfil.engine.saving.data import data_fingerprint
from torchfil.fisher.amplification import name_of_amplification
from torchfil.utils.errors import CheckpointError, require
from torchfil.utils.files import append_checksum, atomic_write_checked, check_checksum, explain_disk_full, write_bytes
from torchfil.utils.noise import preserve_rng, random_state, set_random_state

__all__ = ["Checkpoints", "is_folder", "read_file", "read_folder", "write_file", "write_folder"]

logger = logging.getLogger(__name__)

_LATEST = "latest"
_PREFIX = "checkpoint-"
_REST = "rest"  # the tensor with everything else
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

_STATE, _RANDOM = "fil_engine_state_dict", "random_state"
_SAVED, _PARTS = "_state_dict", ("optimizer", "noise_scheduler", "grad_clip_scheduler")  # names as in Opacus
_DIFFERENCES = {  # settings whose values say nothing
    "ids": "other ids (id_of=)",
    "tracked_ids": "track= for other ids",
    "data": "other data: its examples differ from those of the saved run",
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
            require(isinstance(content, dict), f"it holds a {type(content).__name__}")
        except MemoryError:
            raise
        except Exception as error:  # torch, pickle and zipfile raise many kinds of errors
            unsafe = isinstance(error, pickle.UnpicklingError)  # its text recommends running what the file holds
            reason = "it cannot be unpickled safely" if unsafe else str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"{path if is_named else 'the checkpoint'} is damaged or truncated ({reason}); it must hold only "
                "tensors and plain values. Nothing was loaded: copy it again, or resume from an earlier checkpoint."
            ) from error
    return dict(content)


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
    writer = _FolderWriter(Path(path) / (name if ranks is None else ranks.objects(name)[0]))
    tensors: dict[str, Tensor] = {}

    def taken_out(place: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
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
    """Writes a new checkpoint next to the last one, and makes it the latest when all ranks are done."""

    is_latest = False

    def prepare_local_plan(self, plan: Any) -> Any:
        """As in torch; only the owner may read the folder."""
        Path(self.path).mkdir(mode=0o700, parents=True, exist_ok=True)
        return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """As in torch, with checksums; a full disk is an ``OSError`` here, too."""
        with explain_disk_full(Path(self.path).parent):
            written = super().write_data(plan, planner)
            for name in {result.storage_data.relative_path for result in written.value()}:
                self._append_checksum(name)
        return written

    def finish(self, metadata: Metadata, results: Any) -> None:
        """The last step, on rank 0, after all ranks have written."""
        super().finish(metadata, results)
        self._append_checksum(".metadata")
        own = Path(self.path)
        write_bytes(own.with_name(_LATEST), own.name.encode())
        self.is_latest = True
        for other in {*own.parent.glob(f"{_PREFIX}*")} - {own}:
            shutil.rmtree(other, ignore_errors=True)

    def _append_checksum(self, name: str) -> None:
        with open(Path(self.path) / name, "rb+") as file:
            append_checksum(file)
            file.flush()
            os.fsync(file.fileno())


def read_folder(
    path: str | os.PathLike[str], like: Callable[[str], Any] = lambda _: None, ranks: Ranks | None = None
) -> dict[str, Any]:
    """The latest checkpoint of a folder; every rank reads the parts it needs (collective).

    Args:
        path: The folder.
        like: Maps a tensor's name to a DTensor with the parts to read; None: the whole tensor is read, to the CPU.
        ranks: The processes; if one cannot read, none continues.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: There is no complete checkpoint, or it was changed after it was written.
    """
    tree: Any = None
    problem: BaseException | None = None
    try:
        tree = _read(Path(path), like)
    except (Exception, CheckpointException) as error:  # which is no Exception
        problem = _plain_error(error, path)
    failed = [] if ranks is None else ranks.objects(problem is not None)
    if problem is None and any(failed):
        problem = CheckpointError(f"rank {failed.index(True)} could not read {os.fspath(path)}; nothing was loaded")
    if problem is not None:
        raise problem
    return tree


def _read(folder: Path, like: Callable[[str], Any]) -> Any:
    latest = folder / _LATEST
    require(latest.exists(), "it holds no complete checkpoint: the file 'latest', which names it, is missing")
    name = latest.read_text()
    is_name = re.fullmatch(f"{_PREFIX}[0-9a-f]+", name) is not None
    require(is_name, f"its file 'latest' holds {name[:80]!r}, which does not name a checkpoint")
    reader = _FolderReader(folder / name)
    values: dict[str, Any] = {}
    for key, kind in reader.read_metadata().state_dict_metadata.items():
        if not isinstance(kind, TensorStorageMetadata):
            raise ValueError(f"{key!r} is not a tensor")
        part, dtype = like(key), kind.properties.dtype
        is_whole = part is None or part.shape != kind.size
        values[key] = torch.empty(kind.size, dtype=dtype) if is_whole else torch.empty_like(part, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_GROUP)
        load(values, storage_reader=reader, no_dist=True)  # each rank finds what it needs

    rest: dict[str, Any] = torch.load(io.BytesIO(values[_REST].numpy().tobytes()), weights_only=True)
    return pytree.tree_map(lambda leaf: values[leaf[1]] if _is_part(leaf) else leaf, rest, is_leaf=_is_part)


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
        require(Path(name).name == name, f"{name!r} does not lie in the checkpoint's folder")
        try:
            with open(Path(self.path) / name, "rb") as file:
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


# ---------------------------------------------------------------------- a run's state


class Checkpoints:
    """Keeps the state of one run, as state dicts and as checkpoints; see the engine's methods of the same names.

    Guarantees:
        * What cannot be loaded changes nothing.
        * Noise and Poisson draws are new after loading, unless they were seeded.

    Args:
        training: The run.
        accountant: Its DP accountant.
    """

    def __init__(self, training: PrivateTraining, accountant: IAccountant) -> None:
        self._training, self._accountant = training, accountant
        self._ranks = training.run.ranks
        self._optimizer_name = type(training.optimizer.original_optimizer).__name__
        self._collected: tuple[int, list[dict[str, Any]]] | None = None  # random states by rank, and their step
        self._saving: Future[None] | None = None  # a checkpoint that is still being written

    # ------------------------------------------------------------------ state dicts

    def state_dict(self) -> dict[str, Any]:
        """The accounting's state; tensors and plain values only (collective)."""
        optimizer = self._training.optimizer
        noise = {name: (began, float(getattr(optimizer, name))) for name, began in optimizer.initial_noise.items()}
        return {
            "accountant": self._accountant.state_dict(),
            "run": self._training.run.state_dict(),
            "generators": [states["generators"] for states in self._states_by_rank()],
            "noise": noise,  # σ and C at first and now
            "settings": self._settings(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        try:
            self._check_settings(state_dict["settings"])
            with _all_or_nothing((self.state_dict, self._set_state)):
                self._set_state(state_dict)
        except KeyError as error:
            raise ValueError(f"the state lacks {error.args[0]!r}; was it saved by another version?") from error

    def _set_state(self, state_dict: Mapping[str, Any]) -> None:
        self._training.run.load_state_dict(state_dict["run"])
        self._training.step.guard.forget_last_step()
        self._accountant.load_state_dict(copy.deepcopy(state_dict["accountant"]))
        self._collected = None
        generators, shuffling = self._own(state_dict["generators"]), self._training.loader.generator
        if shuffling is not None and "loader" in generators:
            shuffling.set_state(generators["loader"].cpu())
        self._training.optimizer.noise.load_state_dict(generators)

    def _settings(self) -> dict[str, Any]:
        """What a run must be resumed with, because its sums depend on it."""
        training, options, ids = self._training, self._training.run.options, self._training.run.ids
        accounting, is_stream = options.accounting, isinstance(ids, GrowingIds)
        return {
            "data_set": "a stream" if is_stream else f"{ids.num_examples} examples",
            "accountant": self._accountant.mechanism(),
            "noise": training.optimizer.noise.kind,
            "poisson_sampling": options.sample_rate is not None,
            "amplification": name_of_amplification(options.amplification),
            "clip": options.clip.name,
            "clipping": "flat" if options.shares is None else "per_layer",
            "loss_reduction": options.loss_reduction,
            "track": sorted(accounting.track),
            "tracked_ids": {name: ids.places(each).unique().tolist() for name, each in accounting.chosen.items()},
            "questions": {name: tuple(asked) for name, asked in accounting.asked.items()},
            "ids": None if is_stream else ids.fingerprint(),
            "data": self._data,
        }

    @cached_property
    def _data(self) -> str | None:
        """The data's fingerprint; None for a stream."""
        dataset = self._training.passes.dataset
        if dataset is None:
            return None
        with preserve_rng():
            return data_fingerprint(dataset)

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        """Raise unless this run was made as the saved one."""
        found = [
            _DIFFERENCES.get(name, f"{name}={value!r} instead of {saved.get(name)!r}")
            for name, value in self._settings().items()
            if value != saved.get(name)
        ]
        remedy = "Make it as the saved run was made, or start a new run with a new ledger. Nothing was loaded."
        require(not found, f"this run was made with {', '.join(found)}. {remedy}")

    def gather(self) -> None:
        """Collect the random states of all ranks, so that one can save alone until the next step (collective)."""
        self._collected = None
        self._states_by_rank()

    def _states_by_rank(self) -> list[dict[str, Any]]:
        """The random states of all ranks; collected again if a step was taken since the last time."""
        steps, shuffling = self._training.run.history.steps, self._training.loader.generator
        generators = {} if shuffling is None else {"loader": shuffling.get_state()}
        own = {"generators": {**generators, **self._training.optimizer.noise.state_dict()}, _RANDOM: random_state()}
        if self._ranks is None:
            return [own]
        if self._collected is None or self._collected[0] != steps:
            self._collected = steps, self._ranks.objects(own)
        return self._collected[1]

    def _own(self, by_rank: Sequence[Any]) -> Any:
        """This rank's value; that of rank 0 if another number of ranks has saved theirs."""
        rank, size = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)
        return by_rank[rank if len(by_rank) == size else 0]

    # ------------------------------------------------------------------ checkpoints

    def save(self, path: Any, module: nn.Module, *, asynchronous: bool, **options: Any) -> Future[None] | None:
        """See :meth:`FILPrivacyEngine.save_checkpoint`."""
        for_module = options.pop("module_state_dict_kwargs", None) or {}
        for_file = options.pop("torch_save_kwargs", None) or {}
        if is_folder(path):
            require(not for_file, f"torch_save_kwargs= is for files, and path={path!r} is a folder; leave it out")
        else:
            needs = f"path={path!r} is a file; a sharded model and asynchronous=True need a folder: path='{path}/'"
            require(not asynchronous and not is_sharded(module), needs)

        checkpoint = dict(options.pop("checkpoint_dict", None) or {})
        checkpoint[f"module{_SAVED}"] = module.state_dict(**for_module)
        for name in _PARTS:
            part = options.pop(name, None)
            if part is not None:
                checkpoint[name + _SAVED] = part.state_dict()
        if options:
            raise TypeError(f"save_checkpoint has no option {', '.join(options)}")
        state = {**self.state_dict(), "optimizer": self._optimizer_name}
        checkpoint |= {_STATE: state, _RANDOM: [states[_RANDOM] for states in self._states_by_rank()]}
        if is_folder(path):
            self._wait_for_saving()
            self._saving = write_folder(path, checkpoint, self._ranks, asynchronous=asynchronous)
        elif self._ranks is None or self._ranks.rank == 0:
            checkpoint["privacy_accountant_state_dict"] = state["accountant"]  # where Opacus has it
            write_file(path, checkpoint, **for_file)
        return self._saving if asynchronous else None

    def _wait_for_saving(self) -> None:
        """Wait until an earlier checkpoint is written; raise its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def load(self, path: Any, module: nn.Module, **options: Any) -> dict[str, Any]:
        """See :meth:`FILPrivacyEngine.load_checkpoint`."""
        for_module = options.pop("module_load_dict_kwargs", None) or {}
        for_file = options.pop("torch_load_kwargs", None) or {}
        parts = {name: options.pop(name, None) for name in _PARTS}
        with_random_state = options.pop("restore_random_state", True)
        if options:
            raise TypeError(f"load_checkpoint has no option {', '.join(options)}")
        checkpoint = self._read(path, module, parts["optimizer"], for_file)
        accounted = f"{path} holds no Fisher accounting; it was not saved by FILPrivacyEngine.save_checkpoint"
        require(_STATE in checkpoint, accounted)
        state, by_rank = checkpoint.pop(_STATE), checkpoint.pop(_RANDOM)
        name, other = self._optimizer_name, state["optimizer"]
        remedy = f"the checkpoint is from {other}, whose state {name} cannot continue; build the same optimizer"
        require(parts["optimizer"] is None or name == other, f"{remedy}. Nothing was loaded.")

        # If one part cannot be loaded, the others are restored.
        loaded = [(part.state_dict, part.load_state_dict) for part in (module, *parts.values()) if part is not None]
        with _all_or_nothing(*loaded, (random_state, set_random_state)):
            module.load_state_dict(checkpoint[f"module{_SAVED}"], **for_module)
            for name, part in parts.items():
                part_state = checkpoint.pop(name + _SAVED, None)
                if part is not None and part_state:
                    part.load_state_dict(part_state)
            if with_random_state:
                set_random_state(self._own(by_rank))
            self.load_state_dict(state)

        # σ and C continue relative to this run's initial values
        private = self._training.optimizer
        for name, scheduler in (("noise_multiplier", "noise_scheduler"), ("max_grad_norm", "grad_clip_scheduler")):
            began, reached = state["noise"][name]
            if parts[scheduler] is not None and began:
                setattr(private, name, private.initial_noise[name] / began * reached)
        return checkpoint

    def _read(self, path: Any, module: nn.Module, optimizer: Any, for_file: dict[str, Any]) -> dict[str, Any]:
        """The saved content; sharded weights and their optimizer state come in the same parts."""
        like = {f"['module{_SAVED}']['{name}']": value for name, value in module.state_dict().items()}
        if optimizer is not None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            like |= {f"['optimizer{_SAVED}']['state'][{place}]": p for place, p in enumerate(trained)}

        def part(name: str) -> DTensor | None:
            value = like.get(name, like.get(name.rpartition("[")[0]))
            return value if isinstance(value, DTensor) else None

        if not is_folder(path):
            saved = read_file(path, **for_file)
        else:
            require(not for_file, f"torch_load_kwargs= is for files, and path={path!r} is a folder; leave it out")
            self._wait_for_saving()
            saved = read_folder(path, part, self._ranks)
        return in_parts(saved, part) if is_sharded(module) else saved


@contextlib.contextmanager
def _all_or_nothing(*parts: tuple[Callable[[], Any], Callable[[Any], Any]]) -> Iterator[None]:
    """If an error occurs inside, changes are undone; a part is a pair of functions that read and set its state."""
    before = [(set_state, copy.deepcopy(read())) for read, set_state in parts]
    try:
        yield
    except BaseException:
        for set_state, state in before:
            set_state(state)
        raise
