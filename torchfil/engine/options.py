"""How a run is accounted for and executed: frozen options, and the checks from the arguments of
``make_private`` on.

Everything here is checked before anything changes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.pace import Pace
from torchfil.accounting.quantities import Needs, QuestionSpec, needs_of, tracked
from torchfil.audit.canaries import Canaries
from torchfil.clipping import ClipFunction
from torchfil.engine.distributed.ranks import Ranks, is_sharded
from torchfil.engine.forward import in_training
from torchfil.engine.loader import KeysOf, check_reads_alike, check_sampler, is_stream
from torchfil.engine.rows import Views
from torchfil.fisher.amplification import Amplification, get_amplification
from torchfil.fisher.estimators import EXACT, check_estimator
from torchfil.fisher.gradients import DEFAULT_MAX_MEMORY
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.models import PROBE_PRECISIONS, ProbePrecision
from torchfil.private import Private
from torchfil.questions import Absent, Question, check_questions
from torchfil.run.unit import unit_of
from torchfil.utils.noise import derived_seed
from torchfil.utils.text import nearest

_USUAL_PROBES = 3
# Opacus's ways to form p.grad_sample; the first serves for all of them
_HOOKS = ("hooks", "functorch", "ew")

BatchToInputs = Callable[[Any], tuple[Any, Any]]
# in the order of the data set, or by id
ClipWeights = Tensor | Sequence[float] | Mapping[Hashable, float]


@dataclass(frozen=True)
class Execution:
    """How the accounting's passes run; none of it changes a number beyond rounding.

    Attributes:
        max_memory: Limit for the accounting's temporary tensors in bytes
            (:mod:`torchfil.fisher.batch`); None: 1 GiB, or a quarter of the free memory on the
            model's GPU when the run starts, if that is more.
        cuda_graphs: Whether recorded passes are captured in CUDA graphs on a GPU.
        probe_precision: Precision of products with probes: "float32"; "tf32", on GPUs; "bfloat16".
            "auto": "tf32" on GPUs, or bfloat16 if the model is trained in it; the error is below a
            fiftieth of a probe's own (docs/decisions.md). Norms and released gradients are computed
            as the model is trained.

    Example:
        >>> Execution(max_memory=2**30).cuda_graphs
        True
    """

    max_memory: int | None = None
    cuda_graphs: bool = True
    probe_precision: str = "auto"

    def __post_init__(self) -> None:
        memory, precision = self.max_memory, self.probe_precision
        if memory is not None and not memory > 0:
            raise ValueError(f"max_memory={memory} must be a positive number of bytes")
        known = ("auto", *PROBE_PRECISIONS)
        if precision not in known:
            raise ValueError(f"probe_precision={precision!r} must be one of {known}")

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
        num_probes: Probes per step and example, at every step; None: 3, or what the plan says.
        rel_error: Plan probes and the share of measured steps during the run, at the lowest cost:
            the target for the relative standard error of tr I of the most exposed 5 % at the end,
            as far as it comes from probes and skipped steps.
        track: What to keep besides the trace: "diagonal" for attributes, "fim" for the spectral
            norm, "plis" for the derivative of the privacy loss. All sum by coordinate, so data sets
            that augment at random are refused.
        questions: By name, what an attacker wants to know about every example
            (:mod:`torchfil.questions`); read with ``engine.get_guess(name)``.
        estimator: "weight-probes" or "exact".
        fil_rate: The probability of measuring a step (which is then weighted by its inverse), in
            (0, 1]. For long runs: if few participations of an example are measured, its own number
            is mostly chance.
        epochs: The number of passes over the data, for the plan. Without ``rel_error``, its target
            is that measuring adds 5 % to the error that measuring every draw exactly would leave.
            None: at any time at least eight more are expected, so a shorter run ends above the
            target.
        amplification: What the attacker does not know about the batches: "poisson" (exact; the
            default with Poisson sampling), "none" (the default without), or an object with
            ``factors(rho, q, sigma)`` and ``secret_batches``.
        norm_refresh: How often, in steps, to compute every example's gradient norm for
            ``get_individual_epsilon`` and ``get_reconstruction_robustness``. Recommended if you
            read these, with Poisson sampling (without it, only an example's own steps count); costs
            one pass over the data each time, after the update and without dropout.
        seed: The seed of the probes; None: derived from torch's seed without drawing from its
            stream.
        max_ledger_memory: The largest ledger, in bytes; a larger one is refused until you raise
            this.
        execution: How the passes run.
        views: Augmentation multiplicity: a function that maps x [batch, …] to K views of each
            example, [batch, K, …], or K if batches hold K views each. The mean gradient over an
            example's views is clipped once. Needs ``criterion``, the loss of single views. See
            :mod:`torchfil.engine.rows`.
        owner_of: Who owns which row, if a person has several: the owner of every row, [rows]; the
            name or position of the owners in a batch, which the loop then does not see; or a
            function from a batch to its owners. How many rows a person has counts as public.
        rows_per_owner: The largest number of rows that a drawn owner brings, drawn anew each time;
            the choice counts as known to the attacker. None: all of its rows.
        row_reduction: "mean" or "sum": how the gradients of an owner's rows become one, which is
            clipped once.
        unit: With ``owner_of``, whose privacy is accounted for. "owner": Poisson sampling draws
            owners, and ε, Fisher information and questions are about whole persons. "row": rows are
            drawn and clipped one by one, and readings with ``by="owner"`` say what that means for a
            person.
        unit_names: What reports call an owner and a row, for example ("patient", "visit").
        accumulation_steps: How many batches the loop accumulates before each ``optimizer.step()``
            with Poisson sampling: they are then parts of one draw at that many times the rate.
            Without Poisson sampling any number may be accumulated, and this stays 1.
        sample_rate: q, the probability with which Poisson sampling draws an example for a batch; a
            pass then has ⌊1/q⌋ batches. None: 1 / (the number of batches of the loader).
        expected_batch_size: What the noisy sum of a batch, of all ranks together, is divided by
            with ``loss_reduction="mean"``. None: ⌊n q⌋. Both defaults depend on the number n of
            examples, which ε takes as public; set both to constants chosen without the data if n
            must stay hidden.
        canaries: Examples made for an audit, which join the run (:class:`torchfil.Canaries`); read
            with ``engine.audit(delta=…)``. They are in no table of people, and cost some accuracy
            and time.
        clip_weights: ω in (0, 1] of every example; its clipped gradient is multiplied by ω. None:
            1. Held fixed in all bounds, see :meth:`FILPrivacyEngine.make_private`.

    Example:
        >>> Accounting(num_probes=1, track=("diagonal",)).needs.quantities
        ('trace', 'diagonal')
    """

    num_probes: int | None = None
    rel_error: float | None = None
    track: Collection[str] = ()
    questions: Mapping[str, Question] = field(default_factory=dict)
    estimator: str = "weight-probes"
    fil_rate: float = 1.0
    epochs: float | None = None
    amplification: str | Amplification | None = None
    norm_refresh: int | None = None
    seed: int | None = None
    max_ledger_memory: int = 2**32
    execution: Execution = field(default_factory=Execution)
    views: Views | None = None
    owner_of: KeysOf = field(default=None, compare=False)
    rows_per_owner: int | None = None
    row_reduction: str = "mean"
    unit: str = "owner"
    unit_names: tuple[str, str] = ("person", "row")
    accumulation_steps: int = 1
    sample_rate: float | None = None
    expected_batch_size: float | None = None
    canaries: Canaries | None = None
    clip_weights: ClipWeights | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "track", (self.track,) if isinstance(self.track, str) else tuple(self.track)
        )
        object.__setattr__(self, "questions", check_questions(self.questions))
        self._check_numbers()

        # what must fit together
        for name, values in (("unit", ("owner", "row")), ("row_reduction", ("mean", "sum"))):
            value = getattr(self, name)
            if value not in values:
                raise ValueError(f"{name}={value!r} must be one of {values}")
        unit_of({"unit_names": self.unit_names})
        about_rows = (self.rows_per_owner, self.row_reduction, self.unit)
        if self.owner_of is None and about_rows != (None, "mean", "owner"):
            raise ValueError(
                "rows_per_owner, row_reduction and unit need owner_of=, which says whose rows "
                "they are"
            )
        if self.views is not None and self.owner_of is not None:
            raise ValueError(
                "views= and owner_of= both give an example several rows; make the views in the "
                "data set, as more rows"
            )
        if self.amplification is not None:
            get_amplification(self.amplification)
        check_estimator(self.estimator)
        self._check_probes()

    def _check_numbers(self) -> None:
        for name in ("num_probes", "norm_refresh", "accumulation_steps", "rows_per_owner"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name, meaning in (
            ("fil_rate", "measuring a step"),
            ("sample_rate", "drawing an example"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name}={value} must lie in (0, 1]: the probability of {meaning}")
        for name in ("epochs", "expected_batch_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value} must be positive and finite")

    def _check_probes(self) -> None:
        """What is measured fits the estimator and the number of probes."""
        by_probes = self.estimator != EXACT
        matrix = "matrix" in self.needs.quantities and by_probes
        if matrix and self.num_probes == 1:
            raise ValueError("track=('fim',) from probes needs num_probes of at least 2")

        # a target for the error sets probes and skipped steps itself
        if self.rel_error is not None:
            given, steered = (
                f"rel_error={self.rel_error}",
                self.num_probes is None and self.fil_rate == 1,
            )
            left_out = f"num_probes={self.num_probes} and fil_rate={self.fil_rate}"
            if not 0 < self.rel_error < 1:
                raise ValueError(f"{given} must lie strictly between 0 and 1; 0.05 means 5 %")
            if not steered:
                raise ValueError(
                    f"{given} chooses the probes and the share of steps itself; leave out "
                    f"{left_out}"
                )
            if not by_probes:
                raise ValueError(f"{given} needs estimator='weight-probes', not {self.estimator!r}")

    @property
    def by_owner(self) -> bool:
        """Whether owners are drawn and clipped, each with all of its rows."""
        return self.owner_of is not None and self.unit == "owner"

    @property
    def needs(self) -> Needs:
        """What has to be measured at each step."""
        return needs_of(tuple(self.track))

    @property
    def asked(self) -> dict[str, QuestionSpec]:
        """What the ledger needs to know about the questions, by name."""
        return {
            name: QuestionSpec(q.answers, q.complete, isinstance(q, Absent))
            for name, q in self.questions.items()
        }

    @property
    def exact(self) -> bool:
        """Whether nothing is sampled."""
        return self.estimator == EXACT and self.fil_rate == 1

    @property
    def plans(self) -> bool:
        """Whether probes and the share of measured steps are chosen during the run."""
        fixed = self.num_probes is not None or self.fil_rate < 1 or self.estimator == EXACT
        return not fixed and (self.rel_error is not None or self.epochs is not None)

    @property
    def skips_steps(self) -> bool:
        """Whether some steps are left out at random."""
        return self.plans or self.fil_rate < 1

    def pace(self, *, is_stream: bool = False) -> Pace:
        """The pace to begin with; a stream, whose passes nobody knows, has no plan."""
        if self.plans and not is_stream:
            return Pace.planned(self.rel_error, self.epochs)
        return Pace(_USUAL_PROBES if self.num_probes is None else self.num_probes, self.fil_rate)

    def probe_seed(self) -> int:
        """The seed of the probes.

        Run files keep it, and torch's own seed cannot be found from it.
        """
        return derived_seed(torch.initial_seed(), "probes") if self.seed is None else self.seed

    def amplification_for(self, *, poisson_sampling: bool) -> Amplification:
        """The chosen amplification.

        By default the exact factors with Poisson sampling, and none without.
        """
        if self.amplification is None:
            return get_amplification("poisson" if poisson_sampling else "none")
        chosen = get_amplification(self.amplification)
        if not poisson_sampling and chosen.secret_batches:
            raise ValueError(
                f"amplification={self.amplification!r} needs poisson_sampling=True, batches drawn "
                "at random. Use 'none' for passes over shuffled data."
            )
        return chosen


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
        shares: C_l/‖C‖ by parameter name, if each parameter's gradient is clipped separately; else
            None.
        default_noise: Whether σ is the default, because none was given.
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
    default_noise: bool = False

    def __post_init__(self) -> None:
        rate, steps, reduction = (
            self.sample_rate,
            self.accounting.accumulation_steps,
            self.loss_reduction,
        )
        if rate is not None and not rate <= 1:
            raise ValueError(
                f"accumulation_steps={steps} batches hold more than the data set; accumulate fewer"
            )
        if reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction={reduction!r} must be 'mean' or 'sum'")
        if not self.clip.calibrated:
            raise ValueError(
                f"clip={self.clip.name!r} lets gradients exceed max_grad_norm by a factor of "
                f"{self.clip.norm_bound:g}, so ε would be too small. Use a calibrated clip: "
                "'smooth' or 'gelu'."
            )

    def mechanism(self, noise_multiplier: float, max_grad_norm: float) -> Mechanism:
        """A step with that noise and threshold; σ may be 0."""
        how = (self.clip, self.amplification, self.sample_rate)
        return Mechanism.build(
            max_grad_norm, noise_multiplier, *how, shares=self.shares, allow_zero_noise=True
        )


def take_options(
    accounting: Accounting | None, options: Mapping[str, Any], data_loader: object
) -> tuple[Accounting, dict[str, Any]]:
    """The accounting with those of the options that are its own, and the other options.

    Raises:
        TypeError: The loader is not torch's own.

    Example:
        >>> accounting, others = take_options(
        ...     None, {"num_probes": 2, "clip": "hard"}, DataLoader([])
        ... )
        >>> accounting.num_probes, others
        (2, {'clip': 'hard'})
    """
    if not isinstance(data_loader, DataLoader):
        raise TypeError(
            f"data_loader must be torch's own DataLoader. Got {type(data_loader).__name__}. Pass "
            "the plain DataLoader, before Fabric or WebDataset wraps it; for arrays, "
            "DataLoader(TensorDataset(x, y), batch_size=64)."
        )
    own = {each.name: options[each.name] for each in fields(Accounting) if each.name in options}
    others = {name: value for name, value in options.items() if name not in own}
    return replace(accounting or Accounting(), **own), others


def refuse_unknown(unknown: Mapping[str, object], method: Callable[..., object]) -> None:
    """Raise a TypeError for the first of these options, which are neither the accounting's nor the
    method's.
    """
    for name in unknown:
        known = [*inspect.signature(method).parameters, *(each.name for each in fields(Accounting))]
        raise TypeError(f"Unknown option {name!r}{nearest(name, known)}")


def check_modes(
    clipping: str,
    grad_sample_mode: str,
    module: nn.Module,
    accounting: Accounting,
    *,
    batch_first: bool,
    wrap_model: bool,
) -> str:
    """The mode to use, "auto" or "hooks".

    Raise for options whose release the accounting would not describe.
    """
    if clipping not in ("flat", "per_layer"):
        raise ValueError(
            f"clipping={clipping!r} must be 'flat' or 'per_layer'; 'adaptive' adapts C by "
            "counting factors below 1, and a smooth clip has only such factors"
        )
    if grad_sample_mode not in ("auto", "ghost", *_HOOKS):
        raise ValueError(
            f"grad_sample_mode={grad_sample_mode!r} must be 'auto' or 'ghost', which support "
            "sharded weights as well, or 'hooks'"
        )
    mode = "hooks" if grad_sample_mode in _HOOKS or not wrap_model else "auto"

    # Hooks form one gradient for each row or view, not for each example, and of all weights.
    recorded, several = (
        mode == "auto" and batch_first,
        accounting.views is not None or accounting.by_owner,
    )
    for name, given in (("owner_of= or views=", several), ("a sharded model", is_sharded(module))):
        if not recorded and given:
            raise ValueError(
                f"{name} needs grad_sample_mode='auto', wrap_model=True and batch_first=True"
            )

    # Opacus's hooks give the padding row a gradient that torch does not.
    embeddings = [
        (name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding)
    ]
    padded = [
        name
        for name, part in embeddings
        if part.padding_idx is not None and part.weight.requires_grad
    ]
    if padded and mode != "auto":
        raise ValueError(
            f"the embeddings {padded} have a padding_idx, which Opacus does not leave out of the "
            "gradient: use grad_sample_mode='auto', or set padding_idx = None"
        )
    return mode


def thresholds(
    clipping: str,
    max_grad_norm: float | Sequence[float],
    module: nn.Module,
    optimizer: optim.Optimizer,
) -> tuple[float, dict[str, float] | None]:
    """‖C‖, and C_l/‖C‖ by the trainable parameters' names, None for one threshold on the whole
    gradient.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> thresholds("per_layer", [3.0, 4.0], model, optim.SGD(model.parameters(), lr=0.1))
        (5.0, {'weight': 0.6, 'bias': 0.8})
    """
    several = not isinstance(max_grad_norm, (int, float))
    if clipping != "per_layer":
        if several:
            raise ValueError(
                f"max_grad_norm={max_grad_norm} has several numbers: pass clipping='per_layer' "
                "with them"
            )
        return float(max_grad_norm), None  # type: ignore[arg-type]
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    order = [
        names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names
    ]
    limits = [float(limit) for limit in max_grad_norm] if several else []  # type: ignore[union-attr]
    if len(limits) != len(order):
        raise ValueError(
            f"clipping='per_layer' needs max_grad_norm as a list of {len(order)} numbers, one for "
            f"each of {order} ([C / {len(order)} ** 0.5] * {len(order)}), got {max_grad_norm}"
        )
    if not all(0 < limit < math.inf for limit in limits):
        raise ValueError(f"max_grad_norm={limits} must all be positive and finite")

    norm = math.hypot(*limits)
    by_name = {name: limit / norm for name, limit in zip(order, limits, strict=True)}
    return norm, {name: by_name[name] for name in names.values()}  # in the order of the gradients


def _check_optimizer(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Raise unless the optimizer takes one gradient per step, of the module's trainable parameters
    and no others.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss several times in one step (its step() "
            "needs a closure), and ε counts one. Use an optimizer that takes one gradient per "
            "step, such as Adam."
        )
    own = {id(p) for p in module.parameters()}
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in given]
    foreign, lacking = len(given - own), f"lacks {len(left)} trainable ones ({left[:5]})"
    if given - own or left:
        raise ValueError(
            f"Module parameters are different than optimizer Parameters: it has {foreign} foreign "
            f"ones, and {lacking}. Make it after layers were replaced, and freeze what is not "
            "trained."
        )


def run_options(
    module: nn.Module,
    optimizer: optim.Optimizer,
    data_loader: DataLoader[object],
    accounting: Accounting,
    id_of: KeysOf,
    *,
    mode: str,
    poisson_sampling: bool,
    **options: Any,
) -> RunOptions:
    """Everything fixed for the run, checked.

    The sampling rate is added when the loader is prepared.
    """
    hooked = isinstance(module, AbstractGradSampleModule) or hasattr(
        module, "autograd_grad_sample_hooks"
    )
    if not (not hooked and module not in in_training):
        raise ValueError(
            "the model is already private (make_private was called on it); pass the plain module, "
            "or its _module"
        )
    _check_optimizer(module, optimizer)

    # how batches are drawn, which ε and the amplification rest on
    rate = accounting.sample_rate
    if rate is not None and not poisson_sampling:
        raise ValueError(
            f"sample_rate={rate} is the rate of Poisson sampling, and poisson_sampling=False: "
            "leave one of them out"
        )
    parts = accounting.accumulation_steps
    if not (parts == 1 or (mode == "auto" and poisson_sampling)):
        raise ValueError(
            f"accumulation_steps={parts} is for Poisson sampling in grad_sample_mode='auto'; "
            "without Poisson sampling leave it out: any number of batches may be accumulated"
        )
    amplification = accounting.amplification_for(poisson_sampling=poisson_sampling)
    max_memory = accounting.execution.memory_on(next(module.parameters()).device)
    if is_stream(data_loader):
        _check_stream(data_loader, accounting, id_of, poisson_sampling=poisson_sampling)
    else:
        check_sampler(data_loader, poisson_sampling=poisson_sampling)
        check_reads_alike(
            data_loader, accounting.track, options["private"], options["batch_to_inputs"]
        )
    return RunOptions(
        accounting, amplification=amplification, sample_rate=None, max_memory=max_memory, **options
    )


def _check_stream(
    loader: DataLoader[object], accounting: Accounting, id_of: KeysOf, *, poisson_sampling: bool
) -> None:
    """Raise for streams that cannot be accounted for."""
    if poisson_sampling:
        raise ValueError(
            f"{type(loader.dataset).__name__} is a stream, from which no example can be drawn at "
            "random. Pass poisson_sampling=False and id_of=, or data with numbered examples."
        )
    if not callable(id_of) and not isinstance(id_of, str | int):
        raise ValueError(
            f"id_of={id_of!r} does not identify the examples in a stream: put an id into every "
            "example, and pass its name or place in a batch, or a function from a batch to its "
            "ids"
        )
    if loader.batch_size is None:
        raise ValueError("the loader has batch_size=None: give DataLoader(stream, batch_size=…)")

    # options that need all examples before they have arrived
    unknown = {
        "clip_weights": "who will come is not known",
        "rel_error": "the number of passes is unknown; set num_probes= and fil_rate= instead",
        "norm_refresh": "examples cannot be read again; only an example's own steps count, so it "
        "is not needed",
        "rows_per_owner": "an owner's other rows are not known; leave rows out in the stream "
        "itself",
    }
    by_coordinate = [
        quantity.name for quantity in tracked(tuple(accounting.track)) if quantity.by_coordinate
    ]
    if by_coordinate and accounting.by_owner:
        raise ValueError(
            f"track={tuple(by_coordinate)} sums by coordinate, and a stream does not number the "
            "rows of an owner. Track the trace only."
        )
    for option, reason in unknown.items():
        given = getattr(accounting, option)
        if given is not None:
            raise ValueError(f"{option}={given!r} cannot be used with a stream: {reason}")


def with_owners(
    accounting: Accounting, id_of: KeysOf, loader: DataLoader[object], *, poisson_sampling: bool
) -> tuple[Accounting, KeysOf]:
    """How to account for owners: they are drawn at the rate of the loader's rows, or named in a
    stream's batches.
    """
    if is_stream(loader):
        return accounting, accounting.owner_of
    rate = accounting.sample_rate or (1 / len(loader) if poisson_sampling else None)
    return replace(accounting, sample_rate=rate), id_of


def with_rate(options: RunOptions, prepared: DataLoader[object]) -> RunOptions:
    """Add the rate of Poisson sampling, at which the loader draws from now on.

    Unchanged if it draws otherwise.

    With a given rate q a pass has ⌊1/q⌋ batches.
    """
    sampler, given = prepared.batch_sampler, options.accounting.sample_rate
    if not isinstance(
        sampler, UniformWithReplacementSampler | DistributedUniformWithReplacementSampler
    ):
        return options
    if given is not None:
        vars(sampler).update(
            dict.fromkeys(("steps", "num_batches"), int(1 / given + 1e-9)), sample_rate=given
        )
    return replace(
        options, sample_rate=options.accounting.accumulation_steps * float(sampler.sample_rate)
    )


def example_ids(dataset: Sized, id_of: Any) -> ExampleIds:
    """The examples' ids."""
    count = len(dataset)
    return ExampleIds(count, [id_of(i) for i in range(count)] if callable(id_of) else id_of)


def rate_and_batch_size(
    loader: DataLoader[object], ids: ExampleIds, ranks: Ranks | None, divisor: float | None
) -> tuple[float, int, float]:
    """The accountant's sampling rate, the mean size of all ranks' batches together, and one rank's
    divisor.

    As in Opacus, the divisor is that mean size if none is given.
    """
    num_ranks = 1 if ranks is None else ranks.size
    if is_stream(loader):
        assert loader.batch_size is not None
        rate, drawn = 1.0, loader.batch_size * num_ranks
    else:
        rate = float(getattr(loader.batch_sampler, "sample_rate", 1 / len(loader)))
        drawn = max(1, int(ids.num_examples * rate))
    return rate, drawn, (divisor or drawn) / num_ranks
