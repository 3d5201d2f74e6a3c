"""Private outputs of submodules: how they are found, which are private by default, how offsets are
added to them.

An integer has no derivative, so for tokens the output of their embedding is private. A pass over
one example shows what a submodule returns at each of its calls; later passes add offsets to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.private.batches import Input, Key, Public, first_example, is_mask, named_inputs
from torchfil.utils.given import Args, Kwargs, Outputs

Offsets = Mapping[str, Sequence[Tensor]]  # by submodule, one for each of its calls
Sources = Mapping[int, tuple[Key, Input]]  # inputs by their place in memory
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_PLACES = ("token_type_ids", "segment_ids")  # which part of a text a token belongs to


@dataclass(frozen=True)
class SubmoduleOutput:
    """The output of one call of a submodule for one example, or an input.

    Attributes:
        submodule: Its name, as in ``model.named_modules()``; that of an input.
        key: The same, with the number of the call if there are several: ``"table[1]"``.
        shape: The output's shape, without the batch dimension if that comes first.
        dtype: The output's dtype.
        positions: Whether the first dimension of ``shape`` may run over positions in a text.
        tokens: The input that an embedding took unchanged, with one vector per position as its
            output; for a decoder that shifts the labels, a function from the inputs to its tokens.
        padding: The padding token, if the embedding or the model's configuration names one.
        mask_name: What a mask of its positions would be called.
        appended: How many padding tokens the model itself puts behind ``tokens``, as Longformer
            does.
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


def outputs_of_one_example(
    model: nn.Module, names: Sequence[str], public: Public
) -> tuple[SubmoduleOutput, ...]:
    """The outputs of these submodules in a forward pass over the first example, call by call.

    Args:
        model: The model, which is called once, without changes.
        names: The submodules' names.
        public: Positional inputs, keyword inputs and targets of a batch.

    Raises:
        ValueError: A name is unknown, or that submodule is not called.
        TypeError: An output is not a floating-point tensor.
    """
    modules = dict(model.named_modules())
    tables = {
        name: module.weight for name, module in modules.items() if isinstance(module, _EMBEDDINGS)
    }
    sharing: dict[str, list[str]] = {}  # with the names of other embeddings of the same table
    for name in names:
        known = ", ".join(key for key in modules if key)
        if name not in modules:
            raise ValueError(
                f"submodule={name!r} is not a submodule of {type(model).__name__}; it has {known}"
            )
        sharing[name] = [other for other in tables if tables[other] is tables.get(name)] or [name]
    args, kwargs = first_example(public[:2])
    sources = _inputs_by_storage(model, args, kwargs)
    calls: dict[str, list[SubmoduleOutput]] = {}

    def note(name: str, module: nn.Module, inputs: Args, more: Kwargs, output: Outputs) -> None:
        calls.setdefault(name, []).append(
            _output(model, name, module, inputs[0] if inputs else None, output, sources)
        )

    with (
        torch.no_grad(),
        _hooks(model, {name for others in sharing.values() for name in others}, note),
    ):
        model(*args, **kwargs)

    # A table may be called under a name other than the given one, as T5's "shared" is.
    outputs: list[SubmoduleOutput] = []
    for name in names:
        called = [name] if name in calls else [other for other in sharing[name] if other in calls]
        if not called:
            raise ValueError(
                f"submodule {name!r} is not called in a forward pass over these inputs; name one "
                "that is"
            )
        for other in called:
            several = len(calls[other]) > 1
            outputs += [
                replace(each, key=f"{other}[{i}]") if several else each
                for i, each in enumerate(calls[other])
            ]
    return tuple(dict.fromkeys(outputs))


def _output(
    model: nn.Module, name: str, module: nn.Module, taken: Any, output: object, sources: Sources
) -> SubmoduleOutput:
    """One call's output, with the source of its tokens."""
    if not (isinstance(output, Tensor) and output.is_floating_point()):
        raise TypeError(
            f"the output of submodule {name!r} is not a floating-point tensor: "
            f"{type(output).__name__}"
        )
    shape = output.shape[1:] if output.shape[0] <= 1 else output.shape
    if not isinstance(module, _EMBEDDINGS):
        return SubmoduleOutput(name, name, shape, output.dtype, positions=len(shape) >= 2)

    tokens: Any = None
    padding, appended = _padding_of(model, module), 0
    by_position = (
        isinstance(taken, Tensor)
        and taken.ndim >= 2
        and output.shape == (*taken.shape, output.shape[-1])
    )
    if by_position:
        tokens, given = sources.get(_storage_of(taken), (None, None))
        if given is None or given.value.numel() != taken.numel():
            tokens, given = _padded_input(sources, taken, padding)
            appended = 0 if given is None else taken.shape[1] - given.value.shape[1]

    # A decoder may make its tokens from the labels; the mask of the encoder's text does not apply
    # to them.
    if tokens is not None or "decoder" not in name:
        return SubmoduleOutput(
            name, name, shape, output.dtype, by_position, tokens, padding, appended=appended
        )
    labels = [given.value for key, given in sources.values() if key == "labels"]
    if labels and decoder_tokens(model, labels[0]) is not None:
        tokens = lambda inputs: decoder_tokens(model, inputs["labels"])  # noqa: E731
    return SubmoduleOutput(
        name, name, shape, output.dtype, by_position, tokens, padding, "decoder_attention_mask"
    )


def embeddings_to_protect(
    model: nn.Module, args: Args, kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """The names of the embeddings whose outputs are private by default.

    None if the choice is not clear.

    * Embeddings of an input called ``input_ids``. Without such an input, embeddings of any
      unchanged input except positions and segments, for example all categorical columns of a table.
    * If integers are changed before they are embedded: the embedding that is called, if it is the
      only one.
    * Other embeddings that share a table with one of these, such as a decoder's.

    Embeddings of positions are left out, because they reveal nothing about an example: those that
    are called with 0, 1, 2, …, and those that only use the shape of their input, such as BART's.

    Example:
        >>> model = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(6, 1))
        >>> embeddings_to_protect(model, (torch.tensor([[1, 2, 3]]),), {})
        ('0',)
    """
    args, kwargs = first_example((args, dict(kwargs)))
    sources = _inputs_by_storage(model, args, kwargs)
    # the embedding, and the name of the input whose integers it took ("": computed)
    called: list[tuple[str, str]] = []

    def note(name: str, module: nn.Module, inputs: Args, more: Kwargs, output: Outputs) -> None:
        taken = inputs[0] if inputs else None
        _, source = sources.get(_storage_of(taken)) or _padded_input(
            sources, taken, _padding_of(model, module)
        )
        if not _is_range(taken) if source is None else _uses_values(module, inputs, more, output):
            called.append((name, "" if source is None else source.name))

    embeddings = [name for name, module in model.named_modules() if isinstance(module, _EMBEDDINGS)]
    with torch.no_grad(), _hooks(model, embeddings, note):
        model(*args, **kwargs)

    names = list(dict.fromkeys(name for name, _ in called))
    tables = {
        id(model.get_submodule(name).weight)
        for name in _to_protect(called) or (names if len(names) == 1 else [])
    }
    return tuple(name for name in names if id(model.get_submodule(name).weight) in tables)


def _to_protect(called: Sequence[tuple[str, str]]) -> list[str]:
    """Of embeddings with the inputs that they took, those of texts.

    Without a text, those of any other input.
    """
    taking = [
        (name, source)
        for name, source in called
        if source and not (is_mask(source) or source.endswith(_PLACES))
    ]
    return [name for name, source in taking if source.endswith("input_ids")] or [
        name for name, _ in taking
    ]


def _uses_values(module: nn.Module, inputs: Args, more: Kwargs, output: Outputs) -> bool:
    """Whether an embedding returns something else for other integers.

    Padding tokens stay as they are.
    """
    if type(module).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward):
        return True
    tokens, size = inputs[0], module.num_embeddings
    padding = -1 if module.padding_idx is None else module.padding_idx
    others = (tokens + 1) % size
    others = torch.where(others == padding, (others + 1) % size, others).where(
        tokens != padding, tokens
    )
    return torch.equal(others, tokens) or not torch.equal(
        module.forward(others, *inputs[1:], **more), output
    )


def _is_range(value: object) -> bool:
    """Whether these are numbers that count up one by one."""
    return (
        isinstance(value, Tensor)
        and value.numel() > 1
        and bool((value.flatten().diff() == 1).all())
    )


@contextlib.contextmanager
def added_to_outputs(model: nn.Module, offsets: Offsets) -> Iterator[None]:
    """Inside, for one forward pass, the offsets are added to the submodules' outputs, call by call.

    Raises:
        ValueError: A submodule is called more or less often than there are offsets, or returns
            another shape.
    """
    calls = dict.fromkeys(offsets, 0)

    def add(
        name: str, _module: nn.Module, _inputs: object, _more: object, output: Tensor
    ) -> Tensor:
        calls[name] += 1
        if calls[name] > len(offsets[name]):  # refused below
            return output
        return output + _fitting(name, offsets[name][calls[name] - 1], output).to(output.dtype)

    with _hooks(model, offsets, add):
        yield
    for name, times in calls.items():
        expected = len(offsets[name])
        if times != expected:
            raise ValueError(
                f"submodule {name!r} is called {times} times in one forward pass, and {expected} "
                "times in another; private outputs must not depend in number on the values"
            )


@contextlib.contextmanager
def _hooks(model: nn.Module, names: Iterable[str], hook: Callable[..., object]) -> Iterator[None]:
    """Inside, ``hook(name, module, args, kwargs, output)`` follows each call of these
    submodules.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            handle = model.get_submodule(name).register_forward_hook(
                partial(hook, name), with_kwargs=True
            )
            stack.callback(handle.remove)
        yield


def _fitting(name: str, offset: Tensor, output: Tensor) -> Tensor:
    """The offset in the output's shape: unchanged, or with the batch in another place."""
    if output.shape[output.ndim - offset.ndim :] == offset.shape:
        return offset
    # several rows per example, as the choices of a question; or positions first: [batch, T, 1, …]
    # for [T, batch, …]
    for other in (
        (offset.flatten(0, 1), offset.transpose(0, 2).squeeze(0))
        if offset.ndim == output.ndim + 1
        else ()
    ):
        if other.shape == output.shape:
            return other
    raise ValueError(
        f"submodule {name!r} returned an output of shape {tuple(output.shape)} where "
        f"{tuple(offset.shape)} was expected; a private output must have one shape for all "
        "examples"
    )


def _inputs_by_storage(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Sources:
    """Inputs by their place in memory: a view of an input counts as that input."""
    named = named_inputs(args, kwargs, model)
    return {
        _storage_of(given.value): (key, given)
        for key, given in named.items()
        if isinstance(given.value, Tensor)
    }


def _storage_of(value: object) -> int:
    """The address of a tensor's memory; 0 for anything else."""
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0


def decoder_tokens(model: nn.Module, labels: Tensor) -> Tensor | None:
    """The tokens that a decoder makes from labels [batch, T]; None: it makes none.

    The model's own method makes them. Without one, as in Whisper, labels move one place to the
    right behind the start token, with padding instead of −100.
    """
    own: Callable[[Tensor], Tensor] | None = getattr(
        model, "prepare_decoder_input_ids_from_labels", None
    )
    if own is not None:
        return own(labels)
    config, generates = (
        getattr(model, "config", None),
        getattr(model, "can_generate", lambda: False),
    )
    start, padding = (
        getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id")
    )
    if (
        not (getattr(config, "is_encoder_decoder", False) and generates())
        or start is None
        or padding is None
    ):
        return None
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == -100, padding)


def _padding_of(model: nn.Module, embedding: nn.Module) -> int | None:
    """The padding token, if the embedding or the model's configuration names one."""
    padding = [
        getattr(embedding, "padding_idx", None),
        getattr(getattr(model, "config", None), "pad_token_id", None),
    ]
    return next((token for token in padding if isinstance(token, int)), None)


def _padded_input(
    sources: Sources, taken: Any, padding: int | None
) -> tuple[Key | None, Input | None]:
    """The input [1, T] that a model has made longer by padding tokens behind it, as Longformer
    does; None: none.
    """
    for key, given in (
        sources.values()
        if isinstance(taken, Tensor) and taken.ndim == 2 and padding is not None
        else ()
    ):
        length = given.value.shape[1] if given.value.ndim == 2 else 0
        starts = 0 < length < taken.shape[1] and torch.equal(taken[:, :length], given.value)
        if starts and bool((taken[:, length:] == padding).all()):
            return key, given
    return None, None
