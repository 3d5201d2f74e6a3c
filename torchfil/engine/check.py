"""A check before training: which rules apply, what is not smooth, what is slow, what is refused.

It needs no optimizer and no loader, and leaves the model unchanged: passes run on its weightless
copy (:class:`Replica`), or on the model itself with buffers and random state restored.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.engine.distributed.ranks import is_sharded
from torchfil.engine.forward import ForwardPass, LossInside
from torchfil.engine.guard import Guard
from torchfil.engine.loader import BatchTracker, is_target_name, plain, split_batch
from torchfil.engine.losses import IdentifiedLoss, likely_loss
from torchfil.engine.measure import Wanted
from torchfil.engine.options import Accounting, BatchToInputs, RunOptions
from torchfil.engine.passes import Passes
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.engine.step import private_without_labels
from torchfil.fisher.estimators import Draws
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.models import autocast_now, check_modules, check_unweighted_mean
from torchfil.fisher.recording.record import record
from torchfil.fisher.rules.parameters import ParameterRule
from torchfil.private import Private, as_call
from torchfil.smoothness import SmoothnessValidator
from torchfil.utils.given import Batch
from torchfil.utils.text import aligned
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["LayerCheck", "ModelCheck", "check"]

Criterion = Callable[[Any, Any], Tensor]
_NOISE, _THRESHOLD = 1.0, 1.0  # of a step whose numbers nobody reads
_VERDICTS = {
    "recorded": "runs, in one recorded pass over the batch",
    "mapped": "runs, but gradients are mapped over examples (vmap), which is slower",
    "refused": "is refused",
}


@dataclass(frozen=True)
class LayerCheck:
    """Layers of one kind, and how their gradients are accounted for.

    Attributes:
        kind: Their class.
        rule: The rule that serves them, in words.
        names: Their names.
        parameters: Trainable parameters of all of them.
    """

    kind: str
    rule: str
    names: tuple[str, ...]
    parameters: int


@dataclass(frozen=True)
class ModelCheck:
    """What a training run with this model would do; ``str()`` gives it as a table.

    Attributes:
        model: The model's class.
        verdict: "recorded", "mapped" (over examples: slower) or "refused".
        batch_size: Examples in the batch.
        reason: Why it is mapped or refused; None: it is recorded.
        loss: The loss that is accounted for, in words.
        private: What is private in every example, in words.
        num_coordinates: d, the most private coordinates of an example of the batch.
        layers: The layers that hold trainable parameters, if the pass is recorded.
        not_smooth: Layers and calls whose derivative jumps, one line each; with them, bounds are
            not guarantees.
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

    @property
    def runs(self) -> bool:
        """Whether a training run with this model would start."""
        return self.verdict != "refused"

    def __str__(self) -> str:
        """What is known, as a table."""
        lines = [f"{self.model}, batch of {self.batch_size}: {_VERDICTS[self.verdict]}"]
        private = self.private and f"{self.private}; d = {self.num_coordinates:,}"
        facts = {"why": self.reason, "loss": self.loss, "private": private}
        lines += [f"{name + ':':<10}{text}" for name, text in facts.items() if text]
        if self.layers:
            rows = [
                (each.kind, str(len(each.names)), f"{each.parameters:,}", each.rule)
                for each in self.layers
            ]
            lines += ["", *aligned([("layer", "count", "parameters", "rule"), *rows], left=(0, 3))]
        if self.not_smooth:
            lines += ["", "not smooth:", *(f"  * {line}" for line in self.not_smooth)]
        return "\n".join(lines)


def check(
    model: nn.Module,
    batch: Batch,
    criterion: Criterion | None = None,
    private: Private | None = None,
    *,
    batch_to_inputs: BatchToInputs | None = None,
) -> ModelCheck:
    """What a training run with this model would do with such batches, before there is an optimizer
    or a loader.

    The recorded pass is compared with plain backward passes in float64, as the engine does at its
    first step. The model is not changed.

    Guarantees:
        * If a run would refuse the model, the loss or the private data, this is a result (``verdict
          == "refused"``, ``reason``), not an exception. A model that itself fails on the batch
          raises as usual.
        * Nothing is trained and nothing released; apart from d, no number in the table depends on
          the batch's values.

    Args:
        model: The model, in training mode.
        batch: One batch from the loader, with at least two examples.
        criterion: The loop's loss(outputs, targets); None: the model's own
            (``model(**batch).loss``), else the first standard loss that fits outputs and targets,
            which the loop's first step may contradict.
        private: What is private; None: as in ``make_private``.
        batch_to_inputs: Maps the batch to (inputs, targets), as in ``make_private``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = check(
        ...     model, (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])), nn.CrossEntropyLoss()
        ... )
        >>> found.verdict, found.num_coordinates, [layer.rule for layer in found.layers]
        ('recorded', 4, ['linear, closed form'])
        >>> found.not_smooth
        ('1 (ReLU): its derivative jumps. Use SmoothnessValidator.fix(...) or a smooth layer.',)
    """
    if is_sharded(model):
        raise ValueError(
            "the model is sharded (fully_shard): check it before, in one process; the result also "
            "holds"
        )
    replica, accounting = Replica(model), Accounting(num_probes=1)
    clip, amplification = (
        get_clip(DEFAULT_CLIP),
        accounting.amplification_for(poisson_sampling=False),
    )
    memory = accounting.execution.memory_on(replica.device)
    options = RunOptions(
        accounting, clip, amplification, None, memory, private, batch_to_inputs=batch_to_inputs
    )
    guard = Guard(replica, options, BatchTracker())
    batch = guard.moved(plain(batch))
    result = ModelCheck(
        type(model).__name__, "refused", len(next(leaf for leaf in tensors_of(batch) if leaf.ndim))
    )

    inputs, targets = split_batch(batch, batch_to_inputs)
    if (
        criterion is None
        and batch_to_inputs is None
        and isinstance(batch, Mapping)
        and _takes_labels(model, batch)
    ):
        inputs = dict(batch)
    args, kwargs = as_call(inputs)
    inside, ids, autocast = (
        LossInside(replica),
        list(range(len(tensors_of(inputs)[0]))),
        autocast_now(replica.device),
    )
    # an error here is the model's own, and is raised
    outputs, masks = inside.run_live(args, dict(kwargs))
    call = ForwardPass(ids, batch, args, dict(kwargs), outputs, targets, masks, autocast=autocast)
    guard.tracker.take(ids, batch)
    with replica.random_state_kept(), buffers_kept(model):
        jumps = SmoothnessValidator.validate(model, example_inputs=args or kwargs)
    # numbered alike, share a line
    lines = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", str(jump)) for jump in jumps)
    result = replace(result, not_smooth=tuple(lines))
    try:
        if not model.training:
            raise ValueError("The model is in eval mode; call model.train() before make_private.")
        if criterion is not None:
            check_unweighted_mean(criterion)
        check_modules(model, allow_dropout=True)
        forward, loss, words = _with_loss(guard, inside, call, criterion)
        return _examined(replace(result, loss=words), guard, forward, loss, options)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        reason = (
            " ".join(re.sub(r"This step was not taken[^.]*\.", "", str(error)).split())
            or type(error).__name__
        )
        return replace(result, reason=reason)


def _takes_labels(model: nn.Module, batch: Mapping[str, object]) -> bool:
    """Whether the model's forward names all of the batch's labels, as one that computes its loss
    does.
    """
    named = inspect.signature(type(model).forward).parameters
    # wrappers such as peft's
    takes_any = any(each.kind is each.VAR_KEYWORD for each in named.values())
    labels = [name for name in batch if is_target_name(name)]
    return bool(labels) and (takes_any or all(name in named for name in labels))


def _with_loss(
    guard: Guard, inside: LossInside, call: ForwardPass, criterion: Criterion | None
) -> tuple[ForwardPass, IdentifiedLoss, str]:
    """The forward pass and the loss, also in words: the given one, the model's own, or the most
    likely one.
    """
    losses = inside.losses_in(call.outputs) if criterion is None else []
    if losses:
        forward = inside.forward_pass(
            guard.tracker, call.args, call.kwargs, call.outputs, call.masks
        )
        forward.output_grads[losses[0]] = torch.ones((), device=guard.replica.device)
        loss = guard.identified_loss(forward)
        forward = forward.with_labels() if loss.is_models_own else forward
        return (
            forward,
            loss,
            loss.name if loss.is_models_own else f"{loss.name}, identified from the model's own",
        )

    forward = replace(call, outputs=map_tensors(Tensor.detach, plain(call.outputs)))
    if criterion is not None:
        loss = IdentifiedLoss.of(criterion)
        return forward, loss, f"{loss.name}, as given"
    loss = likely_loss(forward.outputs, forward.targets)
    return forward, loss, f"{loss.name}, assumed (it fits outputs and targets)"


def _examined(
    result: ModelCheck,
    guard: Guard,
    forward: ForwardPass,
    loss: IdentifiedLoss,
    options: RunOptions,
) -> ModelCheck:
    """The same, with the results of the trial and of a pass."""
    replica, execution, targets = (
        guard.replica,
        options.accounting.execution,
        guard.targets(forward),
    )
    private = private_without_labels(options.private, forward.args, forward.kwargs)
    examples = replica.lay_out(forward.args, forward.kwargs, targets, private)
    replica.follow()  # the live model's pass may have changed attributes
    masks = replica.masks_by_example(forward.masks, forward.args, forward.kwargs)
    gradients = replica.gradients(replace(examples, masks=masks), loss)
    precision = execution.probe_precision_on(replica.device)
    gradients = replace(gradients, autocast=forward.autocast, probe_precision=precision)
    passes = Passes(replica, len(examples), options.max_memory, cuda_graphs=execution.cuda_graphs)
    plan = passes.plans.of(gradients)
    mechanism = options.mechanism(_NOISE, _THRESHOLD)
    wanted = Wanted((), options.accounting.estimator)
    seeds = Draws.seeds_from(1, torch.Generator().manual_seed(0))

    # If an example's loss depends on others, no gradient belongs to it alone: the values of a first
    # pass show this.
    values = passes.run(gradients, plan, mechanism, seeds, wanted)
    assert values.losses is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard.check_live_model(
            forward, loss, gradients, values, lambda seen: seen, now=not plan.fits
        )
    own = examples.own_coordinates
    return replace(
        result,
        verdict="recorded" if plan.fits else "mapped",
        reason=plan.reason,
        private=str(examples.layout),
        num_coordinates=own if isinstance(own, int) else int(own.max()),
        layers=_layers(gradients) if plan.fits else (),
    )


def _layers(gradients: ExampleGradients) -> tuple[LayerCheck, ...]:
    """How layers that hold trainable parameters are accounted for.

    One that is called several times counts once.
    """
    found: dict[tuple[str, str], dict[str, set[str]]] = {}  # by kind and rule: parameters by layer
    # the rules do not depend on the number
    part = replace(gradients, examples=gradients.examples[slice(0, 2)])
    with torch.enable_grad(), part.backward_state():
        for call in record(part, part.examples.z.detach().requires_grad_()).calls:
            kind = (
                "Parameter" if isinstance(call.rule, ParameterRule) else type(call.module).__name__
            )
            layers = found.setdefault((kind, call.rule.words or type(call.rule).__name__), {})
            layers.setdefault(call.name, set()).update(call.shared_names.values())

    rows = []
    for (kind, rule), layers in found.items():
        held = set().union(*layers.values()) & gradients.parameters.keys()
        size = sum(gradients.parameters[each].numel() for each in held)
        rows.append(LayerCheck(kind, rule, tuple(layers), size))
    return tuple(rows)
