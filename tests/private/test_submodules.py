"""Several private embeddings, and tables that are called several times: against offsets as inputs,
in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE, relative_error
from tests.fisher.recorded_cases import Model
from torchfil import Private, fisher
from torchfil.clipping import DEFAULT_CLIP, get_clip
from torchfil.fisher import reference
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import RecordedJacobian
from torchfil.private import Examples

SETTINGS: dict[str, Any] = {"max_grad_norm": 0.8, "noise_multiplier": 0.9}


def net(
    run: Callable[..., Tensor], width: int, padding: int | None = None, **tables: tuple[int, int]
) -> nn.Module:
    """Embeddings of these sizes and a head.

    Called with offsets of the embeddings a, b, … where they are given.
    """
    torch.manual_seed(0)
    made = {name: nn.Embedding(*size, padding_idx=padding) for name, size in tables.items()}
    return Model(run, **made, head=nn.Linear(width, 3)).double()


def check(model: nn.Module, inputs: dict[str, Tensor], private: Private, **own: Tensor) -> Examples:
    """The diagonal of every example's FIM is that of offsets which are inputs, where ``own`` is
    true; else nothing.

    The recorded pass must agree with the mapped one.
    """
    y, loss = torch.randint(3, (len(next(iter(inputs.values()))),)), nn.CrossEntropyLoss()
    offsets = {name: torch.zeros(mask.shape, dtype=torch.float64) for name, mask in own.items()}
    arguments = (model, loss, {**inputs, **offsets}, y)
    true = reference.exact_fim(
        *arguments, private=Private(inputs=tuple(offsets)), **SETTINGS
    ).diagonal(dim1=1, dim2=2)
    fim = fisher.exact_fim(model, loss, inputs, y, private=private, **SETTINGS)
    examples = Examples.build(inputs, y, private, model=model)
    maps = examples.maps(fim.diagonal(dim1=1, dim2=2)).values()
    ours = torch.cat([values.flatten(1) for values in maps], dim=1).nan_to_num(0)
    mask = torch.cat([mask.flatten(1) for mask in own.values()], dim=1)
    for row in range(len(y)):
        assert relative_error(ours[row][ours[row] != 0], true[row][mask[row]]) < 1e-9
    gradients = ExampleGradients.build(model, loss, inputs, y, private)
    slopes = [
        jacobian.norm_gradient()
        for jacobian in (
            RecordedJacobian(gradients, Mechanism.build(0.8, 1.0)),
            ClippedJacobian(gradients, get_clip(DEFAULT_CLIP), 0.8),
        )
    ]
    assert relative_error(*slopes) < 1e-9
    return examples


def test_two_categorical_columns_are_private_together() -> None:
    def run(m: Any, x: Tensor, a: Any = 0, b: Any = 0) -> Tensor:
        return m.head(torch.cat([m.town(x[:, 0]) + a, m.job(x[:, 1]) + b], dim=1).tanh())

    columns = torch.stack([torch.randint(5, (4,)), torch.randint(4, (4,))], dim=1)
    own = {"a": torch.ones(4, 2, dtype=torch.bool), "b": torch.ones(4, 3, dtype=torch.bool)}
    check(
        net(run, 5, town=(5, 2), job=(4, 3)),
        {"x": columns},
        Private(submodule=["town", "job"]),
        **own,
    )


def test_a_table_is_private_at_each_of_its_calls_and_padding_is_not() -> None:
    def run(m: Any, left: Tensor, right: Tensor, a: Any = 0, b: Any = 0) -> Tensor:
        return m.head(torch.tanh((m.words(left) + a).mean(dim=1) * (m.words(right) + b).sum(dim=1)))

    left, right = torch.randint(1, 7, (3, 4)), torch.randint(1, 7, (3, 2))
    left[1, 2:] = 0
    right[2, 1:] = 0
    own = {
        name: (text != 0)[..., None].expand(-1, -1, 2) for name, text in (("a", left), ("b", right))
    }
    inputs = {"left": left, "right": right}
    examples = check(net(run, 2, 0, words=(7, 2)), inputs, Private(submodule="words"), **own)
    assert examples.own_coordinates.tolist() == [12, 8, 10]
    assert list(examples.maps(examples.z)) == ["words[0]", "words[1]"]


@pytest.mark.parametrize("given", ["tokens", "mask", "lengths"])
def test_padding_that_the_model_adds_is_not_private(given: str) -> None:
    def run(m: Any, input_ids: Tensor, attention_mask: Any = None, a: Any = 0) -> Tensor:
        padded = nn.functional.pad(input_ids, (0, -input_ids.shape[1] % 4), value=0)
        return m.head((m.words(padded) + a + 1).tanh().mean(dim=1))  # padding enters the loss

    tokens = torch.randint(1, 7, (3, 6))
    tokens[1, 4:] = 0
    inputs = {
        "input_ids": tokens,
        **({} if given == "tokens" else {"attention_mask": (tokens != 0).long()}),
    }
    private = Private(submodule="words", lengths="attention_mask" if given == "lengths" else None)
    own = nn.functional.pad(tokens != 0, (0, 2))[..., None].expand(-1, -1, 2)
    examples = check(net(run, 2, 0, words=(7, 2)), inputs, private, a=own)
    assert examples.own_coordinates.tolist() == [12, 8, 12]


def test_outputs_with_the_positions_in_front() -> None:
    def run(m: Any, tokens: Tensor, a: Any = None) -> Tensor:
        read = m.words(tokens.t())
        return m.head((read if a is None else read + a.transpose(0, 1)).tanh().mean(dim=0))

    model = net(run, 2, words=(7, 2))
    model.words.requires_grad_(False)
    own = torch.ones(3, 4, 2, dtype=torch.bool)
    check(model, {"tokens": torch.randint(7, (3, 4))}, Private(submodule="words"), a=own)


def repeated(m: Any, tokens: Tensor) -> Tensor:
    """Calls its table as often as it is told."""
    return m.head(sum(m.words(tokens).tanh().mean(dim=1) for _ in range(m.times)))


def test_a_table_that_is_called_as_often_as_the_values_say_is_refused() -> None:
    model = net(repeated, 2, words=(7, 2)).to(DEVICE)
    model.times = 1
    tokens, y = torch.randint(7, (3, 4), device=DEVICE), torch.randint(3, (3,), device=DEVICE)
    gradients = ExampleGradients.build(
        model, nn.CrossEntropyLoss(), tokens, y, Private(submodule="words")
    )
    model.times = 2
    with pytest.raises(ValueError, match="2 times"):
        gradients.gradients()
    with pytest.raises(ValueError, match="twice"):
        Private(submodule=["words", "words"])
