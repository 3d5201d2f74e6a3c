"""Which embeddings are private by default: those whose input is an example's integers, unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.private.batches import Key, first_example, is_mask, named_inputs
from torchfil.private.choice import floating_inputs
from torchfil.private.padding import names_of_inputs
from torchfil.private.submodules import inputs_by_storage, padded_input, padding_of, storage_of

__all__ = ["Embedded", "embeddings_called", "embeddings_to_protect", "floating_inputs_of"]

_TOKENS = "input_ids"  # what Hugging Face calls a text
_PLACES = ("token_type_ids", "segment_ids")  # which part of a text a token belongs to


@dataclass(frozen=True)
class Embedded:
    """An embedding that was called: its name, and the input whose integers it took (None: computed integers)."""

    name: str
    input: Key | None


def floating_inputs_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Key]:
    """The inputs of a call that are private by default."""
    return floating_inputs(named_inputs(args, kwargs), names_of_inputs(model, len(args)))


def embeddings_called(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Embedded]:
    """The embeddings that a forward pass over the first example calls, with the inputs that they take.

    Embeddings of positions are left out, because they reveal nothing about an example: those that are called with
    0, 1, 2, …, and those that only use the shape of their input, such as BART's.

    Example:
        >>> model = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(6, 1))
        >>> embeddings_called(model, (torch.tensor([[1, 2, 3]]),), {})
        [Embedded(name='0', input=0)]
    """
    args, kwargs = first_example((args, dict(kwargs)))
    given = inputs_by_storage(args, kwargs)
    called: dict[Embedded, None] = {}
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):

                def note(module: nn.Module, inputs: Any, more: Any, output: Any, name: str = name) -> None:
                    taken = inputs[0] if inputs else None
                    source = given.get(storage_of(taken)) or padded_input(given, taken, padding_of(model, module))
                    if source is None and _is_range(taken):
                        return
                    if source is None or _uses_values(module, inputs, more, output):
                        called[Embedded(name, None if source is None else source.key)] = None

                stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        with torch.no_grad():
            model(*args, **kwargs)
    return list(called)


def embeddings_to_protect(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the embeddings whose outputs are private by default; none if the choice is not clear.

    * Embeddings of an input called ``input_ids``. Without such an input, embeddings of any unchanged input except
      positions and segments, for example all categorical columns of a table.
    * If integers are changed before they are embedded: the embedding that is called, if it is the only one.
    * Other embeddings that share a table with one of these, such as a decoder's.
    """
    called, names = embeddings_called(model, args, kwargs), names_of_inputs(model, len(args))

    def name_of(each: Embedded) -> str:
        return "" if each.input is None else names.get(each.input, str(each.input))

    taking = [each for each in called if name_of(each) and not _is_place(name_of(each))]
    texts = [each for each in taking if name_of(each).endswith(_TOKENS)]
    chosen = {each.name for each in texts or taking or (called if len({each.name for each in called}) == 1 else ())}
    tables = {id(model.get_submodule(name).weight) for name in chosen}
    sharing = [each.name for each in called if id(model.get_submodule(each.name).weight) in tables]
    return tuple(dict.fromkeys(sharing))


def _uses_values(module: nn.Module, inputs: tuple[Any, ...], more: Mapping[str, Any], output: Any) -> bool:
    """Whether an embedding returns something else for other integers; padding tokens stay as they are."""
    if type(module).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward):
        return True
    tokens, size = inputs[0], module.num_embeddings
    padding = -1 if module.padding_idx is None else module.padding_idx
    others = (tokens + 1) % size
    others = torch.where(others == padding, (others + 1) % size, others).where(tokens != padding, tokens)
    return torch.equal(others, tokens) or not torch.equal(module.forward(others, *inputs[1:], **more), output)


def _is_range(value: Any) -> bool:
    """Whether these are numbers that count up one by one."""
    steps = value.flatten().diff() if isinstance(value, Tensor) else torch.zeros(0)
    return bool(len(steps)) and bool((steps == 1).all())


def _is_place(name: str) -> bool:
    return is_mask(name) or name.endswith(_PLACES)
