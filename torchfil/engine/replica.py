"""The weightless copy of the user's model that is differentiated, kept in step with the live one.

``torch.func`` fails on modules with Opacus's hooks, and the engine's passes are not the loop's:
they must not count, log or write. So they run on a copy without weights, hooks or memory, called
with the live weights. A function that was set on a live module (``layer.forward = …``) calls the
copy's modules there. Before each pass, the copy takes over training flags and plain attributes
(numbers, flags, texts, functions) of the live modules.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn

from torchfil.engine.rows import OwnedRows
from torchfil.fisher import models
from torchfil.fisher.gradients import ExampleGradients, LossFunction, differentiable_twice
from torchfil.fisher.masks import MaskLayouts
from torchfil.fisher.rules.parameters import share_roles
from torchfil.fisher.rules.recurrent import run_recurrent
from torchfil.fisher.rules.substitutes import register_substitute
from torchfil.private import (
    Examples,
    Layout,
    Private,
    check_finite,
    embeddings_to_protect,
    num_examples,
)
from torchfil.private.batches import ROWS, Public, as_rows, named_inputs
from torchfil.private.choice import floating_inputs
from torchfil.utils.errors import UnsupportedModuleError
from torchfil.utils.given import Args, Kwargs
from torchfil.utils.trees import form_of, map_tensors, tensors_of

logger = logging.getLogger(__name__)

_MOST_SHAPES = 256
# changes that rebuild a recorded pass; an attribute that changes more often is a counter
_CHANGES_OF_INTEGERS = 8
_USES_LIVE = (
    "the model reaches {} other than through its own modules: a function that was set on a module "
    "(layer.forward = …) or is called by it holds the module where the engine's copy cannot "
    "follow it, so these weights would be trained on noise alone. Set it as a method, "
    "layer.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 0.5, layer), "
    "or write a module. Nothing was trained."
)
_PLAIN = (int, float, bool, str, type(None))
_PLAIN_OR_FUNCTION = frozenset((*_PLAIN, FunctionType, partial))


class Replica:
    """A copy of a module's structure, which follows the live one.

    Args:
        module: The user's module, before it is wrapped.
        batch_first: Whether examples lie along the first dimension of its inputs; otherwise along
            the second.

    Attributes:
        live: The user's module; it takes examples along the first dimension even if the user's own
            calls do not.
        template: The copy, on the meta device.
        device: The device of the live parameters.
        written: The names of buffers that a forward pass writes into; None: not known yet.
        changes: How often a plain attribute of the live modules has changed.
        opaque_changes: How often one became a value that cannot be taken over.
        key: The state of the modules that is built into a recorded pass: their modes and plain
            attributes.
    """

    def __init__(self, module: nn.Module, *, batch_first: bool = True) -> None:
        self.batch_first = batch_first
        self.live = module = module if batch_first else models.with_examples_first(module)
        self.template = models.copy_without_weights(module)
        share_roles(module, self.template)
        self.device = next(module.parameters()).device
        self.written: set[str] | None = None
        self.changes = self.opaque_changes = self._changed_integers = 0

        # what the copy follows: modes, plain attributes, parts and hooks of the live modules
        self._pairs = list(zip(module.modules(), self.template.modules(), strict=True))
        self._flags = tuple(live.training for live, _ in self._pairs)
        self.key: Hashable = (self._flags, 0)
        self._attributes = _plain_attributes(self._pairs)  # of the live modules, as last taken over
        self._dropouts = [live for live, _ in self._pairs if models.may_drop(live)]
        self._parts = [
            (holder, key, part, f"{prefix}.{key}" if prefix else key)
            for prefix, owner in module.named_modules()
            for holder in (owner._modules, owner._parameters)
            for key, part in holder.items()
        ]
        self._num_hooks: int | None = None  # on the live modules, as last seen

        # where weights and buffers are, and what batches have shown
        self._buffers = {name for name, _ in module.named_buffers()}
        self._places = _places_of_weights(module)
        # of the integer inputs; None: not looked for
        self._embeddings: tuple[str, ...] | None = None
        # padding unknown; None: no batch seen
        self._inputs_without_mask: dict[int | str, torch.Size] | None = None
        self._mask_layouts = MaskLayouts()
        # which inputs and targets are one tensor, by all their names
        self._same: dict[Hashable, Any] = {}
        # by form of batch and training flags
        self._layouts: dict[Hashable, tuple[Private | None, Layout]] = {}

    def gather(self) -> bool:
        """Gather all weights in this process, and return whether any came.

        Without sharding, all are here.
        """
        return False

    def free_weights(self) -> None:
        """Free weights that were gathered."""

    def examples_first(self, tree: object) -> Any:
        """The user's inputs, or a batch, with the examples along the first dimension, as ``live``
        takes them.
        """
        return tree if self.batch_first else models.turned(tree)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all weights are here (collective if the model is sharded), and the copy is up to
        date.

        As around the parts of a step, ``enable_grad`` puts autograd back if Ctrl-C came while
        something had it off.
        """
        with torch.enable_grad():
            came = self.gather()
            self.follow()
            try:
                yield
            finally:
                if came:
                    self.free_weights()

    def drops_now(self) -> bool:
        """Whether a dropout layer is active."""
        return bool(self._dropouts) and any(map(models.has_active_dropout, self._dropouts))

    @torch.enable_grad()
    def lay_out(
        self,
        args: Args,
        kwargs: Mapping[str, Any],
        targets: object,
        private: Private | None,
        *,
        check_values: bool = True,
        part: OwnedRows | None = None,
        max_rows: int | None = None,
    ) -> Examples:
        """These examples with their private coordinates; batches of one form share their layout.

        With ``part``, inputs and targets are by row, and the examples are the owners of these rows;
        z then has room for ``max_rows`` (None: as many as the part's largest owner has).
        """
        public: Public = (args, dict(kwargs), targets)
        if part is not None:
            args, kwargs, targets = part.grouped(public)
            public = (
                args,
                {**kwargs, ROWS: part.numbers.to(self.device, non_blocking=True)},
                targets,
            )
        batch = num_examples(*public)  # before the model is called with one example
        if check_values:
            check_finite(*public)
        form = form_of(public, shapes=True)
        kind = (form, *[live.training for live, _ in self._pairs])
        chosen, layout = self._layouts.get(kind, (None, None))
        if layout is None or chosen is not private:
            layout = self._layout(public, private, max_rows)
            if len(self._layouts) >= _MOST_SHAPES:
                self._layouts.clear()
            if batch:
                self._layouts[kind] = private, layout
        examples = layout.examples(public)
        vars(examples)["form"] = form  # known already
        return examples

    def _layout(self, public: Public, private: Private | None, max_rows: int | None) -> Layout:
        """The layout of a batch.

        Which places hold one tensor is decided once, since a few numbers may be equal.
        """
        args, kwargs, targets = as_rows(*public) if ROWS in public[1] else public
        if private is None or not (
            private.submodules or private.target or private.inputs is not None
        ):
            private = self._with_embeddings(private or Private(), args, kwargs)
        names = (*named_inputs(args, kwargs), *named_inputs((), {"target": targets}))
        if names in self._same:
            private = replace(private, same=self._same[names])
        with self.random_state_kept():
            layout = Layout.of(public, private, self.live, max_rows)
        if len(tensors_of(public)[0]):
            self._same[names] = layout.same
        self._log_private(layout)
        return layout

    def _log_private(self, layout: Layout) -> None:
        """Log once what is private, and once if padding counts as private because nothing
        identifies it.
        """
        if self._inputs_without_mask is None:
            logger.info("private in every example: %s", layout)
            self._inputs_without_mask = layout.inputs_without_mask
        elif self._inputs_without_mask and layout.inputs_without_mask != self._inputs_without_mask:
            unknown = (
                "batches differ in length, and nothing shows which positions are padding: "
                "all are private"
            )
            logger.warning(
                "%s, and bounds of short examples are too large. Pass private=Private(lengths=…)",
                unknown,
            )
            self._inputs_without_mask = {}

    def _with_embeddings(self, private: Private, args: Args, kwargs: Kwargs) -> Private:
        """The same, with the outputs of the embeddings of integer inputs private if no input is
        floating-point.

        The embeddings are searched once. If there are floating-point inputs as well, the log says
        that the integers are not private.
        """
        floating = floating_inputs(named_inputs(args, kwargs, self.live))
        if self._embeddings is None:
            with self.random_state_kept(), buffers_kept(self.live):
                integers = not all(leaf.is_floating_point() for leaf in tensors_of((args, kwargs)))
                self._embeddings = (
                    embeddings_to_protect(self.live, args, kwargs) if integers else ()
                )
            names = list(self._embeddings)
            called = " and ".join(map(repr, names))
            if names and floating:
                public = (
                    f"the integers that {called} takes count as known to the attacker. To "
                    "protect them as well"
                )
                remedy = f"private=Private(inputs={floating!r}, submodule={names!r})"
                logger.warning("only the floating-point inputs are private: %s: %s", public, remedy)
            elif names:
                chosen = (
                    f"no input is floating-point, so the output of the embedding {called} "
                    "is private: confirm it"
                )
                only = names[0] if len(names) == 1 else names
                logger.warning(
                    "%s with private=Private(submodule=%r), or name another submodule", chosen, only
                )
        return private if floating else replace(private, submodule=self._embeddings or None)

    def random_state_kept(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model may draw random numbers without any effect on later ones."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    def masks_by_example(
        self,
        masks: tuple[Tensor, ...],
        args: Args,
        kwargs: Mapping[str, Any],
        groups: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Masks that a batch of these inputs has drawn, [batch, …] each.

        See :meth:`MaskLayouts.by_example`.
        """
        if not masks:
            return ()
        inputs = (args, dict(kwargs))

        def run_first() -> None:
            first = map_tensors(lambda leaf: leaf[:1], inputs)
            trainable, constant = self.weights()
            buffers = {name: constant[name].clone() for name in self._buffers if name in constant}
            with torch.no_grad(), differentiable_twice():
                models.call_with(self.template, {**trainable, **constant, **buffers}, *first)

        count, kind = len(tensors_of(inputs)[0]), (form_of(inputs, shapes=True), self.key)
        return self._mask_layouts.by_example(masks, count, kind, run_first, groups)

    def masks_again(self, args: Args, kwargs: Mapping[str, Any]) -> tuple[Tensor, ...] | None:
        """Masks for a batch of these inputs as the model would draw them.

        None if only the model can draw them.
        """
        inputs = (args, dict(kwargs))
        count, kind = len(tensors_of(inputs)[0]), (form_of(inputs, shapes=True), self.key)
        return self._mask_layouts.again(kind, count, self.device)

    def gradients(self, examples: Examples, loss: LossFunction) -> ExampleGradients:
        """The examples' gradients at the current weights, by the copy.

        It writes only into its own buffers.
        """
        parameters, constants = self.weights()
        for name in self._buffers if self.written is None else self.written:
            if name in constants:
                constants[name] = constants[name].clone()
        return ExampleGradients(self.template, loss, examples, parameters, constants)

    def check_own_weights(self, args: Args, kwargs: Mapping[str, Any]) -> None:
        """Raise if a pass of the copy over these inputs uses the live model's trainable weights
        instead of its own.
        """
        trainable, constant = self.weights()
        buffers = {name: constant[name].clone() for name in self._buffers if name in constant}
        used = {name: value for name, value in self.live.named_parameters() if value.requires_grad}
        with torch.enable_grad(), differentiable_twice(), self.random_state_kept():
            outputs = tensors_of(
                models.call_with(self.template, {**trainable, **constant, **buffers}, args, kwargs)
            )
            ends = [leaf.abs().sum() for leaf in outputs if leaf.requires_grad]
            found = (
                torch.autograd.grad(ends, list(used.values()), allow_unused=True) if ends else ()
            )
        names = [name for name, gradient in zip(used, found, strict=False) if gradient is not None]
        if names:
            raise UnsupportedModuleError(_USES_LIVE.format(", ".join(names[:5])))

    def live_gradients(self, examples: Examples, loss: LossFunction) -> ExampleGradients:
        """The same by the live module itself, for the loop's own pass."""
        return ExampleGradients(self.live, loss, examples, *self.weights())

    def follow(self) -> None:
        """Bring the copy's modules up to date with the live ones, before a step and its passes.

        They take over training mode and plain attributes; added or removed hooks are noted. A
        recorded pass has numbers and flags built in; if one changes, the pass is tried and built
        again. An integer that keeps changing is a counter, and no longer triggers this.

        Raises:
            UnsupportedModuleError: A module that went into training mode mixes examples.
            RuntimeError: A module or a parameter was replaced.
        """
        for holder, key, part, name in self._parts:
            if holder.get(key) is not part:
                raise RuntimeError(
                    f"{name} was replaced after make_private, and optimizer and accounting know "
                    "only the old one: change the model before make_private"
                )
        num_hooks = sum(
            len(live._forward_hooks) + len(live._forward_pre_hooks) for live, _ in self._pairs
        )
        self.opaque_changes += self._num_hooks not in (None, num_hooks)
        self._num_hooks = num_hooks

        now, before = _plain_attributes(self._pairs), self._attributes
        if now == before:
            return
        flags = tuple(live.training for live, _ in self._pairs)
        if flags != self._flags:
            models.check_modules(self.live, allow_dropout=True)
            self._flags = flags

        kinds: set[type] = set()  # of the attributes that changed
        for (live, copied), old, new in zip(self._pairs, before, now, strict=True):
            for name in old.keys() - new.keys():
                if name in vars(live):
                    self.opaque_changes += 1
                else:
                    kinds.add(type(vars(copied).pop(name)))
            changed = {
                name: value for name, value in new.items() if name not in old or old[name] != value
            }
            vars(copied).update(changed)
            kinds |= {type(value) for name, value in changed.items() if name != "training"}
        self._attributes = now
        self._changed_integers += int in kinds
        self.changes += bool(kinds - {int}) or (
            int in kinds and self._changed_integers <= _CHANGES_OF_INTEGERS
        )
        self.key = (self._flags, self.changes)

    def learn_written(self, constants: Mapping[str, Tensor]) -> None:
        """Find out from copies of the buffers which of them a pass has written into."""
        seen = {
            name
            for name, value in constants.items()
            if name in self._buffers and value._version > 0
        }
        self.written = seen | (self.written or set())

    def write_buffers(self, gradients: ExampleGradients) -> None:
        """Copy into the live model's buffers what a pass in place of its forward pass has
        written.
        """
        if not self.written:
            return
        live = dict(self.live.named_buffers())
        with torch.no_grad():
            for name in self.written:
                live[name].copy_(gradients.constants[name])

    def weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The trainable parameters, and everything else, by name, detached.

        Without walking through the modules.
        """
        trainable: dict[str, Tensor] = {}
        constant: dict[str, Tensor] = {}
        for name, holder, key in self._places:
            value = holder[key]
            if value is not None:
                (trainable if value.requires_grad else constant)[name] = value.detach()
        return trainable, constant


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Inside, the module may write into its buffers or replace them.

    Afterwards they are as before.
    """
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
    """The place of each parameter, then of each buffer (once if shared): full name, dict and
    key.
    """
    places: list[tuple[str, dict[str, Any], str]] = []
    for kind, named in (
        ("_parameters", module.named_parameters()),
        ("_buffers", module.named_buffers()),
    ):
        for name, _ in named:
            prefix, _, key = name.rpartition(".")
            places.append((name, getattr(module.get_submodule(prefix), kind), key))
    return places


def is_plain(value: object) -> bool:
    """Whether a copy may share this value: a number, a flag, a text, or a function that can be
    imported.

    Hugging Face's models hold their checkpointing function as an attribute when checkpointing is
    on.

    Example:
        >>> (
        ...     is_plain(1.5),
        ...     is_plain(partial(nn.functional.relu, inplace=False)),
        ...     is_plain(nn.Tanh().forward),
        ... )
        (True, True, False)
    """
    if isinstance(value, partial):
        return all(map(is_plain, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, FunctionType):
        return getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
    return type(value) in _PLAIN


def _plain_attributes(pairs: Sequence[tuple[nn.Module, nn.Module]]) -> list[dict[str, Any]]:
    """The plain attributes of each live module, by name.

    Whether a model has hooks of its own is not one.
    """
    found = []
    for live, _ in pairs:  # at every step, so without a function call for each module
        own: dict[str, Any] = {}
        for name, value in live.__dict__.items():
            kind = type(value)
            if kind in _PLAIN or (kind in _PLAIN_OR_FUNCTION and is_plain(value)):
                own[name] = value
        own.pop(models.HOOKS_INSTALLED, None)
        found.append(own)
    return found


# ---------------------------------------------------------------------- Opacus's recurrent layers


def recurrent_forward(module: Any) -> Callable[..., Any]:
    """The substitute for the forward pass of Opacus's layer, whose dropout applies to every state
    before its next use.

    A recorded pass computes these layers as torch's.
    """
    mode = {DPLSTM: "LSTM", DPGRU: "GRU"}.get(
        type(module)
    ) or f"RNN_{module.cell_params['nonlinearity'].upper()}"
    return lambda sequences, state_init=None: run_recurrent(
        module, mode, sequences, state_init, drops_states=True
    )


for _kind in (DPLSTM, DPGRU, DPRNN):
    register_substitute(_kind, recurrent_forward, reports_uses=True)
