"""Several private embeddings, and tables that are called several times: against reverse mode in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from tests.cases import DEVICE, relative_error
from torchfil import Private, fisher
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import RecordedJacobian
from torchfil.private import Examples

STD, C = 0.7, 0.8


class Table(nn.Module):
    """Two categorical columns with a table each."""

    def __init__(self) -> None:
        super().__init__()
        self.town, self.job, self.head = nn.Embedding(5, 2), nn.Embedding(4, 3), nn.Linear(5, 3)

    def forward(self, columns: Tensor) -> Tensor:
        both = torch.cat([self.town(columns[:, 0]), self.job(columns[:, 1])], dim=1)
        out: Tensor = self.head(both.tanh())
        return out


class Siamese(nn.Module):
    """One table for two texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 2, padding_idx=0), nn.Linear(2, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.words(left).mean(dim=1) * self.words(right).sum(dim=1)))
        return out


class Behind(nn.Module):
    """Positions come first inside."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 2), nn.Linear(2, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(tokens.t()).tanh().mean(dim=0))
        return out


class Windowed(nn.Module):
    """It pads texts to a multiple of 4 itself, and padding enters the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 2, padding_idx=0), nn.Linear(2, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        padded = nn.functional.pad(input_ids, (0, -input_ids.shape[1] % 4), value=0)
        out: Tensor = self.head((self.words(padded) + 1).tanh().mean(dim=1))
        return out


def jacobian(
    model: nn.Module, inputs: tuple[Tensor, ...], target: Tensor, calls: Sequence[tuple[str, Tensor]]
) -> Tensor:
    """∂g̃/∂z of one example, [p, d]: z moves the outputs at the own positions (a mask) of these calls, in order."""
    parameters = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    clip, sizes = get_clip(DEFAULT_CLIP), [int(own.sum()) for _, own in calls]

    def clipped(z: Tensor) -> Tensor:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            waiting: dict[str, list[Tensor]] = {name: [] for name, _ in calls}
            for (name, own), part in zip(calls, z.split(sizes), strict=True):
                waiting[name].append(torch.zeros(own.shape, dtype=z.dtype).index_put(tuple(own.nonzero().T), part))
            handles = [
                model.get_submodule(name).register_forward_hook(
                    lambda _m, _i, output, name=name: output + waiting[name].pop(0).reshape(output.shape)
                )
                for name in waiting
            ]
            try:
                value = nn.functional.cross_entropy(functional_call(model, parameters, inputs), target)
            finally:
                for handle in handles:
                    handle.remove()
            return value

        g = torch.cat([part.flatten() for part in grad(loss)(parameters).values()])
        return g / clip.c(g.norm() / clip.threshold(C))

    result: Tensor = jacrev(clipped)(torch.zeros(sum(sizes), dtype=torch.float64))
    return result


def diagonals(model: nn.Module, inputs: Any, y: Tensor, private: Private) -> Tensor:
    """The diagonal of every example's FIM, [batch, d]; the recorded pass must agree with the mapped one."""
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), inputs, y, private)
    exact = fisher.exact_fim(
        model, nn.CrossEntropyLoss(), inputs, y, max_grad_norm=C, noise_multiplier=STD / C, private=private
    ).diagonal(dim1=1, dim2=2)
    slopes = [
        kind(gradients, get_clip(DEFAULT_CLIP), C).norm_gradient() for kind in (ClippedJacobian, RecordedJacobian)
    ]
    assert relative_error(slopes[1], slopes[0]) < 1e-9
    return exact


def test_two_categorical_columns_are_private_together() -> None:
    torch.manual_seed(0)
    model = Table().to(torch.float64)
    columns, y = torch.stack([torch.randint(5, (4,)), torch.randint(4, (4,))], dim=1), torch.randint(3, (4,))
    private = Private(submodule=["town", "job"])
    exact = diagonals(model, columns, y, private)
    for i, row in enumerate(exact):
        own = [("town", torch.ones(2, dtype=torch.bool)), ("job", torch.ones(3, dtype=torch.bool))]
        true = jacobian(model, (columns[i : i + 1],), y[i : i + 1], own).square().sum(dim=0) / STD**2
        assert relative_error(row, true) < 1e-9
    maps = Examples.build(columns, y, private, model=model).maps(exact)
    assert {name: tuple(values.shape) for name, values in maps.items()} == {"town": (4, 2), "job": (4, 3)}


def test_a_table_is_private_at_each_of_its_calls_and_padding_is_not() -> None:
    torch.manual_seed(0)
    model = Siamese().to(torch.float64)
    left, right, y = torch.randint(1, 7, (3, 4)), torch.randint(1, 7, (3, 2)), torch.randint(3, (3,))
    left[1, 2:] = 0
    right[2, 1:] = 0
    private = Private(submodule="words")
    exact = diagonals(model, (left, right), y, private)
    examples = Examples.build((left, right), y, private, model=model)
    assert examples.own_coordinates.tolist() == [12, 8, 10]  # type: ignore[union-attr]
    maps = examples.maps(exact)
    assert {name: tuple(values.shape) for name, values in maps.items()} == {
        "words[0]": (3, 4, 2),
        "words[1]": (3, 2, 2),
    }
    for i in range(3):
        own = [("words", (text[i] != 0)[:, None].expand(-1, 2)) for text in (left, right)]
        true = jacobian(model, (left[i : i + 1], right[i : i + 1]), y[i : i + 1], own).square().sum(dim=0) / STD**2
        ours = torch.cat([values[i].flatten() for values in maps.values()])
        assert relative_error(ours[~ours.isnan()], true) < 1e-9
        assert relative_error(exact[i].sum(), true.sum()) < 1e-9


@pytest.mark.parametrize("given", ["tokens", "mask", "lengths"])
def test_padding_that_the_model_adds_is_not_private(given: str) -> None:
    torch.manual_seed(0)
    model = Windowed().to(torch.float64)
    tokens, y = torch.randint(1, 7, (3, 6)), torch.randint(3, (3,))
    tokens[1, 4:] = 0
    inputs = (tokens,) if given == "tokens" else (tokens, (tokens != 0).long())
    private = Private(submodule="words", lengths=1 if given == "lengths" else None)
    exact = diagonals(model, inputs, y, private)
    examples = Examples.build(inputs, y, private, model=model)
    assert examples.own_coordinates.tolist() == [12, 8, 12]  # type: ignore[union-attr]
    for i in range(3):
        own = nn.functional.pad(tokens[i] != 0, (0, 2))[:, None].expand(-1, 2)
        true = jacobian(model, (tokens[i : i + 1],), y[i : i + 1], [("words", own)]).square().sum(dim=0) / STD**2
        assert relative_error(exact[i][exact[i] != 0], true) < 1e-9


def test_outputs_with_the_positions_in_front() -> None:
    torch.manual_seed(0)
    model = Behind().to(torch.float64)
    model.words.requires_grad_(False)
    tokens, y = torch.randint(7, (3, 4)), torch.randint(3, (3,))
    exact = diagonals(model, tokens, y, Private(submodule="words"))
    for i, row in enumerate(exact):
        own = [("words", torch.ones(4, 1, 2, dtype=torch.bool))]
        true = jacobian(model, (tokens[i : i + 1],), y[i : i + 1], own).square().sum(dim=0) / STD**2
        assert relative_error(row, true) < 1e-9


def test_a_table_that_is_called_as_often_as_the_values_say_is_refused() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head, self.times = nn.Embedding(7, 2), nn.Linear(2, 3), 1

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(sum(self.words(tokens).tanh().mean(dim=1) for _ in range(self.times)))
            return out

    model = Changing().to(DEVICE, torch.float64)
    tokens, y = torch.randint(7, (3, 4), device=DEVICE), torch.randint(3, (3,), device=DEVICE)
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), tokens, y, Private(submodule="words"))
    model.times = 2
    with pytest.raises(ValueError, match="'words' is called 2 times in one forward pass, and 1 times in the pass"):
        gradients.gradients()
    with pytest.raises(ValueError, match="names one submodule twice"):
        Private(submodule=["words", "words"])


def test_a_table_under_another_name_is_that_table() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.words, self.head = nn.Embedding(7, 2), nn.Embedding(7, 2), nn.Linear(2, 3)
            self.words.weight = self.shared.weight

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.words(tokens).mean(dim=1))
            return out

    model, tokens = Shared(), torch.randint(7, (3, 4))
    examples = Examples.build(tokens, torch.zeros(3), Private(submodule="shared"), model=model)
    assert list(examples.maps(examples.z)) == ["words"]
