"""A run with FILTrainer is the plain loop; what it cannot account for is refused."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator
from torch import nn
from torch.utils.data import DataLoader, default_collate

from tests.distributed.rank_runs import replaying
from tests.integrations.ledgers import DELTA, assert_same_run
from tests.repeatable import check_no_noise_is_shared, recorded_noise
from torchfil import Accounting, FILPrivacyEngine, LeakageLogger, Private

pytest.importorskip("accelerate", reason="accelerate is not installed (torchfil[huggingface])")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (torchfil[huggingface])"
)
from accelerate.state import AcceleratorState  # noqa: E402

from tests.integrations.model_zoo.hugging_face import BERT_DROPS, BODY, built  # noqa: E402
from torchfil.integrations.huggingface import STATE_FILE, FILTrainer  # noqa: E402

LENGTH, WORDS, LR, C = 5, 12, 0.1, 0.8
QUIET: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no"}
QUIET |= {"disable_tqdm": True, "seed": 7}
RATE = {"learning_rate": LR, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": C}
# whose the texts are: of seven people
PEOPLE = [min(i, 23 - i) // 2 if i % 5 else 6 for i in range(24)]
# numbered as they come
PEOPLE = [sorted(set(PEOPLE), key=PEOPLE.index).index(each) for each in PEOPLE]


def model(labels: int = 3, dropout: float = 0.0) -> Any:
    sizes = {**BODY, "vocab_size": WORDS, "max_position_embeddings": LENGTH, "num_labels": labels}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        bert = built(dropout, ("BertForSequenceClassification", sizes, BERT_DROPS))
    bert.bert.embeddings.word_embeddings.padding_idx = None
    return bert


def examples(count: int = 24) -> list[dict[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(WORDS, (LENGTH,), generator=source),
            "token_type_ids": torch.zeros(LENGTH, dtype=torch.long),
            "position_ids": torch.arange(LENGTH),
            "attention_mask": (torch.arange(LENGTH) < 3 + i % 3).long(),
            "labels": torch.randint(3, (), generator=source),
        }
        for i in range(count)
    ]


def privacy(**more: Any) -> dict[str, Any]:
    words, noise = (
        Private(submodule="bert.embeddings.word_embeddings"),
        torch.Generator().manual_seed(5),
    )
    accounting = Accounting(seed=3, num_probes=1)
    return {
        "noise_multiplier": 0.9,
        "private": words,
        "noise_generator": noise,
        "accounting": accounting,
        **more,
    }


def arguments(folder: Path, **more: Any) -> Any:
    sizes = {"per_device_train_batch_size": 6, "num_train_epochs": 2}
    return transformers.TrainingArguments(str(folder), **{**QUIET, **RATE, **sizes, **more})


class Noting(FILTrainer):
    """Keeps the numbers of the examples of every step."""

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        self.__dict__.setdefault("batches", []).append(list(inputs._ids))
        loss = super().training_step(model, inputs, num_items_in_batch)
        assert all(part.training for part in model.modules())
        return loss


def made(
    folder: Path, *, kind: Any = Noting, given: dict[str, Any] | None = None, **more: Any
) -> Any:
    """A trainer: ``given`` are its own arguments, ``more`` those of TrainingArguments."""
    usual: dict[str, Any] = {"model": model(), "train_dataset": examples(), "privacy": privacy()}
    return kind(args=arguments(folder, **more), **{**usual, **(given or {})})


def trained(folder: Path, resumed: Any = None, **options: Any) -> Any:
    trainer = made(folder, **options)
    trainer.train(resume_from_checkpoint=resumed)
    assert trainer.engine.get_fil().value.nan_to_num().max() > 0
    return trainer


def by_logits(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels)


def plain_loop(trainer: Any, **more: Any) -> tuple[FILPrivacyEngine, nn.Module]:
    """The same steps by hand, on the batches and with the order of parameters (of the noise) that
    the trainer had.
    """
    drawn = [
        list(dict.fromkeys(more["owner_of"][i] for i in rows)) if more else rows
        for rows in trainer.batches
    ]
    network = model().train()
    names = {id(value): name for name, value in trainer.model.named_parameters()}
    ordered = [
        network.get_parameter(names[id(p)])
        for group in trainer.optimizer.param_groups
        for p in group["params"]
    ]
    engine, optimizer = FILPrivacyEngine(), torch.optim.SGD(ordered, lr=LR)
    loader: Any = DataLoader(examples(), batch_size=6, collate_fn=default_collate)  # type: ignore[arg-type]
    given = {"max_grad_norm": C, "criterion": by_logits, **privacy(**more)}
    wrapped, optimizer, loader = engine.make_private(network, optimizer, loader, **given)
    with replaying(drawn):
        for batch in chain(loader, loader):
            optimizer.zero_grad()
            by_logits(
                wrapped(**{k: v for k, v in batch.items() if k != "labels"}), batch["labels"]
            ).backward()
            optimizer.step()
    return engine, network


@pytest.mark.parametrize(("workers", "criterion"), [(0, None), (1, nn.CrossEntropyLoss())])
def test_the_ledger_is_that_of_the_plain_loop(workers: int, criterion: Any, tmp_path: Path) -> None:
    given = {"leakage_path": tmp_path / "leakage.csv", "delta": 1e-5, "criterion": criterion}
    trainer = trained(tmp_path, given=given, dataloader_num_workers=workers)
    assert all(trainer.batches), "this seed draws an empty batch"
    assert len(trainer.batches) == 8
    assert_same_run(trainer.engine, trainer.model, *plain_loop(trainer))
    assert len((tmp_path / "leakage.csv").read_text().splitlines()) == 1 + 24
    assert not any(part._forward_hooks or part._backward_hooks for part in trainer.model.modules())


@pytest.mark.parametrize("owner_of", [PEOPLE, "patient"])
def test_people_with_several_texts(owner_of: Any, tmp_path: Path) -> None:
    """The model's own loss; a column that the model does not take."""
    texts = [{**each, "patient": owner} for each, owner in zip(examples(), PEOPLE, strict=True)]
    given = {"train_dataset": texts, "privacy": privacy(owner_of=owner_of)}
    trainer = trained(tmp_path, given=given, dataloader_num_workers=1)
    assert_same_run(trainer.engine, trainer.model, *plain_loop(trainer, owner_of=PEOPLE))
    assert trainer.engine.ledger.num_examples == 7


def test_empty_batches_release_noise_and_are_accounted_for(tmp_path: Path) -> None:
    trainer = trained(tmp_path, per_device_train_batch_size=1, num_train_epochs=1)
    assert not all(trainer.batches)
    assert (
        sum(steps for *_, steps in trainer.engine.accountant.history) == len(trainer.batches) == 24
    )
    assert sum(trainer.engine.leakage_columns()[1]["participations"]) == sum(
        map(len, trainer.batches)
    )
    assert any(
        not torch.equal(a, b)
        for a, b in zip(model().parameters(), trainer.model.parameters(), strict=True)
    )


class OwnLoss(FILTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...


class Weighted(transformers.Trainer):  # type: ignore[misc]
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...


class Beside(FILTrainer, Weighted): ...


BY_CLASS = nn.CrossEntropyLoss(weight=torch.ones(3))
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "batch size found": ({"auto_find_batch_size": True}, ValueError, "auto_find_batch_size"),
    "set elsewhere": (
        {"given": {"privacy": privacy(max_grad_norm=1.0)}},
        TypeError,
        "max_grad_norm",
    ),
    "own loss": (
        {"kind": OwnLoss},
        ValueError,
        "OwnLoss.compute_loss would never be called.*criterion=",
    ),
    "another trainer's loss": (
        {"kind": Beside},
        ValueError,
        r"Weighted.compute_loss .*model=other.model",
    ),
    "loss function": (
        {"given": {"compute_loss_func": print}},
        ValueError,
        "not called in training",
    ),
    "smoothed": (
        {"label_smoothing_factor": 0.1, "given": {"criterion": nn.CrossEntropyLoss()}},
        ValueError,
        "label_smoothing_factor",
    ),
    "weighted": ({"given": {"criterion": BY_CLASS}}, ValueError, "weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_accounted_for_is_refused(name: str, tmp_path: Path) -> None:
    options, error, noun = REFUSED[name]
    try:
        with pytest.raises(error, match=noun):
            made(tmp_path, **options)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


class Plain(FILTrainer):
    """Trains by itself, as the Trainer does."""

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        loss: torch.Tensor = model(**self._prepare_inputs(inputs)).loss
        loss.backward()
        return loss.detach()


def test_a_training_step_without_a_private_one_is_refused_at_once(tmp_path: Path) -> None:
    trainer = made(tmp_path, kind=Plain)
    with pytest.raises(
        ValueError,
        match=r"took no private step: let it call super\(\).training_step\(model, inputs\)",
    ):
        trainer.train()
    assert trainer.state.global_step == 0
    assert trainer.engine.accountant.history == []
    assert all(
        torch.equal(a, b)
        for a, b in zip(model().parameters(), trainer.model.parameters(), strict=True)
    )


def test_accumulation_draws_one_large_batch(tmp_path: Path) -> None:
    """k batches of B in one step are one Poisson batch of mean size kB: σ, q and ledger of a batch
    size of kB.
    """
    one, three = (
        trained(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        for size, steps in ((6, 1), (2, 3))
    )
    assert three.args.gradient_accumulation_steps == 3
    assert one.batches == three.batches
    assert one.state.global_step == three.state.global_step == 8
    assert_same_run(three.engine, three.model, one.engine, one.model)


@pytest.mark.slow
# in a pass over the data, and at its end
@pytest.mark.parametrize(("stop", "workers"), [(3, 1), (4, 0)])
def test_a_resumed_run_is_the_uninterrupted_one(stop: int, workers: int, tmp_path: Path) -> None:
    def run(folder: str, resumed: Any = None) -> Any:
        options = privacy(accounting=Accounting(seed=3, num_probes=1, track=("diagonal",)))
        given = {"model": model(dropout=0.2), "privacy": options}
        saving = {
            "save_strategy": "steps",
            "save_steps": stop,
            "optim": "adamw_torch",
            "lr_scheduler_type": "linear",
        }
        return trained(
            tmp_path / folder, resumed, given=given, dataloader_num_workers=workers, **saving
        )

    whole, checkpoint = run("whole"), tmp_path / "whole" / f"checkpoint-{stop}"
    assert (checkpoint / STATE_FILE).stat().st_mode & 0o077 == 0
    resumed = run("resumed", str(checkpoint))
    assert whole.batches[stop:] == resumed.batches
    assert resumed.engine.leakage_columns(delta=DELTA) == whole.engine.leakage_columns(delta=DELTA)
    assert resumed.engine.get_epsilon(DELTA) == whole.engine.get_epsilon(DELTA)
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


def test_resumed_runs_share_no_noise(tmp_path: Path) -> None:
    def run(resumed: Any = None) -> list[torch.Tensor]:
        with recorded_noise() as drawn:
            given = {"privacy": privacy(noise_generator=None)}
            trained(tmp_path, resumed, given=given, save_strategy="steps", save_steps=3)
        return drawn

    check_no_noise_is_shared(run(), *(run(str(tmp_path / "checkpoint-3")) for _ in range(2)))


def test_the_leakage_is_logged_where_the_trainer_reports(tmp_path: Path) -> None:
    given = {"logger": LeakageLogger(delta=1e-4, every=4)}
    trainer = trained(tmp_path / "out", given=given, report_to=["tensorboard"])
    epsilons = [
        each["privacy/epsilon"] for each in trainer.state.log_history if "privacy/epsilon" in each
    ]
    assert len(epsilons) == 3  # at steps 4, 8 and the end
    assert epsilons[-1] == pytest.approx(trainer.engine.get_epsilon(1e-4))
    (folder,) = {path.parent for path in tmp_path.rglob("events*")}
    found = event_accumulator.EventAccumulator(str(folder)).Reload()
    assert [each.step for each in found.Scalars("train/privacy/epsilon")] == [
        4,
        8,
        trainer.state.global_step,
    ]


def test_checkpoints_that_do_not_hold_the_accounting_are_refused(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trained(tmp_path, True, **saving)
    trained(tmp_path, **saving, save_only_model=True)
    with pytest.raises(ValueError, match="torchfil_state"):
        trained(tmp_path, True, **saving)

    # of other data: all or nothing
    trained(tmp_path, **saving)
    other = made(tmp_path, given={"train_dataset": examples(12)}, **saving)
    with pytest.raises(ValueError, match="examples"):
        other.train(resume_from_checkpoint=True)
    assert all(map(torch.equal, model().parameters(), other.model.parameters()))


@pytest.mark.parametrize(
    ("option", "tolerance"), [("bf16", 0.05), ("gradient_checkpointing", 1e-5)]
)
def test_the_same_run_but_for_rounding(option: str, tolerance: float, tmp_path: Path) -> None:
    runs = []
    for settings in ({}, {option: True}):
        AcceleratorState._reset_state(reset_partial_state=True)
        runs.append(trained(tmp_path, **settings))
        AcceleratorState._reset_state(reset_partial_state=True)
    assert runs[1].model.dtype == torch.float32
    exact, other = (run.engine.get_fil().value for run in runs)
    within = {"rtol": tolerance, "atol": 1e-3 if option == "bf16" else 0, "equal_nan": True}
    torch.testing.assert_close(other, exact, **within)
    assert option != "bf16" or not torch.equal(exact, other)
