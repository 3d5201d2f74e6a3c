"""FILTrainer trains the loss that the model computes by itself, on each example alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from torchfil import Accounting, Private
from torchfil.integrations.model_loss import ModelLoss

pytest.importorskip("accelerate", reason="accelerate is not installed (torchfil[huggingface])")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (torchfil[huggingface])")
from torchfil.integrations.huggingface import FILTrainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
WORDS, LENGTH, COUNT, CLASSES = 11, 5, 6, 3
SOURCE = torch.Generator().manual_seed(0)
SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(task: str, **settings: Any) -> Any:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, **shape, **NO_DROPOUT, **{"num_labels": CLASSES, **settings}
    )
    return getattr(transformers, f"BertFor{task}")(config)


def gpt2() -> Any:
    no_dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    shape = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **shape, **no_dropout))


def llama() -> Any:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **shape))


def t5() -> Any:
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=WORDS, decoder_start_token_id=0, feed_forward_proj="gated-gelu", **shape)
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> Any:
    """It has no method that makes the decoder's tokens from labels."""
    shape = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in SIDES.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    places = {"num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": LENGTH, "d_model": 8}
    config = transformers.WhisperConfig(vocab_size=WORDS, **shape, **places, **tokens, use_cache=False)
    return transformers.WhisperForConditionalGeneration(config)


def vit() -> Any:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(image_size=4, patch_size=2, **shape, **NO_DROPOUT, num_labels=CLASSES)
    return transformers.ViTForImageClassification(config)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(WORDS, (COUNT, *(shape or (LENGTH,))), generator=SOURCE)


def classes(*shape: int) -> torch.Tensor:
    return torch.randint(CLASSES, (COUNT, *shape), generator=SOURCE)


def in_part(labels: torch.Tensor) -> torch.Tensor:
    """Some of them do not count, of some examples more than of others."""
    counted = torch.arange(LENGTH) < 2 + torch.arange(COUNT)[:, None] % 4
    return labels.where(counted, -100)


TEXT = {"input_ids": words()}
MULTI = torch.rand(COUNT, CLASSES, generator=SOURCE).round()
NUMBERS = torch.randn(COUNT, 1, generator=SOURCE)
CASES: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "single label": (lambda: bert("SequenceClassification"), {**TEXT, "labels": classes()}),
    "single label [B, 1]": (lambda: bert("SequenceClassification"), {**TEXT, "labels": classes(1)}),
    "several labels": (lambda: bert("SequenceClassification"), {**TEXT, "labels": MULTI}),
    "several labels, told": (
        lambda: bert("SequenceClassification", problem_type="multi_label_classification"),
        {**TEXT, "labels": MULTI},
    ),
    "a number [B, 1]": (lambda: bert("SequenceClassification", num_labels=1), {**TEXT, "labels": NUMBERS}),
    "a number [B]": (lambda: bert("SequenceClassification", num_labels=1), {**TEXT, "labels": NUMBERS[:, 0]}),
    "numbers": (
        lambda: bert("SequenceClassification", problem_type="regression"),
        {**TEXT, "labels": torch.randn(COUNT, CLASSES, generator=SOURCE)},
    ),
    "token classes": (lambda: bert("TokenClassification"), {**TEXT, "labels": in_part(classes(LENGTH))}),
    "masked words": (lambda: bert("MaskedLM"), {**TEXT, "labels": in_part(words())}),
    "choice": (lambda: bert("MultipleChoice"), {"input_ids": words(4, LENGTH), "labels": classes()}),
    "next words, GPT-2": (gpt2, {**TEXT, "labels": in_part(TEXT["input_ids"])}),
    "next words, Llama": (llama, {**TEXT, "labels": in_part(TEXT["input_ids"])}),
    "words to words, T5": (t5, {**TEXT, "labels": in_part(words())}),
    "sounds to words, Whisper": (
        whisper,
        {"input_features": torch.randn(COUNT, 4, 12, generator=SOURCE), "labels": in_part(words())},
    ),
    "image": (vit, {"pixel_values": torch.randn(COUNT, 3, 4, 4, generator=SOURCE), "labels": classes()}),
    "span": (
        lambda: bert("QuestionAnswering", num_labels=2),
        {
            **TEXT,
            "start_positions": torch.randint(3, (COUNT,), generator=SOURCE),
            "end_positions": torch.tensor([2, 3, 4, 4, 2, 1]),
        },
    ),
}
EMBEDDINGS = {
    "bert": "bert.embeddings.word_embeddings",
    "transformer": "transformer.wte",
    "model": "model.embed_tokens",
    "encoder": "encoder.block.0.layer.0.layer_norm",
}


def made(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    build, batch = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return build(), batch


def examples(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: value[i] for name, value in batch.items()} for i in range(COUNT)]


def trainer(name: str, folder: Path, privacy: dict[str, Any] | None = None, **more: Any) -> Any:
    model, batch = made(name)
    arguments = {"per_device_train_batch_size": COUNT, "max_steps": 2, "logging_steps": 1, "learning_rate": 0.1, **more}
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    embedding = next((EMBEDDINGS[part] for part, _ in model.named_children() if part in EMBEDDINGS), None)
    private = None if embedding is None or "input_ids" not in batch else Private(submodule=embedding)
    options = {"noise_multiplier": 0.5, "poisson_sampling": False, "accounting": Accounting(num_probes=1)}
    return FILTrainer(
        model=model,
        args=transformers.TrainingArguments(str(folder), **quiet, **arguments),
        train_dataset=examples(batch),
        eval_dataset=examples(batch),
        privacy={**options, "private": private, **(privacy or {})},
    )


def own_losses(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss on every example alone, [batch]."""
    with torch.no_grad():
        losses = [model(**default_collate([example])).loss for example in examples(batch)]
    return torch.stack(losses)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_models_own(name: str, tmp_path: Path) -> None:
    model, batch = made(name)
    model.eval()
    expected = own_losses(model, batch)
    fit = trainer(name, tmp_path)
    with torch.no_grad():
        outputs = model(**fit._split(batch)[0])
        losses = ModelLoss.of(model).by_example(outputs, fit._split(batch)[1])
        assert fit.compute_loss(model, batch) == pytest.approx(float(expected.mean()), rel=1e-5)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_trains_it(name: str, tmp_path: Path) -> None:
    fit = trainer(name, tmp_path)
    expected = own_losses(fit.model.eval(), CASES[name][1])
    fit.train()
    assert fit.state.log_history[0]["loss"] == pytest.approx(float(expected.mean()), rel=1e-3)
    assert fit.engine.get_fil().value.min() > 0


def test_labels_that_do_not_count_have_no_loss() -> None:
    loss = ModelLoss("tokens", None)
    logits, labels = torch.randn(2, LENGTH, CLASSES), torch.full((2, LENGTH), -100)
    labels[1, 2] = 1
    losses = loss.by_example({"logits": logits}, labels)
    assert losses[0] == 0
    assert losses[1] == pytest.approx(float(torch.nn.functional.cross_entropy(logits[1, 2:3], torch.tensor([1]))))
    span = ModelLoss("span", None)
    ends = {"start_positions": torch.tensor([1, 9]), "end_positions": torch.tensor([9, 9])}
    outputs = {"start_logits": torch.zeros(2, LENGTH), "end_logits": torch.zeros(2, LENGTH)}
    assert span.by_example(outputs, ends).tolist() == pytest.approx([math.log(LENGTH) / 2, 0])


@pytest.mark.parametrize("name", ["single label", "next words, GPT-2", "token classes"])
def test_smoothed_labels_are_the_trainers(name: str, tmp_path: Path) -> None:
    fit = trainer(name, tmp_path, label_smoothing_factor=0.2)
    plain = transformers.Trainer(model=fit.model, args=fit.args)
    plain.args.label_smoothing_factor = 0.2
    with torch.no_grad():
        for example in examples(CASES[name][1]):
            batch = default_collate([example])
            assert fit.compute_loss(fit.model, batch) == pytest.approx(
                float(plain.compute_loss(fit.model, dict(batch)))
            )
    fit.train()
    assert fit.engine.get_fil().value.min() > 0


REFUSED = [
    ("single label", {"labels": torch.full((COUNT,), 7)}, {}, "out of bounds"),
    ("single label", {"labels": torch.rand(COUNT)}, {}, r"\[1\] of torch.float32.*problem_type"),
    ("several labels, told", {"labels": MULTI.long()}, {}, r"\[1, 3\] of torch.int64"),
    ("a number [B]", {"labels": torch.rand(COUNT, 2)}, {}, r"\[1, 2\] of torch.float32"),
    ("numbers", {"labels": torch.rand(COUNT)}, {}, r"\[1\] of torch.float32"),
    ("numbers", {}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
    ("token classes", {"labels": classes()}, {}, r"\[1\] of torch.int64"),
    ("masked words", {"labels": torch.rand(COUNT, LENGTH)}, {}, r"\[1, 5\] of torch.float32"),
]


@pytest.mark.parametrize(("name", "labels", "settings", "message"), REFUSED)
def test_labels_that_cannot_be_meant_are_refused(
    name: str, labels: dict[str, torch.Tensor], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    fit = trainer(name, tmp_path, **settings)
    fit.train_dataset = examples({**CASES[name][1], **labels})
    before = [p.detach().clone() for p in fit.model.parameters()]
    with pytest.raises(ValueError, match=message):
        fit.train()
    assert all(torch.equal(a, b) for a, b in zip(before, fit.model.parameters(), strict=True))


def test_a_loss_that_is_not_the_models_own_is_refused() -> None:
    class Weighted(transformers.BertForSequenceClassification):  # type: ignore[misc]
        def forward(self, **inputs: Any) -> Any:
            outputs = super().forward(**inputs)
            outputs.loss = None if outputs.loss is None else 2 * outputs.loss
            return outputs

    model = Weighted(bert("SequenceClassification").config)
    with pytest.raises(ValueError, match="an auxiliary loss, class weights"):
        ModelLoss.of(model).check(model, TEXT, classes())
    with pytest.raises(ValueError, match="the loss of Linear is unknown"):
        ModelLoss.of(torch.nn.Linear(1, 1))
