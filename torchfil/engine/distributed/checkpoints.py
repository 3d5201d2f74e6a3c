"""Saving a run's state and resuming from it: the sums continue, the noise is always new.

Checkpoints are files or folders. They are read only if they are complete, and safe to read if they
come from others.

A file is what ``torch.save`` writes, with the SHA-256 of all of it at the end, where ``torch.load``
does not look.

A folder has one such file for each rank: its shards of the tensors that are sharded, and in rank
0's file everything else. The folder's file ``latest`` names a subfolder with a complete checkpoint.
A new checkpoint is written next to it; when all ranks are done, ``latest`` is replaced and the old
one removed. If a process is stopped at any time, the last complete checkpoint therefore remains,
and the next write removes the unfinished one. Any number of ranks can read it: each puts the shards
of one tensor after the other together, and keeps its own part. The names of tensors are their keys
as ``torch.utils._pytree.keystr`` prints them: ``['module_state_dict']['0.weight']``.

Reading cannot run code: all files are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, TypeGuard, TypeVar

import torch
from opacus.accountants import IAccountant
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from torchfil.engine.assembly import PrivateTraining
from torchfil.engine.distributed.ranks import Ranks, is_sharded, part_like
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.run import weights_in_words
from torchfil.engine.saving.data import data_fingerprint
from torchfil.fisher.amplification import name_of_amplification
from torchfil.utils.errors import CheckpointError, all_or_nothing
from torchfil.utils.files import atomic_write_checked, check_checksum, check_regular, write_bytes
from torchfil.utils.noise import preserve_rng, random_state, set_random_state

State = dict[str, Any]  # as torch saves it: tensors and plain values by name
FilePlace = str | os.PathLike[str] | IO[bytes]
Keep = Callable[[str, object], object]
Result = TypeVar("Result")
_LATEST = "latest"
_PREFIX = "checkpoint-"
_STATE, _RANDOM = "fil_engine_state_dict", "random_state"
# names as in Opacus
_SAVED, _PARTS = "_state_dict", ("optimizer", "noise_scheduler", "grad_clip_scheduler")
_DIFFERENCES = {  # settings whose values say nothing
    "ids": "other ids (id_of=)",
    "tracked_ids": "track= for other ids",
    "data": "other data: its examples differ from those of the saved run",
}


# ---------------------------------------------------------------------- files


def write_file(path: FilePlace, content: Mapping[str, object], **options: Any) -> None:
    """``torch.save`` to a file that gets a checksum and replaces an earlier one only when complete.

    Args:
        path: The file, or an open one.
        content: Tensors and plain values.
        **options: Options of ``torch.save``.
    """
    # our own file, because torch's errors do not mention a full disk
    with atomic_write_checked(path) as file:
        torch.save(content, file, **options)


def read_file(path: FilePlace, **options: Any) -> State:
    """The content that :func:`write_file` has written: only tensors and plain values.

    Safe on files from others.

    Guarantees:
        * A file that was truncated, or in which any bit has changed, is refused; so is one that
          holds anything but tensors and plain values.

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
        torchfil.utils.errors.CheckpointError: the checkpoint is damaged or truncated...
    """
    is_named = isinstance(path, (str, os.PathLike))
    if is_named:
        check_regular(path)  # type: ignore[arg-type]
    with open(path, "rb") if is_named else io.BytesIO(path.read()) as file:  # type: ignore[arg-type,union-attr]
        try:
            check_checksum(file)
            content = torch.load(path if is_named else file, **{"weights_only": True, **options})
            if not isinstance(content, dict):
                raise ValueError(f"it holds a {type(content).__name__}")
        except MemoryError:
            raise
        except Exception as error:  # torch, pickle and zipfile raise many kinds of errors
            # its text recommends running what the file holds
            unsafe = isinstance(error, pickle.UnpicklingError)
            reason = (
                "it cannot be unpickled safely" if unsafe else str(error).partition("\n")[0][:200]
            )
            raise CheckpointError(
                f"{path if is_named else 'the checkpoint'} is damaged or truncated ({reason}); it "
                "must hold only tensors and plain values. Nothing was loaded: copy it again, or "
                "resume from an earlier checkpoint."
            ) from error
    return dict(content)


# ---------------------------------------------------------------------- folders


def is_folder(path: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a path names a folder: an existing one, or a name that ends with a slash.

    Example:
        >>> is_folder("checkpoints/"), is_folder("checkpoint.pt")
        (True, False)
    """
    if not isinstance(path, str | os.PathLike):
        return False
    return os.fspath(path).endswith(("/", os.sep)) or Path(path).is_dir()


def write_folder(
    path: str | os.PathLike[str], tree: Mapping[str, object], ranks: Ranks | None
) -> None:
    """Write a tree of tensors and plain values as a folder's latest checkpoint (collective).

    Args:
        path: The folder.
        tree: Nested dicts and lists; values that are not sharded (a DTensor is) are written from
            rank 0.
        ranks: The processes; None: a single one.
    """
    folder, name = Path(path), f"{_PREFIX}{uuid.uuid4().hex[:12]}"
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    new = folder / (name if ranks is None else ranks.objects(name)[0])
    # by the tensor's name: place and dimension of this rank's shard
    pieces: dict[str, tuple[int, int, Tensor]] = {}

    def rest(place: pytree.KeyPath, leaf: object) -> object:
        if not isinstance(leaf, DTensor):
            return leaf
        *copies, number = leaf.device_mesh.get_coordinate() or ()
        kind = leaf.placements[-1]
        # no other rank writes the same
        if not any(copies) and (isinstance(kind, Shard) or number == 0):
            shard = leaf.to_local().detach().cpu()
            pieces[pytree.keystr(place)] = number, kind.dim if isinstance(kind, Shard) else 0, shard
        return None

    tree = pytree.tree_map_with_path(rest, tree)

    def write_own() -> None:
        new.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(
            new / f"{rank}.pt", {"tree": tree if rank == 0 else {}, "pieces": pieces, "ranks": size}
        )

    def make_latest() -> None:
        if rank == 0:
            write_bytes(folder / _LATEST, new.name.encode())

    try:
        _on_all(ranks, write_own, path)
        _on_all(ranks, make_latest, path)
    finally:
        if rank == 0:
            _remove_others(folder)


def read_folder(
    path: str | os.PathLike[str], ranks: Ranks | None = None, keep: Keep = lambda _, leaf: leaf
) -> State:
    """The latest checkpoint of a folder, on the CPU (collective).

    Args:
        path: The folder.
        ranks: The processes; if one cannot read, none continues.
        keep: Maps the name and the whole value of a leaf to what this rank keeps of it, for example
            its shard; one sharded tensor after the other is put together.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: There is no complete checkpoint, or it was changed after it was written.
    """

    def read() -> State:
        latest = Path(path) / _LATEST
        if not latest.exists():
            raise ValueError(
                "it holds no complete checkpoint: the file 'latest', which names it, is missing"
            )
        check_regular(latest)
        name = latest.read_text()
        if re.fullmatch(f"{_PREFIX}[0-9a-f]+", name) is None:
            raise ValueError(
                f"its file 'latest' holds {name[:80]!r}, which does not name a checkpoint"
            )
        of_rank = partial(read_file, map_location="cpu", mmap=True)
        first = of_rank(latest.with_name(name) / "0.pt")
        contents = [
            first,
            *(of_rank(latest.with_name(name) / f"{rank}.pt") for rank in range(1, first["ranks"])),
        ]

        def whole(place: pytree.KeyPath, leaf: object) -> object:
            key = pytree.keystr(place)
            pieces = sorted(
                (each["pieces"][key] for each in contents if key in each["pieces"]),
                key=itemgetter(0),
            )
            return keep(
                key,
                torch.cat([shard for *_, shard in pieces], dim=pieces[0][1]) if pieces else leaf,
            )

        return pytree.tree_map_with_path(whole, first["tree"])

    return _on_all(ranks, read, path)


def _on_all(
    ranks: Ranks | None, work: Callable[[], Result], path: str | os.PathLike[str]
) -> Result:
    """What the work returns.

    If it fails on one rank, the first rank's error is raised on all (collective).
    """
    problem: Exception | None = None
    try:
        result = work()
    except OSError as error:
        problem = OSError(error.errno, error.strerror, os.fspath(path))
    except Exception as error:
        problem = CheckpointError(f"{os.fspath(path)} cannot be used as a checkpoint: {error}")
    for each in [problem] if ranks is None else ranks.objects(problem):
        if each is not None:
            raise each
    return result


def _remove_others(folder: Path) -> None:
    """Remove the checkpoints that ``latest`` does not name: earlier ones, and unfinished ones."""
    latest = folder / _LATEST
    named = latest.read_text() if latest.exists() else None
    for other in folder.glob(f"{_PREFIX}*"):
        if other.name != named:
            shutil.rmtree(other, ignore_errors=True)


# ---------------------------------------------------------------------- a run's state


class Checkpoints:
    """Keeps the state of one run, as state dicts and as checkpoints.

    See the engine's methods of the same names.

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
        # random states by rank, and their step
        self._collected: tuple[int, list[State]] | None = None

    # ------------------------------------------------------------------ state dicts

    def state_dict(self) -> State:
        """The accounting's state; tensors and plain values only (collective)."""
        optimizer = self._training.optimizer
        noise = {
            name: (began, float(getattr(optimizer, name)))
            for name, began in optimizer.initial_noise.items()
        }
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
            with all_or_nothing((self.state_dict, self._set_state)):
                self._set_state(state_dict)
        except KeyError as error:
            raise ValueError(
                f"the state lacks {error.args[0]!r}; was it saved by another version?"
            ) from error

    def _set_state(self, state_dict: Mapping[str, Any]) -> None:
        training = self._training
        training.run.load_state_dict(state_dict["run"])
        training.step.guard.flags.forget_last_step()
        if training.run.ids.grows:  # a batch that was read before has rows of another run
            training.step.observer.tracker.ids = None
        self._accountant.load_state_dict(copy.deepcopy(state_dict["accountant"]))
        self._collected = None
        generators, shuffling = self._own(state_dict["generators"]), self._training.loader.generator
        if shuffling is not None and "loader" in generators:
            shuffling.set_state(generators["loader"].cpu())
        if self._training.optimizer.canaries is not None:
            self._training.optimizer.canaries.load_state_dict(generators["canaries"])
        self._training.optimizer.noise.load_state_dict(generators)

    def _settings(self) -> State:
        """What a run must be resumed with, because its sums depend on it."""
        training, options, ids = self._training, self._training.run.options, self._training.run.ids
        accounting, canaries = options.accounting, options.accounting.canaries
        return {
            "data_set": "a stream" if ids.grows else f"{ids.num_examples} examples",
            "accountant": self._accountant.mechanism(),
            "noise": training.optimizer.noise.kind,
            "poisson_sampling": options.sample_rate is not None,
            "amplification": name_of_amplification(options.amplification),
            "clip": options.clip.name,
            "clip_weights": weights_in_words(training.run.clip_weights),
            "rows": training.run.rows_in_words,
            "canaries": None if canaries is None else (canaries.count, canaries.kind),
            "clipping": "flat" if options.shares is None else "per_layer",
            "loss_reduction": options.loss_reduction,
            "track": sorted(accounting.track),
            "questions": {name: tuple(asked) for name, asked in accounting.asked.items()},
            "ids": None if ids.grows else ids.fingerprint,
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
        if found:
            raise ValueError(
                f"this run was made with {', '.join(found)}. Make it as the saved run was made, "
                "or start a new run with a new ledger. Nothing was loaded."
            )

    def gather(self) -> None:
        """Collect the random states of all ranks, so that one can save alone until the next step
        (collective).
        """
        self._collected = None
        self._states_by_rank()

    def canaries(self) -> dict[str, Tensor] | None:
        """Who is in, scores and divergences of the run's canaries, which rank 0 has.

        None: it has none (collective).
        """
        found: dict[str, Tensor] | None = self._states_by_rank()[0]["generators"].get("canaries")
        return found

    def _states_by_rank(self) -> list[State]:
        """The random states of all ranks.

        Collected again if a step was taken since the last time.
        """
        steps, shuffling = self._training.run.history.steps, self._training.loader.generator
        generators = {} if shuffling is None else {"loader": shuffling.get_state()}
        canaries = self._training.optimizer.canaries
        generators |= {} if canaries is None else {"canaries": canaries.state_dict()}
        own = {
            "generators": {**generators, **self._training.optimizer.noise.state_dict()},
            _RANDOM: random_state(),
        }
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

    def save(self, path: FilePlace, module: nn.Module, **options: Any) -> None:
        """See :meth:`FILPrivacyEngine.save_checkpoint`."""
        for_module = options.pop("module_state_dict_kwargs", None) or {}
        for_file = options.pop("torch_save_kwargs", None) or {}
        if is_folder(path) and for_file:
            raise ValueError(f"torch_save_kwargs= is for files, and path={path!r} is a folder")
        if not is_folder(path) and is_sharded(module):
            raise ValueError(
                f"path={path!r} is a file, and a sharded model needs a folder: path='{path}/'"
            )
        checkpoint = dict(options.pop("checkpoint_dict", None) or {})
        checkpoint[f"module{_SAVED}"] = module.state_dict(**for_module)
        for name in _PARTS:
            part = options.pop(name, None)
            if part is not None:
                checkpoint[name + _SAVED] = part.state_dict()
        if options:
            raise TypeError(f"save_checkpoint has no option {', '.join(options)}")
        state = {**self.state_dict(), "optimizer": self._optimizer_name}
        checkpoint |= {
            _STATE: state,
            _RANDOM: [states[_RANDOM] for states in self._states_by_rank()],
        }
        if is_folder(path):
            write_folder(path, checkpoint, self._ranks)
        elif self._ranks is None or self._ranks.rank == 0:
            checkpoint["privacy_accountant_state_dict"] = state["accountant"]  # where Opacus has it
            write_file(path, checkpoint, **for_file)

    def load(self, path: FilePlace, module: nn.Module, **options: Any) -> State:
        """See :meth:`FILPrivacyEngine.load_checkpoint`."""
        for_module = options.pop("module_load_dict_kwargs", None) or {}
        for_file = options.pop("torch_load_kwargs", None) or {}
        parts = {name: options.pop(name, None) for name in _PARTS}
        with_random_state = options.pop("restore_random_state", True)
        if options:
            raise TypeError(f"load_checkpoint has no option {', '.join(options)}")
        checkpoint = self._read(path, module, parts["optimizer"], for_file)
        if _STATE not in checkpoint:
            raise ValueError(
                f"{path} holds no Fisher accounting; it was not saved by engine.save_checkpoint"
            )
        from torchfil.engine.distributed.content import check_content  # which needs msgspec

        check_content(checkpoint, path, parts["optimizer"])
        state, by_rank = checkpoint.pop(_STATE), checkpoint.pop(_RANDOM)
        name, other = self._optimizer_name, state["optimizer"]
        if parts["optimizer"] is not None and name != other:
            raise ValueError(
                f"the checkpoint is from {other}, whose state {name} cannot continue; build the "
                "same optimizer. Nothing was loaded."
            )

        # If one part cannot be loaded, the others are restored.
        loaded = [
            (part.state_dict, part.load_state_dict)
            for part in (module, *parts.values())
            if part is not None
        ]
        with all_or_nothing(*loaded, (random_state, set_random_state)):
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
        for name, scheduler in (
            ("noise_multiplier", "noise_scheduler"),
            ("max_grad_norm", "grad_clip_scheduler"),
        ):
            began, reached = state["noise"][name]
            if parts[scheduler] is not None and began:
                setattr(private, name, private.initial_noise[name] / began * reached)
        return checkpoint

    def _read(
        self, path: FilePlace, module: nn.Module, optimizer: FILOptimizer | None, for_file: State
    ) -> State:
        """The saved content; sharded weights and their optimizer state come in the same parts."""
        like = {
            f"['module{_SAVED}']['{name}']": value for name, value in module.state_dict().items()
        }
        if optimizer is not None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            like |= {
                f"['optimizer{_SAVED}']['state'][{place}]": p for place, p in enumerate(trained)
            }

        def keep(name: str, leaf: object) -> object:
            return part_like(leaf, like.get(name, like.get(name.rpartition("[")[0])))

        if not is_folder(path):
            saved = read_file(path, **{"map_location": "cpu", **for_file})
            return pytree.tree_map_with_path(
                lambda place, leaf: keep(pytree.keystr(place), leaf), saved
            )
        if for_file:
            raise ValueError(
                f"torch_load_kwargs= is for files, and path={path!r} is a folder; leave it out"
            )
        return read_folder(path, self._ranks, keep)
