"""Compiled passes against the same passes as they are, on other examples and weights than they were recorded with."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import CASES, DEVICE, SIGMA, build, grouped, relative_error
from tests.fisher.recorded_cases import LAYERS, Flat
from torchfil import FILPrivacyEngine, zoo
from torchfil.engine.step import captured as passes_module
from torchfil.engine.step.captured import CapturedPasses
from torchfil.engine.step.values import StepValues, Wanted, check_compiled
from torchfil.fisher import PoissonAmplification
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import RecordedJacobian
from torchfil.fisher.recording import compiled as compiled_module
from torchfil.fisher.recording.compiled import CompilationError, CompiledPass
from torchfil.fisher.rules.products import exact_convolutions
from torchfil.fisher.rules.tracing import being_traced

pytestmark = pytest.mark.torch_versions
MECHANISM = Mechanism.build(1.0, SIGMA, "gelu", PoissonAmplification(0.1))


def everything(gradients: ExampleGradients, probes: Tensor, at_once: int = 1) -> dict[str, Any]:
    """What a step asks for, by name."""
    jacobian = RecordedJacobian(gradients, MECHANISM.clip, 1.0)
    return {
        "norm": jacobian.norm,
        "slope": jacobian.clipped_norm_gradient,
        "folded": jacobian.folded_row(MECHANISM, probes[0]),
        "perpendicular": torch.stack(list(jacobian.perpendicular_rows(probes[1:], at_once))),
        "sums": jacobian.clipped_sum(),
        "losses": jacobian.losses,
        "nothing": None,
    }


def compare(
    before: ExampleGradients, after: ExampleGradients, backend: str = "eager", tolerance: float = 1e-10
) -> None:
    """Record with one set, run with the other, whose probes differ, too."""
    size = (3, before.num_parameters)
    probes = [torch.randn(size, dtype=before.dtype, device=DEVICE) for _ in range(2)]
    compiled = CompiledPass(partial(everything, at_once=2), before, probes[0], backend=backend)
    assert not being_traced()
    got, want = compiled(after, probes[1]), everything(after, probes[1])
    got_sums, want_sums = got.pop("sums"), want.pop("sums")
    assert set(got) == set(want)
    assert set(got_sums) == set(want_sums)
    assert got.pop("nothing") is want.pop("nothing") is None
    for name in want_sums:
        scale = float(want_sums[name].abs().max())
        assert torch.allclose(got_sums[name], want_sums[name], rtol=tolerance, atol=tolerance * scale), name
    for name in want:
        assert relative_error(got[name], want[name]) < tolerance, name


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded is run as it is. torch.compile reads it anew, which takes most of the time: test_models."""
    monkeypatch.setattr(torch, "compile", lambda recorded, **_: recorded)


TRACED_IN_THEIR_OWN_WAY = [name for name in LAYERS if "conv2d" in name or name == "groupnorm"]


@pytest.mark.parametrize("name", [*TRACED_IN_THEIR_OWN_WAY, "linear on few tokens", "layernorm", "conv1d", "prelu"])
@pytest.mark.usefixtures("without_compiler")
def test_each_layer_alone(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    passes = []
    for _ in range(2):
        model = Flat(make()).to(DEVICE).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(3, *shape, device=DEVICE).double()
        with torch.no_grad():
            y = torch.randn_like(model(x))
        passes.append(ExampleGradients.build(model, nn.MSELoss(), x, y))
    compare(*passes)


def compare_case(name: str) -> None:
    cases = [build(name, 3, seed=seed) for seed in (0, 1)]
    compare(*(ExampleGradients.build(*case.arguments, case.private) for case in cases))


LARGER = ("mnist_cnn", "groupnorm_residual", "transformer")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGER)) for name in ("two_inputs", *LARGER)]
)
def test_models(name: str) -> None:
    compare_case(name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGER)) for name in CASES if name != "two_inputs"],
)
@pytest.mark.usefixtures("without_compiler")
def test_recorded_models(name: str) -> None:
    compare_case(name)


def passes_of(model: nn.Module, shape: tuple[int, ...], batch: int = 3) -> list[ExampleGradients]:
    """The same network with other examples, and other weights in place."""
    torch.manual_seed(0)
    found = []
    for _ in range(2):
        x, y = torch.rand(batch, *shape), torch.randint(3, (batch,))
        network = copy.deepcopy(model).to(DEVICE)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
        dtype = next(network.parameters()).dtype
        found.append(ExampleGradients.build(network, nn.CrossEntropyLoss(), x.to(DEVICE, dtype), y.to(DEVICE)))
    return found


def small_network() -> nn.Module:
    convolutions = [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(4, 8, 3, stride=2)]
    return nn.Sequential(*convolutions, nn.GroupNorm(2, 8), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@pytest.mark.parametrize(
    "backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=[pytest.mark.long, NEEDS_COMPILER])]
)
def test_inductor_gives_the_same(backend: str) -> None:
    """Strides and poolings that overlap, and probes worked at together; in short without inductor's C++."""
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Conv2d(1, 4, 3, stride=2, padding=2), nn.Tanh(), nn.AvgPool2d(2, 1)]
    if backend == "inductor":
        layers += [nn.Conv2d(4, 3, 3, stride=2), nn.Tanh()]
    network = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))
    network(torch.zeros(1, 1, 9, 9))
    before, after = passes_of(network.double(), (1, 9, 9))

    def run(gradients: ExampleGradients, probes: Tensor, at_once: int) -> list[Tensor]:
        jacobian = RecordedJacobian(gradients, MECHANISM.clip, 1.0)
        rows = torch.stack(list(jacobian.perpendicular_rows(probes, at_once)))
        return [jacobian.norm, jacobian.norm_gradient, rows]

    probes = torch.randn(2, 3, before.num_parameters, dtype=torch.float64, device=DEVICE)
    compiled = CompiledPass(partial(run, at_once=3), before, probes[0], backend=backend)
    for found, true in zip(compiled(after, probes[1]), run(after, probes[1], 1), strict=True):
        assert relative_error(found, true) < 1e-9


def test_inductor_knows_its_options() -> None:
    torch.compile(nn.Linear(2, 2), options=compiled_module._options())  # unknown ones are refused before compiling
    with pytest.raises(RuntimeError, match="no_such_option"):
        torch.compile(nn.Linear(2, 2), options={"no_such_option": True})


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cpu", reason="in float32 on a GPU")
@pytest.mark.parametrize("make", [zoo.mnist_cnn, zoo.cifar_cnn])
def test_inductor_in_single_precision(make: Any) -> None:
    shape = (1, 28, 28) if make is zoo.mnist_cnn else (3, 32, 32)
    with exact_convolutions():
        compare(*passes_of(make(), shape, batch=17), backend="inductor", tolerance=1e-4)


def test_a_pass_that_looks_at_values_is_refused() -> None:
    gradients = ExampleGradients.build(*build("mlp", 3).arguments)

    def looks(gradients: ExampleGradients, _: Any) -> Tensor:
        return gradients.examples.z * float(gradients.examples.z.sum())

    with pytest.raises(CompilationError, match=r"\.item|data-dependent|value"):
        CompiledPass(looks, gradients, backend="eager")


class _Pretended:
    """A captured pass that gives its size."""

    def __init__(self, size: int, compiled: bool = False, probes_at_once: int = 1) -> None:
        self.size, self.compiled, self.probes_at_once = size, compiled, probes_at_once

    def replay(self, examples: Any, wanted: Wanted, look: Any, *, begun: bool = False) -> Any:
        assert len(examples) <= self.size
        return self


class _Choosing(CapturedPasses):
    """Captures and compiles nothing."""

    def __init__(self, expected_batch: int, failing: bool = False) -> None:
        super().__init__(expected_batch, compiled=True)
        self.failing = failing

    def _capture(self, batch: PrivateBatch, wanted: Wanted, size: int, **how: Any) -> Any:
        if how.get("compiled") and self.failing:
            raise CompilationError("no compiler")
        return _Pretended(size, **how)


def served(passes: CapturedPasses, gradients: ExampleGradients, count: int) -> tuple[int, bool]:
    """The size of the pass that so many examples are given to, and whether it is compiled."""
    found = replayed(passes, gradients, count, probes=1, room=1000)
    return found.size, found.compiled


def replayed(passes: CapturedPasses, gradients: ExampleGradients, count: int, probes: int, room: int) -> Any:
    part = replace(gradients, examples=gradients.examples[slice(0, count)])
    return passes.run(
        PrivateBatch(part, MECHANISM), Wanted((), "weight-probes", tuple(range(probes))), room, None, None
    )


@pytest.mark.parametrize(
    ("probes", "room", "at_once"), [(3, 1000, 3), (3, 128, 2), (3, 64, 1), (12, 1000, 12), (12, 128, 2)]
)
def test_memory_decides_how_many_probes_are_worked_at_together(probes: int, room: int, at_once: int) -> None:
    """``room`` is for so many examples; the passes are over 64."""
    passes, gradients = _Choosing(64), ExampleGradients.build(*build("mlp", 64).arguments)
    found = [replayed(passes, gradients, 60, probes, room) for _ in range(16)]
    assert {pretended.probes_at_once for pretended in found if not pretended.compiled} == {1}
    assert found[-1].compiled
    assert found[-1].probes_at_once == at_once


def test_a_pass_in_too_many_parts_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """Each part would be compiled by itself, for minutes."""
    passes, gradients = _Choosing(64), ExampleGradients.build(*build("mlp", 64).arguments)
    assert not any(replayed(passes, gradients, 60, 17, 128).compiled for _ in range(20))
    assert [record.message for record in caplog.records] == [
        "the step could not be compiled and continues uncompiled: it would need 9 compiled parts, because "
        "max_memory holds 2 of its 17 probes at once; raise max_memory or use fewer probes"
    ]


def test_sizes_that_come_up_often_are_compiled_and_serve_rare_ones() -> None:
    passes, gradients = _Choosing(64), ExampleGradients.build(*build("mlp", 100).arguments)
    for _ in range(15):
        assert served(passes, gradients, 60) == (64, False)
    assert served(passes, gradients, 60) == (64, True)
    assert served(passes, gradients, 64) == (64, True)
    assert served(passes, gradients, 53) == (64, True)
    assert served(passes, gradients, 40) == (40, False)
    assert served(passes, gradients, 65) == (72, False)
    for _ in range(15):
        found = served(passes, gradients, 70)
    assert found == (72, True)
    assert served(passes, gradients, 60) == (64, True)
    for _ in range(20):
        assert served(passes, gradients, 90) == (96, False)
        assert {served(passes, gradients, 60) for _ in range(9)} == {(64, True)}


def test_what_cannot_be_compiled_goes_on_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    passes, gradients = _Choosing(64, failing=True), ExampleGradients.build(*build("mlp", 100).arguments)
    found = [served(passes, gradients, 60) for _ in range(40)]
    assert found == [(64, False)] * 40
    assert [record.message for record in caplog.records] == [
        "the step could not be compiled and continues uncompiled: no compiler"
    ]


class _Uncaptured:
    """A captured pass without a GPU: it calls what it was given."""

    def __init__(self, gradients: ExampleGradients, size: int, stages: Any, pool: Any, num_stages: int) -> None:
        assert len(gradients) == size
        self.gradients, self.stages = gradients, stages
        assert len(list(stages(gradients))) == num_stages

    def replay(self, examples: Any, look: Any, *, begun: bool = False) -> Any:
        results = list(self.stages(self.gradients))
        for number, result in enumerate(results[:-1]):
            look(number, result)
        return results


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's graphs are real")
@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(("wrong", "expected"), [(None, (True, 3)), ("together", (True, 1)), ("always", (False, 1))])
def test_what_is_compiled_wrongly_is_not_used(
    wrong: str | None, expected: tuple[bool, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that come out too large by a thousandth of their size, from a compiler, are found."""
    case = build("two_inputs", 8)
    gradients = ExampleGradients.build(*case.arguments, case.private)
    wanted, batch = Wanted((), "weight-probes", (1, 2, 3)), PrivateBatch(gradients, MECHANISM)
    monkeypatch.setattr(passes_module, "CapturedPass", _Uncaptured)
    monkeypatch.setattr(passes_module, "CompiledPass", partial(CompiledPass, backend="eager"))
    monkeypatch.setattr(passes_module, "_USES_BEFORE_COMPILING", 2)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    true = RecordedJacobian.perpendicular_rows

    def rows(self: RecordedJacobian, probes: Any, at_once: int = 1) -> Any:
        spoilt = being_traced() and (wrong == "always" or (wrong == "together" and at_once > 1))
        return (row * 1.001 if spoilt else row for row in true(self, probes, at_once))

    monkeypatch.setattr(RecordedJacobian, "perpendicular_rows", rows)
    passes = CapturedPasses(8, compiled=True)
    with caplog.at_level("INFO", logger="torchfil.engine.step.captured"):
        plain, *_, last = [passes.run(batch, wanted, 1000, None, None) for _ in range(3)]
    assert plain is not None
    assert last is not None
    assert plain.additions is not None
    assert last.additions is not None
    for name, value in plain.additions.items():
        assert relative_error(last.additions[name], value) < 1e-9, name
    (captured,) = passes._captured.values()
    assert (captured.compiled, captured.probes_at_once) == expected
    problems = [record.message for record in caplog.records if "off by" in record.message]
    assert len(problems) == {None: 0, "together": 1, "always": 3}[wrong]
    assert all("addition 'trace' off by" in problem for problem in problems)
    assert passes.compiled == (wrong != "always")


@pytest.mark.parametrize("part", ["losses", "norm", "clipped_norm", "sums", "additions", "output_gradients"])
def test_every_part_of_a_pass_is_confirmed(part: str) -> None:
    """A hundredth of a part makes the difference; rounding in a sum that should vanish makes none."""
    value = torch.linspace(-1.0, 2.0, 5)
    whole: dict[str, Any] = {name: value.clone() for name in ("losses", "norm", "clipped_norm")}
    whole |= {"sums": {"a": value.clone(), "b": torch.full((3,), 1e-8)}, "additions": {"trace": value.clone()}}
    true = StepValues(**whole, output_gradients=(value.clone(),))
    noisy = replace(true, sums={**true.sums, "b": torch.full((3,), -1e-8)})
    check_compiled(noisy, true, torch.float32)

    def moved(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {**tree, next(iter(tree)): moved(next(iter(tree.values())))}
        return (moved(tree[0]),) if isinstance(tree, tuple) else tree + 0.02 * (torch.arange(5) == 3)

    other = replace(true, **{part: moved(getattr(true, part))})
    with pytest.raises(CompilationError, match=r"off by 0\.02, the largest being 2"):
        check_compiled(other, true, torch.float32)
    with pytest.raises(CompilationError, match="off by nan"):
        check_compiled(replace(true, norm=value * float("nan")), true, torch.float32)


def test_compiling_needs_graphs() -> None:
    model = nn.Linear(5, 3)
    dataset = TensorDataset(torch.randn(8, 5), torch.arange(8) % 3)
    with pytest.raises(ValueError, match="cuda_graphs=False"):
        FILPrivacyEngine().make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            DataLoader(dataset, batch_size=4),
            **grouped(noise_multiplier=1.0, max_grad_norm=1.0, cuda_graphs=False, compile=True),
        )


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs are compiled on a GPU only")
def test_a_compiled_run_is_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, losses and ledger, in float64; compiled after few steps."""
    monkeypatch.setattr(passes_module, "_USES_BEFORE_COMPILING", 2)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(48, 3, 6, 6, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(images, torch.randint(3, (48,), generator=generator))
    runs = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = small_network().double().to(DEVICE)
        engine = FILPrivacyEngine()
        _, _, private = engine.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.3),
            DataLoader(dataset, batch_size=16, generator=torch.Generator().manual_seed(2)),
            **grouped(
                noise_multiplier=SIGMA,
                max_grad_norm=1.0,
                criterion=nn.CrossEntropyLoss(),
                noise_generator=torch.Generator(device=DEVICE).manual_seed(3),
                seed=4,
                compile=compiled,
            ),
        )
        losses = [engine.train_step(x, y) for _ in range(4) for x, y in private]
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        runs.append((torch.stack(losses), weights, engine.get_fil().value))
        captured = engine._training.pipeline.evaluator._captured_passes()._captured.values()
        assert any(known.compiled for known in captured) == compiled
    for plain, other in zip(*runs, strict=True):
        assert relative_error(other, plain) < 1e-8


def test_of_many_kinds_those_that_come_again_are_captured() -> None:
    """Sixteen at their first use, further ones at their third; what is remembered of others is bounded."""
    passes = CapturedPasses(8)
    passes._captured = {(k, 8): _Pretended(8) for k in range(16)}  # type: ignore[misc]
    assert not passes._comes_too_rarely(3, 8)
    assert [passes._comes_too_rarely("new", 8) for _ in range(3)] == [True, True, False]
    for k in range(1000):
        assert passes._comes_too_rarely(("other", k), 8)
    assert len(passes._asked) <= 256
