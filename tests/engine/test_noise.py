"""Noise and Poisson draws: no two releases share them, no file gives them away, and seeding is said
aloud.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import DEVICE
from tests.engine.test_augmentation import Views
from torchfil import FILPrivacyEngine
from torchfil.report import load
from torchfil.utils.noise import NoiseSource, Secure, Seeded, noise_source

pytestmark = pytest.mark.usefixtures("noise_of_users")
N, BATCH = 60, 20
PER_LAYER: dict[str, Any] = {"clipping": "per_layer", "max_grad_norm": [0.5] * 4}


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
    loader = DataLoader(
        dataset or TensorDataset(x, y), BATCH, generator=torch.Generator().manual_seed(4)
    )
    options = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "criterion": nn.CrossEntropyLoss(),
        **options,
    }
    return engine, *engine.make_private(
        module, optimizer(module.parameters(), lr=lr), loader, **options
    )


def releases(
    made: Any, steps: int = 2, way: str = "loop", batches: Any = None
) -> list[tuple[Tensor, list[int]]]:
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
    """No two releases of any of the runs have noise in common, nor do two runs make the same
    draws.
    """
    noises = torch.stack([noise for run in runs for noise, _ in run])
    assert noises.std().item() == pytest.approx(1.0, abs=0.1)
    alike = torch.corrcoef(noises) - torch.eye(len(noises))
    # 178 numbers each: six standard deviations of independent noise are 0.45
    assert alike.abs().max() < 0.6
    draws = [tuple(map(tuple, (drawn for _, drawn in run))) for run in runs]
    assert len(set(draws)) == len(draws)


def saved(made: Any, path: Any) -> Any:
    made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
    return path


def resumed(path: Any, **options: Any) -> Any:
    made = private(**options)
    made[0].load_checkpoint(path=path, module=made[1], optimizer=made[2])
    return made


def unlike(*drawn: Tensor) -> bool:
    """Independent noise."""
    return bool((torch.corrcoef(torch.stack(drawn)) - torch.eye(len(drawn))).abs().max() < 0.5)


class TestNothingIsRepeated:
    @pytest.mark.parametrize(
        "options", [{}, {"grad_sample_mode": "hooks"}, {"secure": True}, PER_LAYER], ids=str
    )
    def test_a_script_with_a_seed_run_again(self, options: dict[str, Any]) -> None:
        check_all_differ(
            [releases(private(**options), way=way) for way in ("loop", "loop", "train_step")]
        )

    @pytest.mark.parametrize("kind", ["run.pt", "folder/"])
    def test_runs_that_resume_from_one_checkpoint(self, tmp_path: Path, kind: str) -> None:
        """Which was taken in the middle of a pass.

        In this process, and in one that seeds itself anew.
        """
        made = private()
        batches = iter(made[3])
        before, path = releases(made, 1, batches=batches), saved(made, f"{tmp_path}/{kind}")
        after = [
            releases(made, 1, batches=batches),
            *(releases(resumed(path), 1) for _ in range(2)),
        ]
        runs = [before, *after, releases(resumed(path, lr=0.1), 1)]
        if DEVICE == "cpu":
            runs += _in_a_fork(lambda: [releases(private(), 1), releases(resumed(path), 1)])
        check_all_differ(runs)

    def test_a_source_resumes_with_fresh_numbers(self) -> None:
        source, device = NoiseSource(), torch.device("cpu")
        seed = source.generator(device).initial_seed()
        source.load_state_dict(source.state_dict())
        assert source.generator(device).initial_seed() != seed

    @pytest.mark.skipif(DEVICE != "cpu", reason="CUDA does not survive a fork")
    @pytest.mark.parametrize("secure", [False, True])
    def test_forked_processes(self, secure: bool) -> None:
        made = private(secure=secure)
        check_all_differ(
            [
                releases(made),
                *(_in_a_fork(lambda: releases(made)) for _ in range(2)),
                releases(made),
            ]
        )


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
        made = private()
        releases(made)
        path = saved(made, tmp_path / "run.pt")
        (noise, _), *_ = releases(made)
        file = torch.load(path, weights_only=True)
        (own,) = file["fil_engine_state_dict"]["generators"]
        assert own.keys() == {"loader"}  # which shuffles nothing here
        for state in (file["random_state"][0]["cpu"], *own.values()):
            source = torch.Generator()
            source.set_state(state)
            assert unlike(
                noise,
                torch.cat(
                    [torch.empty(p.numel()).normal_(generator=source) for p in made[1].parameters()]
                ),
            )

    def test_torchs_own_generator_neither_rules_nor_advances(self) -> None:
        before = torch.get_rng_state()
        NoiseSource().normal_(torch.empty(10), 1.0)
        Secure().uniform(10)
        assert torch.equal(torch.get_rng_state(), before)

    def test_all_of_the_mersenne_twisters_state_is_random(self) -> None:
        states = [NoiseSource().generator(torch.device("cpu")) for _ in range(20)]
        words = torch.stack(
            [each.get_state()[24 : 24 + 8 * 624].view(torch.int64) for each in states]
        )
        assert words.flatten().unique().numel() > 0.999 * words.numel()
        assert 0 <= int(words.min()) <= int(words.max()) < 2**32
        by_seed = torch.stack(
            [torch.Generator().manual_seed(each.initial_seed()).get_state() for each in states]
        )
        assert not (by_seed[:, 24 : 24 + 8 * 624].view(torch.int64) == words).any()


class TestDistributions:
    @pytest.mark.parametrize(
        "source", [NoiseSource(), Secure(), Seeded(seed=1)], ids=lambda source: source.kind
    )
    def test_noise_is_normal_and_draws_are_uniform(self, source: NoiseSource) -> None:
        for dtype in (torch.float32, torch.float64):
            noise = source.normal_(torch.empty(100, 999, dtype=dtype), 2.5).flatten()
            assert stats.kstest(noise.numpy() / 2.5, "norm").pvalue > 1e-6
            assert abs(float(torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1])) < 0.02
            # made from the same pairs in secure mode
            halves = noise[: len(noise) // 2 * 2].view(2, -1)
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


class TestSeeding:
    def test_seeded_runs_repeat_and_resume_bit_for_bit(self, tmp_path: Path) -> None:
        made, again = private(noise_seed=7), private(noise_seed=7)
        runs = [releases(each, 3) for each in (made, again)]
        path = saved(made, tmp_path / "run.pt")
        runs += [releases(made, 3), releases(resumed(path, noise_seed=7), 3)]
        for one, other in (runs[:2], runs[2:]):
            assert all(
                torch.equal(a, b) and drawn == same
                for (a, drawn), (b, same) in zip(one, other, strict=True)
            )
        check_all_differ([runs[0], runs[2], releases(private(noise_seed=8), 3)])

    def test_it_is_logged_and_recorded(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "torchfil")
        engines = []
        for options, kind in (
            ({}, "OS-seeded"),
            ({"secure": True}, "cryptographic"),
            ({"noise_seed": 3}, "seeded"),
            ({"noise_generator": torch.Generator(DEVICE).manual_seed(3)}, "seeded"),
        ):
            caplog.clear()
            # all are clipped, and few ε need be computed
            made = private(max_grad_norm=0.01, **options)
            assert kind in caplog.text
            assert ("subtract the noise" in caplog.text) is (kind == "seeded")
            releases(made)
            engines.append(made[0])
            run = load(made[0].save_run(tmp_path / "run.parquet", delta=1e-4))
            assert run.about["mechanism"]["noise"] == kind
            assert "seed" not in run.about
            assert run.about["probe_seed"] not in (torch.initial_seed(), 0)
        path = FILPrivacyEngine.save_merged(
            [engines[0], engines[2]], tmp_path / "run.parquet", delta=1e-4
        )
        assert load(path).about["mechanism"]["noise"] == "seeded"

    def test_seeded_ranks_draw_differently(self) -> None:
        def of_generators(rank: int) -> NoiseSource:
            """In processes that were seeded alike."""
            return noise_source(
                noise=torch.Generator(), draws=torch.Generator().manual_seed(3), rank=rank
            )

        for source in (lambda rank: noise_source(seed=1, rank=rank), of_generators):
            assert not torch.equal(*(source(rank).uniform(100) for rank in range(2)))


def with_one_changed() -> TensorDataset:
    x, y = (part.clone() for part in private()[3].plain_dataset.tensors)
    x[7] = 3.0
    return TensorDataset(x, y)


OTHERS: dict[str, Any] = {  # the noun that is told, and how the other run differs
    "clip=": {"clip": "hard"},
    "clip_weights=": {"clip_weights": [0.5] * N},
    "poisson_sampling=": {"poisson_sampling": False},
    "other ids": {"id_of": lambda row: f"patient {row}"},
    "other data": {"dataset": with_one_changed},
    "noise=": {"noise_seed": 1},
    "clipping=": PER_LAYER,
    "from SGD": {"optimizer": torch.optim.Adam},
}


def test_other_runs_are_not_resumed_and_nothing_changes(tmp_path: Path) -> None:
    made = private()
    releases(made)
    path = saved(made, tmp_path / "run.pt")
    for noun, options in OTHERS.items():
        other = private(
            **{name: value() if name == "dataset" else value for name, value in options.items()}
        )
        before = copy.deepcopy(other[1].state_dict())
        with pytest.raises(ValueError, match=noun):
            other[0].load_checkpoint(path=path, module=other[1], optimizer=other[2])
        assert all(
            torch.equal(value, before[name]) for name, value in other[1].state_dict().items()
        )
        assert not other[0].accountant.history
        releases(other)  # it goes on as the new run that it is
    augmented = Views(lambda _, y: (torch.randn(8), y % 2))  # other values at every reading
    path = saved(private(dataset=augmented), tmp_path / "augmented.pt")
    releases(resumed(path, dataset=augmented))
