"""Linear layers and embeddings: a weight applied at every position, and rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfil.fisher.models import probe_inputs
from torchfil.fisher.rules.base import (
    Call,
    LinearInWeightsRule,
    OuterProductRule,
    UnsupportedCallError,
    register_rule,
)
from torchfil.fisher.rules.substitutes import batched_product, gram


class LinearRule(OuterProductRule):
    """Inputs [batch, …, in], outputs [batch, …, out]."""

    words = "linear, closed form"
    takes_rows = True
    narrow_probes = True

    def output(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        """aUᵀ + b."""
        return F.linear(*probe_inputs(call.input, direction["weight"], direction.get("bias")))

    def input_grad(self, call: Call, direction: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        """δU."""
        return torch.matmul(*probe_inputs(delta, direction["weight"]))

    def weight_grad(self, call: Call, delta: Tensor) -> Tensor:
        """One product over examples and positions."""
        return delta.flatten(0, -2).mT @ call.input.flatten(0, -2)

    def factors(self, call: Call) -> tuple[Tensor, Tensor]:
        """All dimensions between batch and channels are positions."""
        a, delta = call.input, call.delta
        return a.reshape(len(a), 1, -1, a.shape[-1]), delta.reshape(
            len(delta), 1, -1, delta.shape[-1]
        )


class TransposedLinearRule(LinearRule):
    """A weight [in, out], as in GPT-2's Conv1D and in plain products x @ W.

    Norms and products with another pass do not depend on the weight's orientation.
    """

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """Σ_t a_t δ_tᵀ and Σ_t δ_t of every example."""
        return _transposed(
            super().gradients(replace(call, parameters=_transposed(call.parameters)))
        )

    def output(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        """aU + b."""
        return super().output(call, _transposed(direction))

    def input_grad(self, call: Call, direction: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        """δUᵀ."""
        return super().input_grad(call, _transposed(direction), delta)

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LinearRule`, transposed."""
        return _transposed(super().weighted_sum(call, weight))


def _transposed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with the weight transposed."""
    return {name: value.mT if name == "weight" else value for name, value in tensors.items()}


class EmbeddingRule(LinearInWeightsRule):
    """Rows of a table, from tokens [batch, …] to [batch, …, width]: ‖g‖² = Σ_{t,s} 1[token_t =
    token_s] δ_t·δ_s.
    """

    words = "embedding, closed form"
    takes_rows = True

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """δ_t added to the row of token t."""
        tokens, delta = self._layout(call)
        table = call.parameters["weight"]
        empty = delta.new_zeros(len(delta), *table.shape)
        return {
            "weight": empty.scatter_add(1, tokens[:, :, None].expand(-1, -1, table.shape[1]), delta)
        }

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LayerRule`, added to the table's rows."""
        with torch.no_grad():
            tokens, delta = self._layout(call)
            empty = torch.zeros_like(call.parameters["weight"])
            return {
                "weight": empty.index_add(
                    0, tokens.flatten(), (delta * weight[:, None, None]).flatten(0, 1)
                )
            }

    def squared_norm(self, call: Call) -> Tensor:
        """From products of δ with itself: no table per example is formed."""
        tokens, delta = self._layout(call)
        return (gram(delta) * (tokens[:, :, None] == tokens[:, None, :]).to(delta.dtype)).sum(
            dim=(1, 2)
        )

    def products(self, call: Call, other: Call) -> Tensor:
        """As in :class:`LayerRule`: no table per example is formed."""
        own, others = self._layout(call), self._layout(other)
        found = []
        for (t, d), (s, e) in ((own, own), (others, others), (own, others)):
            found.append(
                (batched_product(d, e.mT) * (t[:, :, None] == s[:, None, :])).sum(dim=(1, 2))
            )
        return torch.stack(found)

    def output(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        """The rows of U, 0 for the padding token, whose row gets no gradient."""
        assert isinstance(call.module, nn.Embedding)
        rows, padding = F.embedding(call.input, direction["weight"]), call.module.padding_idx
        return rows if padding is None else rows * call.input.ne(padding).unsqueeze(-1)

    @staticmethod
    def _layout(call: Call) -> tuple[Tensor, Tensor]:
        """The tokens, [batch, T], and δ, [batch, T, width], 0 at padding."""
        module = call.module
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise UnsupportedCallError(
                f"{call.name}: max_norm and scale_grad_by_freq change the gradient"
            )
        tokens = call.input.reshape(len(call.delta), -1)
        delta = call.delta.reshape(*tokens.shape, -1)
        if module.padding_idx is not None:
            delta = delta * (tokens != module.padding_idx)[:, :, None]
        return tokens, delta


register_rule(nn.Linear, LinearRule())
register_rule("transformers.pytorch_utils.Conv1D", TransposedLinearRule())
register_rule(nn.Embedding, EmbeddingRule())
