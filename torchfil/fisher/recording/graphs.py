"""A pass over a batch of fixed size as a CUDA graph: small networks spend most of their time on launching kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torchfil.fisher.gradients import ExampleGradients
from torchfil.private import Examples
from torchfil.utils.trees import map_tensors

__all__ = ["CapturedPass", "signature"]

Result = TypeVar("Result")


def signature(gradients: ExampleGradients) -> Hashable:
    """What a captured pass depends on, the batch's size and contents and the modes of modules aside."""
    weights = tuple(value.data_ptr() for value in (*gradients.parameters.values(), *gradients.constants.values()))
    return gradients.examples.form, weights


class CapturedPass(Generic[Result]):
    """``run`` over ``size`` examples as a CUDA graph; the weights are read anew, where they lie, at each replay.

    Args:
        gradients: A batch to begin with; smaller ones are filled up with copies of the first example.
        size: How many examples the pass takes.
        run: What to capture: a function of the examples' gradients whose results stay where they are.
        pool: Memory shared with other graphs, which then must not be replayed while this one's results are in use. It
            ends with the last of its graphs.
        warm_ups: How often ``run`` is called before it is captured.

    Raises:
        RuntimeError: ``run`` cannot be captured.
    """

    def __init__(
        self,
        gradients: ExampleGradients,
        size: int,
        run: Callable[[ExampleGradients], Result],
        pool: Any = None,
        warm_ups: int = 3,
    ) -> None:
        examples = gradients.examples
        self.size = size
        self.examples = replace(
            examples, z=_filled(examples.z, size), public=map_tensors(lambda leaf: _filled(leaf, size), examples.public)
        )
        self.gradients = replace(gradients, examples=self.examples)
        device = self.examples.z.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(warm_ups):
                run(self.gradients)
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[device.index or 0]
        intact = generator.clone_state()
        try:
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.result = run(self.gradients)
        except RuntimeError:
            generator.graphsafe_set_state(intact)  # a broken capture leaves it unusable
            raise

    def replay(self, examples: Examples) -> Result:
        """The result for these examples, at most ``size``; overwritten by the next replay."""
        count = len(examples)
        pairs = zip(self.examples.tensors, examples.tensors, strict=True)
        for static, given in ((self.examples.z, examples.z), *pairs):
            static[:count] = given
            if count < self.size:
                static[count:] = given[:1]
        self.graph.replay()
        return self.result


def _filled(value: Tensor, size: int) -> Tensor:
    """A new tensor of that many rows, the first row repeated at the end."""
    rows = torch.arange(size, device=value.device)
    return value[rows.where(rows < len(value), torch.zeros_like(rows))].clone()
