"""Hugging Face models on texts padded to the longest of their batch: as if every text were alone, without padding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.utils.data import DataLoader

from tests.cases import grouped, relative_error
from torchfil import FILPrivacyEngine
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.fisher.estimators import draw_bits, register_estimator, signs_of, weight_probes
from torchfil.private import Examples, Private
from torchfil.private.submodules import embeddings_to_protect

transformers = pytest.importorskip("transformers", reason="transformers is not installed (torchfil[huggingface])")

SIGMA, C, WIDTH = 0.9, 0.8, 4
LENGTHS = [2, 4, 3, 1, 5, 2]


def small(**more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 12, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {**sizes, "intermediate_size": 4, "max_position_embeddings": 9, "attn_implementation": "eager", **more}


def bert() -> nn.Module:
    config = transformers.BertConfig(**small(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def albert() -> nn.Module:
    config = transformers.AlbertConfig(**small(embedding_size=3, hidden_dropout_prob=0.0))
    config.attention_probs_dropout_prob = config.classifier_dropout_prob = 0.0
    model: nn.Module = transformers.AlbertForSequenceClassification(config)
    return model


def roberta() -> nn.Module:
    config = transformers.RobertaConfig(**small(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    model: nn.Module = transformers.RobertaForSequenceClassification(config)
    return model


def longformer() -> nn.Module:
    """It pads every text to a multiple of 4 itself."""
    sizes = small(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=12, sep_token_id=2)
    config = transformers.LongformerConfig(**sizes, attention_window=4, pad_token_id=1)
    model: nn.Module = transformers.LongformerForSequenceClassification(config)
    return model


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(item["input_ids"]) for item in items)
    places = torch.arange(longest)
    return {
        "input_ids": torch.stack(
            [nn.functional.pad(item["input_ids"], (0, longest - len(item["input_ids"])), value=1) for item in items]
        ),
        "attention_mask": torch.stack([(places < len(item["input_ids"])).long() for item in items]),
        "labels": torch.stack([item["labels"] for item in items]),
    }


def split(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]


def loss(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, targets)


def noted_probes(notes: list[tuple[int, ...]]) -> str:
    """The name of an estimator that is the default one, and notes the seeds of its probes."""

    def noting(jacobian: Any, mechanism: Any, quantities: Any, draws: Any) -> Any:
        notes.append(draws.seeds)
        return weight_probes(jacobian, mechanism, quantities, draws)

    register_estimator("noted", noting, quantities=("trace", "diagonal", "matrix"), one_pass=True, overwrite=True)
    return "noted"


def to_length(z: Tensor, length: int) -> Tensor:
    """Zeros behind it, if the model has put padding behind a text."""
    return nn.functional.pad(z, (0, 0, 0, length - len(z)))


def trace_alone(model: nn.Module, table: str, item: dict[str, Tensor], seeds: tuple[int, ...]) -> float:
    """The trace that these probes give for one step on this text by itself, every token of it being private."""
    parameters = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    inputs, clip = {"input_ids": item["input_ids"][None]}, get_clip(DEFAULT_CLIP)

    def clipped(z: Tensor) -> Tensor:
        def value(parameters: dict[str, Tensor]) -> Tensor:
            handle = model.get_submodule(table).register_forward_hook(lambda _m, _i, o: o + to_length(z, o.shape[1]))
            try:
                return loss(functional_call(model, parameters, (), inputs), item["labels"][None])
            finally:
                handle.remove()

        g = torch.cat([part.flatten() for part in grad(value)(parameters).values()])
        return g / clip.c(g.norm() / clip.threshold(C))

    # mean_k ‖J̃ᵀPu_k‖² + ‖J̃ᵀĝ‖²
    width = model.get_submodule(table).weight.shape[1]  # type: ignore[union-attr,index,union-attr]
    z = torch.zeros(len(item["input_ids"]), width, dtype=torch.float64)
    jacobian = jacrev(clipped)(z).flatten(1)
    unit = nn.functional.normalize(clipped(z), dim=0)
    signs = [signs_of(draw_bits(seed, torch.empty(len(unit), dtype=torch.int8)), unit.dtype) for seed in seeds]
    squares = [(jacobian.T @ (u - (unit @ u) * unit)).square().sum() for u in signs]
    return float(torch.stack(squares).mean() + (jacobian.T @ unit).square().sum()) / (SIGMA * C) ** 2


@pytest.mark.parametrize("make", [bert, albert, roberta, longformer])
def test_a_padded_text_leaks_what_it_leaks_alone(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make().double().train()
    items = [{"input_ids": torch.randint(2, 12, (n,)), "labels": torch.randint(2, ())} for n in LENGTHS]
    (table,) = embeddings_to_protect(module, (), split(padded(items))[0])
    assert table.endswith("embeddings.word_embeddings")
    plain, engine, notes = copy.deepcopy(module), FILPrivacyEngine(), list[tuple[int, ...]]()
    given = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": C,
        "estimator": noted_probes(notes),
        "num_probes": 2,
        "seed": 3,
    }
    _, _, loader = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.3),
        DataLoader(items, batch_size=2, collate_fn=padded, shuffle=True),  # type: ignore[arg-type]
        criterion=loss,
        poisson_sampling=False,
        **grouped(batch_to_inputs=split, **given),
    )
    truth = torch.zeros(len(items), dtype=torch.float64)
    for batch in loader:
        plain.load_state_dict(module.state_dict())
        engine.train_step(*split(dict(batch)))
        for number in batch._ids:
            truth[number] += trace_alone(plain, table, items[number], notes[-1])
    width = plain.get_submodule(table).weight.shape[1]  # type: ignore[union-attr,index,union-attr]
    assert relative_error(engine.totals.get_trace().value, truth) < 1e-6
    assert engine.totals.get_num_coordinates().tolist() == [width * length for length in LENGTHS]


def test_an_encoder_and_a_decoder_share_what_is_private() -> None:
    config = transformers.T5Config(
        vocab_size=12, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    labels = torch.tensor([[3, 4, 5], [6, -100, -100]])
    inputs = {"input_ids": torch.tensor([[3, 4], [5, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    tables = embeddings_to_protect(model, (), {**inputs, "labels": labels})
    assert tables == ("encoder.embed_tokens", "decoder.embed_tokens")
    for said in (tables, "shared"):
        examples = Examples.build({**inputs, "labels": labels}, None, Private(submodule=said), model=model)
        # the decoder reads the start token, which is padding, and all labels but the last
        assert examples.own_coordinates.tolist() == [4 * (2 + 2), 4 * (1 + 1)]  # type: ignore[union-attr]


def test_positions_are_not_private_because_they_are_called_with_tokens() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "d_model": 4, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 9}
    heads = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(**sizes, **heads, **tokens, scale_embedding=True)
    )
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "decoder_input_ids": torch.tensor([[2, 7, 8, 5]])}
    assert embeddings_to_protect(model, (), inputs) == ("model.encoder.embed_tokens", "model.decoder.embed_tokens")
