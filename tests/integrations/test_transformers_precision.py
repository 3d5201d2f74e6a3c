"""Hugging Face models under autocast, held in bfloat16, with activation checkpoints: accounted for as in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import grouped
from torchfil import FILPrivacyEngine, Private

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


class Classifier(nn.Module):
    """A linear layer over the mean of a model's last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.model(input_ids=tokens).last_hidden_state.mean(dim=1))
        return outputs


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=30, max_position_embeddings=16, attention_probs_dropout_prob=0.0, **SIZES
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def gpt2() -> Any:
    return transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    )


def llama() -> Any:
    return transformers.LlamaModel(transformers.LlamaConfig(vocab_size=30, max_position_embeddings=16, **SIZES))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "bert": (bert, "embeddings.word_embeddings"),
    "gpt2": (gpt2, "wte"),
    "llama": (llama, "embed_tokens"),
}


def traces(name: str, *, autocast: bool = False, held: bool = False, checkpoints: bool | None = None) -> Tensor:
    """tr I of 8 texts after two passes; ``checkpoints``: whether reentrant ones, None: without."""
    make, embedding = MODELS[name]
    torch.manual_seed(0)
    model = make()
    if checkpoints is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
    module = Classifier(model).to(torch.bfloat16 if held else torch.float32).train()
    dataset = TensorDataset(torch.randint(1, 30, (8, 5)), torch.randint(3, (8,)))
    options = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "seed": 1,
        "criterion": nn.CrossEntropyLoss(),
        "private": Private(submodule=f"model.{embedding}"),
        "poisson_sampling": False,
        "noise_generator": torch.Generator().manual_seed(3),
    }
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.01)
    trained, optimizer, loader = engine.make_private(module, optimizer, DataLoader(dataset, 4), **grouped(**options))
    torch.manual_seed(9)
    for _ in range(2):
        for tokens, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(trained(tokens), labels)
            loss.backward()
            optimizer.step()
    value: Tensor = engine.totals.get_trace().value
    return value


@pytest.mark.parametrize("name", MODELS)
def test_reduced_precision(name: str) -> None:
    truth = traces(name)
    for mode in ({"autocast": True}, {"held": True}):
        assert 0 < float(((traces(name, **mode) - truth) / truth).abs().max()) < 0.03, mode


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    assert torch.equal(traces("bert", checkpoints=reentrant), traces("bert"))
