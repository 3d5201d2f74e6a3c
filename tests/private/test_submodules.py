"""Several private embeddings, and tables that are called several times: against reverse mode in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from tests.cases import DEVICE, relative_error
from tests.fisher.recorded_cases import Model
from torchfil import Private, fisher
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import RecordedJacobian
from torchfil.private import Examples

STD, C = 0.7, 0.8


def net(run: Callable[..., Tensor], width: int, padding: int | None = None, **tables: tuple[int, int]) -> nn.Module:
    """Embeddings of these sizes and a head."""
    made = {name: nn.Embedding(*size, padding_idx=padding) for name, size in tables.items()}
    return Model(run, **made, head=nn.Linear(width, 3)).double()


def windowed(m: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """It pads texts to a multiple of 4 itself, and padding enters the loss."""
    padded = nn.functional.pad(input_ids, (0, -input_ids.shape[1] % 4), value=0)
    return m.head((m.words(padded) + 1).tanh().mean(dim=1))


def repeated(m: Any, tokens: Tensor) -> Tensor:
    """Calls its table as often as it is told."""
    return m.head(sum(m.words(tokens).tanh().mean(dim=1) for _ in range(m.times)))


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


def test_two_categorical_columns_are_private_together() -> None:
    model = net(lambda m, x: m.head(torch.cat([m.town(x[:, 0]), m.job(x[:, 1])], 1).tanh()), 5, town=(5, 2), job=(4, 3))
    columns = torch.stack([torch.randint(5, (4,)), torch.randint(4, (4,))], dim=1)
    own = [("town", torch.ones(2, dtype=torch.bool)), ("job", torch.ones(3, dtype=torch.bool))]
    check(model, (columns,), Private(submodule=["town", "job"]), lambda i: own)


def test_a_table_is_private_at_each_of_its_calls_and_padding_is_not() -> None:
    model = net(lambda m, a, b: m.head(torch.tanh(m.words(a).mean(dim=1) * m.words(b).sum(dim=1))), 2, 0, words=(7, 2))
    left, right = torch.randint(1, 7, (3, 4)), torch.randint(1, 7, (3, 2))
    left[1, 2:] = 0
    right[2, 1:] = 0

    def own(i: int) -> list[tuple[str, Tensor]]:
        return [("words", (text[i] != 0)[:, None].expand(-1, 2)) for text in (left, right)]

    examples = check(model, (left, right), Private(submodule="words"), own)
    assert examples.own_coordinates.tolist() == [12, 8, 10]
    shapes = {name: tuple(values.shape) for name, values in examples.maps(examples.z).items()}
    assert shapes == {"words[0]": (3, 4, 2), "words[1]": (3, 2, 2)}


@pytest.mark.parametrize("given", ["tokens", "mask", "lengths"])
def test_padding_that_the_model_adds_is_not_private(given: str) -> None:
    tokens = torch.randint(1, 7, (3, 6))
    tokens[1, 4:] = 0
    inputs = (tokens,) if given == "tokens" else (tokens, (tokens != 0).long())
    private = Private(submodule="words", lengths=1 if given == "lengths" else None)
    own = nn.functional.pad(tokens != 0, (0, 2))[..., None].expand(-1, -1, 2)
    examples = check(net(windowed, 2, 0, words=(7, 2)), inputs, private, lambda i: [("words", own[i])])
    assert examples.own_coordinates.tolist() == [12, 8, 12]


def test_outputs_with_the_positions_in_front() -> None:
    model = net(lambda m, tokens: m.head(m.words(tokens.t()).tanh().mean(dim=0)), 2, words=(7, 2))
    model.words.requires_grad_(False)
    own = [("words", torch.ones(4, 1, 2, dtype=torch.bool))]
    check(model, (torch.randint(7, (3, 4)),), Private(submodule="words"), lambda i: own)


def test_a_table_that_is_called_as_often_as_the_values_say_is_refused() -> None:
    model = net(repeated, 2, words=(7, 2)).to(DEVICE)
    model.times = 1
    tokens, y = torch.randint(7, (3, 4), device=DEVICE), torch.randint(3, (3,), device=DEVICE)
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), tokens, y, Private(submodule="words"))
    model.times = 2
    with pytest.raises(ValueError, match="2 times"):
        gradients.gradients()
    with pytest.raises(ValueError, match="twice"):
        Private(submodule=["words", "words"])


def test_a_table_under_another_name_is_that_table() -> None:
    model = net(repeated, 2, shared=(7, 2), words=(7, 2))
    model.words.weight, model.times = model.shared.weight, 1
    examples = Examples.build(torch.randint(7, (3, 4)), torch.zeros(3), Private(submodule="shared"), model=model)
    assert list(examples.maps(examples.z)) == ["words"]
