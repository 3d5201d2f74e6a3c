"""What is private where little is said: floats, not masks; the embeddings of integers; padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfil import Private, fisher
from torchfil.private import Examples
from torchfil.private.submodules import embeddings_to_protect


class Model(nn.Module):
    """Calls what it is made of as told."""

    def __init__(self, forward: Any, **modules: nn.Module) -> None:
        super().__init__()
        self.told = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.told(self, *args, **kwargs)


def words() -> Tensor:
    return torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]])


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.segments = nn.Embedding(9, 2), nn.Embedding(9, 2), nn.Embedding(2, 2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, position_ids: Tensor
    ) -> Tensor:
        read: Tensor = self.words(input_ids) + self.segments(token_type_ids) + self.places(position_ids)
        return (read * attention_mask[..., None]).sum(dim=1)


def inputs() -> dict[str, Tensor]:
    zeros = torch.zeros(2, 4, dtype=torch.long)
    return {
        "input_ids": words(),
        "attention_mask": (words() != 0).float(),
        "token_type_ids": zeros,
        "position_ids": torch.arange(4).expand(2, 4),
    }


@pytest.mark.parametrize("by_name", [True, False])
def test_of_several_embeddings_that_of_the_text_is_private(by_name: bool) -> None:
    args, kwargs = ((), inputs()) if by_name else (tuple(inputs().values()), {})
    assert embeddings_to_protect(Named(), args, kwargs) == ("words",)
    examples = Examples.build(kwargs if by_name else args, None, Private(submodule="words"), model=Named())
    assert examples.own_coordinates.tolist() == [6, 2]  # type: ignore[union-attr]
    assert str(examples.layout).startswith("the output of 'words', 4×2, without positions masked by")


def test_an_empty_batch_tells_the_same() -> None:
    empty = {name: value[:0] for name, value in inputs().items()}
    assert embeddings_to_protect(Named(), (), empty) == ("words",)
    examples = Examples.build(empty, None, Private(submodule="words"), model=Named())
    assert examples.z.shape == (0, 8)
    whole = Examples.build(inputs(), None, Private(submodule="words"), model=Named())
    assert str(examples.layout) == str(whole.layout)


def test_a_floating_mask_is_not_private_by_itself() -> None:
    x = torch.randn(2, 4, 3)
    examples = Examples.build({"x": x, "attention_mask": inputs()["attention_mask"]}, None)
    assert torch.equal(examples.z, x.flatten(1))
    assert examples.own_coordinates.tolist() == [9, 3]  # type: ignore[union-attr]
    named = Examples.build({"attention_mask": inputs()["attention_mask"]}, None, Private(inputs="attention_mask"))
    assert named.z.shape == (2, 4)
    with pytest.raises(ValueError, match="no input is floating-point except masks, which are not private by default"):
        Examples.build({"input_ids": words(), "attention_mask": inputs()["attention_mask"]}, None)


def test_a_mask_of_a_text_says_nothing_of_other_inputs() -> None:
    given = {"input_ids": words(), "attention_mask": words() != 0, "pixel_values": torch.randn(2, 4, 3, 3)}
    assert Examples.build(given, None).own_coordinates == 36
    assert Examples.build({**given, "pixel_values": torch.randn(2, 4)}, None).own_coordinates == 4


def test_a_mask_may_be_infinite_but_not_nan() -> None:
    given = {"x": torch.randn(2, 4, 3), "attention_mask": torch.zeros(2, 4).masked_fill(words() == 0, -torch.inf)}
    assert Examples.build(given, None).own_coordinates.tolist() == [9, 3]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"inputs\['attention_mask'\] has NaN or infinite values in 2 of 2 rows"):
        Examples.build({**given, "attention_mask": torch.full((2, 4), torch.nan)}, None)
    with pytest.raises(ValueError, match=r"inputs\['x'\] has NaN or infinite values in 1 of 2 rows: 1"):
        Examples.build({**given, "x": torch.tensor([[0.0], [torch.inf]])}, None)


def test_torchs_own_padding_masks_are_true_at_padding() -> None:
    x = torch.randn(2, 4, 3)
    examples = Examples.build({"src": x, "src_key_padding_mask": words() == 0}, None)
    assert examples.own_coordinates.tolist() == [9, 3]  # type: ignore[union-attr]


def test_embeddings_of_all_columns_and_those_that_share_a_table() -> None:
    def columns(model: Any, x: Tensor) -> Any:
        return model.town(x[:, 0]) + model.job(x[:, 1])

    assert embeddings_to_protect(Model(columns, town=nn.Embedding(9, 2), job=nn.Embedding(9, 2)), (words(),), {}) == (
        "town",
        "job",
    )

    def decoding(model: Any, x: Tensor) -> Any:
        return model.encoder(x) + model.decoder(x + 1) + model.place(torch.arange(x.shape[1]))

    model = Model(decoding, encoder=nn.Embedding(9, 2), decoder=nn.Embedding(9, 2), place=nn.Embedding(9, 2))
    assert embeddings_to_protect(model, (words(),), {}) == ("encoder",)
    model.decoder.weight = model.encoder.weight
    assert embeddings_to_protect(model, (words(),), {}) == ("encoder", "decoder")


def test_bags_and_integers_that_are_changed_before() -> None:
    bag = Model(lambda model, x: model.bag(x), bag=nn.EmbeddingBag(9, 2))
    assert embeddings_to_protect(bag, (words(),), {}) == ("bag",)
    examples = Examples.build(words(), None, Private(submodule="bag"), model=bag)
    assert examples.z.shape == (2, 2)
    changed = Model(lambda model, x: model.words(x + 1), words=nn.Embedding(10, 2))
    assert embeddings_to_protect(changed, (words(),), {}) == ("words",)
    placed = Model(lambda model, x: x + model.places(torch.arange(4)).sum(), places=nn.Embedding(9, 2))
    assert embeddings_to_protect(placed, (words(),), {}) == ()
    unclear = Model(lambda model, x: model.a(x + 1) + model.b(x + 2), a=nn.Embedding(11, 2), b=nn.Embedding(11, 2))
    assert embeddings_to_protect(unclear, (words(),), {}) == ()


def test_floats_inside_dicts_and_lists_are_private() -> None:
    def forward(_model: Any, visit: dict[str, Any], days: list[Tensor]) -> Tensor:
        return visit["dose"] ** 2 + visit["more"]["age"][:, :1] * days[0].sum(dim=1, keepdim=True)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 2)

        def forward(self, visit: dict[str, Any], days: list[Tensor]) -> Tensor:
            out: Tensor = self.head(forward(self, visit, days))
            return out

    given = {
        "visit": {"dose": torch.randn(3, 1), "more": {"age": torch.randn(3, 2), "kind": torch.ones(3).long()}},
        "days": [torch.randn(3, 4)],
    }
    examples = Examples.build(given, None)
    assert list(examples.maps(examples.z)) == ["visit.dose", "visit.more.age", "days.0"]
    _, kwargs, _, _ = examples.restore(examples.z * 2, examples.public)
    assert torch.equal(kwargs["visit"]["more"]["age"], 2 * given["visit"]["more"]["age"])  # type: ignore[index]
    assert torch.equal(kwargs["days"][0], 2 * given["days"][0])
    settings = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    fim = fisher.exact_fim(Head(), nn.CrossEntropyLoss(), given, torch.tensor([0, 1, 1]), **settings)
    one = fisher.exact_fim(
        Head(), nn.CrossEntropyLoss(), given, torch.tensor([0, 1, 1]), **settings, private=Private(inputs="visit.dose")
    )
    assert fim.shape == (3, 7, 7)
    assert one.shape == (3, 1, 1)


def test_lengths_as_a_mask_as_numbers_and_as_a_function() -> None:
    x, mask = torch.randn(2, 4, 3), words() != 0
    lengths = torch.tensor([3, 1])
    for said, more in (
        ("own", {"own": mask}),
        ("how_many", {"how_many": lengths}),
        (lambda _: mask.to(torch.uint8), {}),
        ("added", {"added": (mask.float() - 1) * 1e4}),
        ({"x": lambda _: lengths}, {}),
    ):
        examples = Examples.build({"x": x, **more}, None, Private(inputs="x", lengths=said))  # type: ignore[arg-type]
        assert examples.own_coordinates.tolist() == [9, 3]  # type: ignore[union-attr]
        columns = Private(inputs="x", lengths=said, coordinates=[0, 2], max_length=6)  # type: ignore[arg-type]
        chosen = Examples.build({"x": x, **more}, None, columns)
        assert chosen.own_coordinates.tolist() == [6, 2]  # type: ignore[union-attr]
        assert chosen.z.shape == (2, 12)
        assert torch.equal(chosen.restore(chosen.z, chosen.public)[1]["x"], x)
        moved = chosen.restore(chosen.z + 1, chosen.public)[1]["x"] - x
        assert torch.equal(moved != 0, mask[..., None] & torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match=r"lengths='where' is not among the inputs \['x'\]"):
        Examples.build({"x": x}, None, Private(inputs="x", lengths="where"))
    with pytest.raises(ValueError, match=r"yields a mask of shape \(2, 5\) for private values at 4 positions"):
        wrong = Examples.build({"x": x}, None, Private(inputs="x", lengths=lambda _: torch.ones(2, 5)))
        _ = wrong.own_coordinates
    with pytest.raises(ValueError, match="more than max_length=0"):
        Examples.build({"x": x}, None, Private(max_length=0))
