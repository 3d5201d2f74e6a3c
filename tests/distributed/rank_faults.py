"""Tasks in which one rank refuses a step, ranks disagree, or say something to each other."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.distributed.rank_runs import make, replaying, take_step
from tests.engine.hunger import room_for

DRAWS = [[[i, i + 1, i + 2] for i in range(0, 28, 4)], [[i, i + 1] for i in range(30, 58, 4)]]  # of 7 steps


def one_rank_refuses(step: str) -> tuple[str, list[Tensor], Tensor, int]:
    """Rank 1's third batch has a NaN; the error of this rank, and the run after the steps that remain."""
    made = make("digits", questions={})
    error = ""
    with replaying(DRAWS[dist.get_rank()]):
        for place, (x, y) in enumerate(made.loader):
            spoilt = place == 2
            if spoilt and dist.get_rank() == 1:
                x = x.clone().fill_(float("nan"))
            before = [p.detach().clone() for p in made.module.parameters()]
            try:
                take_step(made, x, y) if step == "loop" else made.engine.train_step(x, y)
                assert not spoilt
            except (RuntimeError, ValueError) as caught:
                error = f"{type(caught).__name__}: {caught}"
                assert all(torch.equal(a, b) for a, b in zip(before, made.module.parameters(), strict=True))
    ledger = made.engine.ledger
    assert ledger is not None
    steps = sum(count for *_, count in made.engine.accountant.history)
    return error, [p.detach().clone() for p in made.module.parameters()], ledger.sums["participations"], steps


def noise_differs() -> str:
    """A scheduler that only rank 1 steps."""
    made = make("digits", questions={})
    with replaying(DRAWS[dist.get_rank()]):
        for place, (x, y) in enumerate(made.loader):
            if place == 1 and dist.get_rank() == 1:
                made.optimizer.noise_multiplier *= 0.5
            try:
                take_step(made, x, y)
            except RuntimeError as error:
                return str(error)
    return ""


def refused_inside_a_logical_batch() -> list[str]:
    """Rank 1 refuses the first half of its second batch: nobody can go on."""
    made = make("digits", questions={})
    errors: list[str] = []
    with replaying(DRAWS[dist.get_rank()]):
        for place, (x, y) in enumerate(made.loader):
            if place == 1 and dist.get_rank() == 1:
                made.optimizer.signal_skip_step(do_skip=True)
                x = x.clone().fill_(float("nan"))
            try:
                take_step(made, x, y)
            except (RuntimeError, ValueError) as error:
                errors.append(str(error))
            if place == 2:
                break
    return errors


@contextlib.contextmanager
def counted_messages() -> Iterator[Counter[str]]:
    """The bytes that this rank hands to each of torch.distributed's collectives."""
    counts: Counter[str] = Counter()

    def counting(name: str, place: int) -> Any:
        plain = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            given = args[place]
            counts[name] += given.numel() * given.element_size() if isinstance(given, Tensor) else 1
            return plain(*args, **options)

        return mock.patch.object(dist, name, call)

    places = {"all_reduce": 0, "all_gather": 1, "all_gather_object": 1, "broadcast": 0}
    with contextlib.ExitStack() as stack:
        for name, place in places.items():
            stack.enter_context(counting(name, place))
        yield counts


def messages(**options: Any) -> tuple[list[dict[str, int]], dict[str, int], int]:
    """What this rank sends at each step, when it reads, and the bytes of a gradient."""
    made = make("digits", questions={}, **options)
    by_step = []
    with replaying(2 * DRAWS[dist.get_rank()]):
        for x, y in itertools.chain(made.loader, made.loader):
            with counted_messages() as sent:
                take_step(made, x, y)
            by_step.append(dict(sent))
    with counted_messages() as sent:
        made.engine.get_fil()
        made.engine.get_individual_epsilon(delta=1e-5)
        made.engine.leakage(delta=1e-5)
    gradient = sum(p.numel() * p.element_size() for p in made.module.parameters())
    return by_step, dict(sent), gradient


def reads_alone() -> tuple[list[float], list[float]]:
    """After gather() rank 0 reads and saves its state alone; the others go on."""
    made = make("digits", questions={})
    alone: list[float] = []
    with replaying(DRAWS[dist.get_rank()]):
        for x, y in made.loader:
            take_step(made, x, y)
        made.engine.gather()
        if dist.get_rank() == 0:
            alone = made.engine.get_fil().value.tolist()
            made.engine.state_dict()
    return alone, made.engine.get_fil().value.tolist()


def same_steps_are_skipped() -> tuple[Tensor, Tensor]:
    """Everybody is drawn at each step, of which about half are measured: how often each rank measured its own."""
    everybody = [list(range(0, 61, 2)), list(range(1, 61, 2))][dist.get_rank()]
    made = make("digits", questions={}, fil_rate=0.5)
    with replaying([everybody] * 14):
        for _ in range(2):
            for x, y in made.loader:
                take_step(made, x, y)
    ledger = made.engine.ledger
    assert ledger is not None
    return ledger.sums["trace_measured"], ledger.sums["participations"]


def probe_traces() -> Tensor:
    """Both ranks draw examples that look alike: their numbers differ by the probes alone."""
    made = make("digits", questions={}, estimator="weight-probes", num_probes=2)
    x = torch.ones(61, 16, dtype=torch.float64)
    made.loader.plain_dataset.tensors = (x, torch.zeros(61, dtype=torch.long))
    with replaying([[0, 2, 4], [], [], [], [], [], []] if dist.get_rank() == 0 else [[1, 3, 5], *([[]] * 6)]):
        for x, y in made.loader:
            take_step(made, x, y)
    return made.engine.totals.get_trace().value[:6]


def refused_settings() -> list[str]:
    """What make_private says to ways of training that cannot be accounted for."""
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as Wrapper

    from torchfil import FILPrivacyEngine

    dataset = TensorDataset(torch.randn(9, 4), torch.randint(2, (9,)))
    padded = DistributedSampler(dataset)
    cases: list[tuple[Any, dict[str, Any], Any]] = [
        (nn.parallel.DistributedDataParallel, {}, None),
        (Wrapper, {"rel_error": 0.1}, None),
        (Wrapper, {"poisson_sampling": False}, None),
        (Wrapper, {"poisson_sampling": False}, padded),
    ]
    errors = []
    for wrapper, options, sampler in cases:
        module = wrapper(nn.Linear(4, 2))
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        try:
            FILPrivacyEngine().make_private(module, torch.optim.SGD(module.parameters(), lr=0.1), loader, **options)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return errors


def known_batches() -> tuple[Tensor, list[list[int]], list[Any], str]:
    """Two passes without Poisson sampling, by a DistributedSampler that drops the rest; then both ranks draw alike."""
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as Wrapper

    from torchfil import FILPrivacyEngine

    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(9, 4), torch.randint(2, (9,)))
    module = nn.Linear(4, 2)
    sampler: Any = DistributedSampler(dataset, drop_last=True)
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    plain = DataLoader(dataset, batch_size=2, sampler=sampler)
    model, optimizer, loader = engine.make_private(Wrapper(module), optimizer, plain, poisson_sampling=False)
    drawn, error = [], ""
    for epoch in range(3):
        sampler.set_epoch(epoch)
        sampler.rank = dist.get_rank() if epoch < 2 else 0
        for batch in loader:
            x, y = batch
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            try:
                optimizer.step()
            except RuntimeError as caught:
                error = str(caught)
                break
            drawn.append(list(batch._ids))
    assert engine.ledger is not None
    return engine.ledger.sums["participations"], drawn, list(engine.accountant.history), error


def sketched() -> tuple[Tensor, Tensor, Tensor]:
    """The matrices of all examples, their products with the test matrix, and that one; rank 1 is idle at first."""
    made = make("digits", questions={}, track=("fim", "sketch"))
    with replaying(DRAWS[0] if dist.get_rank() == 0 else [[], [], *DRAWS[1]]):
        for x, y in made.loader:
            take_step(made, x, y)
    run = made.engine.state_dict()["run"]
    sums = run["ledger"]["sums"]
    return sums["fim"].cpu(), sums["sketch"].cpu(), run["test_matrix"].cpu()


def one_rank_runs_out_of_memory(most: int | None, step: str) -> tuple[list[Tensor], dict[str, Tensor], list[str], int]:
    """Rank 1 has room for so many examples from its third step on: weights, ledger, what it said, how it cuts now."""
    made = make("digits", questions={}, estimator="weight-probes", num_probes=2)
    limits = contextlib.nullcontext() if most is None or dist.get_rank() == 0 else room_for(most)
    with (
        replaying(DRAWS[dist.get_rank()]),
        warnings.catch_warnings(record=True) as told,
        contextlib.ExitStack() as stack,
    ):
        warnings.simplefilter("always")
        for place, (x, y) in enumerate(made.loader):
            if place == 2:
                stack.enter_context(limits)
            take_step(made, x, y) if step == "loop" else made.engine.train_step(x, y)
    ledger = made.engine.ledger
    assert ledger is not None
    said = [str(warning.message) for warning in told if "out of memory" in str(warning.message)]
    limit = made.engine._training.step.executor.memory_limit
    return [p.detach().clone() for p in made.module.parameters()], ledger.sums, said, limit


def one_rank_cannot_fit_an_example() -> str:
    """The error of each rank in a step for which rank 1 has no memory; the steps after it are taken."""
    made = make("digits", questions={})
    error = ""
    with replaying(DRAWS[dist.get_rank()]):
        for place, (x, y) in enumerate(made.loader):
            full = place == 3 and dist.get_rank() == 1
            try:
                with room_for(0) if full else contextlib.nullcontext(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    take_step(made, x, y)
            except RuntimeError as caught:
                error += str(caught)
    assert sum(count for *_, count in made.engine.accountant.history) == len(made.loader) - 1
    return error
