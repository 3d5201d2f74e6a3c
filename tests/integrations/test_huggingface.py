"""A run with FILTrainer is the plain loop; what it cannot account for is refused."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from tests.integrations.ledgers import DELTA, assert_same_run
from tests.repeatable import check_no_noise_is_shared, recorded_noise
from torchfil import Accounting, FILPrivacyEngine, Private

pytest.importorskip("accelerate", reason="accelerate is not installed (torchfil[huggingface])")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (torchfil[huggingface])")
from torchfil.integrations.huggingface import STATE_FILE, FILTrainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
LENGTH, WORDS, LR, C = 5, 12, 0.1, 0.8


def model(labels: int = 3) -> Any:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=LENGTH,
        num_labels=labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        bert = transformers.BertForSequenceClassification(config)
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
    words = Private(submodule="bert.embeddings.word_embeddings")
    noise = torch.Generator().manual_seed(5)
    accounting = Accounting(seed=3, num_probes=1)
    return {"noise_multiplier": 0.9, "private": words, "noise_generator": noise, "accounting": accounting, **more}


def arguments(tmp_path: Path, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "max_grad_norm": C,
        "per_device_train_batch_size": 6,
        "num_train_epochs": 2,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
    }
    return transformers.TrainingArguments(str(tmp_path), **{**settings, **more})


def plain_loop(trainer: Any) -> tuple[FILPrivacyEngine, nn.Module]:
    """The same steps by hand, on the batches and with the order of parameters (of the noise) that the trainer had."""
    network, data = model().train(), examples()
    names = {id(value): name for name, value in trainer.model.named_parameters()}
    ordered = [network.get_parameter(names[id(p)]) for group in trainer.optimizer.param_groups for p in group["params"]]
    optimizer: Any = torch.optim.SGD(ordered, lr=LR)
    engine = FILPrivacyEngine()
    loader: Any = DataLoader(data, batch_size=6, collate_fn=default_collate)  # type: ignore[arg-type]
    wrapped, optimizer, loader = engine.make_private(
        network, optimizer, loader, max_grad_norm=C, criterion=by_logits, **privacy()
    )
    loader.batch_sampler._on_start()
    for rows in trainer.batches:
        loader.dataset.__getitems__(rows)
        batch = loader.collate_fn([data[row] for row in rows])
        optimizer.zero_grad()
        by_logits(wrapped(**{k: v for k, v in batch.items() if k != "labels"}), batch["labels"]).backward()
        optimizer.step()
    return engine, network


def by_logits(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels)


class Noting(FILTrainer):
    """Keeps the numbers of the examples of every step."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.__dict__.setdefault("batches", []).append(list(inputs._ids))
        loss = super().training_step(model, inputs, num_items_in_batch)
        assert all(part.training for part in model.modules())
        return loss


@pytest.mark.parametrize("workers", [0, 1])
def test_the_ledger_is_that_of_the_plain_loop(workers: int, tmp_path: Path) -> None:
    fitted, data = model(), examples()
    trainer = Noting(
        model=fitted,
        args=arguments(tmp_path, dataloader_num_workers=workers),
        train_dataset=data,
        privacy=privacy(),
        leakage_path=tmp_path / "leakage.csv",
        delta=1e-5,
    )
    trainer.train()
    assert all(trainer.batches), "this seed draws an empty batch"
    assert len(trainer.batches) == 8
    assert_same_run(trainer.engine, fitted, *plain_loop(trainer))
    assert len((tmp_path / "leakage.csv").read_text().splitlines()) == 1 + len(data)
    assert not any(part._forward_hooks or part._backward_hooks for part in fitted.modules())


def test_empty_batches_release_noise_and_are_accounted_for(tmp_path: Path) -> None:
    fitted = model()
    before = [p.detach().clone() for p in fitted.parameters()]
    args = arguments(tmp_path, per_device_train_batch_size=1, num_train_epochs=1)
    trainer = Noting(model=fitted, args=args, train_dataset=examples(), privacy=privacy())
    trainer.train()
    empty = sum(not batch for batch in trainer.batches)
    assert empty > 0
    assert sum(steps for *_, steps in trainer.engine.accountant.history) == len(trainer.batches) == 24
    participations = trainer.engine.leakage_columns()[1]["participations"]
    assert sum(participations) == sum(map(len, trainer.batches))
    assert any(not torch.equal(a, b) for a, b in zip(before, fitted.parameters(), strict=True))


def test_evaluation_and_other_losses(tmp_path: Path) -> None:
    data = [{**example, "labels": torch.rand(())} for example in examples()]
    trainer = FILTrainer(
        model=model(labels=1),
        args=arguments(tmp_path, num_train_epochs=1),
        train_dataset=data,
        eval_dataset=data,
        criterion=lambda logits, labels: nn.functional.mse_loss(logits[:, 0], labels),
        privacy=privacy(),
    )
    trainer.train()
    metrics = trainer.evaluate()
    with torch.no_grad():
        batch = default_collate(data)
        labels = batch.pop("labels")
        expected = nn.functional.mse_loss(trainer.model(**batch).logits[:, 0], labels)
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert trainer.engine.get_fil().value.max() > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState

    try:
        args = arguments(tmp_path, **settings)
        with pytest.raises(ValueError, match=message):
            FILTrainer(model=model(), args=args, train_dataset=examples(), privacy=privacy())
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_optimizers_of_several_gradients_a_step_are_refused(tmp_path: Path) -> None:
    bert = model()
    optimizer = torch.optim.LBFGS(bert.parameters())
    trainer = FILTrainer(
        model=bert,
        args=arguments(tmp_path),
        train_dataset=examples(),
        privacy=privacy(),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
    )
    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
        trainer.train()


def test_several_devices_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="distributed training"):
        FILTrainer(model=model(), args=args, train_dataset=examples(), privacy=privacy())


def test_what_is_set_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="TrainingArguments.max_grad_norm"):
        FILTrainer(
            model=model(), args=arguments(tmp_path), train_dataset=examples(), privacy=privacy(max_grad_norm=1.0)
        )


def test_losses_that_training_would_not_use_are_refused(tmp_path: Path) -> None:
    class Own(FILTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...

    given: dict[str, Any] = {"model": model(), "train_dataset": examples(), "privacy": privacy()}
    with pytest.raises(ValueError, match="not called in training"):
        Own(args=arguments(tmp_path), **given)
    with pytest.raises(ValueError, match="has no effect on criterion="):
        FILTrainer(args=arguments(tmp_path, label_smoothing_factor=0.1), criterion=nn.CrossEntropyLoss(), **given)
    with pytest.raises(ValueError, match="weight"):
        FILTrainer(args=arguments(tmp_path), criterion=nn.CrossEntropyLoss(weight=torch.ones(3)), **given)


def test_models_run_as_they_come(tmp_path: Path) -> None:
    """Positions for the whole batch, and a padding row that is not trained."""
    bert = model()
    bert.bert.embeddings.word_embeddings.padding_idx = 0
    data = [{k: v for k, v in example.items() if k != "position_ids"} for example in examples()]
    trainer = FILTrainer(model=bert, args=arguments(tmp_path), train_dataset=data, privacy=privacy())
    trainer.train()
    assert trainer.engine.get_fil().value.max() > 0


def test_accumulation_draws_one_large_batch(tmp_path: Path) -> None:
    """k batches of B in one step are one Poisson batch of mean size kB: σ, q and ledger of a batch size of kB."""
    runs = []
    for size, steps in ((6, 1), (2, 3)):
        args = arguments(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        runs.append(Noting(model=model(), args=args, train_dataset=examples(), privacy=privacy()))
        runs[-1].train()
        assert args.gradient_accumulation_steps == steps
    one, three = runs
    assert one.batches == three.batches
    assert one.state.global_step == three.state.global_step == 8
    assert_same_run(three.engine, three.model, one.engine, one.model)


def with_dropout() -> Any:
    network = model()
    for part in network.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.2
    return network


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "workers"), [(3, 0), (4, 0), (3, 1)])  # in a pass over the data, and at its end
def test_a_resumed_run_is_the_uninterrupted_one(stop: int, workers: int, tmp_path: Path) -> None:
    def run(folder: str, **more: Any) -> Any:
        args = arguments(tmp_path / folder, dataloader_num_workers=workers, save_strategy="steps", save_steps=stop)
        args.optim, args.lr_scheduler_type = "adamw_torch", "linear"
        options = privacy(accounting=Accounting(seed=3, num_probes=1, track=("diagonal",)))
        trainer = Noting(model=with_dropout(), args=args, train_dataset=examples(), privacy=options)
        trainer.train(**more)
        return trainer

    whole = run("whole")
    checkpoint = tmp_path / "whole" / f"checkpoint-{stop}"
    assert (checkpoint / STATE_FILE).stat().st_mode & 0o077 == 0
    resumed = run("resumed", resume_from_checkpoint=str(checkpoint))
    assert whole.batches[stop:] == resumed.batches
    ours, truth = resumed.engine.leakage_columns(delta=DELTA), whole.engine.leakage_columns(delta=DELTA)
    assert ours == truth
    assert resumed.engine.get_epsilon(DELTA) == whole.engine.get_epsilon(DELTA)
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stop", [3, 4])  # in the middle of a pass, and after it
def test_resumed_runs_share_no_noise(stop: int, tmp_path: Path) -> None:
    def run(**more: Any) -> list[torch.Tensor]:
        with recorded_noise() as drawn:
            args = arguments(tmp_path, save_strategy="steps", save_steps=stop)
            options = {**privacy(), "noise_generator": None}
            FILTrainer(model=model(), args=args, train_dataset=examples(), privacy=options).train(**more)
        return drawn

    checkpoint = tmp_path / f"checkpoint-{stop}"
    check_no_noise_is_shared(run(), *(run(resume_from_checkpoint=str(checkpoint)) for _ in range(2)))


def test_checkpoints_that_do_not_hold_the_accounting_are_refused(tmp_path: Path) -> None:
    def trainer(**more: Any) -> Any:
        args = arguments(tmp_path, save_strategy="steps", save_steps=4, **more)
        return FILTrainer(model=model(), args=args, train_dataset=examples(), privacy=privacy())

    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer().train(resume_from_checkpoint=True)
    trainer(save_only_model=True).train()
    with pytest.raises(ValueError, match="does not hold the accounting"):
        trainer().train(resume_from_checkpoint=True)

    # of other data: all or nothing
    trainer().train()
    other = trainer()
    other.train_dataset = examples(12)
    before = [p.detach().clone() for p in other.model.parameters()]
    with pytest.raises(ValueError, match="examples"):
        other.train(resume_from_checkpoint=True)
    assert all(torch.equal(a, b) for a, b in zip(before, other.model.parameters(), strict=True))


def test_evaluation_in_training_changes_nothing(tmp_path: Path) -> None:
    """Nothing of an evaluation is accounted for, the model goes back to training, and the best model can be kept."""
    runs = []
    for evaluated in (False, True):
        more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        args = arguments(tmp_path, **(more if evaluated else {}))
        args.load_best_model_at_end = evaluated
        args.metric_for_best_model, args.greater_is_better = "loss", False
        trainer = Noting(
            model=model(), args=args, train_dataset=examples(), eval_dataset=examples(7), privacy=privacy()
        )
        trainer.train()
        runs.append(trainer)
    plain, evaluating = runs
    logged = [entry["eval_loss"] for entry in evaluating.state.log_history if "eval_loss" in entry]
    assert len(logged) == 4
    assert plain.batches == evaluating.batches
    assert evaluating.engine.leakage_columns() == plain.engine.leakage_columns()
    assert evaluating.evaluate()["eval_loss"] == pytest.approx(min(logged))


def test_gradients_that_are_all_zero_are_told(tmp_path: Path) -> None:
    trainer = FILTrainer(
        model=model(),
        args=arguments(tmp_path, max_steps=1),
        train_dataset=examples(),
        privacy=privacy(),
        criterion=lambda logits, labels: (0 * logits).sum(dim=1).mean(),
    )
    with pytest.warns(UserWarning, match="(?i)all .* are exactly (0|zero)"):
        trainer.train()


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path: Path) -> None:
    data = [{**example, "text": torch.zeros(3)} for example in examples()]
    trainer = FILTrainer(model=model(), args=arguments(tmp_path, max_steps=2), train_dataset=data, privacy=privacy())
    trainer.train()
    assert trainer.engine.get_fil().value.max() > 0


def fil_with(folder: Path, **settings: Any) -> Any:
    """The run's FIL under other settings, and the loss of its first step."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        args = arguments(folder, logging_steps=1, **settings)
        trainer = Noting(model=model(), args=args, train_dataset=examples(), privacy=privacy())
        trainer.train()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert trainer.model.dtype == torch.float32
    return trainer.engine.get_fil().value, trainer.state.log_history[0]["loss"]


def test_bf16_is_the_same_run_but_for_rounding(tmp_path: Path) -> None:
    (exact, loss), (rounded, rounded_loss) = fil_with(tmp_path), fil_with(tmp_path, bf16=True)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=1e-3)
    assert rounded_loss == pytest.approx(loss, rel=0.02)


def test_activation_checkpoints_change_nothing(tmp_path: Path) -> None:
    (plain, loss), (saved, saved_loss) = fil_with(tmp_path), fil_with(tmp_path, gradient_checkpointing=True)
    torch.testing.assert_close(saved, plain, rtol=1e-5, atol=0)
    assert saved_loss == pytest.approx(loss, rel=1e-6)


def test_texts_padded_to_the_longest_of_their_batch(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        longest = max(int(sample["attention_mask"].sum()) for sample in samples)
        rows = default_collate(samples)
        return {name: value if name == "labels" else value[:, :longest] for name, value in rows.items()}

    args = arguments(tmp_path, per_device_train_batch_size=2)
    trainer = FILTrainer(model=model(), args=args, train_dataset=examples(), data_collator=collate, privacy=privacy())
    trainer.train()
    assert trainer.engine.get_fil().value.max() > 0


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "huggingface_leakage.py"
    monkeypatch.setattr(
        sys, "argv", [example.name, "--epochs", "1", "--examples", "400", "--path", str(tmp_path / "leakage.csv")]
    )
    runpy.run_path(str(example), run_name="__main__")
    assert "ε = " in capsys.readouterr().out
    assert (tmp_path / "leakage.csv").exists()
