"""What one rank refuses, all refuse; what ranks must agree on; what they say to each other."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as Wrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import Made, make, replaying, start, take_step, whole
from tests.engine.hunger import room_for
from tests.engine.loops import SIGMA
from torchfil import FILPrivacyEngine, check
from torchfil.engine.distributed.ranks import StepNotTakenError

# of 7 steps
DRAWS = [[[i, i + 1, i + 2] for i in range(0, 28, 4)], [[i, i + 1] for i in range(30, 58, 4)]]
EVERYBODY = [[list(range(first, 61, 2))] * 7 for first in (0, 1)]
PROBES = {"estimator": "weight-probes", "num_probes": 2}


class Played(NamedTuple):
    errors: list[str]
    weights: list[Tensor]
    sums: dict[str, Tensor]
    steps: int
    told: list[str]  # of memory
    memory_limit: int


def with_penalty(made: Made, x: Tensor, y: Tensor) -> None:
    loss = nn.functional.cross_entropy(made.model(x), y)
    (loss + sum(p.square().sum().full_tensor() for p in made.module.parameters())).backward()
    made.optimizer.step()


def whole_step(made: Made, x: Tensor, y: Tensor) -> None:
    made.engine.train_step(x, y)


def played(
    draws: Any = DRAWS, spoilt: str = "", place: int = -1, step: Any = take_step, **options: Any
) -> Played:
    """A pass with these draws, in which a step of rank 1 is spoilt: what each rank says, and the
    run afterwards.
    """
    made, errors, rank = make("digits", **{"questions": {}, **options}), [], dist.get_rank()
    with (
        replaying(draws[rank]),
        warnings.catch_warnings(record=True) as told,
        contextlib.ExitStack() as stack,
    ):
        warnings.simplefilter("always")
        for now, (x, y) in enumerate(made.loader):
            kind = spoilt if (now, rank) == (place, 1) else ""
            if kind == "noise":
                made.optimizer.noise_multiplier *= 0.5
            if kind == "NaN in a part":
                made.optimizer.signal_skip_step(do_skip=True)
            if "NaN" in kind:
                x = x.clone().fill_(float("nan"))
            if kind == "little memory":
                stack.enter_context(room_for(1))
            before = [whole(p) for p in made.module.parameters()]
            try:
                with room_for(0) if kind == "no memory" else contextlib.nullcontext():
                    step(made, x, y)
            except (RuntimeError, ValueError) as error:
                errors.append(f"{now} {type(error).__name__}: {error}")
                assert all(map(torch.equal, before, (whole(p) for p in made.module.parameters())))
    said = [str(warning.message) for warning in told if "out of memory" in str(warning.message)]
    steps = sum(count for *_, count in made.engine.accountant.history)
    weights, ledger = [whole(p) for p in made.module.parameters()], made.engine.ledger
    sums = {} if ledger is None else dict(ledger.sums)
    return Played(
        errors, weights, sums, steps, said, made.engine._training.step.passes.memory.limit
    )


@pytest.mark.parametrize(
    ("spoilt", "step", "options"),
    [
        ("NaN", take_step, {}),
        ("no memory", whole_step, {}),
        ("NaN", take_step, {"sharded": True}),
        ("NaN", whole_step, {"sharded": True}),
    ],
)
def test_a_step_that_one_rank_refuses_is_taken_by_none(
    two_ranks: RankPool, spoilt: str, step: Any, options: dict[str, Any]
) -> None:
    there, here = two_ranks.run(played, DRAWS, spoilt, 2, step, **options)
    (error,), (own,) = there.errors, here.errors
    assert error.startswith("2 StepNotTakenError: another rank refused this step")
    assert own.startswith("2 ")
    assert ("NaN" if spoilt == "NaN" else "ran out of memory") in own
    expected = torch.zeros(61, dtype=torch.long)
    for part in DRAWS:
        for drawn in part[:2] + part[3:]:
            expected[drawn] += 1
    assert torch.equal(there.sums["participations"], expected)
    assert there.steps == 6
    assert all(map(torch.equal, there.weights, here.weights))


def test_ranks_must_agree_and_a_refusal_inside_a_logical_batch_ends_the_run(
    two_ranks: RankPool,
) -> None:
    for each in two_ranks.run(played, DRAWS, "noise", 1):
        assert "between 0.45 and 0.9" in each.errors[0]
    there, here = two_ranks.run(played, [part[:3] for part in DRAWS], "NaN in a part", 1)
    assert "another rank refused" in there.errors[0]
    assert "NaN" in here.errors[0]
    assert all("no longer at the same one" in each.errors[1] for each in (there, here))
    for each in two_ranks.run(played, DRAWS, step=with_penalty, sharded=True):
        assert "does not go through the model's output" in each.errors[0]


def cut_off() -> bool:
    """Whether a step in which the ranks no longer hear each other leaves weights and accounting as
    they were.
    """
    made = make("digits", questions={})
    with replaying(DRAWS[dist.get_rank()]):
        batch = next(iter(made.loader))
    before = [whole(p) for p in made.module.parameters()]
    silent = mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("timed out"))
    with silent, pytest.raises(StepNotTakenError, match="end of step 1"):
        take_step(made, *batch)
    return (
        all(map(torch.equal, before, made.module.parameters()))
        and not made.engine.accountant.history
    )


def test_a_step_whose_ranks_are_cut_off_is_not_taken(two_ranks: RankPool) -> None:
    assert two_ranks.run(cut_off) == [True, True]


def test_only_the_rank_that_ran_out_of_memory_halves(two_ranks: RankPool) -> None:
    alone, _ = two_ranks.run(played, **PROBES)
    here, there = two_ranks.run(played, DRAWS, "little memory", 2, **PROBES)
    assert (len(here.told), len(there.told)) == (0, 1)
    assert there.memory_limit < alone.memory_limit == here.memory_limit
    for found in (here, there):
        for a, b in zip(found.weights, alone.weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        for name, value in alone.sums.items():
            torch.testing.assert_close(
                found.sums[name], value, rtol=1e-9, atol=1e-9 * float(value.abs().max())
            )


def test_all_ranks_skip_the_same_steps_and_probe_by_themselves(two_ranks: RankPool) -> None:
    """Everybody is drawn at each step, of which about half are measured.

    Examples that look alike, probed twice.
    """
    sums = two_ranks.run(played, EVERYBODY, fil_rate=0.5)[0].sums
    measured = sums["measured"]
    assert bool((sums["participations"] == 7).all())
    assert 0 < int(measured[0]) < 7
    assert bool((measured == measured[0]).all())
    traces = [two_ranks.run(probed)[rank] for rank in (1, 0)]
    assert torch.equal(*traces)
    assert not torch.allclose(traces[0][0::2], traces[0][1::2], rtol=1e-6)


def probed() -> Tensor:
    made = make("digits", questions={}, **PROBES)
    made.loader.plain_dataset.tensors = (
        torch.ones(61, 16, dtype=torch.float64),
        torch.zeros(61, dtype=torch.long),
    )
    with replaying([[0, 2, 4]] if dist.get_rank() == 0 else [[1, 3, 5]]):
        for x, y in made.loader:
            take_step(made, x, y)
    return made.engine.totals.get_trace().value[:6]


# ------------------------------------------------------------------ refusals


def parallel(module: nn.Module) -> nn.Module:
    return parallelize_module(
        module, init_device_mesh("cpu", (dist.get_world_size(),)), {"0": ColwiseParallel()}
    )


def refusals() -> list[tuple[str, str]]:
    """What make_private says to ways of training that cannot be accounted for, and what it
    should.
    """
    dataset = TensorDataset(torch.randn(9, 4), torch.randint(2, (9,)))
    plain, half = {"poisson_sampling": False}, MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (nn.parallel.DistributedDataParallel, {}, "before they are clipped"),
        (Wrapper, plain, "DistributedSampler(dataset"),
        (Wrapper, {**plain, "sampler": DistributedSampler(dataset)}, "drop_last=True"),
        (
            lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu")),
            {},
            "Use FSDP2",
        ),
        (lambda module: fully_shard(module, mp_policy=half), {}, "torch.autocast"),
        (
            lambda module: fully_shard(module, ignored_params={next(module.parameters())}),
            {},
            "0.weight",
        ),
        (parallel, {}, "each rank draws its own"),
        (fully_shard, {"grad_sample_mode": "hooks"}, "grad_sample_mode='auto'"),
        (fully_shard, {"grad_sample_mode": "ghost_fsdp"}, "support sharded weights"),
        (
            lambda module: fully_shard(nn.Sequential(module, nn.BatchNorm1d(2))),
            {},
            "batch normalisation",
        ),
    ]
    errors = []
    for wrap, options, noun in cases:
        module = wrap(nn.Sequential(nn.Linear(4, 2)))
        loader = DataLoader(dataset, batch_size=4, sampler=options.pop("sampler", None))
        try:
            FILPrivacyEngine().make_private(
                module, torch.optim.SGD(module.parameters(), lr=0.1), loader, **options
            )
        except Exception as error:
            errors.append((str(error), noun))
    with pytest.raises(ValueError, match="check it before"):
        check(fully_shard(nn.Linear(4, 2)), dataset[:])
    assert len(errors) == len(cases)
    return errors


def test_what_cannot_be_accounted_for_is_refused(two_ranks: RankPool) -> None:
    assert all(noun in error for errors in two_ranks.run(refusals) for error, noun in errors)


def known_batches() -> tuple[Tensor, list[list[int]], list[Any], str]:
    """Two passes without Poisson sampling, by a DistributedSampler that drops the rest.

    Then both ranks draw alike.
    """
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(9, 4), torch.randint(2, (9,)))
    sampler: Any = DistributedSampler(dataset, drop_last=True)
    plain = DataLoader(dataset, batch_size=2, sampler=sampler)
    made = start(nn.Linear(4, 2), plain, poisson_sampling=False)
    drawn, error = [], ""
    for epoch in range(3):
        sampler.set_epoch(epoch)
        sampler.rank = dist.get_rank() if epoch < 2 else 0
        for batch in made.loader:
            try:
                take_step(made, *batch)
            except RuntimeError as caught:
                error = str(caught)
                break
            drawn.append(list(batch._ids))
    history = list(made.engine.accountant.history)
    return made.engine.ledger.sums["participations"], drawn, history, error


def test_passes_over_parts_of_the_data(two_ranks: RankPool) -> None:
    (participations, drawn, history, error), (_, others, same, too) = two_ranks.run(known_batches)
    expected = torch.bincount(
        torch.tensor([i for draw in drawn + others for i in draw]), minlength=9
    )
    assert torch.equal(participations, expected)
    assert int(expected.sum()) == 16
    assert history == same == [(SIGMA, 1.0, 2)]
    assert "of ranks [0, 1]" in error
    assert error == too
