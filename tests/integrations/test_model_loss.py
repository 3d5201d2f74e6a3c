"""The loss that a Hugging Face model computes by itself, on each example alone: in FILTrainer, loop
and train_step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from torchfil import Accounting, Private

pytest.importorskip("accelerate", reason="accelerate is not installed (torchfil[huggingface])")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (torchfil[huggingface])"
)
from tests.integrations import test_huggingface as hugging_face  # noqa: E402
from tests.integrations.model_zoo.hugging_face import (  # noqa: E402
    BERT_DROPS,
    BODY,
    ENDS,
    GPT2,
    GPT2_DROPS,
    T5,
    WHISPER,
    built,
)
from torchfil.integrations.huggingface import FILTrainer  # noqa: E402

WORDS, LENGTH, COUNT, CLASSES = 11, 5, 6, 3
SOURCE = torch.Generator().manual_seed(0)
TEXTS = {"vocab_size": WORDS, "max_position_embeddings": LENGTH}
# no method makes the decoder's tokens from labels
SPEECH = {**WHISPER, **ENDS, "use_cache": False, "decoder_start_token_id": 1}


def bert(task: str = "SequenceClassification", **settings: Any) -> Any:
    options = {**BODY, **TEXTS, "num_labels": CLASSES, **settings}
    return lambda: built(0.0, (f"BertFor{task}", options, BERT_DROPS))


def other(head: str, options: dict[str, Any], drops: tuple[str, ...] = ()) -> Any:
    return lambda: built(0.0, (head, {**options, "vocab_size": WORDS}, drops))


def words(*shape: int) -> Tensor:
    return torch.randint(WORDS, (COUNT, *(shape or (LENGTH,))), generator=SOURCE)


def classes(*shape: int) -> Tensor:
    return torch.randint(CLASSES, (COUNT, *shape), generator=SOURCE)


def in_part(labels: Tensor) -> Tensor:
    """Some of them do not count, of some examples more than of others."""
    return labels.where(torch.arange(LENGTH) < 2 + torch.arange(COUNT)[:, None] % 4, -100)


TEXT = {"input_ids": words()}
MULTI, NUMBERS = (
    torch.rand(COUNT, CLASSES, generator=SOURCE).round(),
    torch.randn(COUNT, generator=SOURCE),
)
SPAN = {"start_positions": classes(), "end_positions": torch.tensor([2, 3, 4, 4, 2, 1])}
SOUND = {"input_features": torch.randn(COUNT, 8, 8, generator=SOURCE)}
GPT = other("GPT2LMHeadModel", GPT2, GPT2_DROPS)
# The model and its batch, a Hugging Face class for each kind of loss
CASES: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "single label": (bert(), {**TEXT, "labels": classes()}),
    "several labels": (bert(), {**TEXT, "labels": MULTI}),
    "a number": (bert(num_labels=1), {**TEXT, "labels": NUMBERS}),
    "numbers": (bert(problem_type="regression"), {**TEXT, "labels": torch.randn(COUNT, CLASSES)}),
    "token classes": (bert("TokenClassification"), {**TEXT, "labels": in_part(classes(LENGTH))}),
    "choice": (bert("MultipleChoice"), {"input_ids": words(4, LENGTH), "labels": classes()}),
    "next words": (GPT, {**TEXT, "labels": in_part(TEXT["input_ids"])}),
    "words to words": (
        other("T5ForConditionalGeneration", T5, ("dropout_rate",)),
        {**TEXT, "labels": in_part(words())},
    ),
    "sounds to words": (
        other("WhisperForConditionalGeneration", SPEECH),
        {**SOUND, "labels": in_part(words())},
    ),
    "span": (bert("QuestionAnswering", num_labels=2), {**TEXT, **SPAN}),
}
EMBEDDINGS = {"bert": "bert.embeddings.word_embeddings", "transformer": "transformer.wte"}
EMBEDDINGS["encoder"] = "encoder.block.0.layer.0.layer_norm"


def made(name: str) -> tuple[Any, dict[str, Tensor], Any]:
    """The model, its batch, and what is private."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, batch = CASES[name][0](), CASES[name][1]
    embedding = next(
        (EMBEDDINGS[part] for part, _ in model.named_children() if part in EMBEDDINGS), None
    )
    return (
        model,
        batch,
        Private(submodule=embedding) if embedding and "input_ids" in batch else None,
    )


def examples(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: value[i] for name, value in batch.items()} for i in range(COUNT)]


def trainer(name: str, folder: Path, **more: Any) -> Any:
    model, batch, private = made(name)
    options = {
        "noise_multiplier": 0.5,
        "poisson_sampling": False,
        "accounting": Accounting(num_probes=1),
    }
    given = {
        "model": model,
        "train_dataset": examples(batch),
        "privacy": {**options, "private": private},
    }
    steps = {"per_device_train_batch_size": COUNT, "max_steps": 2, "logging_steps": 1}
    return hugging_face.made(folder, kind=FILTrainer, given=given, **steps, **more)


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_trains_the_models_own_loss(name: str, tmp_path: Path) -> None:
    fit, batch = trainer(name, tmp_path), CASES[name][1]
    model = fit.model.eval()
    with torch.no_grad():
        expected = torch.stack(
            [model(**default_collate([example])).loss for example in examples(batch)]
        ).mean()
    fit.train()
    assert fit.state.log_history[0]["loss"] == pytest.approx(float(expected), rel=1e-3)
    assert fit.engine.get_fil().value.min() > 0
