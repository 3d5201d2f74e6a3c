"""What is private where little is said: floats, not masks; the embeddings of integers; padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fisher.recorded_cases import Model
from torchfil import Private
from torchfil.private import Examples
from torchfil.private.submodules import embeddings_to_protect


def words() -> Tensor:
    return torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]])


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.segments = (
            nn.Embedding(9, 2),
            nn.Embedding(9, 2),
            nn.Embedding(2, 2),
        )

    def forward(
        self, input_ids: Any, attention_mask: Any, token_type_ids: Any, position_ids: Any
    ) -> Tensor:
        read: Tensor = (
            self.words(input_ids) + self.segments(token_type_ids) + self.places(position_ids)
        )
        return (read * attention_mask[..., None]).sum(dim=1)


def inputs() -> dict[str, Tensor]:
    zeros, places = torch.zeros(2, 4, dtype=torch.long), torch.arange(4).expand(2, 4)
    mask = (words() != 0).float()
    return {
        "input_ids": words(),
        "attention_mask": mask,
        "token_type_ids": zeros,
        "position_ids": places,
    }


@pytest.mark.parametrize("by_name", [True, False])
def test_of_several_embeddings_that_of_the_text_is_private(by_name: bool) -> None:
    args, kwargs = ((), inputs()) if by_name else (tuple(inputs().values()), {})
    assert embeddings_to_protect(Named(), args, kwargs) == ("words",)
    examples = Examples.build(
        kwargs if by_name else args, None, Private(submodule="words"), model=Named()
    )
    assert examples.own_coordinates.tolist() == [6, 2]
    assert str(examples.layout).startswith(
        "the output of 'words', 4×2, without positions masked by"
    )
    empty = {name: value[:0] for name, value in inputs().items()}
    assert embeddings_to_protect(Named(), (), empty) == ("words",)
    assert Examples.build(empty, None, Private(submodule="words"), model=Named()).z.shape == (0, 8)


def test_masks_are_not_private_and_say_what_is_padding() -> None:
    x, mask, added = torch.randn(2, 4, 3), inputs()["attention_mask"], torch.zeros(2, 4)
    added = added.masked_fill(words() == 0, -torch.inf)
    for given in (
        {"attention_mask": mask},
        {"attention_mask": added},
        {"src_key_padding_mask": words() == 0},
    ):
        examples = Examples.build({"x": x, **given}, None)
        assert torch.equal(examples.z, x.flatten(1))
        assert examples.own_coordinates.tolist() == [9, 3]
    assert Examples.build(
        {"attention_mask": mask}, None, Private(inputs="attention_mask")
    ).z.shape == (2, 4)
    # which says nothing of other inputs
    text = {"input_ids": words(), "attention_mask": words() != 0}
    for pixels, count in ((torch.randn(2, 4, 3, 3), 36), (torch.randn(2, 4), 4)):
        assert Examples.build({**text, "pixel_values": pixels}, None).own_coordinates == count
    for given, noun in (
        ({"input_ids": words(), "attention_mask": mask}, "masks"),
        ({"x": x, "attention_mask": torch.full((2, 4), torch.nan)}, "2 of 2 rows"),
        ({"x": torch.tensor([[0.0], [torch.inf]]), "attention_mask": added}, "1 of 2 rows: 1"),
    ):
        with pytest.raises(ValueError, match=noun):
            Examples.build(given, None)


EMBEDDINGS: dict[str, tuple[Any, dict[str, int], tuple[str, ...]]] = {
    "columns": (
        lambda m, x: m.town(x[:, 0]) + m.job(x[:, 1]),
        {"town": 9, "job": 9},
        ("town", "job"),
    ),
    "positions": (
        lambda m, x: m.encoder(x) + m.decoder(x + 1) + m.place(torch.arange(x.shape[1])),
        {"encoder": 9, "decoder": 9, "place": 9},
        ("encoder",),
    ),
    "changed before": (lambda m, x: m.words(x + 1), {"words": 10}, ("words",)),
    "positions alone": (lambda m, x: x + m.places(torch.arange(4)).sum(), {"places": 9}, ()),
    "bag": (lambda m, x: m.bag(x), {"bag": 9}, ("bag",)),
    "unclear": (lambda m, x: m.a(x + 1) + m.b(x + 2), {"a": 11, "b": 11}, ()),
}


@pytest.mark.parametrize("case", EMBEDDINGS)
def test_embeddings_that_are_private_by_themselves(case: str) -> None:
    forward, sizes, expected = EMBEDDINGS[case]
    kind = nn.EmbeddingBag if case == "bag" else nn.Embedding
    model = Model(forward, **{name: kind(size, 2) for name, size in sizes.items()})
    assert embeddings_to_protect(model, (words(),), {}) == expected
    if case == "positions":
        model.decoder.weight = model.encoder.weight
        assert embeddings_to_protect(model, (words(),), {}) == ("encoder", "decoder")


def test_floats_inside_dicts_and_lists_are_private() -> None:
    given: dict[str, Any] = {
        "visit": {
            "dose": torch.randn(3, 1),
            "more": {"age": torch.randn(3, 2), "kind": torch.ones(3).long()},
        },
        "days": [torch.randn(3, 4)],
    }
    examples = Examples.build(given, None)
    assert list(examples.maps(examples.z)) == ["visit.dose", "visit.more.age", "days.0"]
    _, kwargs, _, _ = examples.restore(examples.z * 2, examples.public)
    assert torch.equal(kwargs["visit"]["more"]["age"], 2 * given["visit"]["more"]["age"])
    assert torch.equal(kwargs["days"][0], 2 * given["days"][0])
    part = Examples.build(given, None, Private(inputs="visit.dose"))
    assert torch.equal(part.z, given["visit"]["dose"])


LENGTHS: list[tuple[Any, dict[str, Tensor]]] = [
    ("own", {"own": words() != 0}),
    ("how_many", {"how_many": torch.tensor([3, 1])}),
    (lambda _: (words() != 0).to(torch.uint8), {}),
    ("added", {"added": ((words() != 0).float() - 1) * 1e4}),
    ({"x": lambda _: torch.tensor([3, 1])}, {}),
]


@pytest.mark.parametrize(("said", "more"), LENGTHS)
def test_lengths_as_a_mask_as_numbers_and_as_a_function(said: Any, more: dict[str, Tensor]) -> None:
    x = torch.randn(2, 4, 3)
    assert Examples.build(
        {"x": x, **more}, None, Private(lengths=said, inputs="x")
    ).own_coordinates.tolist() == [9, 3]
    columns = Private(inputs="x", lengths=said, coordinates=[0, 2], max_length=6)
    chosen = Examples.build({"x": x, **more}, None, columns)
    assert chosen.own_coordinates.tolist() == [6, 2]
    assert chosen.z.shape == (2, 12)
    assert torch.equal(chosen.restore(chosen.z, chosen.public)[1]["x"], x)
    moved = chosen.restore(chosen.z + 1, chosen.public)[1]["x"] - x
    assert torch.equal(moved != 0, (words() != 0)[..., None] & torch.tensor([True, False, True]))
