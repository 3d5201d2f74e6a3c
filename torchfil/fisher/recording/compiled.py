"""A compiled pass over a batch of fixed size: its operations are traced once and handed to ``torch.compile``.

A pass differentiates twice, which ``torch.compile`` cannot follow on its own. The trace therefore holds the operations
of both derivatives, written out; it contains no autograd.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torchfil.fisher.gradients import ExampleGradients
from torchfil.private import Examples

__all__ = ["CompilationError", "CompiledPass"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def _options() -> dict[str, Any]:
    """Compiler options: channels last for every convolution, no padded strides, no fusion of row and column sums.

    A sum over a padded intermediate may be read with other strides than it was written with
    (https://github.com/pytorch/pytorch/issues/179931). Row sums and column sums that share a kernel are wrong if the
    number of rows is not a multiple of the kernel's block (https://github.com/pytorch/pytorch/issues/195845).
    """
    from torch._inductor import config as inductor  # a slow import

    options: dict[str, Any] = {"force_layout_optimization": True, "comprehensive_padding": False}
    if hasattr(inductor.triton, "mix_order_reduction"):
        options["triton.mix_order_reduction"] = False
    return options


class CompilationError(RuntimeError):
    """A pass cannot be traced or compiled, or the compiled pass gives wrong numbers."""


class CompiledPass(Generic[Result]):
    """``run(gradients, extra)`` for examples of these shapes, compiled.

    Args:
        run: A function of the examples' gradients and a tree of further tensors that returns a tree of tensors. Its
            operations must not depend on the tensors' values.
        gradients: The examples to trace it with.
        extra: The tensors to trace it with.
        backend: The backend of ``torch.compile``.

    Raises:
        CompilationError: ``run`` cannot be traced or compiled.
    """

    def __init__(
        self,
        run: Callable[[ExampleGradients, Any], Result],
        gradients: ExampleGradients,
        extra: Any = None,
        *,
        backend: str = "inductor",
    ) -> None:
        inputs, form = pytree.tree_flatten(_tensors_of(gradients, extra))
        places = [i for i, leaf in enumerate(inputs) if isinstance(leaf, Tensor)]
        fixed = list(inputs)
        self._places = places
        self._outputs: list[Any] = []  # None for a tensor, (value,) for anything else

        def flat(*tensors: Tensor) -> list[Tensor]:
            leaves = list(fixed)
            for place, tensor in zip(places, tensors, strict=True):
                leaves[place] = tensor
            parameters, constants, (own, *others), more = pytree.tree_unflatten(leaves, form)
            alternatives = zip(gradients.examples.alternatives, others, strict=True)
            examples = replace(
                _at(gradients.examples, own), alternatives=tuple(_at(other, at) for other, at in alternatives)
            )
            result = run(replace(gradients, parameters=parameters, constants=constants, examples=examples), more)
            outputs, self._form = pytree.tree_flatten(result)
            self._outputs = [None if isinstance(output, Tensor) else (output,) for output in outputs]
            return [output.detach() for output in outputs if isinstance(output, Tensor)]

        begin = time.perf_counter()
        given = [inputs[place].detach() for place in places]
        try:
            traced = make_fx(flat)(*given)
            traced.graph.eliminate_dead_code()
            traced.recompile()
            options = _options() if backend == "inductor" else None
            self._compiled = torch.compile(traced, fullgraph=True, dynamic=False, backend=backend, options=options)
            self._call(given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise CompilationError(f"{type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - begin
        logger.info("compiled a pass over %d examples in %.0f s", len(gradients), seconds)

    def __call__(self, gradients: ExampleGradients, extra: Any = None) -> Result:
        """The result of ``run`` for these examples and tensors."""
        leaves = pytree.tree_leaves(_tensors_of(gradients, extra))
        found = iter(self._call([leaves[place].detach() for place in self._places]))
        results = [next(found) if fixed is None else fixed[0] for fixed in self._outputs]
        result: Result = pytree.tree_unflatten(results, self._form)
        return result

    def _call(self, tensors: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            found: list[Tensor] = self._compiled(*tensors)
        return found


def _tensors_of(gradients: ExampleGradients, extra: Any) -> tuple[Any, ...]:
    examples = gradients.examples
    batches = [(part.z, part.public, part.clip_weights) for part in (examples, *examples.alternatives)]
    return gradients.parameters, gradients.constants, batches, extra


def _at(examples: Examples, given: tuple[Tensor, Any, Tensor | None]) -> Examples:
    return replace(examples, z=given[0], public=given[1], clip_weights=given[2])
