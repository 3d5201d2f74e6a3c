"""Hugging Face models on texts padded to the longest of their batch: as if every text were alone,
without padding.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.cases import relative_error
from tests.engine.ways import start
from torchfil.private import Examples, Private
from torchfil.private.submodules import embeddings_to_protect

pytest.importorskip("transformers", reason="transformers is not installed (torchfil[huggingface])")
from tests.integrations.model_zoo.hugging_face import BART, BERT_DROPS, ENCODER, T5, built

LENGTHS = [2, 4, 1]
SMALL = {
    **ENCODER,
    "hidden_size": 4,
    "intermediate_size": 4,
    "pad_token_id": 1,
    "attn_implementation": "eager",
}
TEXTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Bert": ({}, BERT_DROPS),
    "Roberta": ({}, BERT_DROPS),  # positions count from the padding
    # it pads texts to a multiple of 4 itself
    "Longformer": ({"attention_window": 4, "sep_token_id": 2}, BERT_DROPS),
}


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    words = [item["input_ids"] for item in items]
    ids = nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=1)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in words])
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": torch.stack([item["labels"] for item in items]),
    }


def one_pass(module: nn.Module, items: list[Any], batch_size: int) -> Any:
    """The totals after a pass with these weights.

    Docs/models.md compares such runs with brute force.
    """
    given: dict[str, Any] = {"estimator": "exact", "amplification": "none", "criterion": None}
    data: Any = DataLoader(items, batch_size=batch_size, collate_fn=padded)  # type: ignore[arg-type]
    engine, *_, loader = start(copy.deepcopy(module), data, "auto", **given)
    for batch in loader:
        engine.train_step(dict(batch))
    return engine.totals


@pytest.mark.parametrize("name", TEXTS)
def test_a_padded_text_leaks_what_it_leaks_alone(name: str) -> None:
    torch.manual_seed(0)
    options, drops = TEXTS[name]
    module = (
        built(0.0, (f"{name}ForSequenceClassification", {**SMALL, **options}, drops))
        .double()
        .train()
    )
    items = [
        {"input_ids": torch.randint(2, 12, (n,)), "labels": torch.randint(2, ())} for n in LENGTHS
    ]
    together, alone = one_pass(module, items, 3), one_pass(module, items, 1)
    assert float(alone.get_trace().value.min()) > 0
    assert relative_error(together.get_trace().value, alone.get_trace().value) < 1e-6
    for totals in (together, alone):
        assert totals.get_num_coordinates().tolist() == [4 * length for length in LENGTHS]


def test_tokens_of_an_encoder_and_a_decoder_are_private_and_positions_are_not() -> None:
    model = built(0.0, ("T5ForConditionalGeneration", T5, ("dropout_rate",)))
    inputs = {
        "input_ids": torch.tensor([[3, 4], [5, 0]]),
        "attention_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    inputs["labels"] = torch.tensor([[3, 4, 5], [6, -100, -100]])
    tables = embeddings_to_protect(model, (), inputs)
    assert tables == ("encoder.embed_tokens", "decoder.embed_tokens")
    for said in (tables, "shared"):
        examples = Examples.build(inputs, None, Private(submodule=said), model=model)
        # the decoder reads the start token, which is padding, and all labels but the last
        assert examples.own_coordinates.tolist() == [8 * (2 + 2), 8 * (1 + 1)]  # type: ignore[union-attr]
    model = built(
        0.0, ("BartForConditionalGeneration", {**BART, "scale_embedding": True}, ("dropout",))
    )
    inputs = {
        "input_ids": torch.tensor([[3, 4, 5]]),
        "decoder_input_ids": torch.tensor([[2, 7, 8, 5]]),
    }
    assert embeddings_to_protect(model, (), inputs) == (
        "model.encoder.embed_tokens",
        "model.decoder.embed_tokens",
    )
