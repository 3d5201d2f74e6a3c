"""Hugging Face models on texts padded to the longest of their batch: as if every text were alone, without padding."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.utils.data import DataLoader

import torchfil
from tests.cases import grouped, relative_error
from tests.fisher.recorded_cases import Model
from torchfil import FILPrivacyEngine
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.fisher.estimators import draw_bits, signs_of
from torchfil.private import Examples, Private
from torchfil.private.submodules import embeddings_to_protect

transformers = pytest.importorskip("transformers", reason="transformers is not installed (torchfil[huggingface])")
from tests.integrations.model_zoo.hugging_face import BART, BERT_DROPS, ENCODER, GPT2, T5, built  # noqa: E402
from tests.integrations.model_zoo.truth import noted_probes, split  # noqa: E402

SIGMA, C = 0.9, 0.8
LENGTHS = [2, 4, 3, 1, 5, 2]
SMALL = {**ENCODER, "hidden_size": 4, "intermediate_size": 4, "pad_token_id": 1, "attn_implementation": "eager"}
TEXTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Bert": ({}, BERT_DROPS),
    "Albert": ({"embedding_size": 3}, (*BERT_DROPS, "classifier_dropout_prob")),
    "Roberta": ({}, BERT_DROPS),
    "Longformer": ({"attention_window": 4, "sep_token_id": 2}, BERT_DROPS),  # it pads texts to a multiple of 4 itself
}


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    words = [item["input_ids"] for item in items]
    ids = nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=1)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in words])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.stack([item["labels"] for item in items])}


def loss(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, targets)


def trace_alone(model: nn.Module, table: str, item: dict[str, Tensor], seeds: tuple[int, ...]) -> float:
    """The trace that these probes give for one step on this text by itself, every token of it being private."""
    parameters = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    words, clip, embedding = item["input_ids"], get_clip(DEFAULT_CLIP), model.get_submodule(table)

    def clipped(z: Tensor) -> Tensor:
        def moved(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            return output + nn.functional.pad(z, (0, 0, 0, output.shape[1] - len(z)))  # the model's own padding

        def value(parameters: dict[str, Tensor]) -> Tensor:
            handle = embedding.register_forward_hook(moved)
            try:
                return loss(functional_call(model, parameters, (), {"input_ids": words[None]}), item["labels"][None])
            finally:
                handle.remove()

        g = torch.cat([part.flatten() for part in grad(value)(parameters).values()])
        return g / clip.c(g.norm() / clip.threshold(C))

    # mean_k ‖J̃ᵀPu_k‖² + ‖J̃ᵀĝ‖²
    z = torch.zeros(len(words), embedding.weight.shape[1], dtype=torch.float64)  # type: ignore[index,union-attr]
    jacobian, unit = jacrev(clipped)(z).flatten(1), nn.functional.normalize(clipped(z), dim=0)
    signs = [signs_of(draw_bits(seed, torch.empty(len(unit), dtype=torch.int8)), unit.dtype) for seed in seeds]
    squares = [(jacobian.T @ (u - (unit @ u) * unit)).square().sum() for u in signs]
    return float(torch.stack(squares).mean() + (jacobian.T @ unit).square().sum()) / (SIGMA * C) ** 2


@pytest.mark.parametrize("name", TEXTS)
def test_a_padded_text_leaks_what_it_leaks_alone(name: str) -> None:
    torch.manual_seed(0)
    options, drops = TEXTS[name]
    module = built(0.0, (f"{name}ForSequenceClassification", {**SMALL, **options}, drops)).double().train()
    items = [{"input_ids": torch.randint(2, 12, (n,)), "labels": torch.randint(2, ())} for n in LENGTHS]
    (table,) = embeddings_to_protect(module, (), split(padded(items))[1])
    assert table.endswith("embeddings.word_embeddings")
    plain, engine, notes = copy.deepcopy(module), FILPrivacyEngine(), list[tuple[int, ...]]()
    truth = torch.zeros(len(items), dtype=torch.float64)
    with noted_probes(notes) as estimator:
        given = {"noise_multiplier": SIGMA, "max_grad_norm": C, "estimator": estimator, "num_probes": 2, "seed": 3}
        _, _, loader = engine.make_private(
            module,
            torch.optim.SGD(module.parameters(), lr=0.3),
            DataLoader(items, batch_size=2, collate_fn=padded, shuffle=True),  # type: ignore[arg-type]
            criterion=loss,
            poisson_sampling=False,
            **grouped(batch_to_inputs=lambda batch: split(batch)[1:], **given),
        )
        for batch in loader:
            plain.load_state_dict(module.state_dict())
            engine.train_step(*split(dict(batch))[1:])
            for number in batch._ids:
                truth[number] += trace_alone(plain, table, items[number], notes[-1])
    width = plain.get_submodule(table).weight.shape[1]
    assert relative_error(engine.totals.get_trace().value, truth) < 1e-6
    assert engine.totals.get_num_coordinates().tolist() == [width * length for length in LENGTHS]


def test_an_encoder_and_a_decoder_share_what_is_private() -> None:
    model = built(0.0, ("T5ForConditionalGeneration", T5, ("dropout_rate",)))
    inputs = {"input_ids": torch.tensor([[3, 4], [5, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    inputs["labels"] = torch.tensor([[3, 4, 5], [6, -100, -100]])
    tables = embeddings_to_protect(model, (), inputs)
    assert tables == ("encoder.embed_tokens", "decoder.embed_tokens")
    for said in (tables, "shared"):
        examples = Examples.build(inputs, None, Private(submodule=said), model=model)
        # the decoder reads the start token, which is padding, and all labels but the last
        assert examples.own_coordinates.tolist() == [8 * (2 + 2), 8 * (1 + 1)]  # type: ignore[union-attr]


def test_positions_are_not_private_because_they_are_called_with_tokens() -> None:
    model = built(0.0, ("BartForConditionalGeneration", {**BART, "scale_embedding": True}, ("dropout",)))
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "decoder_input_ids": torch.tensor([[2, 7, 8, 5]])}
    assert embeddings_to_protect(model, (), inputs) == ("model.encoder.embed_tokens", "model.decoder.embed_tokens")


class TestCheck:
    """torchfil.check on models as they come: dropout, masks, the loss inside the output."""

    def batch(self) -> dict[str, Tensor]:
        source = torch.Generator().manual_seed(0)
        ids = torch.randint(1, 12, (6, 10), generator=source)
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (6,), generator=source)}

    def test_bert_runs_with_its_defaults_and_its_layers_are_grouped(self) -> None:
        model = built(0.1, ("BertForSequenceClassification", {**ENCODER, "num_hidden_layers": 3}, BERT_DROPS))
        found = torchfil.check(model, self.batch())
        assert found.verdict == "recorded"
        assert found.loss == "CrossEntropyLoss(reduction='mean'), identified from the model's own"
        assert found.num_coordinates == 80
        assert "without positions masked by 'attention_mask'" in str(found.private)
        (query,) = [row for row in found.rows if row["name"] == "bert.encoder.layer.*.attention.self.query"]
        assert (query["kind"], query["count"], query["parameters"]) == ("Linear", 3, 3 * 9 * 8)
        assert sum(row["parameters"] for row in found.rows) == model.num_parameters()
        assert not any(row["falls_back"] for row in found.rows)
        assert (found.not_smooth, found.advice) == ((), ())

    def test_gpt2_with_a_loss_by_token_and_tied_weights(self) -> None:
        given = self.batch()
        found = torchfil.check(built(0.1, ("GPT2LMHeadModel", GPT2, ())), {**given, "labels": given["input_ids"]})
        assert found.verdict == "recorded"
        assert "of the next token" in str(found.loss)
        assert {"Conv1D", "Embedding", "LayerNorm"} < {row["kind"] for row in found.rows}


BASES: dict[str, tuple[Any, str]] = {
    "Bert": ({**ENCODER, "attention_probs_dropout_prob": 0.0}, "embeddings.word_embeddings"),
    "GPT2": (GPT2, "wte"),
    "Llama": (ENCODER, "embed_tokens"),
}


def traces(name: str, *, autocast: bool = False, held: bool = False, checkpoints: bool | None = None) -> Tensor:
    """tr I of 8 texts after two passes; ``checkpoints``: whether reentrant ones, None: without."""
    options, embedding = BASES[name]
    torch.manual_seed(0)
    body = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))
    if checkpoints is not None:
        body.gradient_checkpointing_enable({"use_reentrant": checkpoints})
    body.pooler = None
    model: Any = Model(
        lambda m, x: m.head(m.body(input_ids=x).last_hidden_state.mean(dim=1)), body=body, head=nn.Linear(8, 3)
    )
    model = model.to(torch.bfloat16 if held else torch.float32).train()
    dataset = torch.utils.data.TensorDataset(torch.randint(1, 13, (8, 5)), torch.randint(3, (8,)))
    private, noise = Private(submodule=f"body.{embedding}"), torch.Generator().manual_seed(3)
    options = {"criterion": nn.CrossEntropyLoss(), "private": private, "poisson_sampling": False, "seed": 1}
    engine, optimizer = FILPrivacyEngine(), torch.optim.SGD(model.parameters(), lr=0.01)
    trained, optimizer, loader = engine.make_private(
        model, optimizer, DataLoader(dataset, 4), **grouped(noise_generator=noise, **options)
    )
    torch.manual_seed(9)
    for tokens, labels in itertools.chain(loader, loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = nn.functional.cross_entropy(trained(tokens), labels)
        value.backward()
        optimizer.step()
    return engine.totals.get_trace().value


@pytest.mark.parametrize("name", BASES)
def test_reduced_precision_is_accounted_for_as_float32(name: str) -> None:
    truth = traces(name)
    for mode in ({"autocast": True}, {"held": True}):
        assert 0 < float(((traces(name, **mode) - truth) / truth).abs().max()) < 0.03, mode


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_change_nothing(reentrant: bool) -> None:
    assert torch.equal(traces("Bert", checkpoints=reentrant), traces("Bert"))
