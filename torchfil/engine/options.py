"""How a run is accounted for and executed: frozen options that check themselves before anything changes."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import Tensor

from torchfil.accounting.ledger import Ledger
from torchfil.accounting.norms import NormHistory
from torchfil.accounting.pace import Pace
from torchfil.accounting.quantities import Asked, Needs, needs_of
from torchfil.clipping import ClipFunction
from torchfil.engine.views import Views
from torchfil.fisher.amplification import Amplification, get_amplification
from torchfil.fisher.estimators import Estimator, get_estimator, names_of_estimators
from torchfil.fisher.gradients import DEFAULT_MAX_MEMORY
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.precision import PROBE_PRECISIONS, ProbePrecision
from torchfil.private import Private
from torchfil.questions import Question, check_questions
from torchfil.utils.errors import require
from torchfil.utils.noise import derived_seed

__all__ = ["SHORTCUTS", "WHY_NOT_ADAPTIVE", "Accounting", "BatchToInputs", "ClipWeights", "Execution", "RunOptions"]

_USUAL_PROBES = 3
SHORTCUTS = (  # options of Accounting that make_private takes directly
    *("num_probes", "questions", "rel_error", "track", "views"),
    *("accumulation_steps", "clip_weights", "sample_rate", "expected_batch_size"),
)
WHY_NOT_ADAPTIVE = "it adapts the threshold by counting factors below 1, and a smooth clip has only such factors"

BatchToInputs = Callable[[Any], tuple[Any, Any]]
ClipWeights = Tensor | Sequence[float] | Mapping[Hashable, float]  # in the order of the data set, or by id


@dataclass(frozen=True)
class Execution:
    """How the accounting's passes run; none of it changes a number beyond rounding.

    Attributes:
        max_memory: Limit for the accounting's temporary tensors, in bytes; see :mod:`torchfil.fisher.fim`. None: 1 GiB,
            or a quarter of the free memory on the model's GPU when the run starts, if that is more.
        cuda_graphs: Whether recorded passes are captured in CUDA graphs on a GPU.
        probe_precision: Precision of products with probes: "float32"; "tf32", on GPUs; "bfloat16". "auto": "tf32" on
            GPUs, or bfloat16 if the model is trained in it; the error is below a fiftieth of a probe's own
            (docs/decisions.md). Norms and released gradients are computed as the model is trained.

    Example:
        >>> Execution(max_memory=2**30).cuda_graphs
        True
    """

    max_memory: int | None = None
    cuda_graphs: bool = True
    probe_precision: str = "auto"

    def __post_init__(self) -> None:
        memory, precision = self.max_memory, self.probe_precision
        require(memory is None or memory > 0, f"max_memory={memory} must be a positive number of bytes")
        known = ("auto", *PROBE_PRECISIONS)
        require(precision in known, f"probe_precision={precision!r} must be one of {known}")

    def probe_precision_on(self, device: torch.device) -> ProbePrecision:
        """The precision of products with probes.

        Example:
            >>> Execution().probe_precision_on(torch.device("cuda"))
            'tf32'
        """
        if self.probe_precision == "auto":
            return "tf32" if device.type == "cuda" else "float32"
        return self.probe_precision  # type: ignore[return-value]

    def memory_on(self, device: torch.device) -> int:
        """The ceiling for temporary tensors, in bytes."""
        if self.max_memory is not None:
            return self.max_memory
        if device.type != "cuda":
            return DEFAULT_MAX_MEMORY
        free, _ = torch.cuda.mem_get_info(device)
        return max(DEFAULT_MAX_MEMORY, free // 4)


@dataclass(frozen=True)
class Accounting:
    """How the leakage of each example is accounted for.

    Attributes:
        num_probes: Probes per step and example; None: 3. One suffices for long runs, with conservative errors.
        rel_error: Target for the relative standard error of the median example's FIL at the end (for tr I and the MSE
            bound it is twice as large). Probes and skipped steps are chosen during the run, at the lowest cost.
        track: What to keep besides the trace: "diagonal" for attributes, "fim" or "sketch" for the spectral norm,
            "plis" for the derivative of the privacy loss. All sum by coordinate, so data sets that augment at random
            are refused. A dict keeps them for chosen ids only, ``{"diagonal": ids}`` (None: for all); for others they
            read NaN.
        questions: By name, what an attacker wants to know about every example (:mod:`torchfil.questions`); read with
            ``engine.get_guess(name)``.
        estimator: "weight-probes", "input-probes", "coordinates", "exact", or a registered one.
        fil_rate: The probability of measuring a step (which is then weighted by its inverse), in (0, 1]. For long runs:
            if few participations of an example are measured, its own number is mostly chance.
        epochs: With ``rel_error``, the planned number of passes over the data. None: at any time at least eight more
            are expected, so a shorter run ends above the target.
        amplification: What the attacker does not know about the batches: "poisson" (exact; the default with Poisson
            sampling), "none" (the default without), "theorem4", a registered name or an object with
            ``factors(rho, q, sigma)``.
        sketch_rank: Columns of the sketch.
        norm_refresh: How often, in steps, to compute every example's gradient norm for ``get_individual_epsilon`` and
            ``get_reconstruction_robustness``. Recommended if you read these, with Poisson sampling (without it, only an
            example's own steps count); costs one pass over the data each time.
        seed: The seed of the probes; None: derived from torch's seed without drawing from its stream.
        max_ledger_memory: The largest ledger, in bytes; a larger one is refused until you raise this.
        rows_at: Where the rows of all examples are kept. None: on the model's device; "cpu": in main memory; a folder:
            in memory-mapped files there, which disappear with the process. Only a batch's rows are then on the GPU.
        execution: How the passes run.
        extra_probes: This many probes, instead of ``num_probes``, measure the few examples of each batch that decide
            the lower end for all examples together (one in 64: those that leaked most so far, and those that suddenly
            leak), in a separate small pass. In the first 16 passes over the data, when most is learned, half as many
            measure everybody. For long runs with one probe; 0: nobody.
        views: Augmentation multiplicity: a function that maps x [batch, …] to K views of each example, [batch, K, …],
            or K if batches hold K views each. The mean gradient over an example's views is clipped once. Needs
            ``criterion``, the loss of single views. See :mod:`torchfil.engine.views`.
        accumulation_steps: How many batches the loop accumulates before each ``optimizer.step()`` with Poisson
            sampling: they are then parts of one draw at that many times the rate. Without Poisson sampling any number
            may be accumulated, and this stays 1.
        sample_rate: q, the probability with which Poisson sampling draws an example for a batch; a pass then has ⌊1/q⌋
            batches. None: 1 / (the number of batches of the loader).
        expected_batch_size: What the noisy sum of a batch, of all ranks together, is divided by with
            ``loss_reduction="mean"``. None: ⌊n q⌋. Both defaults depend on the number n of examples, which ε takes as
            public; set both to constants chosen without the data if n must stay hidden.
        clip_weights: ω in (0, 1] of every example; its clipped gradient is multiplied by ω. None: 1. Held fixed in all
            bounds, see :meth:`FILPrivacyEngine.make_private`.

    Example:
        >>> Accounting(num_probes=1, track=("diagonal",)).needs.quantities
        ('trace', 'diagonal')
    """

    num_probes: int | None = None
    rel_error: float | None = None
    track: Collection[str] | Mapping[str, Iterable[Hashable] | None] = ()
    questions: Mapping[str, Question] = field(default_factory=dict)
    estimator: str = "weight-probes"
    fil_rate: float = 1.0
    epochs: float | None = None
    amplification: str | Amplification | None = None
    sketch_rank: int = 4
    norm_refresh: int | None = None
    seed: int | None = None
    max_ledger_memory: int = 2**32
    execution: Execution = field(default_factory=Execution)
    extra_probes: int = 0
    views: Views | None = None
    accumulation_steps: int = 1
    sample_rate: float | None = None
    expected_batch_size: float | None = None
    clip_weights: ClipWeights | None = field(default=None, compare=False)
    rows_at: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "track", _named(self.track))
        object.__setattr__(self, "questions", check_questions(self.questions))
        for name in ("num_probes", "sketch_rank", "norm_refresh", "accumulation_steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value} must be at least 1")
        for name, meaning in (("fil_rate", "measuring a step"), ("sample_rate", "drawing an example")):
            value = getattr(self, name)
            require(value is None or 0 < value <= 1, f"{name}={value} must lie in (0, 1]: the probability of {meaning}")
        for name in ("epochs", "expected_batch_size"):
            value = getattr(self, name)
            require(value is None or 0 < value < float("inf"), f"{name}={value} must be positive and finite")
        place = self.rows_at in (None, "cpu") or Path(self.rows_at).is_dir()
        require(place, f"rows_at={str(self.rows_at)!r} must be None, 'cpu' or a folder that exists")

        # what must fit together
        if self.amplification is not None:
            get_amplification(self.amplification)
        self.chosen_estimator.check_gives(self.needs.quantities, f"track={tuple(self.track)}")
        matrix = "matrix" in self.needs.quantities and not self.chosen_estimator.exact
        require(not matrix or self.num_probes != 1, "track=('fim',) from probes needs num_probes of at least 2")
        able = names_of_estimators(lambda other: other.one_pass)
        if self.rel_error is not None:
            given, steered = f"rel_error={self.rel_error}", self.num_probes is None and self.fil_rate == 1
            left_out = f"num_probes={self.num_probes} and fil_rate={self.fil_rate}"
            require(0 < self.rel_error < 1, f"{given} must lie strictly between 0 and 1; 0.05 means 5 %")
            require(steered, f"{given} chooses the probes and the share of steps itself; leave out {left_out}")
            require(self.chosen_estimator.one_pass, f"{given} needs estimator={able}, not {self.estimator!r}")
        if self.extra_probes:
            given, fewest = f"extra_probes={self.extra_probes}", 1 + (self.num_probes or _USUAL_PROBES)
            single = self.chosen_estimator.one_pass and not self.needs.products
            require(self.extra_probes >= fewest, f"{given} must be 0, or more than num_probes: at least {fewest}")
            require(not self.skips_steps, f"{given} skips no step: leave out rel_error and fil_rate, or extra_probes")
            require(single, f"{given} needs estimator={able}, and no track=('sketch',)")

    def rows_place(self, device: torch.device) -> torch.device | Path:
        """Where the rows are kept for a model on that device."""
        if self.rows_at is None:
            return device
        return torch.device("cpu") if self.rows_at == "cpu" else Path(self.rows_at)

    @property
    def needs(self) -> Needs:
        """What has to be measured at each step."""
        return needs_of(self.track)

    def bytes_per_example(self, num_coordinates: int) -> int:
        """The bytes that the ledger and the norm history keep for an example.

        Quantities that are tracked for chosen ids count as for a chosen example.

        Args:
            num_coordinates: d; only quantities by coordinate depend on it.

        Example:
            >>> Accounting().bytes_per_example(100), Accounting(track=("diagonal",)).bytes_per_example(100)
            (136, 1336)
        """
        rank = min(self.sketch_rank, num_coordinates)
        return Ledger.bytes_needed(1, num_coordinates, self.track, rank, self.asked) + NormHistory.bytes_needed(1)

    @property
    def chosen(self) -> dict[str, Tensor | tuple[Hashable, ...]]:
        """By tracked quantity, the ids for which it is kept, if these are not all."""
        track = self.track if isinstance(self.track, Mapping) else {}
        return {name: ids for name, ids in track.items() if ids is not None}

    @property
    def asked(self) -> dict[str, Asked]:
        """What the ledger needs to know about the questions, by name."""
        return {name: Asked(question.answers, question.complete) for name, question in self.questions.items()}

    @property
    def chosen_estimator(self) -> Estimator:
        """The estimator, with what it can do."""
        return get_estimator(self.estimator)

    @property
    def exact(self) -> bool:
        """Whether nothing is sampled."""
        return self.chosen_estimator.exact and self.fil_rate == 1

    @property
    def skips_steps(self) -> bool:
        """Whether some steps are left out at random."""
        return self.rel_error is not None or self.fil_rate < 1

    def pace(self) -> Pace:
        """The pace to begin with."""
        if self.rel_error is not None:
            return Pace.steered(2 * self.rel_error, self.epochs)  # η̄ ∝ sqrt(tr I): half of tr I's relative error
        return Pace(_USUAL_PROBES if self.num_probes is None else self.num_probes, self.fil_rate)

    def generator(self) -> torch.Generator:
        """The source of the probes; run files keep its seed, from which torch's own seed cannot be found."""
        seed = derived_seed(torch.initial_seed(), "probes", 0) if self.seed is None else self.seed
        return torch.Generator().manual_seed(seed)

    def amplification_for(self, *, poisson_sampling: bool) -> Amplification:
        """The chosen amplification; by default the exact factors with Poisson sampling, and none without."""
        if self.amplification is None:
            return get_amplification("poisson" if poisson_sampling else "none")
        chosen = get_amplification(self.amplification)
        if chosen.secret_batches and not poisson_sampling:
            raise ValueError(
                f"amplification={self.amplification!r} needs poisson_sampling=True: it holds for batches drawn at "
                "random, not for passes over a shuffled data set. Use 'none'."
            )
        return chosen

    def with_shortcuts(self, shortcuts: Mapping[str, Any]) -> Accounting:
        """The same, with the shortcut options of ``make_private``.

        Raises:
            TypeError: An unknown option; the message says where it belongs.
            ValueError: An option that is given twice.
        """
        usual = vars(Accounting())
        for name in shortcuts:
            if name not in SHORTCUTS:
                raise _unknown_option(name)
            value, default = getattr(self, name), usual[name]
            if (value is not None) if default is None else (value != default):  # arrays are not compared
                raise ValueError(f"{name} is given twice, in accounting= and directly; keep one of them")
        return replace(self, **shortcuts)


def _named(track: Any) -> Any:
    """A tuple of names, or a dict from names to chosen ids; None: all."""
    if isinstance(track, Mapping):
        lasting = {name: ids if ids is None or isinstance(ids, Tensor) else tuple(ids) for name, ids in track.items()}
        return lasting if any(ids is not None for ids in lasting.values()) else tuple(lasting)
    return (track,) if isinstance(track, str) else tuple(track)


def _unknown_option(name: str) -> TypeError | ValueError:
    """The error for an option of ``make_private`` that it does not take."""
    if "clipbound" in name or "unclipped" in name:
        return ValueError(
            f"{name} belongs to Opacus's adaptive clipping, which cannot be accounted for: {WHY_NOT_ADAPTIVE}. "
            "Leave it out, with clipping='flat'."
        )
    places = {Accounting: "Accounting({}=…)", Execution: "Accounting(execution=Execution({}=…))"}
    kinds: dict[str, Any] = {part.name: kind for kind in places for part in dataclasses.fields(kind)}
    if name in kinds:
        where, kind = places[kinds[name]].format(name), kinds[name].__name__
        return TypeError(f"make_private takes {name} as accounting={where}; see torchfil.{kind}")
    of_opacus = inspect.signature(PrivacyEngine.make_private).parameters
    ours = ("clip", "private", "id_of", "batch_to_inputs", "accounting")
    alike = difflib.get_close_matches(name, [*of_opacus, *ours, *kinds], n=1)
    hint = f". Did you mean {alike[0]!r}?" if alike else ""
    return TypeError(
        f"make_private got an unexpected option {name!r}; accounting=Accounting(…) takes {', '.join(kinds)}{hint}"
    )


@dataclass(frozen=True)
class RunOptions:
    """Everything that is fixed for a run.

    Attributes:
        accounting: How to account.
        clip: The clip function, calibrated.
        amplification: What the attacker does not know about the batches.
        sample_rate: q with Poisson sampling, else None.
        max_memory: For temporary tensors, in bytes.
        private: What is private; None: see :meth:`FILPrivacyEngine.make_private`.
        loss_reduction: "mean" or "sum".
        batch_to_inputs: Maps a batch to (inputs, targets).
        shares: C_l/‖C‖ by parameter name, if each parameter's gradient is clipped separately; else None.
    """

    accounting: Accounting
    clip: ClipFunction
    amplification: Amplification
    sample_rate: float | None
    max_memory: int
    private: Private | None = None
    loss_reduction: str = "mean"
    batch_to_inputs: BatchToInputs | None = None
    shares: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        rate, steps, reduction = self.sample_rate, self.accounting.accumulation_steps, self.loss_reduction
        more = f"accumulation_steps={steps} batches hold more than the data set (a rate of {rate}); accumulate fewer"
        require(rate is None or rate <= 1, more)
        require(reduction in ("mean", "sum"), f"loss_reduction={reduction!r} must be 'mean' or 'sum'")
        if not self.clip.calibrated:
            raise ValueError(
                f"clip={self.clip.name!r} lets gradients exceed max_grad_norm by a factor of {self.clip.norm_bound:g}, "
                "so the accountant's ε would be too small. Use a calibrated clip: 'smooth', the default, or 'gelu'."
            )

    def mechanism(self, noise_multiplier: float, max_grad_norm: float) -> Mechanism:
        """A step with that noise and threshold; σ may be 0."""
        return Mechanism.build(
            max_grad_norm,
            noise_multiplier,
            self.clip,
            self.amplification,
            self.sample_rate,
            shares=self.shares,
            allow_zero_noise=True,
        )
