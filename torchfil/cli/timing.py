"""What the accounting costs on this machine: steps of a model, as multiples of a step of stock Opacus."""

from __future__ import annotations

import copy
import importlib
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil.engine import FILPrivacyEngine
from torchfil.engine.loader import plain, split_batch
from torchfil.papers.zoo import mnist_cnn
from torchfil.private import Private, as_call
from torchfil.utils.trees import map_tensors, tensors_of

Step = Callable[[], None]


@dataclass(frozen=True)
class StepTime:
    """The median time of a step, and its multiple of the unit's; or why it cannot be taken."""

    name: str
    milliseconds: float | None = None
    relative: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Job:
    """A model with a batch as its loader gives it.

    Attributes:
        model: On its device; it is left as it is.
        batch: On the same device.
        criterion: The loop's loss; None: the model's own, ``model(**batch).loss``.
        private: What is private.
    """

    model: nn.Module
    batch: Any
    criterion: Callable[[Any, Any], Tensor] | None = None
    private: Private | None = None

    @property
    def batch_size(self) -> int:
        """Examples in the batch."""
        return len(next(leaf for leaf in tensors_of(self.batch) if leaf.ndim))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """What the loop calls ``backward()`` on."""
        if self.criterion is not None:
            inputs, targets = split_batch(batch, None)
            args, kwargs = as_call(inputs)
            return self.criterion(model(*args, **kwargs), targets)
        outputs = model(**batch) if isinstance(batch, Mapping) else None
        loss = outputs["loss"] if isinstance(outputs, Mapping) and "loss" in outputs else getattr(outputs, "loss", None)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"{type(model).__name__} gives no loss of its own: return (model, batch, criterion), with the loop's "
                "loss(outputs, targets)"
            )
        return loss


def mnist_job(batch_size: int, device: str) -> Job:
    """Guo et al.'s MNIST network on random images."""
    torch.manual_seed(0)
    batch = (torch.rand(batch_size, 1, 28, 28).to(device), torch.randint(10, (batch_size,)).to(device))
    return Job(mnist_cnn().to(device), batch, nn.CrossEntropyLoss())


def named_job(name: str, device: str) -> Job:
    """What the function ``package.module:function`` returns: (model, batch), and criterion and ``Private`` where given.

    Raises:
        ValueError: There is no such function, or it returns something else.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name) or module_name.endswith(".py"):
        raise ValueError(
            f"--model {name!r} must be package.module:function; for a function f of a file job.py in this folder: job:f"
        )
    if str(Path.cwd()) not in sys.path:  # a file in this folder, as with python -m
        sys.path.insert(0, str(Path.cwd()))
    with own_errors(f"--model {name!r}, importing {module_name}"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--model {name!r}: {module_name} has no function {function_name!r}")

    with own_errors(f"--model {name!r}, calling {function_name}()"):
        parts = function()
    if not (isinstance(parts, tuple) and 2 <= len(parts) <= 4 and isinstance(parts[0], nn.Module)):
        raise ValueError(
            f"--model {name!r} must return (model, batch), (model, batch, criterion) or (model, batch, criterion, "
            f"private); it returned {type(parts).__name__}"
        )
    batch = map_tensors(lambda leaf: leaf.to(device), plain(parts[1]))
    return Job(parts[0].to(device).train(), batch, *parts[2:])


@contextmanager
def own_errors(doing: str) -> Iterator[None]:
    """Tell an error of the user's own code in one line, with the place in it.

    Raises:
        ValueError: Instead of an error that is no refusal by itself.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        installed = (str(Path(__file__).parents[1]), "site-packages")
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not any(folder in frame.filename for folder in installed)]
        place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        raise ValueError(f"{doing}: {type(error).__name__}: {error}{place}") from error


def step_times(
    job: Job,
    *,
    repeats: int = 5,
    device: str = "cpu",
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[StepTime]:
    """Steps of the job's model, all variants in turns, the first turn not counted; the unit comes first.

    The unit is a step of stock Opacus with hooks; of plain training where Opacus cannot take it.

    Args:
        job: The model.
        repeats: Turns.
        device: Where.
        progress: Wraps the turns, e.g. a progress bar.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    variants: dict[str, Callable[[], Step]] = {
        "stock Opacus (hooks)": lambda: _opacus_step(job),
        "plain training": lambda: _plain_step(job),
        "training loop, 1 probe": lambda: _engine_step(job, num_probes=1, whole_step=False),
        "engine.train_step, 1 probe": lambda: _engine_step(job, num_probes=1, whole_step=True),
        "engine.train_step, 3 probes": lambda: _engine_step(job, num_probes=3, whole_step=True),
    }
    steps: dict[str, Step] = {}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    failed: dict[str, str] = {}

    # in turns, so that a busy moment of the machine hits all of them alike
    for _ in progress(range(repeats + 1)):
        for name in [name for name in variants if name not in failed]:
            try:
                if name not in steps:
                    steps[name] = variants[name]()
                start = time.perf_counter()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    steps[name]()
                if device.startswith("cuda"):
                    torch.cuda.synchronize()
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                failed[name] = " ".join(str(error).split())[:200] or type(error).__name__
                continue
            seconds[name].append(time.perf_counter() - start)
    return _in_units(seconds, failed)


def _in_units(seconds: Mapping[str, list[float]], failed: Mapping[str, str]) -> list[StepTime]:
    """Medians as multiples of the first that could be taken, which comes first."""
    median = {name: 1e3 * statistics.median(times[1:]) for name, times in seconds.items() if name not in failed}
    unit = next(iter(median.values()), None)
    taken = [StepTime(name, value, value / unit) for name, value in median.items() if unit is not None]
    return [*taken, *(StepTime(name, failed=reason) for name, reason in failed.items())]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


def _loop_step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    job.loss(model, batch).backward()
    optimizer.step()


def _plain_step(job: Job) -> Step:
    model = copy.deepcopy(job.model)
    return partial(_loop_step, job, model, _sgd(model), job.batch)


def _opacus_step(job: Job) -> Step:
    model = GradSampleModule(copy.deepcopy(job.model))
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": job.batch_size}
    return partial(_loop_step, job, model, DPOptimizer(_sgd(model), **options), job.batch)


def _engine_step(job: Job, *, num_probes: int, whole_step: bool) -> Step:
    module = copy.deepcopy(job.model)
    engine = FILPrivacyEngine()
    numbers = TensorDataset(torch.arange(job.batch_size))
    model, optimizer, loader = engine.make_private(
        module,
        _sgd(module),
        DataLoader(numbers, batch_size=job.batch_size, collate_fn=lambda rows: job.batch),
        criterion=job.criterion,
        private=job.private,
        num_probes=num_probes,
        poisson_sampling=False,
    )

    def step() -> None:
        for batch in loader:  # one
            if not whole_step:
                _loop_step(job, model, optimizer, batch)
            elif job.criterion is None:
                engine.train_step(batch)
            else:
                engine.train_step(*split_batch(batch, None))

    return step
