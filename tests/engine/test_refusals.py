"""Refusals and documented results, each of which changes nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from tests.cases import DEVICE, grouped
from tests.engine.loops import SIGMA, C, data, loader, network, train
from tests.engine.made import make, step
from torchfil import FILPrivacyEngine
from torchfil.clipping import register_clip
from torchfil.engine import Execution
from torchfil.fisher import NoAmplification
from torchfil.utils.errors import UnsupportedModuleError


def test_bare_three_argument_call_runs() -> None:
    engine, _, model, optimizer, private = make()
    for batch in private:
        step(model, optimizer, batch)
    assert optimizer.noise_multiplier == optimizer.max_grad_norm == 1.0
    assert engine.get_fil().kind == "estimate"
    assert (engine.get_fil().standard_error > 0).any()


def test_unknown_keywords_raise() -> None:
    with pytest.raises(TypeError, match="unexpected option 'noise_multiplyer'"):
        make(noise_multiplyer=1.0)
    with pytest.raises(TypeError, match="unexpected option 'probes'"):
        engine = FILPrivacyEngine()
        module = network()
        engine.make_private_with_epsilon(
            module,
            torch.optim.SGD(module.parameters(), lr=0.1),
            loader(data(40)),
            target_epsilon=3.0,
            target_delta=1e-5,
            epochs=1,
            probes=3,
        )


class TestBreakUnderBatchMemoryManager:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_leaving_inside_a_logical_batch_is_refused_until_discarded(self, workers: int) -> None:
        dataset = data(93)
        plain = loader(dataset, 12, num_workers=workers)
        engine, module, model, optimizer, private = make(plain)
        manager = {"data_loader": private, "max_physical_batch_size": 3, "optimizer": optimizer}
        with BatchMemoryManager(**manager) as batches:
            for batch in batches:
                step(model, optimizer, batch)
                if optimizer.inside_logical_batch:
                    break
        weights = {k: v.clone() for k, v in module.state_dict().items()}
        with (
            BatchMemoryManager(**manager) as batches,
            pytest.raises(
                RuntimeError, match=r"left in the middle of a logical batch.*optimizer\.discard_partial_batch\(\)"
            ),
        ):
            for batch in batches:
                step(model, optimizer, batch)
        assert all(torch.equal(weights[k], v) for k, v in module.state_dict().items())
        assert engine._training.run.history.steps == len(engine.accountant.history) == 0
        optimizer.discard_partial_batch()
        with BatchMemoryManager(**manager) as batches:
            for batch in batches:
                step(model, optimizer, batch)
        assert engine._training.run.history.steps == engine.accountant.history[-1][2] == len(private)
        assert (engine.ledger.sums["participations"] <= len(private)).all()

    def test_leaving_at_the_end_of_a_logical_batch_is_fine_even_with_prefetched_batches(self) -> None:
        dataset = data(93)
        engine, _, model, optimizer, private = make(loader(dataset, 12, num_workers=2))
        manager = {"data_loader": private, "max_physical_batch_size": 3, "optimizer": optimizer}
        for _ in range(3):
            with BatchMemoryManager(**manager) as batches:
                seen = []
                for batch in batches:
                    step(model, optimizer, batch)
                    seen += batch._ids
                    if not optimizer.inside_logical_batch:
                        break
                assert len(seen) == len(set(seen))
        assert engine._training.run.history.steps == 3


def test_second_make_private_is_refused() -> None:
    engine, module, model, _, private = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="this engine already accounts for a run"):
        engine.make_private(network(), optimizer, private)
    for again in (model, module):
        with pytest.raises(ValueError, match="the model is already private"):
            FILPrivacyEngine().make_private(again, optimizer, loader(data(40)))


def test_a_refused_make_private_leaves_the_engine_usable() -> None:
    engine, module = FILPrivacyEngine(), network()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="noise_multiplier=-1.0 must be positive"):
        engine.make_private(module, optimizer, loader(data(40)), noise_multiplier=-1.0)
    assert not hasattr(module, "autograd_grad_sample_hooks")
    model, optimizer, private = engine.make_private(module, optimizer, loader(data(40)))
    step(model, optimizer, next(iter(private)))


def test_reading_before_any_step() -> None:
    engine = FILPrivacyEngine()
    with pytest.raises(RuntimeError, match="call make_private first"):
        engine.get_fil()
    engine = make()[0]
    readers: list[Callable[[], Any]] = [
        engine.get_fil,
        engine.get_mse_bound,
        engine.get_attribute_fil,
        engine.leakage,
        engine.get_rdp_mse_bound,
    ]
    for read in readers:
        with pytest.raises(RuntimeError, match="no private step has been taken yet"):
            read()
    assert torch.equal(engine.get_individual_epsilon(delta=1e-5).value, torch.zeros(40, dtype=torch.float64))


def test_weighted_samplers_are_refused() -> None:
    dataset = data(40)
    weights = torch.rand(40)
    replacing = DataLoader(dataset, batch_size=8, sampler=WeightedRandomSampler(weights.tolist(), 40))
    with pytest.raises(ValueError, match="with the same probability"):
        make(replacing)
    with pytest.raises(ValueError, match=r"can put an example into a batch twice.*replacement=False"):
        make(replacing, poisson_sampling=False)
    without = WeightedRandomSampler(weights.tolist(), 40, replacement=False)
    engine, _, model, optimizer, private = make(
        DataLoader(dataset, batch_size=8, sampler=without), poisson_sampling=False
    )
    for batch in private:
        step(model, optimizer, batch)
    assert engine._training.run.options.amplification == NoAmplification()
    assert engine.ledger.sums["participations"].tolist() == [1] * 40


def test_data_without_numbered_examples_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from data(8)

    with pytest.raises(ValueError, match="Pass poisson_sampling=False and id_of="):
        make(DataLoader(Stream(), batch_size=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0 must be positive"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0 must be positive"),
        ({"clipping": "adaptive"}, "counting factors below 1"),
        ({"clipping": "per_layer"}, "needs max_grad_norm as a list of 4 numbers"),
        ({"grad_sample_mode": "ghost_fsdp"}, "which support sharded weights as well"),
        ({"clip": "gelu-paper"}, "lets gradients exceed max_grad_norm by a factor of 1.11522"),
        ({"clip": "soft"}, "is not a registered clip function"),
        (
            {"amplification": "magic"},
            "amplification='magic' is unknown; use one of none, poisson, theorem4",
        ),
        ({"amplification": "poisson", "poisson_sampling": False}, "needs poisson_sampling=True"),
        ({"amplification": "theorem4", "poisson_sampling": False}, "needs poisson_sampling=True"),
        ({"estimator": "magic"}, "is unknown"),
        ({"num_probes": 0}, "num_probes=0 must be at least 1"),
        ({"fil_rate": 0.0}, r"fil_rate=0.0 must lie in \(0, 1\]"),
        ({"fil_rate": 1.5}, r"fil_rate=1.5 must lie in \(0, 1\]"),
        ({"track": ("spectrum",)}, r"track=\['spectrum'\] is unknown"),
        ({"track": ("diagonal",), "estimator": "coordinates"}, "gives the trace only"),
        ({"track": ("fim",), "num_probes": 1}, "needs num_probes of at least 2"),
        ({"loss_reduction": "none"}, "must be 'mean' or 'sum'"),
        ({"norm_refresh": 0}, "norm_refresh=0 must be at least 1"),
    ],
)
def test_impossible_settings_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    module = network()
    with pytest.raises(ValueError, match=message):
        make(module=module, **options)
    assert not hasattr(module, "autograd_grad_sample_hooks"), "nothing was touched"


def test_too_large_a_ledger_is_refused_and_can_be_confirmed() -> None:
    engine, _, model, optimizer, private = make(track=("fim",), max_ledger_memory=10_000)
    batch = next(iter(private))
    F.cross_entropy(model(batch[0].to(DEVICE)), batch[1].to(DEVICE)).backward()
    with pytest.raises(
        MemoryError, match=r"the ledger would take .* GiB.*confirm with accounting=Accounting\(max_ledger_memory=\d+\)"
    ):
        optimizer.step()
    assert engine.accountant.history == []
    with pytest.raises(MemoryError, match="Track less"):
        make(max_ledger_memory=10)


def test_forward_passes_that_do_not_train_are_ignored() -> None:
    engine, _, model, optimizer, private = make()
    for batch in private:
        x, y = (t.to(DEVICE) for t in batch)
        with torch.no_grad():
            model(x)
        model.eval()
        model(x)
        model.train()
        step(model, optimizer, (x, y))
    assert engine._training.run.history.steps == len(private)


def test_the_usual_order_with_zero_grad_after_the_forward_pass() -> None:
    dataset = data(40)
    first = train(dataset, steps=5, estimator="exact").engine
    engine, _, model, optimizer, private = make(
        dataset, noise_multiplier=SIGMA, max_grad_norm=C, estimator="exact", seed=3
    )
    torch.manual_seed(4)
    for x, y in private:
        x, y = x.to(DEVICE), y.to(DEVICE)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert engine._training.run.history.steps == 5
    assert torch.equal(engine.ledger.sums["participations"], first._training.run.ledger.sums["participations"])


def test_loops_that_clear_gradients_through_the_model_or_throw_them_away() -> None:
    engine, _, model, optimizer, private = make(data(60))
    seen = torch.zeros(60, dtype=torch.long)
    for k, batch in enumerate(private):
        x, y = (t.to(DEVICE) for t in batch)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if k == 2:
            continue  # the gradients of this batch are never used
        optimizer.step()
        seen[batch._ids] += 1
    assert torch.equal(engine.ledger.sums["participations"].cpu(), seen)
    assert engine._training.run.history.steps == len(private) - 1


def test_non_finite_inputs_are_named_and_stop_the_step() -> None:
    x, y = data(8).tensors
    x[3, 1] = float("nan")
    dataset = TensorDataset(x, y)
    _, module, model, optimizer, private = make(DataLoader(dataset, batch_size=8), poisson_sampling=False)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    batch = next(iter(private))
    F.cross_entropy(model(batch[0].to(DEVICE)), batch[1].to(DEVICE)).backward()
    with pytest.raises(ValueError, match=r"inputs has NaN or infinite values in 1 of 8 rows: 3"):
        optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())


def test_a_non_smooth_model_warns_and_names_the_operators() -> None:
    module = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double().to(DEVICE)
    _, _, model, optimizer, private = make(module=module)
    with pytest.warns(UserWarning, match=r"the model calls relu, whose derivative jumps.*SmoothnessValidator\.fix"):
        step(model, optimizer, next(iter(private)))


def test_batch_norm_is_refused_as_opacus_does() -> None:
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double().to(DEVICE)
    with pytest.raises(ValueError, match="batch normalisation mixes the examples"):
        make(module=module)


def test_a_clip_of_ones_own_and_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.schedulers import ExponentialGradClip, ExponentialNoise

    from torchfil import clipping
    from torchfil.fisher import exact_fim

    monkeypatch.setattr(clipping, "_REGISTRY", dict(clipping._REGISTRY))
    register_clip("quartic", lambda t: (1 + t**4) ** 0.25)
    dataset, module, plain = data(40), network(), network()
    engine = FILPrivacyEngine()
    inner = torch.optim.Adam(module.parameters(), lr=0.05)
    model, optimizer, private = engine.make_private(
        module,
        inner,
        loader(dataset),
        **grouped(noise_multiplier=SIGMA, max_grad_norm=C, clip="quartic", estimator="exact", amplification="none"),
    )
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    noise, threshold = ExponentialNoise(optimizer, gamma=0.9), ExponentialGradClip(optimizer, gamma=0.95)
    want = torch.zeros(40, dtype=torch.float64)
    for k, batch in enumerate(private):
        plain.load_state_dict(module.state_dict())
        if batch._ids:
            fim = exact_fim(
                plain,
                nn.CrossEntropyLoss(),
                *(t.to(DEVICE) for t in batch),
                max_grad_norm=C * 0.95**k,
                noise_multiplier=SIGMA * 0.9**k,
                clip="quartic",
            )
            want[batch._ids] += torch.einsum("bii->b", fim).cpu()
        step(model, optimizer, batch)
        rates.step()
        noise.step()
        threshold.step()
    assert torch.allclose(engine.totals.get_trace().value.cpu(), want, rtol=1e-6)
    assert [round(h[0] / SIGMA, 6) for h in engine.accountant.history] == [round(0.9**k, 6) for k in range(5)]
    assert engine.get_individual_epsilon(delta=1e-5).value.max() <= engine.get_epsilon(1e-5) + 1e-9


def test_a_trained_padding_row_is_refused_with_the_remedy() -> None:
    module = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)).to(DEVICE)
    tokens = TensorDataset(torch.randint(5, (40, 3)), torch.randint(3, (40,)))
    with pytest.raises(ValueError, match=r"embeddings \['0'\] have a padding_idx.*padding_idx = None"):
        make(tokens, module=module, grad_sample_mode="hooks")
    make(tokens, module=copy.deepcopy(module))
    module[0].padding_idx = None
    make(tokens, module=module, grad_sample_mode="hooks")
    frozen = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)).to(DEVICE)
    frozen[0].requires_grad_(False)
    make(tokens, module=frozen, grad_sample_mode="hooks")


def test_parameters_that_see_one_row_for_the_batch_are_named() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.out = nn.Embedding(1, 5, dtype=torch.float64), nn.Linear(5, 3, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x + self.positions(torch.zeros(1, dtype=torch.long, device=x.device)))

    _, _, model, optimizer, private = make(module=Positions().to(DEVICE), grad_sample_mode="hooks")
    with pytest.raises(RuntimeError, match=r"parameters of shape \[\(1, 5\)\] saw one row"):
        step(model, optimizer, next(batch for batch in private if len(batch[0]) > 1))


@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_detached_model_is_plain_and_its_ledger_stays(wrap_model: bool) -> None:
    engine, module, model, optimizer, private = make(wrap_model=wrap_model)
    call = model if wrap_model else module
    for batch in private:
        step(call, optimizer, batch)
    before = engine.get_fil().value
    engine.detach()
    assert not any(part._forward_hooks or part._backward_hooks for part in module.modules())
    assert torch.equal(engine.get_fil().value, before)
    with pytest.raises((ValueError, RuntimeError), match="[Pp]er sample gradient|without a backward pass"):
        step(module, optimizer, next(iter(private)))


def test_memory_follows_the_gpu_where_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what is free, never less than on a CPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    free = 2**36
    assert Execution().memory_on(torch.device("cuda")) == 2**34
    assert Execution().memory_on(torch.device("cpu")) == 2**30
    free = 2**20
    assert Execution().memory_on(torch.device("cuda")) == 2**30


class TestMistakesOfOpacusUsers:
    """What a loop that ran with Opacus may get wrong: the reason is the true one, and the remedy works."""

    @pytest.mark.parametrize("mistake", ["eval mode", "the model as it was passed"])
    def test_a_pass_that_does_not_belong_to_the_run(self, mistake: str) -> None:
        engine, plain, model, optimizer, private = make()
        batch = next(iter(private))
        if mistake == "eval mode":
            model.eval()
        with pytest.raises(RuntimeError, match=r"model\.train\(\), and call the returned model"):
            step(model if mistake == "eval mode" else plain, optimizer, batch)

        model.train()
        step(model, optimizer, batch)
        assert engine.leakage(delta=1e-3)["participations"].sum() == len(batch[0])

    def test_one_id_is_not_a_list(self) -> None:
        engine, _, model, optimizer, private = make(id_of=[f"person {i}" for i in range(40)])
        step(model, optimizer, next(iter(private)))
        with pytest.raises(TypeError, match=r"for one example: \['person 7'\]"):
            engine.get_fil("person 7")
        assert len(engine.get_fil(["person 7"]).value) == 1
        with pytest.raises(TypeError, match=r"for one example: \[3\]"):
            engine.get_fil(3)

    def test_a_private_model_is_not_pickled(self, tmp_path: Path) -> None:
        _, plain, model, optimizer, private = make()
        step(model, optimizer, next(iter(private)))
        with pytest.raises(TypeError, match=r"torch\.save\(model\._module\.state_dict\(\), path\)"):
            torch.save(model, tmp_path / "model.pt")

        torch.save(model._module.state_dict(), tmp_path / "weights.pt")
        plain.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))

    def test_a_misspelt_option_is_named(self) -> None:
        with pytest.raises(TypeError, match="unexpected option 'noise_multipler'"):
            make(noise_multipler=1.0)

    def test_a_sum_over_the_batch(self) -> None:
        def summed_step(model: Any, optimizer: Any, batch: Any) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(batch[0].to(DEVICE)), batch[1].to(DEVICE), reduction="sum").backward()
            optimizer.step()

        _, _, model, optimizer, private = make()
        with pytest.raises(ValueError, match="the sum over the batch: pass loss_reduction='sum' to make_private"):
            summed_step(model, optimizer, next(iter(private)))
        engine, _, model, optimizer, private = make(loss_reduction="sum")
        summed_step(model, optimizer, next(iter(private)))
        assert engine.get_fil().value.max() > 0

    def test_class_weights(self) -> None:
        weight = torch.tensor([1.0, 3.0, 2.0], device=DEVICE, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"reduction='sum', and in the loop divide by the number of examples"):
            make(criterion=nn.CrossEntropyLoss(weight=weight))
        criterion = nn.CrossEntropyLoss(weight=weight, reduction="sum")
        engine, _, model, optimizer, private = make(criterion=criterion)
        x, y = (part.to(DEVICE) for part in next(iter(private)))
        optimizer.zero_grad()
        (criterion(model(x), y) / len(y)).backward()
        optimizer.step()
        assert engine.get_fil().value.max() > 0

    def test_an_empty_data_set(self) -> None:
        with pytest.raises(ValueError, match="the loader's data set is empty"):
            make(DataLoader(TensorDataset(torch.zeros(0, 5), torch.zeros(0)), batch_size=4))
        with pytest.raises(ValueError, match="Give the DataLoader a batch_size"):
            make(DataLoader(data(40), batch_size=None))


def test_an_unknown_accountant_is_refused() -> None:
    with pytest.raises(ValueError, match="rpd"):
        FILPrivacyEngine(accountant="rpd")


def test_a_model_in_eval_mode_says_what_to_call() -> None:
    module = network().eval()
    with pytest.raises(ValueError, match=r"in eval mode; call model\.train\(\) before make_private"):
        make(module=module)


def test_a_loop_that_steps_the_optimizer_it_passed_is_told_at_the_next_pass() -> None:
    """That optimizer trains nothing, and nothing else would say so; with "hooks" Opacus refuses the second batch."""
    module, engine = network(), FILPrivacyEngine()
    passed = torch.optim.SGD(module.parameters(), lr=0.1)
    model, returned, private = engine.make_private(module, passed, loader(data(40)))
    for batch in private:
        step(model, passed, batch)
    with pytest.raises(RuntimeError, match=r"no step of the optimizer that make_private returned"):
        next(iter(private))
    returned.zero_grad()
    step(model, returned, next(iter(private)))
    assert engine.get_fil().value.max() > 0


def test_batches_that_are_only_looked_at_are_no_mistake() -> None:
    engine, _, model, optimizer, private = make()
    for _ in range(2):
        for x, _ in private:
            model(x.to(DEVICE))  # in training mode, without a backward pass
    step(model, optimizer, next(iter(private)))
    assert engine.leakage()["participations"].sum() > 0


class _Both(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.net(x + 0.1 * torch.randn_like(x))


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"poisson_sampling": False}])
def test_two_passes_over_one_batch_get_advice_that_works(options: dict[str, Any]) -> None:
    module = network()
    made = FILPrivacyEngine().make_private(
        module, torch.optim.SGD(module.parameters(), lr=0.1), loader(data()), **options
    )
    model, optimizer, batches = made
    x, y = next(iter(batches))
    loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
    (loss / 2).backward()
    with pytest.raises(ValueError, match=r"one module to make_private that calls it and returns all"):
        optimizer.step()

    both = _Both(network())
    engine = FILPrivacyEngine()
    model, optimizer, batches = engine.make_private(
        both,
        torch.optim.SGD(both.parameters(), lr=0.1),
        loader(data()),
        criterion=lambda outputs, y: (F.cross_entropy(outputs[0], y) + F.cross_entropy(outputs[1], y)) / 2,
    )
    x, y = next(iter(batches))
    one, two = model(x)
    ((F.cross_entropy(one, y) + F.cross_entropy(two, y)) / 2).backward()
    optimizer.step()
    assert bool((engine.get_fil().value > 0).any())


class _Denoiser(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        return self.net(x + noise) - noise


def test_noise_that_the_loop_draws_as_a_target_gets_advice_that_works() -> None:
    x = torch.randn(16, 5, dtype=torch.float64)
    module = network(5, 5)
    model, optimizer, batches = FILPrivacyEngine().make_private(
        module, torch.optim.SGD(module.parameters(), lr=0.1), loader(TensorDataset(x))
    )
    (rows,) = next(iter(batches))
    noise = torch.randn_like(rows)
    F.mse_loss(model(rows + noise), noise).backward()
    with pytest.raises(ValueError, match=r"has to be drawn in the model's forward\(\)"):
        optimizer.step()

    denoiser, engine = _Denoiser(network(5, 5)), FILPrivacyEngine()
    model, optimizer, batches = engine.make_private(
        denoiser,
        torch.optim.SGD(denoiser.parameters(), lr=0.1),
        loader(TensorDataset(x)),
        criterion=lambda outputs, _: outputs.square().mean(),
    )
    (rows,) = next(iter(batches))
    model(rows).square().mean().backward()
    optimizer.step()
    assert bool((engine.get_fil().value > 0).any())


def test_a_loss_without_a_second_derivative_is_named() -> None:
    def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
        steps, length = torch.full((len(targets),), outputs.shape[1]), torch.full((len(targets),), targets.shape[1])
        return F.ctc_loss(outputs.transpose(0, 1).log_softmax(-1), targets, steps, length)

    module, sounds = network(5, 4), TensorDataset(torch.randn(6, 7, 5).double(), torch.randint(1, 4, (6, 2)))
    engine = FILPrivacyEngine()
    _, _, batches = engine.make_private(
        module, torch.optim.SGD(module.parameters(), lr=0.1), loader(sounds, 6), criterion=ctc, poisson_sampling=False
    )
    with pytest.raises(UnsupportedModuleError, match="ctc_loss_backward"):
        engine.train_step(*next(iter(batches)))
