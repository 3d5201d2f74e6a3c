"""torchfil.check on Hugging Face models as they come: dropout, masks, the loss inside the output."""

from __future__ import annotations

import pytest
import torch

import torchfil

transformers = pytest.importorskip("transformers")


def batch() -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 30, (6, 10), generator=source)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (6,), generator=source)}


def test_bert_runs_with_its_defaults_and_its_layers_are_grouped() -> None:
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
    )
    model = transformers.BertForSequenceClassification(config)
    found = torchfil.check(model, batch())
    assert found.verdict == "recorded"
    assert found.loss == "CrossEntropyLoss(reduction='mean'), identified from the model's own"
    assert found.num_coordinates == 160
    assert found.private is not None
    assert "without positions masked by 'attention_mask'" in found.private
    rows = {row["name"]: row for row in found.rows}
    query = rows["bert.encoder.layer.*.attention.self.query"]
    assert (query["kind"], query["count"], query["parameters"]) == ("Linear", 3, 3 * 17 * 16)
    assert sum(row["parameters"] for row in found.rows) == model.num_parameters()
    assert not any(row["falls_back"] for row in found.rows)
    assert (found.not_smooth, found.advice) == ((), ())


def test_gpt2_with_a_loss_by_token_and_tied_weights() -> None:
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=12, bos_token_id=1, eos_token_id=1
    )
    given = batch()
    found = torchfil.check(transformers.GPT2LMHeadModel(config), {**given, "labels": given["input_ids"]})
    assert found.verdict == "recorded"
    assert found.loss is not None
    assert "of the next token" in found.loss
    assert {"Conv1D", "Embedding", "LayerNorm"} < {row["kind"] for row in found.rows}
