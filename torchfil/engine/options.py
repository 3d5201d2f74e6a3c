"""How a run is accounted for, checked before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchfil.accounting.pace import Pace
from torchfil.accounting.quantities import Needs, Track, needs_of
from torchfil.clipping import ClipFunction
from torchfil.fisher.amplification import Amplification, Theorem4Amplification, get_amplification
from torchfil.fisher.estimators import Estimator, get_estimator, names_of_estimators
from torchfil.fisher.gradients import DEFAULT_MAX_MEMORY
from torchfil.private import Private

__all__ = ["BatchToInputs", "Settings", "choose_amplification", "refuse_modes", "usual_memory"]

_USUAL_PROBES = 3

BatchToInputs = Callable[[Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Settings:
    """How a run is accounted for; see :meth:`FILPrivacyEngine.make_private`."""

    clip: ClipFunction
    private: Private | None
    amplification: Amplification
    estimator: str
    num_probes: int | None
    fil_rate: float
    track: tuple[Track, ...]
    sketch_rank: int
    loss_reduction: str
    batch_to_inputs: BatchToInputs | None
    norm_refresh: int | None
    max_memory: int
    max_ledger_memory: int
    cuda_graphs: bool = True
    compile: bool = False
    one_pass: bool = False
    rel_error: float | None = None
    epochs: float | None = None

    def __post_init__(self) -> None:
        self.chosen_estimator.check_gives(self.needs.quantities, f"track={self.track}")
        if self.num_probes is not None and self.num_probes < 1:
            raise ValueError(f"num_probes={self.num_probes} must be at least 1")
        self._check_target()
        if not 0 < self.fil_rate <= 1:
            raise ValueError(f"fil_rate={self.fil_rate} must lie in (0, 1]: it is the probability of measuring a step")
        if self.sketch_rank < 1:
            raise ValueError(f"sketch_rank={self.sketch_rank} must be at least 1")
        if self.norm_refresh is not None and self.norm_refresh < 1:
            raise ValueError(f"norm_refresh={self.norm_refresh} must be at least 1 step")
        if self.loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction={self.loss_reduction!r} must be 'mean' or 'sum'")
        if self.one_pass and (not self.chosen_estimator.one_pass or self.needs.products):
            able = names_of_estimators(lambda other: other.one_pass)
            raise ValueError(
                f"grad_sample_mode='one-pass' needs estimator={able}, and has no sketch; with estimator="
                f"{self.estimator!r} and track={self.track} use grad_sample_mode='hooks'"
            )
        if self.compile and not self.cuda_graphs:
            raise ValueError("compile=True compiles the passes of CUDA graphs; leave out cuda_graphs=False")
        if not self.clip.calibrated:
            raise ValueError(
                f"clip={self.clip.name!r} lets gradients exceed max_grad_norm by a factor of {self.clip.norm_bound:g}, "
                "so the accountant's ε would be too small. Use a calibrated clip, such as 'smooth' or 'gelu'."
            )
        if "matrix" in self.needs.quantities and not self.chosen_estimator.exact and self.num_probes == 1:
            raise ValueError("track=('fim',) from probes needs num_probes of at least 2")

    def _check_target(self) -> None:
        if self.epochs is not None and not self.epochs > 0:
            raise ValueError(f"epochs={self.epochs} must be positive: it is the planned number of passes over the data")
        if self.rel_error is None:
            return
        if not 0 < self.rel_error < 1:
            raise ValueError(f"rel_error={self.rel_error} must lie strictly between 0 and 1; 0.05 means 5 %")
        if self.num_probes is not None or self.fil_rate != 1:
            raise ValueError(
                f"rel_error={self.rel_error} chooses the probes and the share of steps by itself; leave out num_probes="
                f"{self.num_probes} and fil_rate={self.fil_rate}"
            )
        if not self.chosen_estimator.one_pass:
            able = names_of_estimators(lambda other: other.one_pass)
            raise ValueError(f"rel_error needs estimator={able}, not {self.estimator!r}")

    def pace(self) -> Pace:
        """The pace to begin with."""
        if self.rel_error is not None:
            return Pace.steered(2 * self.rel_error, self.epochs)  # η̄ ∝ sqrt(tr I): half of tr I's relative error
        return Pace(_USUAL_PROBES if self.num_probes is None else self.num_probes, self.fil_rate)

    @property
    def exact(self) -> bool:
        """Whether nothing is sampled."""
        return self.chosen_estimator.exact and self.fil_rate == 1

    @property
    def chosen_estimator(self) -> Estimator:
        """The estimator with what it can do."""
        return get_estimator(self.estimator)

    @property
    def needs(self) -> Needs:
        """What has to be measured at each step."""
        return needs_of(self.track)


def usual_memory(device: torch.device) -> int:
    """The ceiling for temporary tensors, in bytes, where nobody gives one."""
    if device.type != "cuda":
        return DEFAULT_MAX_MEMORY
    free, _ = torch.cuda.mem_get_info(device)
    return max(DEFAULT_MAX_MEMORY, free // 4)


def choose_amplification(
    amplification: str | Amplification | None, poisson_sampling: bool, theorem4_delta: float
) -> Amplification:
    """The user's choice, or the exact factors with Poisson sampling and none without."""
    if amplification is None:
        amplification = "poisson" if poisson_sampling else "none"
    by_theorem4 = Theorem4Amplification(delta=theorem4_delta)
    chosen = by_theorem4 if amplification == "theorem4" else get_amplification(amplification)
    if chosen.secret_batches and not poisson_sampling:
        raise ValueError(
            f"amplification={amplification!r} needs poisson_sampling=True: it holds for batches drawn at random, "
            "not for passes over a shuffled data set. Use 'none'."
        )
    return chosen


def refuse_modes(
    clipping: str, grad_sample_mode: str, batch_first: bool, module: nn.Module, *, wrap_model: bool = True
) -> None:
    """Raise for options of Opacus whose release the accounting would not describe."""
    reasons = {
        "adaptive": "it moves the threshold by counting factors below 1, which a smooth clip always has",
        "per_layer": "its Jacobian has one clip factor per layer, which the accounting does not differentiate yet",
    }
    if clipping != "flat":
        raise ValueError(
            f"clipping={clipping!r} cannot be accounted for: {reasons.get(clipping, 'it is not known')}. Use 'flat'."
        )
    if grad_sample_mode not in ("hooks", "functorch", "ew", "one-pass"):
        raise ValueError(
            f"grad_sample_mode={grad_sample_mode!r} clips inside the module with Opacus's own hard formula, which is "
            "not the one that is accounted for. Use 'hooks', 'functorch' or 'one-pass'."
        )
    if grad_sample_mode == "one-pass" and not wrap_model:
        raise ValueError("grad_sample_mode='one-pass' hands out other outputs than the module's; leave out wrap_model")
    if not batch_first:
        raise ValueError("batch_first=False is not supported: the first dimension must run over examples")
    if isinstance(module, nn.parallel.DistributedDataParallel) or type(module).__name__ in (
        "DifferentiallyPrivateDistributedDataParallel",
        "FSDPModule",
    ):
        raise ValueError("distributed training is not supported by FILPrivacyEngine yet; train on one device")
    padded = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding) and part.padding_idx is not None and part.weight.requires_grad
    ]
    if padded and grad_sample_mode == "hooks":
        raise ValueError(
            f"the embeddings {padded} have a padding_idx, for whose row torch's gradient is zero and Opacus's is not, "
            "so what is released is not what is accounted for. Set padding_idx = None on them (the row is then trained "
            "as any other), or freeze them (requires_grad_(False))."
        )
