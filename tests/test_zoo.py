"""The zoo: shapes, sizes, smoothness, and the transformer against torch's own encoder layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks import zoo
from torchfil import SmoothnessValidator

IMAGE_NETWORKS: dict[str, Callable[..., nn.Sequential]] = {"small_alexnet": zoo.small_alexnet, "vgg11": zoo.vgg11}


@pytest.mark.parametrize("name", IMAGE_NETWORKS)
@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (3, (62, 47)), (3, (64, 64)), (2, 8)])
def test_image_networks_take_every_size(name: str, channels: int, size: int | tuple[int, int]) -> None:
    model = IMAGE_NETWORKS[name](5, channels, size)
    height, width = (size, size) if isinstance(size, int) else size
    assert model(torch.rand(2, channels, height, width)).shape == (2, 5)
    assert SmoothnessValidator.validate(model) == []


def test_the_layers_are_those_of_the_paper() -> None:
    def shapes(model: nn.Module) -> list[tuple[int, ...]]:
        return [tuple(value.shape) for name, value in model.named_parameters() if name.endswith("weight")]

    assert [shape[0] for shape in shapes(zoo.small_alexnet())] == [16, 32, 64, 256, 2]
    assert [shape[0] for shape in shapes(zoo.vgg11())] == [16, 16, 16, 16, 32, 32, 64, 64, 256, 128, 2]
    assert [shape[0] for shape in shapes(zoo.fcnet())] == [32] * 8 + [2]
    vgg = zoo.vgg11(activation=nn.ReLU, pool="max")
    pools = [name for name, module in vgg.named_children() if isinstance(module, nn.MaxPool2d)]
    assert pools == ["pool6", "pool7", "pool8"]
    assert sum(isinstance(module, nn.ReLU) for module in vgg) == 10  # every layer but the output


def test_the_encoder_layer_is_torchs_own() -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    ours = zoo.token_transformer(width=8, depth=1, heads=2).get_submodule("encoder.layers.0")
    weights = dict(theirs.named_parameters())
    names = {
        "attention_norm": "norm1.",
        "queries_keys_values": "self_attn.in_proj_",
        "attention_output": "self_attn.out_proj.",
        "mlp_norm": "norm2.",
        "mlp.0": "linear1.",
        "mlp.2": "linear2.",
    }
    state = {f"{a}.{kind}": weights[b + kind].detach() for a, b in names.items() for kind in ("weight", "bias")}
    ours.load_state_dict(state)
    h = torch.randn(3, 5, 8)
    torch.testing.assert_close(ours(h), theirs(h), rtol=1e-5, atol=1e-6)
