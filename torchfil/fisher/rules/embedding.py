"""Embeddings: rows of a table."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfil.fisher.rules.base import LinearInWeightsRule, register_rule
from torchfil.fisher.rules.call import Call, UnsupportedCallError
from torchfil.fisher.rules.products import batched_product, gram

__all__ = ["EmbeddingRule"]


class EmbeddingRule(LinearInWeightsRule):
    """Rows of a table, from tokens [batch, …] to [batch, …, width]: ‖g‖² = Σ_{t,s} 1[token_t = token_s] δ_t·δ_s."""

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """δ_t added to the row of token t."""
        tokens, delta = self._layout(call)
        table = call.parameters["weight"]
        empty = delta.new_zeros(len(delta), *table.shape)
        index = tokens[:, :, None].expand(-1, -1, table.shape[1])
        return {"weight": empty.scatter_add(1, index, delta)}

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LayerRule`, added to the table's rows."""
        with torch.no_grad():
            tokens, delta = self._layout(call)
            empty = torch.zeros_like(call.parameters["weight"])
            return {"weight": empty.index_add(0, tokens.flatten(), (delta * weight[:, None, None]).flatten(0, 1))}

    def squared_norm(self, call: Call) -> Tensor:
        """From products of δ with itself: no table per example is formed."""
        tokens, delta = self._layout(call)
        same = (tokens[:, :, None] == tokens[:, None, :]).to(delta.dtype)
        return (gram(delta) * same).sum(dim=(1, 2))

    def products(self, call: Call, other: Call) -> Tensor:
        """As in :class:`LayerRule`: no table per example is formed."""
        own, others = self._layout(call), self._layout(other)
        pairs = ((own, own), (others, others), (own, others))
        return torch.stack(
            [(batched_product(d, e.mT) * (t[:, :, None] == s[:, None, :])).sum(dim=(1, 2)) for (t, d), (s, e) in pairs]
        )

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
            raise UnsupportedCallError(f"{call.name}: max_norm and scale_grad_by_freq change the gradient")
        tokens = call.input.reshape(len(call.delta), -1)
        delta = call.delta.reshape(*tokens.shape, -1)
        if module.padding_idx is not None:
            delta = delta * (tokens != module.padding_idx)[:, :, None]
        return tokens, delta


register_rule(nn.Embedding, EmbeddingRule())
