"""The Fisher information of the examples in a forward pass, at the live weights and the present noise and clipping."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchfil.accounting.contributions import additions
from torchfil.accounting.ledger import Ledger
from torchfil.accounting.pace import Pace
from torchfil.engine.fused import FusedPass, FusedResult, Wanted
from torchfil.engine.loader import split_batch
from torchfil.engine.losses import IdentifiedLoss, check_loss, identify_loss, refuse_unequal_weights
from torchfil.engine.observer import ForwardPass
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.options import Settings
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.draws import Draws
from torchfil.fisher.gradients import (
    ExampleGradients,
    copy_without_weights,
    has_active_dropout,
    may_drop,
    output_of_one_example,
    refuse_unsupported_modules,
)
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import Plan, UnsupportedCallError, plan
from torchfil.private import Examples, as_call
from torchfil.smoothness import non_smooth_operators
from torchfil.utils.deferred import read_later
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["NOT_FINITE", "Measurer"]

logger = logging.getLogger(__name__)

_MOST_SHAPES = 256
_STEPS_BETWEEN_LOOKS = 128  # at whether the live model still gives what its copy does
_EXAMPLES_TO_LOOK_AT = 8
_CHANGES_OF_INTEGERS = 8  # that make a recorded pass anew; what changes more often is a counter
_FAR_APART = 5  # times the tolerance: beyond what lower precision does
_PLAIN = (int, float, bool, str, type(None))
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}


@dataclass(frozen=True)
class Measured:
    """What one forward pass's measurement gives.

    Attributes:
        norm: ‖g‖ of its examples, [batch].
        additions: What the ledger adds for them, by name.
        output_gradients: ∂ℓ_i/∂output_i of the engine's loss for the output's tensors; None where the loss was checked.
    """

    norm: Tensor
    additions: dict[str, Tensor]
    output_gradients: tuple[Tensor, ...] | None = None


class Measurer:
    """Turns forward passes of the training loop into contributions to a ledger; keeps no sums.

    Args:
        module: The user's module, before it is wrapped; a weightless copy of it is differentiated.
        settings: How to account.
        generator: Source of the probes and masks.
    """

    def __init__(self, module: nn.Module, settings: Settings, generator: torch.Generator) -> None:
        self.module = module
        self.template = copy_without_weights(module)
        self.settings = settings
        self.generator = generator
        self.device = next(module.parameters()).device
        self.sample_rate: float | None = None
        self._plans: dict[Hashable, Plan] = {}
        self._submodule_shapes: dict[Hashable, tuple[torch.Size, torch.dtype]] = {}
        self._fused_pass: FusedPass | None = None
        self._modules = list(zip(module.modules(), self.template.modules(), strict=True))
        self._flags: tuple[bool, ...] = tuple(live.training for live, _ in self._modules)
        self._dropouts = [live for live, _ in self._modules if may_drop(live)]
        self._attributes: list[tuple[dict[str, Any], int, list[tuple[str, Any]]]] = []  # as last followed
        self._changes = 0  # of the live modules' attributes
        self._counts = 0  # changes of integers among them
        self._until_look = 0
        self._buffers = {name for name, _ in module.named_buffers()}
        self._written: set[str] | None = None  # buffers that a forward pass writes into; None: not known yet
        self._places = _places_of_weights(module)

    def identified_loss(self, forward: ForwardPass) -> IdentifiedLoss:
        """The loss whose gradient came back to the model's output."""
        observed, reduction = self._observed(forward), self.settings.loss_reduction
        loss = identify_loss(forward.outputs, self._targets(forward), observed, reduction)
        logger.info("the training loop's loss was identified as %s", loss.name)
        return loss

    def check_loss(self, forward: ForwardPass, loss: IdentifiedLoss) -> None:
        """Raise unless the gradient that came back to the model's output is that of the loss."""
        check_loss(loss, forward.outputs, self._targets(forward), self._observed(forward))

    def _observed(self, forward: ForwardPass) -> Any:
        """∂ℓ_i/∂output_i as the training loop has it, in the outputs' structure."""
        factor = len(forward.ids or ()) if self.settings.loss_reduction == "mean" else 1
        return map_tensors(lambda g: g * factor, forward.output_gradients)

    def examples_of(self, forward: ForwardPass) -> Examples:
        """The examples of a forward pass with their private coordinates laid out."""
        return self.lay_out(forward.args, forward.kwargs, self._targets(forward))

    def lay_out(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any, *, check_values: bool = True
    ) -> Examples:
        """These examples with their private coordinates laid out."""

        def submodule_shape(name: str, public: Any) -> tuple[torch.Size, torch.dtype]:
            kind = (name, _kind(public), tuple(live.training for live, _ in self._modules))
            known = self._submodule_shapes.get(kind)
            if known is None:
                if len(self._submodule_shapes) >= _MOST_SHAPES:
                    self._submodule_shapes.clear()
                known = self._submodule_shapes[kind] = output_of_one_example(self.module, name, public)
            return known

        return Examples.from_call(
            args, kwargs, targets, self.settings.private, submodule_shape=submodule_shape, check_values=check_values
        )

    def _targets(self, forward: ForwardPass) -> Any:
        return _moved(split_batch(forward.batch, self.settings.batch_to_inputs)[1], self.device)

    def gradients_at(self, examples: Examples, loss: IdentifiedLoss) -> ExampleGradients:
        """The examples' gradients at the present weights."""
        self._follow_live_modules()
        parameters, constants = self._weights()
        for name in self._buffers if self._written is None else self._written:
            if name in constants:
                constants[name] = constants[name].clone()
        seed = int(torch.randint(2**62, (), generator=self.generator)) if self.draws_masks() else None
        return ExampleGradients(self.template, loss, examples, parameters, constants, seed)

    def _follow_live_modules(self) -> None:
        """Bring the copy's modules to where the live ones are: in training or not, with the same plain attributes.

        A recorded pass has numbers and flags built in; it is tried and made anew where one has changed. An integer that
        goes on changing counts something, and is not taken for a change any more.

        Raises:
            UnsupportedModuleError: A module that went into training mode mixes examples.
        """
        if self._attributes and _are_as(self._attributes):
            return
        flags = tuple(live.training for live, _ in self._modules)
        if flags != self._flags:
            refuse_unsupported_modules(self.module, allow_dropout=True)
            self._flags = flags
        changed = counted = False
        for live, copied in self._modules:
            there = copied.__dict__
            for name in [name for name, value in there.items() if type(value) in _PLAIN and name not in live.__dict__]:
                changed = True
                del there[name]
            for name, value in live.__dict__.items():
                kind, own = type(value), there.get(name, there)
                if kind in _PLAIN and own is not value and (type(own) is not kind or own != value):
                    changed = changed or (kind is not int and name != "training")
                    counted = counted or kind is int
                    there[name] = value
                elif kind not in _PLAIN and type(own) in _PLAIN:
                    self._until_look = 0  # it became something that is not followed: the next step is looked at
        self._counts += counted
        changed = changed or (counted and self._counts <= _CHANGES_OF_INTEGERS)
        self._attributes = [_attributes(live) for live, _ in self._modules]
        if changed:
            self._changes += 1
            self._fused_pass = None

    def confirm_losses(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any, loss: IdentifiedLoss, found: Tensor
    ) -> None:
        """Now and then, raise unless the live model's loss on a batch is that of the recorded pass, [batch].

        Raises:
            RuntimeError: They differ: something outside the modules' own forward methods changes the output.
            LossMismatchError: The criterion's value on the batch is neither their mean nor their sum.
        """
        self._until_look -= 1
        if self._until_look >= 0 or self.draws_masks():
            return
        self._until_look = 0  # again at the next step, unless this look ends well
        few = range(min(len(found), _EXAMPLES_TO_LOOK_AT))
        with torch.no_grad(), _kept_buffers(self.module):
            outputs = self.module(*args, **kwargs)
            live = torch.stack([loss(*_one_example((outputs, targets), i)).reshape(()) for i in few])
        copied = found[: len(few)]
        apart, size = float((live - copied).abs().max()), float(live.abs().max())
        if apart > _TOLERANCE.get(found.dtype, 0.1) * size:
            raise RuntimeError(
                f"the model's losses on this batch are at most {size:.4g}, "
                f"{_COPY_DIFFERS.format(f'some that differ by up to {apart:.3g}')}"
            )
        refuse_unequal_weights(loss, outputs, targets, found)
        self._until_look = _STEPS_BETWEEN_LOOKS

    def write_buffers(self, gradients: ExampleGradients) -> None:
        """Bring into the live model what a pass that stands for its forward pass has written into buffers."""
        if not self._written:
            return
        live = dict(self.module.named_buffers())
        with torch.no_grad():
            for name in self._written:
                live[name].copy_(gradients.constants[name])

    def mechanism(self, optimizer: FILOptimizer) -> Mechanism:
        """Clipping, noise and subsampling as the optimizer has them now."""
        return Mechanism.build(
            float(optimizer.max_grad_norm),
            float(optimizer.noise_multiplier),
            self.settings.clip,
            self.settings.amplification,
            self.sample_rate,
        )

    def measured(
        self,
        forward: ForwardPass,
        examples: Examples,
        loss: IdentifiedLoss,
        optimizer: FILOptimizer,
        ledger: Ledger,
        test_matrix: Tensor | None,
        pace: Pace,
    ) -> Measured:
        """The Fisher information of a forward pass's examples under the present noise and clipping.

        The loop's loss is checked before, by itself; on a GPU that has captured the pass, from the pass's results.
        """
        self.check_coordinates(examples.num_coordinates, ledger)
        gradients = self.gradients_at(examples, loss)
        can_capture = test_matrix is None and gradients.device.type == "cuda"
        checked = not can_capture or self._plan_key(gradients) not in self._plans
        if checked:
            self.check_loss(forward, loss)
        batch = PrivateBatch(gradients, self.mechanism(optimizer), self.plan(gradients))
        settings = self.settings
        if can_capture and self.fits_one_pass(batch):
            seeds = Draws.seeds_from(pace.num_probes, self.generator)
            wanted = Wanted(settings.track, seeds, pace.rate, False, True, settings.estimator)
            try:
                one_pass = self.run_once(batch, wanted, optimizer).kept()
            except UnsupportedCallError as error:  # of a batch that is not as the trial's
                batch = replace(batch, plan=self.give_up_one_pass(gradients, str(error)))
            else:
                assert one_pass.additions is not None
                return Measured(one_pass.norm, one_pass.additions, one_pass.output_gradients)
        if not checked:
            self.check_loss(forward, loss)
        measurement = batch.measure(
            settings.needs.quantities,
            settings.estimator,
            pace.num_probes,
            self.generator,
            settings.max_memory,
            test_matrix.to(gradients.dtype) if test_matrix is not None else None,
            susceptibility=settings.needs.susceptibility,
        )
        added = additions(measurement, pace.rate, skipping=pace.rate < 1, track=settings.track)
        return Measured(measurement.norm, added)

    def summed(
        self,
        forward: ForwardPass,
        examples: Examples,
        loss: IdentifiedLoss,
        optimizer: FILOptimizer,
        pace: Pace,
        *,
        measured: bool,
    ) -> FusedResult:
        """The clipped sum over a forward pass's examples and, if wanted, their Fisher information, from one pass.

        Raises:
            RuntimeError: One pass does not fit the model.
        """
        gradients = self.gradients_at(examples, loss)
        if self._plan_key(gradients) not in self._plans:
            self.check_loss(forward, loss)
        batch = PrivateBatch(gradients, self.mechanism(optimizer), self.plan(gradients))
        if not self.fits_one_pass(batch):
            raise RuntimeError(
                f"one pass does not fit this model ({batch.plan.reason if batch.plan else 'no plan'}); use "
                "grad_sample_mode='hooks', which serves any model whose examples do not mix. This step was not taken."
            )
        settings = self.settings
        seeds = Draws.seeds_from(pace.num_probes, self.generator) if measured else ()
        wanted = Wanted(settings.track, seeds, pace.rate, True, True, settings.estimator)
        try:
            return self.run_once(batch, wanted, optimizer).kept()
        except UnsupportedCallError as error:
            raise RuntimeError(
                f"one pass does not fit this batch, though a trial of a few examples went well ({error}); use "
                "grad_sample_mode='hooks'. This step was not taken."
            ) from error

    def fits_one_pass(self, batch: PrivateBatch) -> bool:
        """Whether one recorded pass serves this batch's measurement."""
        found = batch.plan
        return (
            bool(len(batch.gradients))
            and self.settings.chosen_estimator.one_pass
            and found is not None
            and found.reason is None
        )

    def would_write_often(self, batch: PrivateBatch) -> bool:
        """Whether the pass would be cut into chunks, each of which writes into the model's buffers."""
        found = batch.plan
        return bool(self._written) and (
            found is not None and len(batch.gradients) * found.bytes_per_example > self.settings.max_memory
        )

    def give_up_one_pass(self, gradients: ExampleGradients, reason: str) -> Plan:
        """From now on such examples are mapped over."""
        logger.info("gradients are mapped over examples, which is slower: %s", reason)
        self._plans[self._plan_key(gradients)] = found = Plan(reason, 0)
        return found

    def run_once(self, batch: PrivateBatch, wanted: Wanted, optimizer: FILOptimizer) -> FusedResult:
        """One recorded pass over a batch that it fits; its CUDA graph is kept, and the next overwrites what it gave."""
        if self._fused_pass is None:
            settings = self.settings
            self._fused_pass = FusedPass(
                int(optimizer.expected_batch_size),
                graphs=settings.cuda_graphs and not self._written,  # copies of those lie elsewhere at each step
                compiled=settings.compile,
            )
        return self._fused_pass.run(batch, wanted, self.settings.max_memory, self._flags)

    @staticmethod
    def check_coordinates(num_coordinates: int, ledger: Ledger) -> None:
        """Raise unless this batch has as many private coordinates as the ledger."""
        if num_coordinates != ledger.num_coordinates:
            raise ValueError(
                f"this batch has {num_coordinates} private coordinates per example, earlier ones "
                f"{ledger.num_coordinates}; pad inputs to one length so that the sums compare"
            )

    def moved(self, tree: Any) -> Any:
        """The same with its tensors on the model's device."""
        return _moved(tree, self.device)

    def plan(self, gradients: ExampleGradients) -> Plan:
        """Whether one batched pass fits this model; tried once for every shape of examples."""
        key = self._plan_key(gradients)
        if key in self._plans or not len(gradients):
            return self._plans.get(key, Plan(None, 1))
        buffers = {name: value.clone() for name, value in gradients.constants.items() if name in self._buffers}
        found = plan(replace(gradients, constants=gradients.constants | buffers))
        self._written = {name for name, value in buffers.items() if value._version > 0} | (self._written or set())
        if len(gradients) > 1:  # one example cannot show whether examples mix
            if len(self._plans) >= _MOST_SHAPES:
                self._plans.clear()
            self._plans[key] = found
            if found.reason is not None:
                logger.info("gradients are mapped over examples, which is slower: %s", found.reason)
            elif found.generic:
                logger.info(
                    "no layer rule for %s: their gradients are formed example by example, which is slower "
                    "(CONTRIBUTING.md tells how to add one)",
                    ", ".join(found.generic),
                )
        return found

    def _plan_key(self, gradients: ExampleGradients) -> Hashable:
        return gradients.examples.form, self.draws_masks(), self._flags, tuple(gradients.parameters), self._changes

    def confirmation(
        self,
        forwards: Sequence[ForwardPass],
        gradients: Sequence[tuple[Tensor, ...] | None],
        loss: IdentifiedLoss,
        norms: tuple[Tensor, Tensor] | None = None,
    ) -> Callable[[], None]:
        """Begin to compare what was measured with what the loop did; what is returned raises where they differ.

        The gradients at the outputs, where they are given, must be those of the loop; the measured norms, if given,
        those of the gradients that Opacus clips.
        """
        looked_at = [(forward, found) for forward, found in zip(forwards, gradients, strict=True) if found is not None]
        pairs = [] if norms is None else [norms]
        for forward, found in looked_at:
            observed = tensors_of(self._observed(forward))
            pairs += [(a, b) for a, b in zip(found, observed, strict=True) if b.is_floating_point()]
        if self.draws_masks() or not pairs:
            return lambda: None
        tolerance = _TOLERANCE.get(pairs[0][1].dtype, 0.1)
        extremes = [torch.stack([(a - b).abs().max(), b.abs().max()]).double() for a, b in pairs]
        compared = read_later(torch.stack([part.to(extremes[0].device) for part in extremes]))

        def confirm() -> None:
            distances = compared().tolist()
            if not all(math.isfinite(number) for pair in distances for number in pair):
                raise RuntimeError(NOT_FINITE.format("This step was not taken."))
            distance, largest = distances.pop(0) if norms is not None else (0.0, 0.0)
            if any(apart > tolerance * size for apart, size in distances):
                for forward, _ in looked_at:
                    self.check_loss(forward, loss)
                apart, size = max(distances, key=lambda pair: pair[0] / max(pair[1], 1e-30))
                if apart > _FAR_APART * tolerance * size:
                    theirs = f"one that differs by up to {apart:.3g}"
                    raise RuntimeError(
                        f"the gradient at the model's output is at most {size:.3g}, {_COPY_DIFFERS.format(theirs)}"
                    )
            if distance > tolerance * largest:
                raise RuntimeError(
                    "the per-example gradients that the optimizer clips differ from those of the engine's loss (norms "
                    f"by up to {distance:.3g}, the largest being {largest:.3g}): the loss reaches the parameters by "
                    "another road than the model's output, or the model mixes examples. This step was not taken."
                )

        return confirm

    def gradients_of(self, batch: Any, loss: IdentifiedLoss) -> ExampleGradients:
        """The gradients, at the present weights, of a batch from the data set."""
        inputs, targets = _moved(split_batch(batch, self.settings.batch_to_inputs), self.device)
        args, kwargs = as_call(inputs)
        return self.gradients_at(self.lay_out(args, kwargs, targets), loss)

    def clipped_ratios(self, batch: Any, loss: IdentifiedLoss, max_grad_norm: float) -> Tensor:
        """‖g̃‖/C of every example of a batch from the data set, at the present weights, [batch]."""
        gradients = self.gradients_of(batch, loss)
        chunks = gradients.chunks(self.settings.max_memory, 4)
        norms = torch.cat([torch.linalg.vector_norm(part.gradients(), dim=1) for _, part in chunks])
        return norms * self.settings.clip.scale(norms, max_grad_norm) / max_grad_norm

    def warn_if_not_smooth(self, forward: ForwardPass) -> None:
        """Warn of operators whose derivative jumps, in layers or called by the forward pass itself."""
        devices = range(torch.cuda.device_count())
        with torch.random.fork_rng(devices=devices), _kept_buffers(self.module):
            found = non_smooth_operators(self.module, forward.args, forward.kwargs)
        if found:
            warnings.warn(
                f"the model calls {', '.join(sorted(found))}, whose derivative jumps: its Fisher information misses "
                "the jumps, and error bounds made from it are not guarantees. torchfil.SmoothnessValidator.fix(model) "
                "replaces such layers.",
                stacklevel=2,
            )

    def draws_masks(self) -> bool:
        """Whether dropout is active now."""
        return any(map(has_active_dropout, self._dropouts))

    def _weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """:func:`trainable_and_constant` without walking through the modules."""
        trainable: dict[str, Tensor] = {}
        constant: dict[str, Tensor] = {}
        for name, holder, key in self._places:
            value = holder[key]
            if value is not None:
                (trainable if value.requires_grad else constant)[name] = value.detach()
        return trainable, constant


NOT_FINITE = (
    "the gradient of an example in this batch is NaN or infinite, though its inputs are finite: is there a function "
    "whose derivative is not finite there, such as sqrt at 0? {}"
)
_COPY_DIFFERS = (
    "the engine's copy of the model gives {}: a forward hook, or an attribute of a module that is no plain number, "
    "flag or text, changes the output, and the copy does not have it. Move it into a module's forward(). This step "
    "was not taken."
)


@contextlib.contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """Inside, the module may write into its buffers or replace them; afterwards they are as before."""
    before = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for holder, entries in before:
            holder.update(entries)


def _places_of_weights(module: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Where each parameter, then each buffer lies, once for shared ones: its full name, the dict and the key."""
    places: list[tuple[str, dict[str, Any], str]] = []
    for kind in ("_parameters", "_buffers"):
        known: set[int] = set()
        for prefix, part in module.named_modules():
            holder: dict[str, Any] = getattr(part, kind)
            for key, value in holder.items():
                if value is not None and id(value) not in known:
                    known.add(id(value))
                    places.append((f"{prefix}.{key}" if prefix else key, holder, key))
    return places


_OTHER = object()
_OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}


def _attributes(module: nn.Module) -> tuple[dict[str, Any], int, list[tuple[str, Any]]]:
    """A module's own attributes: where they lie, how many there are, and those that are plain, others as _OTHER."""
    live = module.__dict__
    own = [(name, value) for name, value in live.items() if name not in _OF_MODULES]
    return live, len(live), [(name, value if type(value) in _PLAIN else _OTHER) for name, value in own]


def _are_as(known: Sequence[tuple[dict[str, Any], int, list[tuple[str, Any]]]]) -> bool:
    """Whether all modules' attributes are the very ones they were, as far as they are plain."""
    for live, size, attributes in known:
        if len(live) != size:
            return False
        for name, before in attributes:
            now = live.get(name, live)
            if now is not before and (before is not _OTHER or type(now) in _PLAIN):
                return False
    return True


def _one_example(tree: Any, i: int) -> Any:
    return map_tensors(lambda leaf: leaf[i : i + 1] if leaf.ndim else leaf, tree)


def _moved(tree: Any, device: torch.device) -> Any:
    return map_tensors(lambda leaf: leaf.to(device), tree)


def _kind(tree: Any) -> Hashable:
    """The shapes of one example's tensors, and what stands beside them."""
    leaves, structure = pytree.tree_flatten(tree)
    parts = [(leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    return tuple(parts), repr(structure)
