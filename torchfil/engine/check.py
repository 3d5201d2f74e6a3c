"""A check before training: which rules apply, what is not smooth, what is slow, what it costs, what to change.

It needs no optimizer and no loader, and leaves the model unchanged: passes run on its weightless copy
(:class:`Replica`), or on the model itself with buffers and random state restored.
"""

from __future__ import annotations

import inspect
import re
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.engine.distributed.ranks import is_sharded
from torchfil.engine.executor import Executor, Wanted
from torchfil.engine.forward import ForwardPass, LossInside
from torchfil.engine.guard import Guard
from torchfil.engine.loader import BatchTracker, is_target_name, plain, split_batch
from torchfil.engine.losses import IdentifiedLoss, likely_loss
from torchfil.engine.options import Accounting, BatchToInputs, RunOptions
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.engine.step import private_without_labels
from torchfil.fisher.estimators import Draws
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.models import autocast_now, check_modules, check_unweighted_mean, without_checkpoints
from torchfil.fisher.recording import Plan
from torchfil.fisher.recording.record import record
from torchfil.fisher.rules.parameters import GenericRule, ParameterRule
from torchfil.private import Private, as_call
from torchfil.smoothness import SmoothnessValidator
from torchfil.utils.text import aligned
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["LayerCheck", "ModelCheck", "StepCost", "check"]

Criterion = Callable[[Any, Any], Tensor]
_NOISE, _THRESHOLD = 1.0, 1.0  # for the timed step; its time does not depend on them
_LONG = 10.0  # seconds, after which a pass is not timed again
_VERDICTS = {
    "recorded": "runs, in one recorded pass over the batch",
    "mapped": "runs, but gradients are mapped over examples (vmap), which is slower",
    "refused": "is refused",
}


@dataclass(frozen=True)
class LayerCheck:
    """Layers of one kind and place, and how their gradients are accounted for.

    Attributes:
        name: Their name, with * for numbers that differ.
        kind: Their class.
        count: How many there are.
        parameters: Trainable parameters of all of them.
        rule: The rule that serves them, in words.
        falls_back: Whether they have no specific rule.
    """

    name: str
    kind: str
    count: int
    parameters: int
    rule: str
    falls_back: bool = False


@dataclass(frozen=True)
class StepCost:
    """The median time of a pass over the batch, and its multiple of a plain forward and backward pass."""

    name: str
    milliseconds: float
    relative: float


@dataclass(frozen=True)
class ModelCheck:
    """What a training run with this model would do; ``str()`` gives it as a table.

    Attributes:
        model: The model's class.
        verdict: "recorded", "mapped" (over examples: slower) or "refused".
        reason: Why it is mapped or refused; None: it is recorded.
        loss: The loss that is accounted for, in words.
        private: What is private in every example, in words.
        num_coordinates: d, the most private coordinates of an example of the batch.
        layers: Rows of the table.
        not_smooth: Layers and calls whose derivative jumps, one line each; with them, bounds are not guarantees.
        costs: Times of passes over the batch on this machine.
        batch_size: Examples in the batch.
        advice: What to change, one line each.
    """

    model: str
    verdict: str
    batch_size: int
    reason: str | None = None
    loss: str | None = None
    private: str | None = None
    num_coordinates: int | None = None
    layers: tuple[LayerCheck, ...] = ()
    not_smooth: tuple[str, ...] = ()
    costs: tuple[StepCost, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether a training run with this model would start."""
        return self.verdict != "refused"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table of layers, one dict per row."""
        return [asdict(layer) for layer in self.layers]

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain types, for JSON."""
        return {"runs": self.runs, **asdict(self)}

    def __str__(self) -> str:
        """The table, followed by what to change."""
        lines = [f"{self.model}, batch of {self.batch_size}: {_VERDICTS[self.verdict]}"]
        private = self.private and f"{self.private}; d = {self.num_coordinates:,}"
        facts = {"why": self.reason, "loss": self.loss, "private": private}
        lines += [f"{name + ':':<10}{text}" for name, text in facts.items() if text]
        if self.layers:
            rows = [(each.name, each.kind, str(each.count), f"{each.parameters:,}", each.rule) for each in self.layers]
            lines += ["", *aligned([("layer", "kind", "count", "parameters", "rule"), *rows], left=(0, 1, 4))]
        if self.costs:
            costs = [(cost.name, f"{cost.milliseconds:.3g}", f"{cost.relative:.2f}") for cost in self.costs]
            lines += ["", *aligned([("pass over the batch", "ms", "× plain"), *costs], left=(0,))]
        for title, items in (("not smooth", self.not_smooth), ("what to change", self.advice)):
            lines += ["", f"{title}:", *(f"  * {item}" for item in items)] if items else []
        return "\n".join(lines)


def check(
    model: nn.Module,
    batch: Any,
    criterion: Criterion | None = None,
    private: Private | None = None,
    *,
    batch_to_inputs: BatchToInputs | None = None,
    num_probes: int = 1,
    repeats: int = 3,
) -> ModelCheck:
    """What a training run with this model would do with such batches, before there is an optimizer or a loader.

    The recorded pass is compared with plain backward passes in float64, as the engine does at its first step. Times
    are those of this machine. The model is not changed.

    Guarantees:
        * If a run would refuse the model, the loss or the private data, this is a result (``verdict == "refused"``,
          ``reason``), not an exception. A model that itself fails on the batch raises as usual.
        * Nothing is trained and nothing released; apart from d, no number in the table depends on the batch's values.

    Args:
        model: The model, in training mode.
        batch: One batch from the loader, with at least two examples.
        criterion: The loop's loss(outputs, targets); None: the model's own (``model(**batch).loss``), else the first
            standard loss that fits outputs and targets, which the loop's first step may contradict.
        private: What is private; None: as in ``make_private``.
        batch_to_inputs: Maps the batch to (inputs, targets), as in ``make_private``.
        num_probes: Probes of the timed step.
        repeats: How often each pass is timed, after a first run that does not count.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = check(model, (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])), nn.CrossEntropyLoss())
        >>> found.verdict, found.num_coordinates, [row["rule"] for row in found.rows]
        ('recorded', 4, ['linear, closed form'])
        >>> found.not_smooth
        ('1 (ReLU): its derivative jumps. Use SmoothnessValidator.fix(model, activation=...) or a smooth layer.',)
    """
    if is_sharded(model):
        raise ValueError("the model is sharded (fully_shard): check it before, in one process; the result also holds")
    replica, accounting = Replica(model), Accounting(num_probes=num_probes)
    clip, amplification = get_clip(DEFAULT_CLIP), accounting.amplification_for(poisson_sampling=False)
    memory = accounting.execution.memory_on(replica.device)
    options = RunOptions(accounting, clip, amplification, None, memory, private, batch_to_inputs=batch_to_inputs)
    guard = Guard(replica, options, BatchTracker())
    batch = guard.moved(plain(batch))
    result = ModelCheck(type(model).__name__, "refused", len(next(leaf for leaf in tensors_of(batch) if leaf.ndim)))

    inputs, targets = split_batch(batch, batch_to_inputs)
    if criterion is None and batch_to_inputs is None and isinstance(batch, Mapping) and _takes_labels(model, batch):
        inputs = dict(batch)
    args, kwargs = as_call(inputs)
    inside, ids, autocast = LossInside(replica), list(range(len(tensors_of(inputs)[0]))), autocast_now(replica.device)
    outputs, masks = inside.run_live(args, dict(kwargs))  # an error here is the model's own, and is raised
    call = ForwardPass(ids, batch, args, dict(kwargs), outputs, targets, masks, autocast=autocast)
    guard.tracker.take(ids, batch)
    with replica.random_state_kept(), buffers_kept(model):
        jumps = SmoothnessValidator.validate(model, example_inputs=args or kwargs)
    lines = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", str(jump)) for jump in jumps)  # numbered alike, share a line
    result = replace(result, not_smooth=tuple(lines))
    try:
        if criterion is not None:
            check_unweighted_mean(criterion)
        check_modules(model, allow_dropout=True)
        forward, loss, words = _with_loss(guard, inside, call, criterion)
        return _examined(replace(result, loss=words), guard, forward, loss, options, repeats)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(re.sub(r"This step was not taken[^.]*\.", "", str(error)).split()) or type(error).__name__
        return replace(result, reason=reason, advice=_advice(model, result))


def _takes_labels(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the model's forward names all of the batch's labels, as one that computes its loss does."""
    named = inspect.signature(type(model).forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in named.values())  # wrappers such as peft's
    labels = [name for name in batch if is_target_name(name)]
    return bool(labels) and (takes_any or all(name in named for name in labels))


def _with_loss(
    guard: Guard, inside: LossInside, call: ForwardPass, criterion: Criterion | None
) -> tuple[ForwardPass, IdentifiedLoss, str]:
    """The forward pass and the loss, also in words: the given one, the model's own, or the most likely one."""
    losses = inside.losses_in(call.outputs) if criterion is None else []
    if losses:
        forward = inside.forward_pass(guard.tracker, call.args, call.kwargs, call.outputs, call.masks)
        forward.output_grads[losses[0]] = torch.ones((), device=guard.replica.device)
        loss = guard.identified_loss(forward)
        forward = forward.with_labels() if loss.is_models_own else forward
        return forward, loss, loss.name if loss.is_models_own else f"{loss.name}, identified from the model's own"

    forward = replace(call, outputs=map_tensors(Tensor.detach, plain(call.outputs)))
    if criterion is not None:
        loss = IdentifiedLoss.of(criterion)
        return forward, loss, f"{loss.name}, as given"
    loss = likely_loss(forward.outputs, forward.targets)
    return forward, loss, f"{loss.name}, assumed (it fits outputs and targets)"


def _examined(
    result: ModelCheck, guard: Guard, forward: ForwardPass, loss: IdentifiedLoss, options: RunOptions, repeats: int
) -> ModelCheck:
    """The same, with the results of the trial, the passes and the timings."""
    replica, execution, targets = guard.replica, options.accounting.execution, guard.targets(forward)
    private = private_without_labels(options.private, forward.args, forward.kwargs)
    examples = replica.lay_out(forward.args, forward.kwargs, targets, private)
    replica.follow()  # the live model's pass may have changed attributes
    masks = replica.masks_by_example(forward.masks, forward.args, forward.kwargs)
    gradients = replica.gradients(replace(examples, masks=masks), loss)
    precision = execution.probe_precision_on(replica.device)
    gradients = replace(gradients, autocast=forward.autocast, probe_precision=precision)
    executor = Executor(replica, len(examples), options.max_memory, cuda_graphs=execution.cuda_graphs)
    plan = executor.plan(gradients)
    mechanism = options.mechanism(_NOISE, _THRESHOLD)
    seeds = Draws.seeds_from(options.accounting.num_probes or 1, torch.Generator().manual_seed(0))
    wanted = Wanted((), options.accounting.estimator, seeds)

    # If an example's loss depends on others, no gradient belongs to it alone: the values of a first pass show this.
    values = executor.run(gradients, plan, mechanism, wanted)
    assert values.losses is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard.check_live_model(forward, loss, gradients, values.losses, now=not plan.fits)

    def plain_pass() -> None:
        trainable = [value for value in replica.live.parameters() if value.requires_grad]
        with torch.enable_grad(), buffers_kept(replica.live), replica.random_state_kept(), without_checkpoints():
            losses = loss(replica.live(*forward.args, **forward.kwargs), targets)
            torch.autograd.grad(losses.sum(), trainable, allow_unused=True)

    before = _median_seconds(plain_pass, replica.device, repeats)
    after = _median_seconds(lambda: executor.run(gradients, plan, mechanism, wanted), replica.device, repeats)
    verdict, probes = "recorded" if plan.fits else "mapped", f"{len(seeds)} probe{'s' if len(seeds) > 1 else ''}"
    own = examples.own_coordinates
    result = replace(
        result,
        verdict=verdict,
        reason=plan.reason,
        private=str(examples.layout),
        num_coordinates=own if isinstance(own, int) else int(own.max()),
        layers=_layers(gradients, plan),
        costs=(
            StepCost("plain forward and backward", 1e3 * before, 1.0),
            StepCost(f"{verdict} pass: sums and accounting, {probes}", 1e3 * after, after / before),
        ),
    )
    return replace(result, advice=_advice(replica.live, result))


def _layers(gradients: ExampleGradients, plan: Plan) -> tuple[LayerCheck, ...]:
    """How layers that hold trainable parameters are accounted for, in the order of the forward pass.

    Those whose names differ only in numbers share a row; a layer that is called several times counts once.
    """
    found: list[tuple[str, str, str, bool, Collection[str]]] = []  # name, kind, rule, falls back, its parameters
    if plan.fits:
        part = replace(gradients, examples=gradients.examples[slice(0, 2)])  # the rules do not depend on the number
        with torch.enable_grad(), part.backward_state():
            for call in record(part, part.examples.z.detach().requires_grad_()).calls:
                rule = call.rule
                kind = "Parameter" if isinstance(rule, ParameterRule) else type(call.module).__name__
                words, falls_back = rule.words or type(rule).__name__, isinstance(rule, GenericRule)
                found.append((call.name, kind, words, falls_back, call.shared_names.values()))
    else:
        mapped = "none: the whole model is mapped over examples (vmap)"
        for name, module in gradients.model.named_modules():
            own = [key for key in gradients.parameters if key.rpartition(".")[0] == name]
            if own:
                found.append((name, type(module).__name__, mapped, True, own))

    groups: dict[tuple[str, str, str, bool], dict[str, set[str]]] = {}  # parameters by layer
    for name, kind, words, falls_back, names in found:
        starred = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        groups.setdefault((starred, kind, words, falls_back), {}).setdefault(name, set()).update(names)
    rows = []
    for (starred, kind, words, falls_back), layers in groups.items():
        name = starred if len(layers) > 1 else next(iter(layers))
        held = set().union(*layers.values()) & gradients.parameters.keys()
        size = sum(gradients.parameters[each].numel() for each in held)
        rows.append(LayerCheck(name or "the model itself", kind, len(layers), size, words, falls_back))
    return tuple(rows)


def _median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of a call; the first call counts only if it takes very long."""
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
        if times[0] > _LONG:
            return times[0]
    return statistics.median(times[1:])


def _advice(model: nn.Module, result: ModelCheck) -> tuple[str, ...]:
    """What to change, most serious first."""
    loss = result.loss or ""
    own = loss.startswith("the model's own")
    mapped = result.verdict == "mapped" and not own
    no_rule = [f"{layer.name} ({layer.kind})" for layer in result.layers if layer.falls_back]
    advice = {
        "the model is in evaluation mode: call model.train() before make_private": not model.training,
        # what makes steps slow
        "the loss could not be identified from the other outputs: let the model also run without labels and return "
        "the outputs that its loss uses, or pass criterion=": own,
        "the recorded pass would be faster; the reason against it stands above. Keep parameters in torch.nn layers "
        "that are called as modules, with the examples in the first dimension": mapped,
        f"no layer rule for {', '.join(no_rule)}: use layers that have one (docs/layers.md), or register one with "
        "torchfil.fisher.rules.register_rule (CONTRIBUTING.md)": no_rule and result.verdict == "recorded",
        # what the numbers depend on
        "bounds are no guarantees for a model that is not smooth: torchfil.SmoothnessValidator.fix(model) replaces "
        "layers; replace calls inside forward by hand": result.not_smooth,
        "pass criterion= to state the loss; otherwise it is identified at the loop's first step": "assumed" in loss,
    }
    return tuple(text for text, applies in advice.items() if applies)
