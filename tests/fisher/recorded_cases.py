"""Layers and models of every kind, and what each Jacobian of them is compared with: plain autograd,
in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.cases import DEVICE
from torchfil.fisher import ClippedJacobian, ExampleGradients, PoissonAmplification
from torchfil.fisher.gradients import flatten
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import Jacobian
from torchfil.fisher.recording import RecordedJacobian, forward_pass, plan

BATCH = 3
MECHANISM = Mechanism.build(1.0, 0.7, "gelu", PoissonAmplification(0.1))


class Model(nn.Module):
    """Layers, parameters and buffers by name, and a forward pass that is given them."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@dataclass(frozen=True)
class Truth:
    """What products of J̃ must be.

    Attributes:
        clipped: g̃, [batch, p].
        along: a = J̃ᵀĝ, [batch, d].
        probes: u, [probes, p].
        across: J̃ᵀPu, [probes, batch, d].
    """

    clipped: Tensor
    along: Tensor
    probes: Tensor
    across: Tensor

    @classmethod
    def of_dense(cls, clipped: Tensor, jacobian: Tensor, probes: Tensor) -> Truth:
        """From g̃ and all of J̃, [batch, p, d]."""
        norm = clipped.norm(dim=1, keepdim=True)
        unit = clipped / norm.where(norm > 0, 1.0)
        along = torch.einsum("bpd,bp->bd", jacobian, unit)
        rows = torch.einsum("bpd,kp->kbd", jacobian, probes)
        return cls(clipped, along, probes, rows - (probes @ unit.mT)[:, :, None] * along)

    @classmethod
    def of_plain_passes(cls, gradients: ExampleGradients, probes: Tensor) -> Truth:
        """From g, ∇‖g‖² and Jᵀu of one example after the other, with the mechanism's clip
        function.
        """
        found = [
            [gradients.plain_products_of_one(i, u) for i in range(len(gradients))] for u in probes
        ]
        g, slope = (torch.stack([row[k] for row in found[0]]) for k in (0, 1))
        rows = torch.stack([torch.stack([row[2] for row in each]) for each in found])
        norm, clip = g.norm(dim=1), MECHANISM.clip
        weight = gradients.examples.clip_weights
        omega = torch.ones_like(norm) if weight is None else weight
        scale, turn = omega * clip.scale(norm, 1.0), omega * clip.scale_derivative(norm, 1.0)
        safe = norm.where(norm > 0, 1.0)
        slope, unit = slope / (2 * safe[:, None]), g / safe[:, None]
        across = scale[:, None] * (rows - (probes @ unit.mT)[:, :, None] * slope)
        return cls(scale[:, None] * g, (scale + norm * turn)[:, None] * slope, probes, across)


def close(value: Tensor, truth: Tensor, tolerance: float = 1e-8) -> None:
    """Equal to a relative error, with the largest entry for the small ones."""
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    torch.testing.assert_close(
        value, truth, rtol=tolerance, atol=1e-2 * tolerance * max(largest, 1e-2)
    )


def probes_for(gradients: ExampleGradients, count: int = 2) -> Tensor:
    return torch.randn(count, gradients.num_parameters, dtype=torch.float64).to(DEVICE)


def check_products(jacobian: Jacobian, truth: Truth, mechanism: Mechanism) -> None:
    """Norms, their slopes, rows one by one and together, folded rows and sums."""
    norm = truth.clipped.norm(dim=1)
    close(jacobian.clipped_norm, norm, 1e-10)
    close(jacobian.clipped_norm_gradient(), truth.along)
    for at_once in (1, 2):
        close(torch.stack(list(jacobian.perpendicular_rows(truth.probes, at_once))), truth.across)
    perpendicular, parallel = (weight.sqrt()[:, None] for weight in mechanism.weights(norm))
    close(
        jacobian.folded_row(mechanism, truth.probes[0]),
        perpendicular * truth.across[0] + parallel * truth.along,
    )
    mask = (torch.arange(len(norm)) % 3 != 1).to(truth.clipped)
    close(flatten(jacobian.clipped_sum(mask)), mask @ truth.clipped, 1e-9)


def state_of(model: nn.Module) -> Any:
    """All that a pass might change: hooks, attributes, parameters."""
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    return (
        hooks,
        attributes,
        {name: (id(p), p.requires_grad, p.grad) for name, p in model.named_parameters()},
    )


def check(
    gradients: ExampleGradients, *, generic: tuple[str, ...] | None = None, mapped: bool = True
) -> None:
    """A recorded pass, whole and in halves, and mapped gradients, against plain passes.

    With a weight ω by example.

    Args:
        gradients: The examples with model and loss.
        generic: Layers without a rule, where they are known.
        mapped: Whether mapped gradients are compared, too.
    """
    model = gradients.model
    before, buffers = state_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    found = plan(gradients)
    assert found.fits, found.reason
    assert found.bytes_per_example > 0
    assert generic is None or found.generic == generic

    weights = torch.linspace(0.3, 1.0, len(gradients), dtype=torch.float64, device=DEVICE)
    gradients = replace(gradients, examples=replace(gradients.examples, clip_weights=weights))
    truth = Truth.of_plain_passes(gradients, probes_for(gradients))
    recorded = RecordedJacobian(gradients, MECHANISM)
    check_products(recorded, truth, MECHANISM)
    assert DEVICE != "cpu" or not gradients.facts.probes_apart

    # the forward half knows no loss
    early = replace(gradients, loss_fn=lambda outputs, targets: outputs.sum())
    forward = forward_pass(early, gradients.examples.z.detach().requires_grad_())
    released = RecordedJacobian(gradients, MECHANISM, forward, measured=False)
    close(released.losses, recorded.losses, 1e-12)
    close(released.clipped_norm, truth.clipped.norm(dim=1), 1e-10)
    close(flatten(released.clipped_sum()), truth.clipped.sum(dim=0), 1e-9)
    assert not released.norm.requires_grad
    assert all(not call.delta.requires_grad for call in released.recording.calls)

    if mapped:
        jacobian = ClippedJacobian(gradients, MECHANISM.clip, 1.0)
        close(jacobian.clipped_gradient, truth.clipped)
        close(jacobian.perpendicular_rmatvec(truth.probes[0]), truth.across[0])
        close(released.products_with(gradients), jacobian.products_with(gradients))
    assert state_of(model) == before
    assert all(torch.equal(v, buffers[k]) for k, v in model.state_dict().items())


def gradients_of(
    model: nn.Module, *inputs: Tensor, loss_fn: Any = None, private: Any = None
) -> ExampleGradients:
    """In float64, with random targets."""
    model = model.to(DEVICE).double()
    given = tuple(x.to(DEVICE).double() if x.is_floating_point() else x.to(DEVICE) for x in inputs)
    with torch.no_grad():
        y = torch.randn_like(model(*(x.clone() for x in given)))
    return ExampleGradients.build(model, loss_fn or nn.MSELoss(), given, y, private)


def norms_and_slopes(gradients: ExampleGradients) -> tuple[Tensor, Tensor]:
    """‖g‖², [batch], and ∇_z‖g‖² = 2Jᵀg, [batch, d], of a recorded pass."""
    jacobian = RecordedJacobian(gradients, Mechanism.build(1.0, 1.0, "rsqrt"))
    return jacobian.norm.square(), 2 * jacobian.norm[:, None] * jacobian.norm_gradient()


def flat(layer: nn.Module) -> nn.Module:
    """A layer under a nonlinearity, so that its input and output gradient both depend on x."""
    return Model(lambda m, x: torch.tanh(m.layer(torch.sin(x))).flatten(1), layer=layer)


def mixed() -> nn.Module:
    """A parameter that meets the examples in a sum of products."""
    return Model(
        lambda m, x: torch.einsum("bi,ij->bj", x, m.mix), mix=nn.Parameter(torch.randn(3, 3))
    )


def scaled() -> nn.Module:
    """A parameter beside a child with parameters of its own."""
    scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]))
    return Model(lambda m, x: m.scale * torch.tanh(m.inner(x)), scale=scale, inner=nn.Linear(4, 3))


Cases = dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]
LAYERS: Cases = {
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "linear on few tokens": (lambda: nn.Linear(20, 15), (2, 20)),
    "linear on many tokens": (lambda: nn.Linear(3, 2), (9, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 6)),
    "conv2d by Gram matrices": (lambda: nn.Conv2d(6, 8, 2), (6, 3, 2)),
    "conv2d stride, padding": (
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2)),
        (2, 5, 6),
    ),
    "conv2d many channels": (lambda: nn.Conv2d(8, 3, (3, 2), padding=(2, 1)), (8, 4, 5)),
    "conv2d strides that differ": (
        lambda: nn.Conv2d(8, 2, (4, 3), stride=(4, 1), padding=(3, 2)),
        (8, 11, 5),
    ),
    "conv2d groups, stride": (
        lambda: nn.Conv2d(4, 6, (3, 2), groups=2, stride=(2, 3), padding=1),
        (4, 6, 5),
    ),
    "conv2d groups, one position": (lambda: nn.Conv2d(4, 6, 2, groups=2), (4, 2, 2)),
    "conv2d circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "conv2d a rest": (lambda: nn.Conv2d(8, 2, 2, stride=2), (8, 5, 3)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, stride=(1, 2, 1)), (2, 3, 4, 3)),
    "transposed conv": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 3, 3)),
    "groupnorm without weights": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(3, 3, affine=False)),
        (3, 4),
    ),
    "layernorm on tokens": (lambda: nn.LayerNorm((4, 3)), (2, 4, 3)),
    "rmsnorm": (lambda: nn.RMSNorm(5), (3, 5)),
    "groupnorm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "instancenorm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
    "own parameters beside a child": (scaled, (4,)),
    "prelu": (lambda: nn.PReLU(4), (4,)),
    **{
        name: (lambda kind=kind: nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 2)), (4,))
        for name, kind in (("gelu", nn.GELU), ("silu", nn.SiLU))
    },
}
# Average pooling adds views of adjacent windows and of those one apart; other pooling is torch's.
LAYERS |= {
    f"pool, {given}": (
        lambda given=given: nn.Sequential(nn.Conv2d(2, 2, 1), nn.AvgPool2d(2, **given)),
        (2, 4, 4),
    )
    for given in ({}, {"stride": 1}, {"divisor_override": 3})
}
# With the first parameter frozen, too.
FROZEN = (
    "linear",
    "conv2d",
    "layernorm on tokens",
    "groupnorm",
    "instancenorm",
    "own parameters beside a child",
)


class Dense(nn.Linear):
    """A subclass that keeps the forward pass of its layer."""


def between(layer: nn.Module, width: int = 3) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(width, 2))


def linear_layers(run: Callable[..., Any], **sizes: tuple[int, int]) -> Callable[[], nn.Module]:
    """Makes a model of linear layers of these sizes."""
    return lambda: Model(run, **{name: nn.Linear(*size) for name, size in sizes.items()})


def tied() -> nn.Module:
    model = linear_layers(
        lambda m, x: m.second(torch.tanh(m.first(x))), first=(4, 4), second=(4, 4)
    )()
    model.second.weight = model.first.weight
    return model


def folded(together: bool, layer: nn.Module | None = None) -> nn.Module:
    """Rows of all examples as one batch: those of an example together, or not."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x if together else x.transpose(0, 1)
        h = torch.tanh(m.layer(x.flatten(0, 1).sin())).reshape(x.shape)
        return h if together else h.transpose(0, 1)

    return Model(run, layer=layer or nn.Linear(4, 4))


def attends(
    *, across: bool = False, need_weights: bool = False, kdim: int | None = None, **options: Any
) -> nn.Module:
    """Attention with both masks, on x and, across, on a part of it."""

    def run(m: Any, x: Tensor) -> Tensor:
        first, keys = m.attention.batch_first, x.sin() if across else x
        padding = (torch.arange(x.shape[1]) == 2).expand(len(x), -1).to(x.device)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        inputs = (x, keys[..., :kdim], keys) if across else (x if first else x.transpose(0, 1),) * 3
        h = m.attention(
            *inputs, need_weights=need_weights, key_padding_mask=padding, attn_mask=causal
        )[0]
        return m.head(torch.tanh(h if first else h.transpose(0, 1))).mean(dim=1)

    attention = nn.MultiheadAttention(4, 2, kdim=kdim, **{"batch_first": True, **options})
    nn.init.normal_(attention.in_proj_bias)
    return Model(run, attention=attention, head=nn.Linear(4, 2))


def attends_to_other_values() -> nn.Module:
    """Queries that are the keys, and values of their own, as in detection transformers."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    return Model(
        lambda m, x: m.attention(s := x.sin(), s, x.cos())[0].mean(dim=1), attention=attention
    )


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    h.tanh_()
    return m.second(h).tanh_()


def time_first() -> nn.Module:
    """Positions first, as many as examples in a trial, with a table of positions."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.norm(torch.tanh(m.layer(x.transpose(0, 1) + m.table))).mean(dim=0))

    table = nn.Parameter(torch.randn(3, 1, 4))
    return Model(
        run, table=table, layer=nn.Linear(4, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 2)
    )


def twice(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer(torch.tanh(m.layer(x)))))


def in_two_layouts(m: Any, x: Tensor) -> Tensor:
    """The same layer with the examples first, and behind as many positions."""
    return m.head(
        torch.tanh(m.layer(x)) + torch.tanh(m.layer(x.transpose(0, 1).cos())).transpose(0, 1)
    ).mean(dim=1)


def with_and_without_the_examples(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.layer(x)) + m.layer(torch.eye(4)[:1].to(x)).sin()


def behind_its_back(m: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(m.layer(x)), m.layer.weight)


MODELS: Cases = {
    "a layer used twice": (linear_layers(twice, layer=(4, 4), head=(4, 2)), (4,)),
    "tied weights": (tied, (4,)),
    "in-place operations": (linear_layers(in_place, first=(4, 5), second=(5, 2)), (4,)),
    "a layer in two layouts": (
        linear_layers(in_two_layouts, layer=(4, 4), head=(4, 2)),
        (BATCH, 4),
    ),
    "rows of all examples as one batch": (partial(folded, True), (2, 4)),
    "rows of all examples, convolved": (
        lambda: folded(True, nn.Conv1d(2, 2, 3, padding=1)),
        (2, 2, 4),
    ),
    "rows of all examples, normalised": (lambda: folded(True, nn.GroupNorm(2, 4)), (2, 4)),
    "positions first": (time_first, (3, 4)),
    "a weight used behind its layer's back": (linear_layers(behind_its_back, layer=(4, 4)), (4,)),
    "with and without the examples": (
        linear_layers(with_and_without_the_examples, layer=(4, 4)),
        (4,),
    ),
    "subclasses": (lambda: nn.Sequential(Dense(4, 4), nn.Tanh(), Dense(4, 2)), (4,)),
    "weight normalisation": (lambda: between(weight_norm(nn.Linear(4, 3))), (4,)),
    "weight normalisation by hooks": (lambda: between(nn.utils.weight_norm(nn.Linear(4, 3))), (4,)),
    "spectral normalisation": (lambda: between(spectral_norm(nn.Linear(4, 3))).eval(), (4,)),
    "frozen first layer": (lambda: between(nn.Linear(4, 6).requires_grad_(False), 6), (4,)),
    "attention": (attends, (3, 4)),
    "attention, positions first": (partial(attends, batch_first=False), (3, 4)),
    "attention, keys of their own width": (partial(attends, across=True, kdim=3), (3, 4)),
    "attention, values of their own": (attends_to_other_values, (3, 4)),
    "attention, its weights asked for": (partial(attends, need_weights=True), (3, 4)),
    "attention with rows added": (partial(attends, add_bias_kv=True), (5, 4)),
    "a layer of two inputs that is given one": (
        lambda: Model(
            lambda m, x: torch.tanh(m.pair(torch.tanh(x), torch.tanh(x))), pair=nn.Bilinear(3, 3, 4)
        ),
        (3,),
    ),
}


def _changed_in_place(m: Any, h: Tensor) -> Tensor:
    h *= m.theta
    h += m.other
    return h


def _standardised(w: Tensor) -> Tensor:
    return (w - w.mean(dim=(1, 2), keepdim=True)) / w.std()


class _Unseen(torch.autograd.Function):
    """A product that no mode sees."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradients[0] * b, (gradients[0] * a).sum_to_size(b.shape)


Use = tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]
# Of a parameter theta, of this shape, and other, [4], on tokens, [batch, 2, 4].
USES: dict[str, Use] = {
    "scale": (lambda m, h: m.theta * h, (4,)),
    "position": (lambda m, h: h + m.theta[: h.shape[1]], (5, 4)),
    "as many positions as examples": (
        lambda m, h: torch.cat([h, h[:, :1]], 1) * m.theta,
        (BATCH, 4),
    ),
    "broadcast inside": (lambda m, h: h * m.theta, (2, 1)),
    "class token": (lambda m, h: torch.cat([m.theta.expand(len(h), -1, -1), h], dim=1), (1, 1, 4)),
    "two together": (lambda m, h: torch.addcmul(h, m.theta, m.other), (4,)),
    "a function of two": (lambda m, h: h * (m.theta[:, None] * m.other), (2,)),
    "in place": (_changed_in_place, (4,)),
    "product": (lambda m, h: h @ m.theta, (4, 4)),
    "sum of both kinds": (lambda m, h: m.theta[0] * h + h @ m.theta, (4, 4)),
    "tokens of all": (
        lambda m, h: torch.addmm(m.other, h.reshape(-1, 4), m.theta).reshape(h.shape),
        (4, 4),
    ),
    "time first": (
        lambda m, h: (F.linear(h.transpose(0, 1), m.theta) + m.theta[:2, None]).transpose(0, 1),
        (4, 4),
    ),
    "layer norm": (lambda m, h: F.layer_norm(h, (4,), m.theta, m.other), (4,)),
    "group norm": (lambda m, h: F.group_norm(h, 1, m.theta, m.other[:2]), (2,)),
    "standardised convolution": (
        lambda m, h: F.conv1d(h, _standardised(m.theta), padding="same"),
        (2, 2, 3),
    ),
    "rows of a table": (lambda m, h: h * m.theta[(h.detach() > 0).sum(dim=-1)], (5, 4)),
    "embedding": (lambda m, h: h * F.embedding((h.detach() > 0).sum(dim=-1), m.theta, 1), (5, 4)),
    "added to scores": (
        lambda m, h: F.scaled_dot_product_attention(*[h[:, None]] * 3, m.theta)[:, 0],
        (2, 2),
    ),
    "windows": (
        lambda m, h: F.scaled_dot_product_attention(
            *[h.reshape(-1, 1, 4, 1)] * 3, m.theta.exp()
        ).reshape(h.shape),
        (1, 4, 4),
    ),
    "queries": (lambda m, h: m.body(m.theta.expand(len(h), -1, -1)) * h, (2, 4)),
    "product with queries": (lambda m, h: (m.theta.expand(len(h), -1, -1) @ h.mT) @ h, (2, 4)),
    "behind a layer's back": (lambda m, h: F.linear(h, m.body.weight, m.theta) + m.theta, (4,)),
}
# These are not understood and go the generic way.
OTHER_USES: dict[str, Use] = {
    "sum": (lambda m, h: torch.einsum("bti,ij->btj", h, m.theta), (4, 4)),
    "embedding, divided by counts": (
        lambda m, h: (
            h * F.embedding((h.detach() > 0).sum(dim=-1) // 3, m.theta, scale_grad_by_freq=True)
        ),
        (5, 4),
    ),
    "addmm with factors": (
        lambda m, h: torch.addmm(m.other, h.reshape(-1, 4), m.theta, beta=2, alpha=0.5).reshape(
            h.shape
        ),
        (4, 4),
    ),
    "an autograd function": (lambda m, h: _Unseen.apply(h, m.theta), (4,)),
}


def using(use: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...]) -> nn.Module:
    """A layer, a use of two parameters of the model's own, and another layer."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.tanh(use(m, torch.tanh(m.body(x)) + m.other)).mean(dim=1))

    theta, other = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(4))
    return Model(run, theta=theta, other=other, body=nn.Linear(4, 4), head=nn.Linear(4, 2))


def bert(layer: bool) -> nn.Module:
    """Integer tokens, with positions from a layer without examples, or from a table of the model's
    own.
    """

    def run(m: Any, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        at = m.position(places) if layer else m.position[: tokens.shape[1]]
        h = torch.cat([m.token.expand(len(tokens), -1, -1), m.embedding(tokens) + at], dim=1)
        return m.head(m.encoder(h)[:, 0])

    encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True)
    return Model(
        run,
        embedding=nn.Embedding(9, 4),
        token=nn.Parameter(torch.randn(1, 1, 4)),
        position=nn.Embedding(7, 4) if layer else nn.Parameter(torch.randn(7, 4)),
        encoder=nn.TransformerEncoder(encoder, 1, enable_nested_tensor=False),
        head=nn.Linear(4, 3),
    )
