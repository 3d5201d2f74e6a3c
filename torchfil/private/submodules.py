"""Private outputs of submodules: how they are found, and how offsets are added to them.

An integer has no derivative, so for tokens the output of their embedding is private. A pass over one example shows
what a submodule returns at each of its calls; later passes add offsets to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfil.private.batches import Key, first_example, named_inputs

__all__ = [
    "Given",
    "Output",
    "added_to_outputs",
    "decoder_tokens",
    "inputs_by_storage",
    "outputs_of_one_example",
    "padded_input",
    "padding_of",
    "storage_of",
]

Offsets = Mapping[str, Sequence[Tensor]]  # by submodule, one for each of its calls


@dataclass(frozen=True)
class Output:
    """The output of one call of a submodule for one example.

    Attributes:
        submodule: Its name, as in ``model.named_modules()``.
        key: The same, with the number of the call if there are several: ``"table[1]"``.
        shape: The output's shape, without the batch dimension if that comes first.
        dtype: The output's dtype.
        positions: Whether the first dimension of ``shape`` may run over positions in a text.
        tokens: The input that an embedding took unchanged, with one vector per position as its output; for a
            decoder that shifts the labels, a function from the inputs to its tokens.
        padding: The padding token, if the embedding or the model's configuration names one.
        mask_name: What a mask of its positions would be called.
        appended: How many padding tokens the model itself puts behind ``tokens``, as Longformer does.
    """

    submodule: str
    key: str
    shape: torch.Size
    dtype: torch.dtype
    positions: bool = True
    tokens: Key | Callable[[Any], Tensor] | None = None
    padding: int | None = None
    mask_name: str = "attention_mask"
    appended: int = 0


def outputs_of_one_example(model: nn.Module, names: Sequence[str], public: Any) -> tuple[Output, ...]:
    """The outputs of these submodules in a forward pass over the first example, call by call.

    Args:
        model: The model, which is called once, without changes.
        names: The submodules' names.
        public: Positional inputs, keyword inputs and targets of a batch.

    Raises:
        ValueError: There is no such submodule, or it is not called.
        TypeError: It returns no floating-point tensor.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules or name == "":
            raise ValueError(
                f"submodule={name!r} is not a submodule of {type(model).__name__}; it has "
                f"{', '.join(key for key in modules if key)}"
            )
    args, kwargs = first_example(public[:2])
    given = inputs_by_storage(args, kwargs)
    calls: dict[str, list[tuple[Any, Any]]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda _module, inputs, output: calls.setdefault(name, []).append(
            (inputs[0] if inputs else None, output)
        )

    sharing = {name: _sharing(modules, name) for name in names}
    with contextlib.ExitStack() as stack:
        for name in {name for others in sharing.values() for name in others}:
            stack.callback(modules[name].register_forward_hook(note(name)).remove)
        with torch.no_grad():
            model(*args, **kwargs)

    # A table may be called under a name other than the given one, as T5's "shared" is.
    outputs: list[Output] = []
    for name in names:
        called = [name] if name in calls else [other for other in sharing[name] if other in calls]
        if not called:
            raise called_otherwise(name, 0)
        for other in called:
            outputs += _of_calls(model, other, modules[other], calls[other], given)
    return tuple(dict.fromkeys(outputs))


def _sharing(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """The name itself and, for an embedding, the names of others with the same table."""
    module = modules[name]
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return [name]
    return [
        other
        for other, each in modules.items()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and (each is module or each.weight is module.weight)
    ]


def _of_calls(
    model: nn.Module, name: str, module: nn.Module, calls: Sequence[tuple[Any, Any]], given: dict[int, Given]
) -> list[Output]:
    """The outputs of all calls of one submodule, from the inputs and outputs of each call."""
    outputs: list[Output] = []
    for call, (taken, output) in enumerate(calls):
        if not (isinstance(output, Tensor) and output.is_floating_point()):
            raise TypeError(f"the output of submodule {name!r} is not a floating-point tensor: {type(output).__name__}")
        key = name if len(calls) == 1 else f"{name}[{call}]"
        outputs.append(_output(model, name, key, module, taken, output, given))
    return outputs


def _output(
    model: nn.Module, name: str, key: str, module: nn.Module, taken: Any, output: Tensor, given: dict[int, Given]
) -> Output:
    """One call's output, with the source of its tokens."""
    shape = output.shape[1:] if output.shape[0] <= 1 else output.shape
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return Output(name, key, shape, output.dtype, positions=len(shape) >= 2)
    by_position = isinstance(taken, Tensor) and taken.ndim >= 2 and output.shape == (*taken.shape, output.shape[-1])
    source = given.get(storage_of(taken)) if by_position else None
    tokens: Any = source.key if source is not None and source.value.numel() == taken.numel() else None
    padding, appended = padding_of(model, module), 0
    padded = padded_input(given, taken, padding) if tokens is None and by_position else None
    if padded is not None:
        tokens, appended = padded.key, taken.shape[1] - padded.value.shape[1]

    # A decoder may make its tokens from the labels; the mask of the encoder's text does not apply to them.
    if tokens is not None or "decoder" not in name:
        return Output(name, key, shape, output.dtype, by_position, tokens, padding, appended=appended)
    labels = [source.value for source in given.values() if source.key == "labels"]
    if labels and decoder_tokens(model, labels[0]) is not None:
        tokens = lambda inputs: decoder_tokens(model, inputs["labels"])  # noqa: E731
    return Output(name, key, shape, output.dtype, by_position, tokens, padding, "decoder_attention_mask")


@contextlib.contextmanager
def added_to_outputs(model: nn.Module, offsets: Offsets) -> Iterator[None]:
    """Inside, for one forward pass, the offsets are added to the submodules' outputs, call by call.

    Raises:
        ValueError: A submodule is called more or less often than there are offsets, or returns another shape.
    """
    calls = dict.fromkeys(offsets, 0)

    def add_to(name: str) -> Callable[..., Tensor]:
        def add(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            calls[name] += 1
            if calls[name] > len(offsets[name]):
                raise called_otherwise(name, calls[name], len(offsets[name]))
            return output + _fitting(name, offsets[name][calls[name] - 1], output).to(output.dtype)

        return add

    with contextlib.ExitStack() as stack:
        for name in offsets:
            stack.callback(model.get_submodule(name).register_forward_hook(add_to(name)).remove)
        yield
    for name, times in calls.items():
        if times < len(offsets[name]):
            raise called_otherwise(name, times, len(offsets[name]))


def _fitting(name: str, offset: Tensor, output: Tensor) -> Tensor:
    """The offset in the output's shape: unchanged, or with the batch in another place."""
    if output.shape[output.ndim - offset.ndim :] == offset.shape:
        return offset
    if offset.ndim == output.ndim + 1:
        folded = offset.flatten(0, 1)  # several rows per example, such as the choices of a question
        behind = offset.transpose(0, 2).squeeze(0)  # positions first: [batch, T, 1, …] for [T, batch, …]
        for other in (folded, behind):
            if other.shape == output.shape:
                return other
    raise ValueError(
        f"submodule {name!r} returned an output of shape {tuple(output.shape)} where {tuple(offset.shape)} "
        "was expected from inputs of the same shape; a private output must have the same shape for every example"
    )


def called_otherwise(name: str, times: int, expected: int | None = None) -> ValueError:
    """The error for a submodule that is not called, or not as often as in a pass over one example."""
    if expected is None:
        return ValueError(
            f"submodule {name!r} is not called in a forward pass over these inputs, so it has no output that could be "
            "private; name one that is called"
        )
    return ValueError(
        f"submodule {name!r} is called {times} times in one forward pass, and {expected} times in the pass over "
        "another example of the same shape; its outputs can be private only if their number does not depend on the "
        "values"
    )


class Given(NamedTuple):
    """An input."""

    key: Key
    value: Tensor


def inputs_by_storage(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Given]:
    """Inputs by their place in memory: a view of an input counts as that input."""
    named = {key: given.value for key, given in named_inputs(args, kwargs).items() if isinstance(given.value, Tensor)}
    return {storage_of(value): Given(key, value) for key, value in named.items()}


def storage_of(value: Any) -> int:
    """The address of a tensor's memory; 0 for anything else."""
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0


def decoder_tokens(model: nn.Module, labels: Tensor) -> Tensor | None:
    """The tokens that a decoder makes from labels [batch, T]; None: it makes none.

    The model's own method makes them. Without one, as in Whisper, labels move one place to the right behind the start
    token, with padding instead of −100.
    """
    own: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        tokens: Tensor = own(labels)
        return tokens
    config, generates = getattr(model, "config", None), getattr(model, "can_generate", lambda: False)
    start, padding = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    if not (getattr(config, "is_encoder_decoder", False) and generates()) or start is None or padding is None:
        return None
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == -100, padding)


def padding_of(model: nn.Module, embedding: nn.Module) -> int | None:
    """The padding token, if the embedding or the model's configuration names one."""
    padding = getattr(embedding, "padding_idx", None)
    padding = getattr(getattr(model, "config", None), "pad_token_id", None) if padding is None else padding
    return padding if isinstance(padding, int) else None


def padded_input(given: Mapping[int, Given], taken: Any, padding: int | None) -> Given | None:
    """The input [1, T] that a model has made longer by padding tokens behind it, as Longformer does; None: none."""
    for each in given.values() if isinstance(taken, Tensor) and taken.ndim == 2 and padding is not None else ():
        length = each.value.shape[1] if each.value.ndim == 2 else 0
        starts = 0 < length < taken.shape[1] and torch.equal(taken[:, :length], each.value)
        if starts and bool((taken[:, length:] == padding).all()):
            return each
    return None
