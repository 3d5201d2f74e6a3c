"""Saving a run's state and resuming from it: the sums continue, the noise is always new."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from opacus.accountants import IAccountant
from torch import nn, optim
from torch.distributed.tensor import DTensor

from torchfil.accounting.ids import GrowingIds
from torchfil.engine.assembly import PrivateTraining
from torchfil.engine.distributed.checkpoints import is_folder, read_file, read_folder, write_file, write_folder
from torchfil.engine.distributed.shards import in_parts, is_sharded
from torchfil.engine.saving.data import data_fingerprint
from torchfil.fisher.amplification import name_of_amplification
from torchfil.utils.noise import preserve_rng, random_state, set_random_state

__all__ = ["Checkpoints"]

_STATE, _RANDOM = "fil_engine_state_dict", "random_state"
_MODULE, _OPTIMIZER = "module_state_dict", "optimizer_state_dict"  # as in Opacus
_DIFFERENCES = {  # settings whose values say nothing
    "ids": "other ids (id_of=)",
    "tracked_ids": "track= for other ids",
    "data": "other data: its examples differ from those of the saved run",
}


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
            # Opacus 1.5 has a function in place of the mechanism's name
            "accountant": {**self._accountant.state_dict(), "mechanism": self._accountant.mechanism()},
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
        own = {"mechanism": self._accountant.state_dict()["mechanism"]}  # a name, or Opacus 1.5's function
        self._accountant.load_state_dict(copy.deepcopy({**state_dict["accountant"], **own}))
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
        dataset = self._training.looks.dataset
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
                f"this run was made with {', '.join(found)}. Make it as the saved run was made, or start a new run "
                "with a new ledger. Nothing was loaded."
            )

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

    def save(self, path: Any, *, asynchronous: bool, **options: Any) -> Future[None] | None:
        """See :meth:`FILPrivacyEngine.save_checkpoint`."""
        save_options = options.pop("torch_save_kwargs", None) or {}
        module, to_folder = options.pop("module"), is_folder(path)
        remedy = f"give a folder: path='{path}/'" if isinstance(path, str | os.PathLike) else "give a folder's path"
        if to_folder and save_options:
            raise TypeError(f"torch_save_kwargs= is for files, and path={path!r} is a folder; leave it out")
        if asynchronous and not to_folder:
            raise ValueError(f"asynchronous=True writes folders, and path={path!r} is a file; {remedy}")
        if is_sharded(module) and not to_folder:
            raise ValueError(f"the model is sharded, and a file would hold only the weights of rank 0; {remedy}")

        checkpoint = dict(options.pop("checkpoint_dict", None) or {})
        checkpoint[_MODULE] = module.state_dict(**options.pop("module_state_dict_kwargs", None) or {})
        for name in ("optimizer", "noise_scheduler", "grad_clip_scheduler"):
            part = options.pop(name, None)
            if part is not None:
                checkpoint[f"{name}_state_dict"] = part.state_dict()
        if options:
            raise TypeError(f"save_checkpoint has no option {', '.join(options)}")
        state = {**self.state_dict(), "optimizer": self._optimizer_name}
        checkpoint |= {_STATE: state, _RANDOM: [states[_RANDOM] for states in self._states_by_rank()]}
        if to_folder:
            self._wait_for_saving()
            self._saving = write_folder(path, checkpoint, self._ranks, asynchronous=asynchronous)
            return self._saving
        if self._ranks is None or self._ranks.rank == 0:
            checkpoint["privacy_accountant_state_dict"] = state["accountant"]  # where Opacus has it
            write_file(path, checkpoint, **save_options)
        return None

    def _wait_for_saving(self) -> None:
        """Wait until an earlier checkpoint is written; raise its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def load(
        self,
        path: Any,
        module: nn.Module,
        optimizer: optim.Optimizer | None = None,
        *,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
        restore_random_state: bool = True,
    ) -> dict[str, Any]:
        """See :meth:`FILPrivacyEngine.load_checkpoint`."""
        parts = {
            _OPTIMIZER: optimizer,
            "noise_scheduler_state_dict": noise_scheduler,
            "grad_clip_scheduler_state_dict": grad_clip_scheduler,
        }
        checkpoint = self._read(path, module, optimizer, torch_load_kwargs or {})
        if _STATE not in checkpoint:
            raise ValueError(f"{path} holds no Fisher accounting; it was not saved by FILPrivacyEngine.save_checkpoint")
        state = checkpoint.pop(_STATE)
        if optimizer is not None and state["optimizer"] != self._optimizer_name:
            raise ValueError(
                f"the checkpoint is from {state['optimizer']}, whose state {self._optimizer_name} cannot continue; "
                "build the same optimizer. Nothing was loaded."
            )

        # If one part cannot be loaded, the others are restored.
        loaded = [(part.state_dict, part.load_state_dict) for part in (module, *parts.values()) if part is not None]
        with _all_or_nothing(*loaded, (random_state, set_random_state)):
            module.load_state_dict(checkpoint[_MODULE], **module_load_dict_kwargs or {})
            for key, part in parts.items():
                part_state = checkpoint.pop(key, None)
                if part is not None and part_state:
                    part.load_state_dict(part_state)
            by_rank = checkpoint.pop(_RANDOM)
            if restore_random_state:
                set_random_state(self._own(by_rank))
            self.load_state_dict(state)

        # σ and C continue relative to this run's initial values
        private = self._training.optimizer
        for name, scheduler in (("noise_multiplier", noise_scheduler), ("max_grad_norm", grad_clip_scheduler)):
            began, reached = state["noise"][name]
            if scheduler is not None and began:
                setattr(private, name, private.initial_noise[name] / began * reached)
        return checkpoint

    def _read(self, path: Any, module: nn.Module, optimizer: Any, load_options: dict[str, Any]) -> dict[str, Any]:
        """The saved content; sharded weights and their optimizer state come in the same parts."""
        like = {f"['{_MODULE}']['{name}']": value for name, value in module.state_dict().items()}
        if optimizer is not None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            like |= {f"['{_OPTIMIZER}']['state'][{place}]": p for place, p in enumerate(trained)}

        def part(name: str) -> DTensor | None:
            value = like.get(name, like.get(name.rpartition("[")[0]))
            return value if isinstance(value, DTensor) else None

        if not is_folder(path):
            saved = read_file(path, **load_options)
        elif load_options:
            raise TypeError(f"torch_load_kwargs={load_options} is for files; a folder's tensors are loaded to the CPU")
        else:
            self._wait_for_saving()
            saved = read_folder(path, part, () if optimizer is not None else (_OPTIMIZER,), self._ranks)
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
