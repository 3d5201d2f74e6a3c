"""The gradient of one example's loss as a function of its private coordinates, and its Jacobian's
products.

With ℓ(z; w) the loss of one example as a function of its private coordinates z ∈ R^d and the
trainable parameters w ∈ R^p, this module gives, for every example of a batch,

    g = ∇_w ℓ ∈ R^p,   Jv = ∇_w ⟨∇_z ℓ, v⟩,   Jᵀu = ∇_z ⟨∇_w ℓ, u⟩,   J = ∂g/∂z ∈ R^{p×d}.

Both products are a gradient of a gradient: no forward-mode rule is needed, so every module that can
be differentiated twice works. Clipping, noise and subsampling come later, in
:mod:`torchfil.fisher.operator`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchfil.fisher import models
from torchfil.fisher.masks import replayed_masks
from torchfil.private import Examples, Inputs, Private, added_to_outputs
from torchfil.utils.errors import UnsupportedModuleError, ran_out
from torchfil.utils.trees import map_tensors, tensors_of

logger = logging.getLogger(__name__)

LossFunction = Callable[[Any, Any], Tensor]
DEFAULT_MAX_MEMORY = 2**30


@dataclass
class ModelFacts:
    """What passes over a model have shown about it; later passes begin with it and may add to it.

    Modules are given by name, so that the facts hold for the model and for its copy.

    Attributes:
        whole: Modules whose parameters cannot be watched one by one: their calls are recorded,
            whatever their rule.
        watched: Layers whose parameters are watched instead of their calls: they are called without
            the examples (on a range of positions), or not called at all (``F.linear(x,
            self.layer.weight)``).
        layouts: For each call of a layer, the dimension of the examples in its output; None: the
            first everywhere.
        overwrites: Whether the model or its loss overwrites a layer's input or output, so that
            copies are needed.
        unmapped: Whether torch.func does not run the model: it reads a tensor's values, …
        probes_apart: Whether probes cannot be processed together.
        layers: What a recorded pass does with each layer, by model; follows from the rest.
    """

    whole: set[str] = field(default_factory=set)
    watched: set[str] = field(default_factory=set)
    layouts: Mapping[str, tuple[int | None, ...]] | None = None
    overwrites: bool = False
    unmapped: bool = False
    probes_apart: bool = False
    layers: dict[nn.Module, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExampleGradients:
    """Per-example losses, gradients and Jacobian products of one batch at fixed weights.

    Guarantees:
        * One example at a time: the model sees batches of one, so nothing can mix examples.
        * ``loss_fn`` with mean and sum reduction give the same numbers.
        * An empty batch gives empty tensors of the right shape.

    Attributes:
        model: Any module; it is called functionally and left unchanged. If Opacus has made the
            model private, a copy without hooks is called, with the current weights.
        loss_fn: ``loss_fn(outputs, targets)``, an ordinary torch loss.
        examples: The batch with its private coordinates, and the masks for active dropout; without
            masks, a model that draws random numbers is refused.
        parameters: The trainable parameters by name, detached.
        constants: Frozen parameters and buffers by name.
        autocast: The dtype of autocast under which model and loss run; None: without.
        probe_precision: The precision of products with probes, see
            :func:`torchfil.fisher.models.probes_in`; None: as everything else.
        twice: Whether passes will be differentiated twice; if not, fused attention kernels may be
            used.
        facts: What earlier passes over the model have shown.
        rows_at_once: How many rows of an owner a mapped pass takes; None: all. Everything here is
            linear in the loss, so it is added up over the rows.
    """

    model: nn.Module
    loss_fn: LossFunction
    examples: Examples
    parameters: dict[str, Tensor]
    constants: dict[str, Tensor]
    autocast: torch.dtype | None = None
    probe_precision: models.ProbePrecision | None = None
    twice: bool = True
    facts: ModelFacts = field(default_factory=ModelFacts, compare=False)
    rows_at_once: int | None = None

    @classmethod
    def build(
        cls,
        model: nn.Module,
        loss_fn: LossFunction,
        inputs: Inputs,
        targets: object,
        private: Private | None = None,
    ) -> ExampleGradients:
        """Check the model and the batch, and bind them together, with autocast as it is now.

        Raises:
            UnsupportedModuleError: BatchNorm (it mixes examples), or active dropout (its gradient
                is random).
            ValueError: No trainable parameter; a batch that :meth:`Examples.build` refuses; a loss
                that gives more than one number for one example, or a mean weighted by class.
        """
        models.check_unweighted_mean(loss_fn)
        live, model = models.without_opacus(model)
        models.check_modules(model)
        parameters, constants = models.trainable_and_constant(live)
        if not parameters:
            raise ValueError(
                f"{type(model).__name__} has no trainable parameter, so its gradient releases "
                "nothing; unfreeze some"
            )
        examples = Examples.build(inputs, targets, private, model=live)
        device = next(iter(parameters.values())).device
        return cls(model, loss_fn, examples, parameters, constants, models.autocast_now(device))

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def num_coordinates(self) -> int:
        """d, the number of private coordinates of one example."""
        return self.examples.num_coordinates

    @cached_property
    def num_parameters(self) -> int:
        """p, the number of trainable parameters."""
        return sum([value.numel() for value in self.parameters.values()])

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of gradients, norms and sums: the parameters' dtype, or float32 if that is
        wider.
        """
        return models.wide_dtype(next(iter(self.parameters.values())).dtype)

    @cached_property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return next(iter(self.parameters.values())).device

    @cached_property
    def reduced(self) -> bool:
        """Whether the model computes with fewer digits than float32 has."""
        return (
            self.autocast is not None
            or next(iter(self.parameters.values())).dtype in models.REDUCED
        )

    @contextlib.contextmanager
    def forward_state(self) -> Iterator[None]:
        """Inside, model and loss run as the accounting needs them: under their autocast,
        differentiable twice.

        Fused attention kernels are also left out if they would draw dropout's masks where nobody
        sees them.
        """
        with contextlib.ExitStack() as stack:
            if self.autocast is not None or torch.is_autocast_enabled(self.device.type):
                stack.enter_context(models.autocast_as(self.autocast, self.device))
            if self.twice or self.examples.masks:
                stack.enter_context(differentiable_twice())
            stack.enter_context(models.without_checkpoints())
            yield

    @contextlib.contextmanager
    def backward_state(self, *, probes: bool = False) -> Iterator[None]:
        """Take derivatives of such passes inside: without autocast, as in a training loop.

        Matrix products in TF32 keep all digits of bfloat16 and float16 numbers. Products with
        ``probes`` are only as precise as these need it.
        """
        reduced = self.reduced
        with differentiable_twice(), contextlib.ExitStack() as stack:
            if torch.is_autocast_enabled(self.device.type):
                stack.enter_context(models.autocast_as(None, self.device))
            if reduced:
                stack.enter_context(models.products_in("tf32"))
            if probes and self.probe_precision is not None:
                stack.enter_context(models.probes_in(self.probe_precision, reduced=reduced))
            yield

    @property
    def bytes_per_vector(self) -> int:
        """The bytes of one vector of length p."""
        return self.num_parameters * self.dtype.itemsize

    def chunks(
        self, max_memory: int, bytes_per_example: int
    ) -> Iterator[tuple[slice, ExampleGradients]]:
        """The batch in pieces that fit in ``max_memory`` bytes, of one example or more.

        An empty batch is one piece.
        """
        count, room = len(self.examples), max(1, max_memory // max(1, bytes_per_example))
        if count <= room:
            yield slice(0, count), self
            return
        for rows, examples in self.examples.chunks(room):
            yield rows, replace(self, examples=examples)

    def double(self) -> ExampleGradients:
        """The same in float64, without autocast."""

        def doubled(value: Tensor) -> Tensor:
            return value.double() if value.is_floating_point() else value

        examples = replace(
            self.examples,
            z=self.examples.z.double(),
            public=map_tensors(doubled, self.examples.public),
        )
        parameters, constants = map_tensors(doubled, (self.parameters, self.constants))
        own = {"examples": examples, "parameters": parameters, "constants": constants}
        return replace(self, **own, autocast=None, probe_precision=None)

    def gradients(self) -> Tensor:
        """g of every example, [batch, p]."""
        return self.gradients_and_losses()[0]

    def gradients_and_losses(self) -> tuple[Tensor, Tensor]:
        """g of every example, [batch, p], and ℓ, [batch]."""

        def one(z: Tensor, public: object) -> Tensor:
            gradient, loss = self._grad_and_value(self.loss_of_one)(self.parameters, z, public)
            return torch.cat([flatten(gradient), loss.reshape(1).to(self.dtype)])

        both = self._map(one, (), (self.num_parameters + 1,))
        return both[:, :-1], both[:, -1]

    def plain_products_of_one(self, i: int, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """g [p], ∇_z‖g‖² [d] and Jᵀu [d] of example i, for u [p], by plain backward passes.

        Faster computations are checked against it.
        """
        parameters = {
            name: value.clone().requires_grad_() for name, value in self.parameters.items()
        }
        one = self.examples[slice(i, i + 1)]
        public = map_tensors(lambda leaf: leaf[0], one.public)
        z = one.z[0].detach().requires_grad_()
        options: Any = {"allow_unused": True, "materialize_grads": True}
        with torch.enable_grad(), replayed_masks(one.masks), self.backward_state():
            with self.forward_state():
                loss = self.loss_of_one(parameters, z, public)
            by_parameter = torch.autograd.grad(
                loss, list(parameters.values()), create_graph=True, **options
            )
            g = models.wide(torch.cat([part.flatten() for part in by_parameter]))
            if not g.requires_grad:
                return g, torch.zeros_like(z), torch.zeros_like(z)
            (slope,) = torch.autograd.grad(g.square().sum(), z, retain_graph=True, **options)
            (product,) = torch.autograd.grad(g @ u, z, retain_graph=True, **options)
        return g.detach(), models.wide(slope), models.wide(product)

    def jvp(self, v: Tensor) -> Tensor:
        """Jv of every example, [batch, p], for v of shape [batch, d]."""
        return self._map(self.jvp_of_one, ((v, 0),), (self.num_parameters,))

    def jvp_of_one(self, z: Tensor, public: object, v: Tensor) -> Tensor:
        """Jv of one example, [p], for z and v of shape [d]; may be mapped over either."""

        def directional(parameters: dict[str, Tensor]) -> Tensor:
            return (self._grad_and_value(self.loss_of_one, 1)(parameters, z, public)[0] * v).sum()

        return flatten(self._grad_and_value(directional)(self.parameters)[0])

    def vjp(self, u: Tensor) -> Tensor:
        """Jᵀu of every example, [batch, d], for u of shape [p] (shared) or [batch, p]."""

        def one(z: Tensor, public: object, u: Tensor) -> Tensor:
            direction = self.unflatten(u)

            def directional(z: Tensor) -> Tensor:
                gradient = self._grad_and_value(self.loss_of_one)(self.parameters, z, public)[0]
                return torch.stack(
                    [(gradient[name] * direction[name]).sum() for name in gradient]
                ).sum()

            return self._grad_and_value(directional)(z)[0]

        return self._map(one, ((u, 0 if u.ndim == 2 else None),), (self.num_coordinates,))

    def jacobian_columns(self, coordinates: slice) -> Tensor:
        """The columns ``coordinates`` of J, [batch, p, columns]."""
        basis = torch.eye(self.num_coordinates, dtype=self.examples.z.dtype, device=self.device)[
            coordinates
        ]
        # Inside two vmaps dropout, where one shares masks, crashes on CUDA, and PReLU is wrong or
        # fails (torch 2.13): one vmap, over a copy of each example for each column.
        if self.examples.masks or any(
            isinstance(module, nn.PReLU) for module in self.model.modules()
        ):
            rows = torch.arange(len(self)).repeat_interleave(len(basis))
            columns = replace(self, examples=self.examples[rows]).jvp(basis.repeat(len(self), 1))
            return columns.unflatten(0, (len(self), len(basis))).mT

        def one(z: Tensor, public: object) -> Tensor:  # [p, columns]
            if self.facts.unmapped:
                return torch.stack([self.jvp_of_one(z, public, e).detach() for e in basis], dim=1)
            return vmap(lambda e: self.jvp_of_one(z, public, e), out_dims=1)(basis)

        return self._map(one, (), (self.num_parameters, len(basis)))

    def loss_of_one(self, parameters: dict[str, Tensor], z: Tensor, public: object) -> Tensor:
        """ℓ of one example as a function of the weights by name and z [d]; ``public`` is the rest
        of the example.
        """
        args, kwargs, target, offsets = self.examples.restore(z, public)
        batched = map_tensors(lambda leaf: leaf.unsqueeze(0), (args, kwargs, target))
        with added_to_outputs(self.model, offsets):
            outputs = models.call_with(
                self.model, {**parameters, **self.own_constants()}, batched[0], batched[1]
            )
        value = self.loss_fn(outputs, batched[2])
        if value.numel() != 1:
            raise ValueError(
                f"loss_fn gave {value.numel()} numbers (shape {tuple(value.shape)}) for one "
                "example; it must give one: use reduction='mean' or 'sum'"
            )
        return value.reshape(())

    def _grad_and_value(
        self, function: Callable[..., Tensor], argnum: int = 0
    ) -> Callable[..., tuple[Any, Tensor]]:
        """torch.func's ``grad_and_value``.

        The same by plain backward passes if torch.func does not run the model.
        """
        return (_plain_grad_and_value if self.facts.unmapped else grad_and_value)(function, argnum)

    @cached_property
    def _buffers(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.model.named_buffers())

    def own_constants(self) -> dict[str, Tensor]:
        """The constants, with copies of buffers: a forward pass may write into them, but a mapped
        one must not.
        """
        return {
            name: value.clone() if name in self._buffers else value
            for name, value in self.constants.items()
        }

    def _map(
        self,
        one: Callable[..., Tensor],
        extra: tuple[tuple[Tensor, int | None], ...],
        shape: tuple[int, ...],
    ) -> Tensor:
        """``one`` over all examples together, or one after the other if torch.func does not run the
        model.

        It does not run models that read a tensor's values, send rows to experts, or have autograd
        functions of old; later batches are then not mapped, either. An empty batch gives an empty
        tensor of that trailing shape.
        """
        if self.rows_at_once is not None:
            total = torch.zeros(len(self), *shape, dtype=self.dtype, device=self.device)
            for part in self.examples.in_rows(self.rows_at_once):
                share: Tensor = self.loss_fn.share(part, self.examples).to(total)  # type: ignore[attr-defined]
                found = replace(self, examples=part, rows_at_once=None)._map(one, extra, shape)
                total += share.reshape(-1, *(1,) * len(shape)) * found
            return total
        # torch.func does not support autocast
        examples, alone = self.examples, replace(self, autocast=None)
        if len(examples) == 0:
            return torch.zeros(0, *shape, dtype=self.dtype, device=self.device)
        in_dims = (0, examples.in_dims, *(dim for _, dim in extra))
        mapped = vmap(one, in_dims=in_dims, randomness="different" if examples.masks else "error")
        unmapped, cause = self.facts.unmapped, ""
        for _ in range(0 if unmapped else 2):  # an error that does not come again is not vmap's
            try:
                with alone.forward_state(), replayed_masks(examples.masks):
                    return models.wide(
                        mapped(examples.z, examples.public, *(given for given, _ in extra)).detach()
                    )
            except RuntimeError as error:
                if "randomness" in str(error):
                    raise UnsupportedModuleError(
                        "the model draws random numbers in its forward pass (dropout called as a "
                        "function?): its gradient is random; use eval mode"
                    ) from error
                if ran_out(error):
                    raise
                cause = models.first_line(error)

        # one example after the other
        self.facts.unmapped, rows = True, list[Tensor]()
        try:
            for i in range(len(examples)):
                example = examples[slice(i, i + 1)]
                public = map_tensors(lambda leaf: leaf[0], example.public)
                more = [given if dim is None else given[i] for given, dim in extra]
                with alone.forward_state(), replayed_masks(example.masks):
                    rows.append(models.wide(one(example.z[0], public, *more).detach()))
        except RuntimeError as error:
            if ran_out(error):
                raise
            raise UnsupportedModuleError(
                "one example's gradient, or its derivative, cannot be computed "
                f"({models.first_line(error)}): the model does not run on a batch of one, or "
                "torch has no second derivative of an operation. Write it with others, for "
                "example (x[:, None] - y).norm(dim=-1) instead of torch.cdist(x, y)."
            ) from error
        finally:
            self.facts.unmapped = unmapped or len(rows) == len(examples)
        if cause:
            slow = "gradients are computed one example after the other, which is many times slower"
            logger.warning("%s: torch.func.vmap does not run the model (%s)", slow, cause)
        return torch.stack(rows)

    def unflatten(self, u: Tensor) -> dict[str, Tensor]:
        """A vector of length p by parameter name, in the parameters' shapes."""
        pieces = u.split([value.numel() for value in self.parameters.values()])
        named = zip(self.parameters.items(), pieces, strict=True)
        return {name: piece.reshape(value.shape) for (name, value), piece in named}


def _plain_grad_and_value(
    function: Callable[..., Tensor], argnum: int
) -> Callable[..., tuple[Any, Tensor]]:
    """The gradient with respect to one argument, which can be differentiated again, and the
    value.
    """

    def run(*args: object) -> tuple[Any, Tensor]:
        given = map_tensors(
            lambda leaf: leaf if leaf.requires_grad else leaf.detach().requires_grad_(),
            args[argnum],
        )
        leaves = tensors_of(given)
        with torch.enable_grad():
            value = function(*args[:argnum], given, *args[argnum + 1 :])
            constant = 0 * torch.stack([leaf.sum() for leaf in leaves]).sum()
            moving = value if value.requires_grad else constant
            found = torch.autograd.grad(
                moving, leaves, create_graph=True, allow_unused=True, materialize_grads=True
            )
            parts = iter(found)
        return map_tensors(lambda _: next(parts), given), value

    return run


def flatten(tree: Mapping[str, Tensor]) -> Tensor:
    """Tensors by parameter name as one vector, [p]."""
    return torch.cat([value.reshape(-1) for value in tree.values()])


def differentiable_twice() -> contextlib.AbstractContextManager[None]:
    """Inside, attention uses plain kernels, because fused ones have no second derivative."""
    cuda = torch.backends.cuda
    fused = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    return (
        _plain_attention()
        if fused or torch.backends.mha.get_fastpath_enabled()
        else contextlib.nullcontext()
    )


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
