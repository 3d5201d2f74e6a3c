"""Saving a run's state and resuming from it: the sums continue, the noise is always new."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import IO, Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from torchfil.accounting.ids import GrowingIds
from torchfil.engine.augmentation import generators_kept
from torchfil.engine.distributed.checkpoint import random_state, set_random_state
from torchfil.engine.distributed.checkpoint_folder import is_folder, read_folder, write_folder
from torchfil.engine.distributed.sharded import in_parts, is_sharded
from torchfil.engine.distributed.whole_file import MARK, load_whole, sealed_when_complete
from torchfil.engine.saving.fingerprint import data_fingerprint
from torchfil.engine.saving.run_files import RunFiles
from torchfil.fisher.amplification import name_of_amplification

__all__ = ["Resuming"]

_STATE_KEY = "fil_engine_state_dict"
_RANDOM_KEY = "random_state"
_MODULE, _OPTIMIZER = "module_state_dict", "optimizer_state_dict"


class Resuming(RunFiles):
    """The part of the engine that keeps its state: state dicts and checkpoints."""

    _collected: tuple[int, list[dict[str, Any]]] | None = None  # random states by rank, and their step
    _saving: Future[None] | None = None  # a checkpoint that is still being written
    _data: str | None = None  # the data's fingerprint, once it was needed

    def state_dict(self) -> dict[str, Any]:
        """The accounting's state: DP accountant, ledger, norm history, probes; tensors and plain values only.

        It holds no state of noise or Poisson draws, unless they were seeded (``noise_seed=``, ``noise_generator=``).

        With several processes it is that of all of them, on every rank, and any number of ranks can resume from it; all
        ranks must call it, or :meth:`gather` before.
        """
        return self._state()

    def _state(self, *, in_blocks: bool = False) -> dict[str, Any]:
        """The accounting's state; ``in_blocks``: with a block of the rows on each rank."""
        run, optimizer = self._training.run, self._training.optimizer
        return {
            "accountant": self._accountant_state(),
            "run": run.state_dict(in_blocks=in_blocks),
            "generators": self._generator_states(),
            "noise": {name: float(getattr(optimizer, name)) for name in optimizer.initial_noise},
            "initial_noise": dict(optimizer.initial_noise),
            "settings": self._settings(),
            **({"ranks": self._states_by_rank()} if run.ranks is not None else {}),
        }

    def _accountant_state(self) -> dict[str, Any]:
        """The DP accountant's state with its mechanism's name, in whose place Opacus 1.5 has a function."""
        return {**self.accountant.state_dict(), "mechanism": self.accountant.mechanism()}

    def gather(self) -> None:
        """See :meth:`LeakageReading.gather`; also collects the random states of all ranks, for checkpoints."""
        super().gather()
        self._collected = None
        self._states_by_rank()

    def _generator_states(self) -> dict[str, Tensor]:
        loader = self._training.loader.generator
        shuffling = {} if loader is None else {"loader": loader.get_state()}
        return {**shuffling, **self._training.optimizer.noise.state_dict()}

    def _settings(self) -> dict[str, Any]:
        """What a run must be resumed with, because its sums depend on it."""
        training = self._training
        options, ids = training.run.options, training.run.ids
        if self._data is None and training.looks.dataset is not None:
            with generators_kept():
                self._data = data_fingerprint(training.looks.dataset)
        return {
            "noise": training.optimizer.noise.kind,
            "poisson_sampling": options.sample_rate is not None,
            "amplification": name_of_amplification(options.amplification),
            "clip": options.clip.name,
            "clipping": "flat" if options.shares is None else "per_layer",
            "loss_reduction": options.loss_reduction,
            "ids": None if isinstance(ids, GrowingIds) else ids.fingerprint(),
            "data": self._data,
        }

    def _states_by_rank(self) -> list[dict[str, Any]]:
        """The random states of all ranks; collected again if a step was taken since the last time."""
        run = self._training.run
        if run.ranks is None:
            return []
        steps = run.history.steps
        if self._collected is None or self._collected[0] != steps:
            own = {"generators": self._generator_states(), _RANDOM_KEY: random_state()}
            self._collected = steps, run.ranks.objects(own)
        return self._collected[1]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, on an engine whose make_private was called with the same settings."""
        run = self._training.run
        missing = [key for key in ("accountant", "run", "generators") if key not in state_dict]
        if missing:
            raise ValueError(f"the state lacks {missing}; was it saved by FILPrivacyEngine.state_dict?")
        saved = state_dict["accountant"].get("mechanism")
        if saved != self.accountant.mechanism():
            raise ValueError(
                f"the state is from accountant {saved!r}, this engine's is {self.accountant.mechanism()!r}"
            )
        if run.batch.parts:
            raise RuntimeError(
                "a state can be loaded only between logical batches; finish the batch first, or call "
                "optimizer.discard_partial_batch()"
            )
        try:
            with _all_or_nothing((self.state_dict, self._set_state)):
                self._set_state(state_dict)
        except KeyError as error:
            raise ValueError(f"the state lacks {error.args[0]!r}; was it saved by another version?") from error

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        """Raise unless this run was made as the saved one."""
        own = self._settings()
        apart = {name: (saved.get(name), value) for name, value in own.items() if saved.get(name) != value}
        words = {"ids": "other ids (id_of=)", "data": "other data: its examples differ from those of the saved run"}
        found = [words.get(name, f"{name}={now!r} instead of {then!r}") for name, (then, now) in apart.items()]
        if found:
            raise ValueError(
                f"this run was made with {', '.join(found)}. Make it as the saved run was made, or start a new run "
                "with a new ledger. Nothing was loaded."
            )

    def _set_state(self, state_dict: Mapping[str, Any]) -> None:
        training = self._training
        training.run.load_state_dict(state_dict["run"])
        self._check_settings(state_dict["settings"])
        training.step.guard.forget_last_step()
        own = {"mechanism": self.accountant.state_dict()["mechanism"]}  # a name, or Opacus 1.5's function
        self.accountant.load_state_dict(copy.deepcopy({**state_dict["accountant"], **own}))
        self._collected = None
        ranks, saved = training.run.ranks, state_dict["generators"]
        if ranks is not None and ranks.own(state_dict.get("ranks", ())) is not None:
            saved = ranks.own(state_dict["ranks"])["generators"]
        if training.loader.generator is not None and "loader" in saved:
            training.loader.generator.set_state(saved["loader"].cpu())
        training.optimizer.noise.load_state_dict(saved)

    def save_checkpoint(
        self, *, path: str | os.PathLike[str] | IO[bytes], asynchronous: bool = False, **options: Any
    ) -> Future[None] | None:
        """As in Opacus, with the accounting, torch's random state and checksums; only a complete one replaces the last.

        Torch's random state serves dropout, shuffling and augmentation. Noise and Poisson draws are not in it, and a
        checkpoint holds nothing of them (unless they were seeded). Keep it as confidential as the data all the same:
        it has the ledger and weights that were perhaps never released.

        With several processes all ranks must call it. A file is written by rank 0 from what all have, which all then
        load (after :meth:`gather`, rank 0 may save alone). In a folder every rank writes its part, by
        ``torch.distributed.checkpoint``. Any number of processes can resume from either.

        Args:
            path: A file, or a folder: an existing one, or a name that ends with a slash.
            asynchronous: Whether to write into the folder while training continues, from a copy in memory.
            **options: As in Opacus: ``module``, ``optimizer``, ``checkpoint_dict`` and others.

        Returns:
            With ``asynchronous`` a future; its ``result()`` waits until the checkpoint is on the disk and raises any
            error. The next save or load waits for it, too.
        """
        if is_folder(path):
            return self._save_folder(path, options, asynchronous=asynchronous)
        _check_file(path, options.get("module"), asynchronous=asynchronous)
        save_options = options.pop("torch_save_kwargs", None) or {}
        checkpoint = self._checkpoint(options, in_blocks=False)
        checkpoint["privacy_accountant_state_dict"] = self._accountant_state()  # where Opacus has it
        if not self._writes:
            return None
        with sealed_when_complete(path) as file:
            torch.save({**checkpoint, **MARK}, file, **save_options)
        return None

    def _checkpoint(self, options: dict[str, Any], *, in_blocks: bool) -> dict[str, Any]:
        """What is saved, under the names that Opacus has; ``options`` of :meth:`save_checkpoint` are used up."""
        checkpoint = dict(options.pop("checkpoint_dict", None) or {})
        checkpoint[_MODULE] = options.pop("module").state_dict(**options.pop("module_state_dict_kwargs", None) or {})
        for name in ("optimizer", "noise_scheduler", "grad_clip_scheduler"):
            part = options.pop(name, None)
            if part is not None:
                checkpoint[f"{name}_state_dict"] = part.state_dict()
        if options:
            raise TypeError(f"save_checkpoint has no option {', '.join(options)}")

        checkpoint[_STATE_KEY] = {**self._state(in_blocks=in_blocks), "optimizer": self._optimizer_name}
        checkpoint[_RANDOM_KEY] = random_state()
        return checkpoint

    @property
    def _optimizer_name(self) -> str:
        return type(self._training.optimizer.original_optimizer).__name__

    def _save_folder(self, path: Any, options: dict[str, Any], *, asynchronous: bool) -> Future[None] | None:
        """What a file would hold, with rows, weights and optimizer state in parts."""
        if options.pop("torch_save_kwargs", None):
            raise TypeError(f"torch_save_kwargs= is for files, and path={path!r} is a folder; leave it out")
        self._wait_for_saving()
        checkpoint = self._checkpoint(options, in_blocks=True)
        self._saving = write_folder(path, checkpoint, self._training.run.ranks, asynchronous=asynchronous)
        return self._saving

    def _wait_for_saving(self) -> None:
        """Wait until an earlier checkpoint is written; raise its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: optim.Optimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
        restore_random_state: bool = True,
    ) -> dict[str, Any]:
        """As in Opacus, but loads tensors and plain values only (``weights_only=True``): safe on files from others.

        Weights, optimizer and accounting continue where they stopped, with new noise and new draws: two runs that
        resume from one checkpoint share neither. Only a run with ``noise_seed=`` continues bit for bit, if it stopped
        between epochs. ``restore_random_state=False`` leaves torch's global random state alone. ``path`` is a file or a
        folder that :meth:`save_checkpoint` wrote, of any number of processes.

        Raises:
            ValueError: The run was made with other data, ids, clip function, sampling or optimizer; nothing was
                changed.
            CheckpointError: The file is damaged or truncated; nothing was changed.
        """
        checkpoint = self._read(path, module, optimizer, torch_load_kwargs)
        if _STATE_KEY not in checkpoint:
            raise ValueError(f"{path} holds no Fisher accounting; it was not saved by FILPrivacyEngine.save_checkpoint")
        kwargs = module_load_dict_kwargs or {}
        _refuse_other_module(module, checkpoint[_MODULE], strict=kwargs.get("strict", True))
        accounting = checkpoint.pop(_STATE_KEY)
        if optimizer is not None and accounting.get("optimizer") != self._optimizer_name:
            raise ValueError(
                f"the checkpoint is from {accounting.get('optimizer')}, whose state {self._optimizer_name} cannot "
                "continue; build the same optimizer. Nothing was loaded."
            )
        parts = {
            _OPTIMIZER: optimizer,
            "noise_scheduler_state_dict": noise_scheduler,
            "grad_clip_scheduler_state_dict": grad_clip_scheduler,
        }

        # If one part cannot be loaded, the others are restored.
        loaded = [(part.state_dict, part.load_state_dict) for part in (module, *parts.values()) if part is not None]
        with _all_or_nothing(*loaded, (random_state, set_random_state)):
            module.load_state_dict(checkpoint[_MODULE], **kwargs)
            for key, part in parts.items():
                state = checkpoint.pop(key, None)
                if part is not None and state:
                    part.load_state_dict(state)
            saved = self._own_random_state(checkpoint.pop(_RANDOM_KEY, None), accounting)
            if restore_random_state and saved is not None:
                set_random_state(saved)
            self.load_state_dict(accounting)
        for name, scheduler in (("noise_multiplier", noise_scheduler), ("max_grad_norm", grad_clip_scheduler)):
            if scheduler is not None:
                self._go_on_with(name, accounting)
        return checkpoint

    def _read(
        self, path: Any, module: nn.Module, optimizer: Any, torch_load_kwargs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The saved content, as in a file; sharded weights and their optimizer state come in the same parts."""
        weights = {f"/{_MODULE}/{name}": value for name, value in module.state_dict().items()}
        groups = [] if optimizer is None else optimizer.param_groups
        trained = [p for group in groups for p in group["params"]]

        def like(name: str) -> Tensor | None:
            value = weights.get(name)
            of_optimizer = re.fullmatch(f"/{_OPTIMIZER}/state/([0-9]+)/.*", name)
            if of_optimizer is not None and int(of_optimizer[1]) < len(trained):
                value = trained[int(of_optimizer[1])]
            return value if isinstance(value, DTensor) else None

        if not is_folder(path):
            saved = load_whole(path, **(torch_load_kwargs or {}))
            return in_parts(saved, like) if is_sharded(module) else saved
        if torch_load_kwargs:
            raise TypeError(
                f"torch_load_kwargs={torch_load_kwargs} is for files; a folder's tensors are loaded to the CPU"
            )
        self._wait_for_saving()
        without = () if optimizer is not None else (_OPTIMIZER,)
        saved = read_folder(path, like, without, self._training.run.ranks)
        return in_parts(saved, like) if is_sharded(module) else saved  # small ones were read whole

    def _own_random_state(self, saved: Any, accounting: Mapping[str, Any]) -> Any:
        """Torch's random state of this rank, if the same number of ranks have saved theirs."""
        ranks = self._training.run.ranks
        own = None if ranks is None else ranks.own(accounting.get("ranks", ()))
        return saved if own is None else own[_RANDOM_KEY]

    def _go_on_with(self, name: str, accounting: Mapping[str, Any]) -> None:
        """Set σ or C to the scheduler's saved value, relative to this run's initial value."""
        optimizer = self._training.optimizer
        own, began = optimizer.initial_noise[name], accounting["initial_noise"][name]
        reached = accounting["noise"][name]
        if own == began:  # bit for bit
            setattr(optimizer, name, reached)
        elif began:
            setattr(optimizer, name, own * reached / began)


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


def _check_file(path: Any, module: nn.Module | None, *, asynchronous: bool) -> None:
    """Raise if a file is not possible."""
    remedy = f"give a folder: path='{path}/'" if isinstance(path, str | os.PathLike) else "give the path of a folder"
    if asynchronous:
        raise ValueError(f"asynchronous=True writes folders, and path={path!r} is a file; {remedy}")
    if module is not None and is_sharded(module):
        raise ValueError(f"the model is sharded, and a file would hold only the weights of rank 0; {remedy}")


def _refuse_other_module(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Raise unless the weights fit such a module, before anything is loaded."""
    own = module.state_dict()
    renames = any(part._load_state_dict_pre_hooks for part in module.modules())
    apart = sorted(own.keys() ^ state.keys()) if strict and not renames else []
    shapes = [
        f"{name} {list(value.shape)} instead of {list(own[name].shape)}"
        for name, value in state.items()
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and own[name].shape != value.shape
    ]
    if apart or shapes:
        found = "; ".join([*(f"only one of both has {name}" for name in apart[:5]), *shapes[:5]])
        raise ValueError(f"the checkpoint is from another model ({found}); build the same one. Nothing was loaded.")
