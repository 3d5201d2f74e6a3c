"""A check before training: which rules apply, what is not smooth, what is slow, what it costs, what to change.

It needs no optimizer and no loader, and leaves the model unchanged: passes run on its weightless copy
(:class:`Replica`), or on the model itself with buffers and random state restored.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.engine.checked import ModelCheck, StepCost
from torchfil.engine.checked_layers import layers_of, median_seconds
from torchfil.engine.distributed.shards import is_sharded
from torchfil.engine.executor import Executor
from torchfil.engine.forward import ForwardPass
from torchfil.engine.guard import Guard
from torchfil.engine.loader import BatchTracker, is_target_name, plain, split_batch
from torchfil.engine.loss_inside import LossInside
from torchfil.engine.losses import IdentifiedLoss, LossMismatchError, likely_loss
from torchfil.engine.measure import Wanted
from torchfil.engine.options import Accounting, RunOptions
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.engine.step import private_without_labels
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.draws import Draws
from torchfil.fisher.gradients import differentiable_twice
from torchfil.fisher.masks import call_and_record_masks
from torchfil.fisher.models import check_modules, check_unweighted_mean
from torchfil.fisher.precision import autocast_now
from torchfil.fisher.recording import Plan
from torchfil.private import Private, as_call
from torchfil.smoothness import SmoothnessValidator
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["check"]

Criterion = Callable[[Any, Any], Tensor]
_NOISE, _THRESHOLD = 1.0, 1.0  # for the timed step; its time does not depend on them


@dataclass(frozen=True)
class _Subject:
    """A model's call on a batch, and its loss, as a step would have them."""

    replica: Replica
    checks: Guard
    forward: ForwardPass
    loss: IdentifiedLoss
    loss_in_words: str

    @property
    def targets(self) -> Any:
        return self.checks.targets(self.forward)


def check(
    model: nn.Module,
    batch: Any,
    criterion: Criterion | None = None,
    private: Private | None = None,
    *,
    batch_to_inputs: Callable[[Any], tuple[Any, Any]] | None = None,
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
    if num_probes < 1 or repeats < 1:
        raise ValueError(f"num_probes={num_probes} and repeats={repeats} must be at least 1")
    if is_sharded(model):
        raise ValueError(
            "the model is sharded (fully_shard): check it before sharding, in one process; the result also holds for "
            "a sharded run"
        )
    accounting = Accounting(num_probes=num_probes)
    device = next(model.parameters()).device
    replica, options = Replica(model), _options(accounting, device, private, batch_to_inputs)
    checks = Guard(replica, options, BatchTracker())
    batch = checks.moved(plain(batch))
    size = len(next(leaf for leaf in tensors_of(batch) if leaf.ndim))
    result = ModelCheck(type(model).__name__, "refused", size)

    args, kwargs, targets = _call_of(model, batch, criterion, batch_to_inputs)
    outputs, masks = _run_live(replica, args, kwargs)  # an error here is the model's own, and is raised
    result = replace(result, not_smooth=_not_smooth(model, args, kwargs))
    try:
        if criterion is not None:
            check_unweighted_mean(criterion)
        check_modules(model, allow_dropout=True)
        subject = _subject(checks, batch, (args, kwargs, targets), outputs, masks, criterion)
        found = _examined(result, subject, options, repeats)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return replace(result, reason=_one_line(error), advice=_advice(model, result, None))
    return found


def _options(accounting: Accounting, device: torch.device, private: Private | None, batch_to_inputs: Any) -> RunOptions:
    """The default options of a run."""
    return RunOptions(
        accounting,
        get_clip(DEFAULT_CLIP),
        accounting.amplification_for(poisson_sampling=False),
        None,
        accounting.execution.memory_on(device),
        private,
        batch_to_inputs=batch_to_inputs,
    )


def _call_of(
    model: nn.Module, batch: Any, criterion: Criterion | None, batch_to_inputs: Any
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The loop's call for the batch, with labels if the model takes them, and the targets."""
    inputs, targets = split_batch(batch, batch_to_inputs)
    if criterion is None and batch_to_inputs is None and isinstance(batch, Mapping) and _takes_labels(model, batch):
        inputs = dict(batch)
    args, kwargs = as_call(inputs)
    return args, dict(kwargs), targets


def _takes_labels(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the model's forward names all of the batch's labels, as one that computes its loss does."""
    code = getattr(type(model).forward, "__wrapped__", type(model).forward).__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    labels = [name for name in batch if is_target_name(name)]
    takes_any = bool(code.co_flags & 0x08)  # **kwargs of wrappers such as peft's
    return bool(labels) and all(name in names or takes_any for name in labels)


def _run_live(replica: Replica, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Tensor, ...]]:
    """Outputs with their graph, and the masks that were drawn; buffers and random state stay unchanged."""

    def run() -> Any:
        with torch.enable_grad(), differentiable_twice(), buffers_kept(replica.live):
            return replica.live(*args, **kwargs)

    with torch.random.fork_rng(devices=[replica.device] if replica.device.type == "cuda" else []):
        return call_and_record_masks(run, replica.device, expected=True)


def _subject(
    checks: Guard,
    batch: Any,
    called: tuple[tuple[Any, ...], dict[str, Any], Any],
    outputs: Any,
    masks: tuple[Tensor, ...],
    criterion: Criterion | None,
) -> _Subject:
    """The forward pass and the loss: the given one, the model's own, or the most likely one."""
    replica, (args, kwargs, targets) = checks.replica, called
    state: dict[str, Any] = {"masks": masks, "autocast": autocast_now(replica.device)}
    inside, tracker = LossInside(replica), checks.tracker
    losses = inside.losses_in(outputs) if criterion is None else []
    tracker.take(list(range(len(tensors_of((args, kwargs))[0]))), batch)
    if losses:
        forward = ForwardPass.of_call(tracker, inside.call(args, kwargs, outputs, masks), outputs, **state)
        forward.output_grads[losses[0]] = torch.ones((), device=replica.device)
        try:
            loss = checks.identified_loss(forward)
        except LossMismatchError:
            forward = forward.with_labels()
            loss = checks.own_loss(forward)
        words = loss.name if loss.is_models_own else f"{loss.name}, identified from the model's own"
        return _Subject(replica, checks, forward, loss, words)

    outputs = map_tensors(Tensor.detach, plain(outputs))
    forward = ForwardPass(tracker.ids, batch, args, kwargs, outputs, targets, **state)
    if criterion is not None:
        loss = IdentifiedLoss.of(criterion)
        return _Subject(replica, checks, forward, loss, f"{loss.name}, as given")
    loss = likely_loss(outputs, targets)
    return _Subject(replica, checks, forward, loss, f"{loss.name}, assumed (it fits outputs and targets)")


def _examined(result: ModelCheck, subject: _Subject, options: RunOptions, repeats: int) -> ModelCheck:
    """The same, with the results of the trial, the passes and the timings."""
    replica, forward, execution = subject.replica, subject.forward, options.accounting.execution
    private = private_without_labels(options.private, forward.args, forward.kwargs)
    examples = replica.lay_out(forward.args, forward.kwargs, subject.targets, private)
    masks = replica.masks_by_example(forward.masks, forward.args, forward.kwargs)
    gradients = replace(
        replica.gradients(replace(examples, masks=masks), subject.loss),
        autocast=forward.autocast,
        probe_precision=execution.probe_precision_on(replica.device),
    )
    executor = Executor(replica, len(examples), options.max_memory, cuda_graphs=execution.cuda_graphs)
    plan = executor.plan(gradients)
    mechanism = options.mechanism(_NOISE, _THRESHOLD)
    seeds = Draws.seeds_from(options.accounting.num_probes or 1, torch.Generator().manual_seed(0))
    wanted = Wanted((), options.accounting.estimator, seeds)

    # If an example's loss depends on others, no gradient belongs to it alone: the values of a first pass show this.
    values = executor.run(gradients, mechanism, wanted)
    assert values.losses is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject.checks.check_live_model(forward, subject.targets, subject.loss, values.losses, now=not plan.fits)

    own = examples.own_coordinates
    result = replace(
        result,
        verdict="recorded" if plan.fits else "mapped",
        reason=plan.reason,
        loss=subject.loss_in_words,
        private=str(examples),
        num_coordinates=own if isinstance(own, int) else int(own.max()),
        layers=layers_of(gradients, plan, options.max_memory),
        costs=_costs(subject, lambda: executor.run(gradients, mechanism, wanted), plan, len(seeds), repeats),
        bytes_per_example=plan.bytes_per_example
        or _mapped_bytes(PrivateBatch(gradients, mechanism, plan), wanted, options.max_memory),
        tried_in=str(plan.tried_in).removeprefix("torch."),
    )
    return replace(result, advice=_advice(replica.live, result, options.max_memory))


def _not_smooth(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Layers and calls whose derivative jumps, one line each; names that differ only in numbers share a line."""
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), buffers_kept(model):
        errors = SmoothnessValidator.validate(model, example_inputs=args or kwargs)
    return tuple(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", str(error)) for error in errors))


def _costs(
    subject: _Subject, step: Callable[[], object], plan: Plan, num_probes: int, repeats: int
) -> tuple[StepCost, ...]:
    """The times of a plain forward and backward pass, and of a measured step."""
    replica, forward, targets = subject.replica, subject.forward, subject.targets
    trainable = [value for value in replica.live.parameters() if value.requires_grad]

    def plainly() -> None:
        devices = [replica.device] if replica.device.type == "cuda" else []
        with torch.enable_grad(), buffers_kept(replica.live), torch.random.fork_rng(devices=devices):
            loss = subject.loss(replica.live(*forward.args, **forward.kwargs), targets)
            torch.autograd.grad(loss.sum(), trainable, allow_unused=True)

    before = median_seconds(plainly, replica.device, repeats)
    after = median_seconds(step, replica.device, repeats)
    probes = f"{num_probes} probe{'s' if num_probes > 1 else ''}"
    name = f"{'recorded' if plan.fits else 'mapped'} pass: sums and accounting, {probes}"
    return (
        StepCost("plain forward and backward", 1e3 * before, 1.0),
        StepCost(name, 1e3 * after, after / before),
    )


def _mapped_bytes(batch: PrivateBatch, wanted: Wanted, max_memory: int) -> int:
    """The memory of a mapped pass for an example: some vectors as long as the gradient."""
    vectors = batch.working_vectors(wanted.estimator, max_memory)[1]
    return vectors * batch.gradients.num_parameters * batch.gradients.dtype.itemsize


def _advice(model: nn.Module, result: ModelCheck, max_memory: int | None) -> tuple[str, ...]:
    """What to change, most serious first."""
    lines = []
    if not model.training:
        lines.append("the model is in evaluation mode: call model.train() before make_private")

    # What makes steps slow.
    if result.loss is not None and result.loss.startswith("the model's own"):
        lines.append(
            "the loss could not be identified from the other outputs: let the model also run without labels and "
            "return the outputs that its loss uses, or pass criterion="
        )
    elif result.verdict == "mapped":
        lines.append(
            "the recorded pass would be faster; the reason against it stands above. Keep parameters in torch.nn "
            "layers that are called as modules, with the examples in the first dimension"
        )
    generic = [f"{layer.name} ({layer.kind})" for layer in result.layers if layer.falls_back]
    if generic and result.verdict == "recorded":
        lines.append(
            f"no layer rule for {', '.join(generic)}: use layers that have one (docs/layers.md), or register one with "
            "torchfil.fisher.rules.register_rule (CONTRIBUTING.md)"
        )

    # What the numbers depend on.
    if result.not_smooth:
        lines.append(
            "bounds are no guarantees for a model that is not smooth: torchfil.SmoothnessValidator.fix(model) "
            "replaces layers; replace calls inside forward by hand"
        )
    if result.loss is not None and "assumed" in result.loss:
        lines.append("pass criterion= to state the loss; otherwise it is identified at the loop's first step")

    room = max_memory // max(1, result.bytes_per_example or 1) if max_memory else result.batch_size
    if room < result.batch_size:
        lines.append(
            f"the batch runs in pieces of {max(1, room)} examples: Execution(max_memory=…) may allow more than "
            f"{max_memory:,} bytes"
        )
    return tuple(lines)


def _one_line(error: BaseException) -> str:
    """An error's message, without its remark about the step."""
    return " ".join(re.sub(r"This step was not taken[^.]*\.", "", str(error)).split()) or type(error).__name__
