"""The default loop against brute force: blocks of the day, dropout of every spelling, all ways in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from tests.cases import DEVICE
from tests.engine.architectures import ConvNeXt, Encoder
from tests.engine.brute_force import (
    C,
    assert_released,
    assert_true,
    clipped_gradients,
    images,
    make,
    texts,
    train,
    truth,
)
from torchfil import Private

EMBEDDING = Private(submodule="embedding")
WAYS = ("auto", "hooks", "train_step")


def convnext(kernel: int = 3, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return ConvNeXt(kernel, dropout).double()


def encoder(kind: str = "by hand", dropout: float = 0.0, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Encoder(kind, dropout, **options).double()


class Perceptron(nn.Module):
    """Dropout by a layer, by a function and by hand, on [batch, 1, 4, 4] images."""

    def __init__(self, dropout: float = 0.3, by: str = "all") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(16, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        self.dropout = nn.Dropout(dropout if by in ("all", "layer") else 0.0)
        self.by_function = dropout if by in ("all", "function") else 0.0
        self.by_hand = dropout if by in ("all", "hand") else 0.0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.first(x.flatten(1)).tanh())
        h = F.dropout(self.second(h).tanh(), self.by_function, self.training)
        if self.training and self.by_hand:
            h = h * h.new_empty(len(h), 1).bernoulli_(1 - self.by_hand)
        logits: Tensor = self.last(h)
        return logits


class Behind(nn.Module):
    """Uses a child's weight behind its back, in an operation of which nothing is known."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.dropout = nn.Linear(16, 5), nn.Linear(5, 3), nn.Dropout(dropout)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.tensordot(x.flatten(1), self.layer.weight, dims=([1], [1])) + self.layer.bias
        logits: Tensor = self.head(self.dropout(scores.tanh()))
        return logits


class ReadyMade(nn.Module):
    """torch's encoder layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout, "gelu", batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embedding(tokens)).mean(dim=1))
        return logits


class TestArchitectures:
    @pytest.mark.parametrize("dropout", [0.0, 0.1])
    @pytest.mark.parametrize("kernel", [3, 7])
    def test_convnext(self, kernel: int, dropout: float, caplog: pytest.LogCaptureFixture) -> None:
        assert_true(train(make(convnext(kernel, dropout), images())))
        assert "mapped over examples" not in caplog.text

    @pytest.mark.product
    @pytest.mark.parametrize("dropout", [0.0, 0.1])
    @pytest.mark.parametrize("kind", ["by hand", "fused", "opacus", "torch"])
    @pytest.mark.parametrize("norm_first", [True, False])
    def test_encoder(self, kind: str, dropout: float, norm_first: bool, caplog: pytest.LogCaptureFixture) -> None:
        module = encoder(kind, dropout, norm_first=norm_first)
        assert_true(train(make(module, texts(), private=EMBEDDING), steps=2), private=EMBEDDING)
        assert "mapped over examples" not in caplog.text

    def test_torchs_attention_needs_opacus_remedy_under_hooks_only(self) -> None:
        assert_true(train(make(encoder("torch"), texts(), private=EMBEDDING), steps=2), private=EMBEDDING)
        with pytest.raises(ValueError, match="DPMultiheadAttention"):
            make(encoder("torch", 0.1), texts(), private=EMBEDDING, grad_sample_mode="hooks")
        fixed = ModuleValidator.fix(encoder("torch", 0.1)).double()
        assert_true(train(make(fixed, texts(), private=EMBEDDING), steps=2), private=EMBEDDING)

    @pytest.mark.parametrize("dropout", [0.0, 0.1])
    def test_an_encoder_layer_of_torch(self, dropout: float) -> None:
        torch.manual_seed(0)
        for module in (ReadyMade(dropout).double(), ModuleValidator.fix(ReadyMade(dropout)).double()):
            assert_true(train(make(module, texts(), private=EMBEDDING), steps=2), private=EMBEDDING)

    @pytest.mark.parametrize("way", ["auto", "train_step"])
    def test_poissons_factors(self, way: str) -> None:
        """All options as they are by default, but for the estimator."""
        run = make(
            convnext(3, 0.1), images(), noise_multiplier=0.9, amplification=None, criterion=nn.CrossEntropyLoss()
        )
        assert_true(train(run, way=way), q=0.25, sigma=0.9)

    @pytest.mark.parametrize(
        ("build", "dataset", "private"),
        [
            pytest.param(convnext, images, None, marks=pytest.mark.slow, id="convnext"),
            pytest.param(encoder, texts, EMBEDDING, id="bert"),
        ],
    )
    def test_weight_probes(self, build: Any, dataset: Callable[[], Any], private: Private | None) -> None:
        run = make(build(dropout=0.1), dataset(), estimator="weight-probes", num_probes=200, private=private)
        traces, sums = truth(train(run, steps=2), private=private)
        assert_released(run, sums)
        trace = run.engine.totals.get_trace()
        assert bool(((trace.value.cpu() - traces).abs() <= 5 * trace.standard_error.cpu()).all())
        relative = trace.standard_error.cpu()[traces > 0] / traces[traces > 0]
        assert float(relative.max()) < 0.2, "few probes would show nothing"


class TestDropout:
    """What is accounted for and released are the gradients under the loop's own masks."""

    @pytest.mark.product
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("by", ["layer", "function", "hand", "all"])
    def test_ways_and_spellings(self, way: str, by: str) -> None:
        mode = "hooks" if way == "hooks" else "auto"
        run = make(Perceptron(by=by), images(), grad_sample_mode=mode, criterion=nn.CrossEntropyLoss())
        assert_true(train(run, way=way))

    @pytest.mark.parametrize("mode", ["auto", "hooks", "functorch"])
    def test_under_batch_memory_manager(self, mode: str) -> None:
        run = make(Perceptron(), images(), batch_size=6, grad_sample_mode=mode)
        assert_true(train(run, physical=2))
        assert max(map(len, run.passes)) > 1

    @pytest.mark.product
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("build", [Perceptron, lambda: Behind()], ids=["recorded", "mapped"])
    def test_in_chunks(self, way: str, build: Callable[[], nn.Module]) -> None:
        """With so little memory examples are worked at one by one."""
        mode = "hooks" if way == "hooks" else "auto"
        if mode == "hooks" and isinstance(build(), Behind):
            pytest.skip("Opacus's hooks cannot see it either")
        run = make(build(), images(), max_memory=1, grad_sample_mode=mode, criterion=nn.CrossEntropyLoss())
        assert_true(train(run, steps=2, way=way))

    @pytest.mark.parametrize("kind", ["fused", "opacus"])
    def test_attention_in_chunks(self, kind: str) -> None:
        run = make(encoder(kind, 0.2), texts(), batch_size=3, max_memory=1, private=EMBEDDING)
        assert_true(train(run, steps=1), private=EMBEDDING)

    @pytest.mark.parametrize("way", ["auto", "train_step"])
    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    def test_mapped_over_examples(self, way: str, dropout: float, caplog: pytest.LogCaptureFixture) -> None:
        if DEVICE == "cuda" and dropout and way == "auto":
            pytest.skip("a GPU draws by other operations where no gradient is wanted, and so in this loop's passes")
        run = make(Behind(dropout), images(), criterion=nn.CrossEntropyLoss())
        assert_true(train(run, way=way))
        told = [record.getMessage() for record in caplog.records if "mapped over examples" in record.getMessage()]
        assert len(told) == 1
        assert "layer.weight" in told[0]

    @pytest.mark.product
    @pytest.mark.parametrize("way", ["auto", "train_step"])
    @pytest.mark.parametrize("max_memory", [None, 1])
    @pytest.mark.parametrize("layout", ["time first", "flat", "shared", "shared alike"])
    def test_masks_that_do_not_run_over_the_examples_first(self, layout: str, max_memory: int | None, way: str) -> None:
        class Model(nn.Module):
            """A shared mask of 4 in batches of 4 looks like one of the examples."""

            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
                self.double()

            def forward(self, x: Tensor) -> Tensor:
                rows: Tensor = x[:, 0] if layout != "flat" else x.reshape(-1, 4)
                rows = rows.transpose(0, 1) if layout == "time first" else rows
                h = self.first(rows).tanh()
                if layout.startswith("shared"):
                    shape = (4,) if layout == "shared alike" else (1, 4)
                    h = h * F.dropout(torch.ones(shape, dtype=h.dtype, device=h.device), 0.4, self.training)
                else:
                    h = F.dropout(h, 0.4, self.training)
                logits: Tensor = self.last(h)
                if layout == "flat":
                    return logits.unflatten(0, (len(x), -1)).mean(dim=1)
                return logits.mean(dim=0 if layout == "time first" else 1)

        run = make(Model(), images(), poisson_sampling=False, max_memory=max_memory, criterion=nn.CrossEntropyLoss())
        assert_true(train(run, steps=2, way=way))

    @pytest.mark.parametrize("way", WAYS)
    def test_the_random_stream_is_that_of_a_plain_loop(self, way: str) -> None:
        """Neither a forward pass nor a step of the accounting draws more than the model itself does."""
        torch.manual_seed(0)
        mode = "hooks" if way == "hooks" else "auto"
        options = {"grad_sample_mode": mode, "criterion": nn.CrossEntropyLoss(), "track": ("diagonal",)}
        run = train(make(Perceptron(), images(), estimator="weight-probes", **options), way=way, steps=4)
        drawn = torch.rand(3, device=DEVICE)
        torch.manual_seed(4)
        for begun in [begun for passes in run.passes for begun in passes]:
            if begun.ids:
                run.plain(begun.x)
        assert torch.equal(torch.rand(3, device=DEVICE), drawn)

    def test_a_probability_that_changes_in_mid_training(self) -> None:
        run = make(Perceptron(by="layer"), images())
        for probability in (0.3, 0.0, 0.5):
            run.module.dropout.p = run.plain.dropout.p = probability  # type: ignore[union-attr]
            before = len(run.passes)
            train(run, steps=before + 2)
            assert_released_since(run, before)

    @pytest.mark.parametrize("way", WAYS)
    def test_parts_in_eval_mode(self, way: str) -> None:
        mode = "hooks" if way == "hooks" else "auto"
        run = make(Perceptron(by="layer"), images(), grad_sample_mode=mode, criterion=nn.CrossEntropyLoss())
        for training in (True, False, True):
            for module in (run.module, run.plain):
                module.dropout.train(training)  # type: ignore[union-attr]
            before = len(run.passes)
            train(run, steps=before + 1, way=way)
            assert_released_since(run, before)

    @pytest.mark.parametrize("way", WAYS)
    def test_batches_of_one_example_and_of_none(self, way: str) -> None:
        mode = "hooks" if way == "hooks" else "auto"
        options = {"grad_sample_mode": mode, "criterion": nn.CrossEntropyLoss()}
        run = train(make(Perceptron(), images(8), batch_size=1, **options), steps=12, way=way)
        assert {0, 1} <= {len(begun.ids) for passes in run.passes for begun in passes}
        assert_true(run)


def assert_released_since(run: Any, first: int) -> None:
    """Of the steps from this one on."""
    for passes, released in zip(run.passes[first:], run.released[first:], strict=True):
        parts = [clipped_gradients(run.plain, begun).sum(dim=0) for begun in passes if begun.ids]
        total = sum(parts, torch.zeros_like(released))
        assert float((released - total).norm()) < 1e-6 * max(float(total.norm()), C)
