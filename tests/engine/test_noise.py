"""Noise and Poisson draws: no two releases share them, no file gives them away, and seeding is said aloud."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.cases import DEVICE
from torchfil import FILPrivacyEngine
from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.glm import LogisticRegression
from torchfil.report import load
from torchfil.utils.noise import NoiseSource, Secure, Seeded, noise_source

pytestmark = pytest.mark.usefixtures("noise_of_users")
N, BATCH = 60, 20


def private(
    optimizer: Any = torch.optim.SGD,
    lr: float = 0.5,
    secure: bool = False,
    noise_seed: int | None = None,
    dataset: Any = None,
    **options: Any,
) -> Any:
    """An engine with model, optimizer and loader; seeded as scripts are."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(11)
    x, y = torch.randn(N, 8, generator=generator), torch.randint(2, (N,), generator=generator)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(DEVICE)
    engine = FILPrivacyEngine(secure_mode=secure, noise_seed=noise_seed)
    loader = DataLoader(dataset or TensorDataset(x, y), BATCH, generator=torch.Generator().manual_seed(4))
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "criterion": nn.CrossEntropyLoss(), **options}
    return engine, *engine.make_private(module, optimizer(module.parameters(), lr=lr), loader, **options)


def releases(made: Any, steps: int = 2, way: str = "loop", batches: Any = None) -> list[tuple[Tensor, list[int]]]:
    """The noise and the drawn examples of so many steps."""
    engine, model, optimizer, loader = made
    found, real = [], optimizer.add_noise

    def spy() -> None:
        clean = torch.cat([p.summed_grad.flatten() for p in optimizer.params]).clone()
        real()
        noisy = torch.cat([p.grad.flatten() for p in optimizer.params])
        found.append((noisy - clean).cpu())

    optimizer.add_noise = spy
    drawn: list[list[int]] = []
    for x, y in itertools.islice(batches if batches is not None else loader, steps):
        drawn.append([int(value) for value in x[:, 0] * 1e6])  # who they are
        if way == "train_step":
            engine.train_step(x, y)
        else:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
            optimizer.step()
    del optimizer.add_noise
    return list(zip(found, drawn, strict=True))


def check_all_differ(runs: list[list[tuple[Tensor, list[int]]]]) -> None:
    """No two releases of any of the runs have noise in common, nor do two runs make the same draws."""
    noises = torch.stack([noise for run in runs for noise, _ in run])
    assert noises.std().item() == pytest.approx(1.0, abs=0.1)
    alike = torch.corrcoef(noises) - torch.eye(len(noises))
    assert alike.abs().max() < 0.6  # 178 numbers each: six standard deviations of independent noise are 0.45
    draws = [tuple(map(tuple, (drawn for _, drawn in run))) for run in runs]
    assert len(set(draws)) == len(draws)


def resumed(path: Path, **options: Any) -> Any:
    made = private(**options)
    made[0].load_checkpoint(path=path, module=made[1], optimizer=made[2])
    return made


class TestNothingIsRepeated:
    @pytest.mark.parametrize(
        "options",
        [{}, {"grad_sample_mode": "hooks"}, {"secure": True}, {"clipping": "per_layer", "max_grad_norm": [0.5] * 4}],
        ids=["auto", "hooks", "secure", "per layer"],
    )
    def test_a_script_with_a_seed_run_again(self, options: dict[str, Any]) -> None:
        check_all_differ([releases(private(**options), way=way) for way in ("loop", "loop")])

    def test_whole_steps(self) -> None:
        check_all_differ([releases(private(), way="train_step") for _ in range(2)])

    @pytest.mark.parametrize("kind", ["run.pt", "folder/"])
    def test_runs_that_resume_from_one_checkpoint(self, tmp_path: Path, kind: str) -> None:
        made = private()
        before, path = releases(made, 3), f"{tmp_path}/{kind}"
        made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
        runs = [before, releases(made, 3), releases(resumed(path), 3), releases(resumed(path), 3)]
        check_all_differ([*runs, releases(resumed(path, lr=0.1), 3)])

    def test_stopped_in_the_middle_of_a_pass(self, tmp_path: Path) -> None:
        made = private()
        batches, path = iter(made[3]), tmp_path / "run.pt"
        first = releases(made, 1, batches=batches)
        made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
        check_all_differ([first, releases(made, 1, batches=batches), releases(resumed(path), 1)])

    def test_states_that_the_loop_keeps_itself(self) -> None:
        made = private()
        before, state = releases(made), made[0].state_dict()
        again = private()
        again[0].load_state_dict(state)
        after = releases(again)
        again[0].load_state_dict(state)
        check_all_differ([before, releases(made), after, releases(again)])

    def test_a_new_process_that_reseeds(self, tmp_path: Path) -> None:
        made = private()
        runs, path = [releases(made)], tmp_path / "run.pt"
        made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
        script = (
            "import pickle, sys; from tests.engine.test_noise import *; "
            "fresh = releases(private()); again = releases(resumed(sys.argv[1])); "
            "sys.stdout.buffer.write(pickle.dumps((fresh, again)))"
        )
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, check=True)
            runs += pickle.loads(done.stdout)
        check_all_differ(runs)

    @pytest.mark.skipif(DEVICE != "cpu", reason="CUDA does not survive a fork")
    @pytest.mark.parametrize("secure", [False, True])
    def test_forked_processes(self, secure: bool) -> None:
        made = private(secure=secure)
        runs = [releases(made)]
        for _ in range(2):
            runs.append(_in_a_fork(lambda: releases(made)))
        check_all_differ([*runs, releases(made)])

    def test_copies_of_the_source(self) -> None:
        source = NoiseSource()
        source.normal_(torch.empty(3), 1.0)
        kinds: list[Callable[[], NoiseSource]] = [
            lambda: source,
            lambda: copy.deepcopy(source),
            lambda: pickle.loads(pickle.dumps(source)),
        ]
        drawn = torch.stack([make().normal_(torch.empty(200), 1.0) for make in kinds])
        assert (torch.corrcoef(drawn) - torch.eye(3)).abs().max() < 0.5

    def test_releases_of_linear_models(self) -> None:
        x, y = np.random.default_rng(0).normal(size=(40, 300)), np.arange(40) % 2
        model = LogisticRegression(l2=0.1).fit(x, y)

        def drawn() -> Tensor:
            torch.manual_seed(0)
            return model.release(1.0) - model.release(1e-12)

        assert abs(float(torch.corrcoef(torch.stack([drawn(), drawn()]))[0, 1])) < 0.5


def _in_a_fork(work: Callable[[], Any]) -> Any:
    """What the work returns in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "wb") as end:
            end.write(pickle.dumps(work()))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as end:
        answer = end.read()
    os.waitpid(child, 0)
    return pickle.loads(answer)


class TestNothingIsGivenAway:
    def test_a_checkpoint_and_the_next_weights_do_not_give_the_noise(self, tmp_path: Path) -> None:
        made, path = private(), tmp_path / "run.pt"
        releases(made)
        made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
        (noise, _), *_ = releases(made)
        saved = torch.load(path, weights_only=True)
        (own,) = saved["fil_engine_state_dict"]["generators"]
        assert own.keys() == {"loader"}  # which shuffles nothing here

        generators = [saved["random_state"][0]["cpu"], *own.values()]
        for state in generators:
            source = torch.Generator()
            source.set_state(state)
            guess = torch.cat([torch.empty(p.numel()).normal_(generator=source) for p in made[1].parameters()])
            assert abs(float(torch.corrcoef(torch.stack([noise, guess]))[0, 1])) < 0.5

    def test_the_run_file_has_no_seed_of_torch(self, tmp_path: Path) -> None:
        made = private()
        releases(made)
        about = load(made[0].save_run(tmp_path / "run.parquet", delta=1e-4)).about
        assert "seed" not in about
        assert about["probe_seed"] not in (torch.initial_seed(), 0)
        assert about["mechanism"]["noise"] == "OS-seeded"

    def test_torchs_own_generator_neither_rules_nor_advances(self) -> None:
        before = torch.get_rng_state()
        NoiseSource().normal_(torch.empty(10), 1.0)
        Secure().uniform(10)
        assert torch.equal(torch.get_rng_state(), before)

    def test_all_of_the_mersenne_twisters_state_is_random(self) -> None:
        states = [NoiseSource().generator(torch.device("cpu")) for _ in range(20)]
        words = torch.stack([each.get_state()[24 : 24 + 8 * 624].view(torch.int64) for each in states])
        assert words.flatten().unique().numel() > 0.999 * words.numel()
        assert words.min() >= 0
        assert words.max() < 2**32
        by_seed = torch.stack([torch.Generator().manual_seed(each.initial_seed()).get_state() for each in states])
        assert not (by_seed[:, 24 : 24 + 8 * 624].view(torch.int64) == words).any()


class TestDistributions:
    @pytest.mark.parametrize("source", [NoiseSource(), Secure(), Seeded(seed=1)], ids=lambda source: source.kind)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_noise_is_normal_and_draws_are_uniform(self, source: NoiseSource, dtype: torch.dtype) -> None:
        noise = source.normal_(torch.empty(100, 999, dtype=dtype), 2.5).flatten()
        assert stats.kstest(noise.numpy() / 2.5, "norm").pvalue > 1e-6
        assert abs(float(torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1])) < 0.02
        halves = noise[: len(noise) // 2 * 2].view(2, -1)  # made from the same pairs in secure mode
        assert abs(float(torch.corrcoef(halves.abs())[0, 1])) < 0.03
        assert stats.kstest(source.uniform(100_000).numpy(), "uniform").pvalue > 1e-6

    @pytest.mark.parametrize("secure", [False, True])
    def test_every_example_is_drawn_at_the_rate(self, secure: bool) -> None:
        _, _, _, loader = private(secure=secure)
        drawn = torch.zeros(N)
        for batch in itertools.chain.from_iterable(loader.batch_sampler for _ in range(200)):
            drawn[batch] += 1
        assert stats.chisquare(drawn, f_exp=torch.full((N,), float(drawn.mean()))).pvalue > 1e-6
        assert float(drawn.mean()) == pytest.approx(200, abs=6)  # 600 draws at a rate of 1/3

    def test_zero_noise_adds_nothing(self) -> None:
        with pytest.warns(UserWarning, match="no privacy"):
            made = private(noise_multiplier=0.0)
        assert not any(noise.any() for noise, _ in releases(made))


class TestSeeding:
    def test_seeded_runs_repeat_and_resume_bit_for_bit(self, tmp_path: Path) -> None:
        path, runs = tmp_path / "run.pt", []
        for _ in range(2):
            made = private(noise_seed=7)
            runs.append(releases(made, 3))
        made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
        runs += [releases(made, 3), releases(resumed(path, noise_seed=7), 3)]
        for one, other in (runs[:2], runs[2:]):
            assert all(torch.equal(a, b) and drawn == again for (a, drawn), (b, again) in zip(one, other, strict=True))
        check_all_differ([runs[0], runs[2], releases(private(noise_seed=8), 3)])

    def test_it_is_logged_and_recorded_and_the_gate_fails(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "torchfil")
        for options, kind, passes in (
            ({}, "OS-seeded", True),
            ({"secure": True}, "cryptographic", True),
            ({"noise_seed": 3}, "seeded", False),
            ({"noise_generator": torch.Generator(DEVICE).manual_seed(3)}, "seeded", False),
        ):
            caplog.clear()
            made = private(**options)
            assert kind in caplog.text
            assert ("subtract the noise" in caplog.text) is not passes
            releases(made)
            run = load(made[0].save_run(tmp_path / "run.parquet", delta=1e-4))
            assert run.about["mechanism"]["noise"] == kind
            (verdict,) = [v for v in check(run, Policy(max_epsilon=1e9)) if v.rule == "allow_seeded_noise"]
            assert verdict.passed is passes
            (verdict,) = [v for v in check(run, Policy(allow_seeded_noise=True)) if v.rule == "allow_seeded_noise"]
            assert verdict.passed

    def test_a_run_file_of_several_runs_says_if_one_was_seeded(self, tmp_path: Path) -> None:
        both = [private(), private(noise_seed=1)]
        for made in both:
            releases(made, 3)
        path = FILPrivacyEngine.save_merged([made[0] for made in both], tmp_path / "run.parquet", delta=1e-4)
        assert load(path).about["mechanism"]["noise"] == "seeded"

    def test_contradictions_are_refused(self) -> None:
        with pytest.raises(ValueError, match="noise_seed"):
            private(secure=True, noise_seed=1)
        with pytest.raises(ValueError, match="noise_generator"):
            private(secure=True, noise_generator=torch.Generator())
        with pytest.raises(ValueError, match="both"):
            private(noise_seed=1, noise_generator=torch.Generator())
        with pytest.raises(TypeError, match="copied"):
            copy.deepcopy(noise_source(seed=1))

    def test_seeded_ranks_draw_differently(self) -> None:
        for options in ({"seed": 1}, {"noise": torch.Generator(), "draws": torch.Generator().manual_seed(3)}):
            state = options["draws"].get_state() if "draws" in options else None
            drawn = []
            for rank in range(2):
                if state is not None:
                    options["draws"].set_state(state)  # two processes that were seeded alike
                drawn.append(noise_source(**options, rank=rank).uniform(100))
            assert not torch.equal(*drawn)


class Augmented(Dataset[Any]):
    """Other values at every reading."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.randn(8), row % 2


class TestOtherRunsAreNotResumed:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"clip": "hard"}, "clip='hard' instead of 'smooth'"),
            ({"poisson_sampling": False}, "poisson_sampling=False instead of True"),
            ({"id_of": lambda row: f"patient {row}"}, "other ids"),
            ({"dataset": TensorDataset(torch.zeros(N, 8), torch.arange(N) % 2)}, "other data"),
            ({"noise_seed": 1}, "noise='seeded' instead of 'OS-seeded'"),
            ({"clipping": "per_layer", "max_grad_norm": [0.5] * 4}, "clipping='per_layer' instead of 'flat'"),
            ({"optimizer": torch.optim.Adam}, "from SGD"),
        ],
        ids=["clip", "shuffled", "ids", "data", "seeded", "per layer", "Adam"],
    )
    def test_the_difference_is_named_and_nothing_changes(
        self, tmp_path: Path, options: dict[str, Any], said: str
    ) -> None:
        made, path = private(), tmp_path / "run.pt"
        releases(made)
        made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
        other = private(**options)
        before = copy.deepcopy(other[1].state_dict())
        with pytest.raises(ValueError, match=said):
            other[0].load_checkpoint(path=path, module=other[1], optimizer=other[2])
        assert all(torch.equal(value, before[name]) for name, value in other[1].state_dict().items())
        assert not other[0].accountant.history
        releases(other)  # it goes on as the new run that it is

    def test_one_changed_example_is_noticed(self, tmp_path: Path) -> None:
        made, path = private(), tmp_path / "run.pt"
        made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
        x, y = made[3].plain_dataset.tensors
        changed = x.clone()
        changed[7] = 3.0
        with pytest.raises(ValueError, match="other data"):
            resumed(path, dataset=TensorDataset(changed, y))

    def test_augmented_data_resume(self, tmp_path: Path) -> None:
        made, path = private(dataset=Augmented()), tmp_path / "run.pt"
        made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
        releases(resumed(path, dataset=Augmented()))
