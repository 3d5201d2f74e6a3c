"""Several private embeddings, and tables that are called several times: against reverse mode in float64."""

from __future__ import annotations

import contextlib
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


class Net(nn.Module):
    """Embeddings of these sizes and a head."""

    def __init__(self, width: int, **tables: tuple[int, int]) -> None:
        super().__init__()
        for name, size in tables.items():
            self.add_module(name, nn.Embedding(*size, padding_idx=self.padding))
        self.head = nn.Linear(width, 3)

    padding: int | None = None


class Table(Net):
    """Two categorical columns with a table each."""

    def forward(self, columns: Tensor) -> Tensor:
        return self.head(torch.cat([self.town(columns[:, 0]), self.job(columns[:, 1])], dim=1).tanh())


class Siamese(Net):
    """One table for two texts."""

    padding = 0

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(left).mean(dim=1) * self.words(right).sum(dim=1)))


class Behind(Net):
    """Positions come first inside."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens.t()).tanh().mean(dim=0))


class Windowed(Net):
    """It pads texts to a multiple of 4 itself, and padding enters the loss."""

    padding = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        padded = nn.functional.pad(input_ids, (0, -input_ids.shape[1] % 4), value=0)
        return self.head((self.words(padded) + 1).tanh().mean(dim=1))


class Repeated(Net):
    """Calls its table as often as it is told."""

    times = 1

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(sum(self.words(tokens).tanh().mean(dim=1) for _ in range(self.times)))


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
            with contextlib.ExitStack() as stack:
                for name, parts in waiting.items():
                    move = lambda _m, _i, output, parts=parts: output + parts.pop(0).reshape(output.shape)  # noqa: E731
                    stack.enter_context(model.get_submodule(name).register_forward_hook(move))
                return nn.functional.cross_entropy(functional_call(model, parameters, inputs), target)

        g = torch.cat([part.flatten() for part in grad(loss)(parameters).values()])
        return g / clip.c(g.norm() / clip.threshold(C))

    return jacrev(clipped)(torch.zeros(sum(sizes), dtype=torch.float64))


def check(model: nn.Module, inputs: tuple[Tensor, ...], private: Private, calls: Any) -> Examples:
    """The diagonal of every example's FIM against the truth; the recorded pass must agree with the mapped one.

    ``calls`` tells of an example which outputs of which table are its own, in the order of its calls.
    """
    model.double()
    y, settings = torch.randint(3, (len(inputs[0]),)), {"max_grad_norm": C, "noise_multiplier": STD / C}
    fim = fisher.exact_fim(model, nn.CrossEntropyLoss(), inputs, y, private=private, **settings)
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), inputs, y, private)
    kinds = RecordedJacobian, ClippedJacobian
    slopes = [kind(gradients, get_clip(DEFAULT_CLIP), C).norm_gradient() for kind in kinds]
    assert relative_error(*slopes) < 1e-9
    examples = Examples.build(inputs, y, private, model=model)
    maps = examples.maps(fim.diagonal(dim1=1, dim2=2))
    for i in range(len(y)):
        one = tuple(value[i : i + 1] for value in inputs)
        true = jacobian(model, one, y[i : i + 1], calls(i)).square().sum(dim=0) / STD**2
        ours = torch.cat([values[i].flatten() for values in maps.values()])
        assert relative_error(ours[~ours.isnan() & (ours != 0)], true) < 1e-9
    return examples


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def shapes(examples: Examples) -> dict[str, tuple[int, ...]]:
    return {name: tuple(values.shape) for name, values in examples.maps(examples.z).items()}


def test_two_categorical_columns_are_private_together() -> None:
    columns = torch.stack([torch.randint(5, (4,)), torch.randint(4, (4,))], dim=1)
    own = [("town", torch.ones(2, dtype=torch.bool)), ("job", torch.ones(3, dtype=torch.bool))]
    model = Table(5, town=(5, 2), job=(4, 3))
    assert shapes(check(model, (columns,), Private(submodule=["town", "job"]), lambda i: own)) == {
        "town": (4, 2),
        "job": (4, 3),
    }


def test_a_table_is_private_at_each_of_its_calls_and_padding_is_not() -> None:
    left, right = torch.randint(1, 7, (3, 4)), torch.randint(1, 7, (3, 2))
    left[1, 2:] = 0
    right[2, 1:] = 0

    def own(i: int) -> list[tuple[str, Tensor]]:
        return [("words", (text[i] != 0)[:, None].expand(-1, 2)) for text in (left, right)]

    examples = check(Siamese(2, words=(7, 2)), (left, right), Private(submodule="words"), own)
    assert examples.own_coordinates.tolist() == [12, 8, 10]
    assert shapes(examples) == {"words[0]": (3, 4, 2), "words[1]": (3, 2, 2)}


@pytest.mark.parametrize("given", ["tokens", "mask", "lengths"])
def test_padding_that_the_model_adds_is_not_private(given: str) -> None:
    tokens = torch.randint(1, 7, (3, 6))
    tokens[1, 4:] = 0
    inputs = (tokens,) if given == "tokens" else (tokens, (tokens != 0).long())
    private = Private(submodule="words", lengths=1 if given == "lengths" else None)
    own = nn.functional.pad(tokens != 0, (0, 2))[..., None].expand(-1, -1, 2)
    examples = check(Windowed(2, words=(7, 2)), inputs, private, lambda i: [("words", own[i])])
    assert examples.own_coordinates.tolist() == [12, 8, 12]


def test_outputs_with_the_positions_in_front() -> None:
    model, own = Behind(2, words=(7, 2)), [("words", torch.ones(4, 1, 2, dtype=torch.bool))]
    model.words.requires_grad_(False)
    check(model, (torch.randint(7, (3, 4)),), Private(submodule="words"), lambda i: own)


def test_a_table_that_is_called_as_often_as_the_values_say_is_refused() -> None:
    model = Repeated(2, words=(7, 2)).to(DEVICE, torch.float64)
    tokens, y = torch.randint(7, (3, 4), device=DEVICE), torch.randint(3, (3,), device=DEVICE)
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), tokens, y, Private(submodule="words"))
    model.times = 2
    with pytest.raises(ValueError, match="2 times"):
        gradients.gradients()
    with pytest.raises(ValueError, match="twice"):
        Private(submodule=["words", "words"])


def test_a_table_under_another_name_is_that_table() -> None:
    model = Repeated(2, shared=(7, 2), words=(7, 2))
    model.words.weight = model.shared.weight
    examples = Examples.build(torch.randint(7, (3, 4)), torch.zeros(3), Private(submodule="shared"), model=model)
    assert list(examples.maps(examples.z)) == ["words"]
