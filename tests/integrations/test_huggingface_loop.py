"""Hugging Face models in a loop as it is written everywhere, and in train_step, against the loss written down."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.cases import relative_error
from torchfil import Accounting, FILPrivacyEngine, Private
from torchfil.clipping import DEFAULT_CLIP, get_clip

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, COUNT = 17, 6, 12
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": WORDS, "n_positions": 8, "bos_token_id": 1}
GPT |= {"eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class _Texts(Dataset[Any]):
    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: column[i] for name, column in self.columns.items()}


def encoded(samples: list[dict[str, Tensor]]) -> Any:
    stacked = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    return transformers.BatchEncoding(stacked)


def own_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)


def case(name: str) -> tuple[nn.Module, _Texts, Any, str]:
    """The model, its data, the loss of one example written down, and the embedding."""
    torch.manual_seed(0)
    words = torch.randint(1, WORDS, (COUNT, LENGTH))
    common = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    kinds = torch.arange(COUNT) % 3
    some = words.clone()
    some[::3, 3:] = -100
    some[4] = -100
    bert = transformers.BertConfig(**SMALL, num_labels={"regression": 1, "answers": 2}.get(name, 3))
    if name == "multi-label":
        bert.problem_type = "multi_label_classification"
    table = "bert.embeddings.word_embeddings"
    if name in ("classes", "hidden states"):
        bert.output_hidden_states = name == "hidden states"
        model, labels = transformers.BertForSequenceClassification(bert), kinds
        return model, _Texts(**common, labels=labels), lambda o, y: F.cross_entropy(o.logits, y), table
    if name == "regression":
        model = transformers.BertForSequenceClassification(bert)
        return model, _Texts(**common, labels=kinds.float()), lambda o, y: F.mse_loss(o.logits[:, 0], y), table
    if name == "multi-label":
        model, labels = transformers.BertForSequenceClassification(bert), F.one_hot(kinds, 3).float()
        bce = F.binary_cross_entropy_with_logits
        return model, _Texts(**common, labels=labels), lambda o, y: bce(o.logits, y), table
    if name == "tokens":
        model = transformers.BertForTokenClassification(bert)
        labels = torch.where(some < 0, some, some % 3)
        return model, _Texts(**common, labels=labels), lambda o, y: own_tokens(o.logits, y), table
    if name == "answers":
        model = transformers.BertForQuestionAnswering(bert)
        texts = _Texts(**common, start_positions=kinds, end_positions=kinds + 1)

        def both(o: Any, y: Any) -> Tensor:
            first = F.cross_entropy(o.start_logits, y["start_positions"])
            return (first + F.cross_entropy(o.end_logits, y["end_positions"])) / 2

        return model, texts, both, table
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT))
    return model, _Texts(**common, labels=some), lambda o, y: own_tokens(o.logits[:, :-1], y[:, 1:]), "transformer.wte"


def trained(way: str, model: nn.Module, texts: _Texts, criterion: Any, table: str) -> tuple[Tensor, dict[str, Tensor]]:
    engine, model = FILPrivacyEngine(), copy.deepcopy(model).double()
    private_model, optimizer, loader = engine.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3),
        DataLoader(texts, batch_size=4, collate_fn=encoded),
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(5),
        criterion=criterion if way == "truth" else None,
        private=Private(submodule=table),
        accounting=Accounting(seed=3),
    )
    for batch in loader:
        if way == "loop":
            optimizer.zero_grad()
            private_model(**batch).loss.backward()
            optimizer.step()
        elif way == "train_step":
            engine.train_step(batch)
        else:
            labels = {key: batch[key] for key in batch if key not in ("input_ids", "attention_mask")}
            targets = next(iter(labels.values())) if len(labels) == 1 else labels
            engine.train_step({key: batch[key] for key in ("input_ids", "attention_mask")}, targets)
    return engine.get_fil().value, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["classes", "hidden states", "regression", "multi-label", "tokens", "answers", "next token"]
)
def test_the_models_own_loss(name: str) -> None:
    expected, weights = trained("truth", *case(name))
    for way in ("loop", "train_step"):
        fil, ours = trained(way, *case(name))
        assert torch.allclose(fil, expected, rtol=1e-6)
        assert bool((fil > 0).any())
        for key, value in weights.items():
            assert torch.allclose(ours[key], value, rtol=1e-6, atol=1e-9), key


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["loop", "train_step"])
def test_a_loss_that_balances_experts_is_that_of_each_text_alone(way: str) -> None:
    torch.manual_seed(0)
    sizes = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
    routed = {"num_local_experts": 3, "output_router_logits": True, "router_aux_loss_coef": 0.5, "use_cache": False}
    config = transformers.MixtralConfig(**sizes, **routed, num_hidden_layers=1, num_key_value_heads=1)
    model, texts = transformers.MixtralForCausalLM(config), [case("next token")[1][i] for i in range(3)]
    plain, engine, clip = copy.deepcopy(model).train(), FILPrivacyEngine(), get_clip(DEFAULT_CLIP)
    private_model, optimizer, loader = engine.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3),
        DataLoader(texts, batch_size=3, collate_fn=encoded),
        noise_multiplier=1e-9,
        poisson_sampling=False,
        private=Private(submodule="model.embed_tokens"),
    )
    for batch in loader:
        if way == "loop":
            private_model(**batch).loss.backward()
            optimizer.step()
        else:
            engine.train_step(batch)

    truth = torch.zeros(sum(p.numel() for p in plain.parameters()))
    for text in texts:
        parts = torch.autograd.grad(plain(**encoded([text])).loss, list(plain.parameters()))
        g = torch.cat([part.flatten() for part in parts])
        truth += g / clip.c(g.norm() / clip.threshold(1.0))
    released = torch.cat([p.grad.flatten() for p in model.parameters()]) * len(texts)
    assert relative_error(released, truth) < 1e-5
