"""A pass over a batch of fixed size as CUDA graphs: small networks spend most of their time
launching kernels.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchfil.fisher.gradients import ExampleGradients
from torchfil.private import Examples
from torchfil.utils.given import Args, Kwargs

# share of the free memory that graphs may keep; other passes and the loop need some, too
_LARGEST_SHARE = 0.5


def signature(gradients: ExampleGradients) -> Hashable:
    """What a captured pass depends on, besides the batch's size and contents and the modes of
    modules.
    """
    weights = tuple(
        value.data_ptr()
        for value in (*gradients.parameters.values(), *gradients.constants.values())
    )
    masks = tuple((mask.shape[1:], mask.dtype) for mask in gradients.examples.masks)
    examples = gradients.examples
    weighted = examples.clip_weights is not None
    return examples.form, masks, len(examples.alternatives), weighted, weights, gradients.autocast


class CapturedPass:
    """``stages`` over ``size`` examples as CUDA graphs; each replay reads the current weights.

    Each stage is a separate graph, so that the results of one can be read while the next is still
    running.

    Args:
        gradients: A batch for the capture; batches with fewer examples are padded with copies of
            the first one.
        size: How many examples the pass takes.
        stages: What to capture: a function of the examples' gradients that yields the results of
            each stage in turn. They stay at the same addresses.
        pool: Memory shared with other graphs, which must not be replayed while this one's results
            are in use. It is freed with the last of its graphs.
        num_stages: The number of stages.
        warm_up: Whether to run the stages once before, because a capture may not be able to load a
            kernel.

    Raises:
        RuntimeError: A stage cannot be captured, or the graphs would keep more than half of the
            free memory.
    """

    def __init__(
        self,
        gradients: ExampleGradients,
        size: int,
        stages: Callable[[ExampleGradients], Iterator[Any]],
        pool: object = None,
        num_stages: int = 1,
        *,
        warm_up: bool = True,
    ) -> None:
        examples = gradients.examples
        self.size = size
        self.examples = examples.map(lambda leaf: _filled(leaf, size))
        self.gradients = replace(gradients, examples=self.examples)
        if warm_up:
            self._warm_up(stages)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.results: list[Any] = []
        self._capture(stages(self.gradients), num_stages, pool)

    def _warm_up(self, stages: Callable[[ExampleGradients], Iterator[Any]]) -> None:
        """Run the stages once, on a separate stream.

        That stream begins without memory, so the memory that it takes is what the graphs will keep.
        """
        device = self.examples.z.device
        reserved = torch.cuda.memory_reserved(device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in stages(self.gradients):
                pass
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        needed = torch.cuda.memory_reserved(device) - reserved

        release_memory()  # otherwise the stream would keep its memory in addition to the graphs'
        free, _ = torch.cuda.mem_get_info(device)
        if needed > _LARGEST_SHARE * free:
            raise RuntimeError(
                f"graphs over {self.size} examples would keep {needed / 2**30:.1f} GiB, more than "
                f"half of the free {free / 2**30:.1f} GiB"
            )

    def _capture(self, stages: Iterator[object], num_stages: int, pool: Any) -> None:
        device = self.examples.z.device
        stream = torch.cuda.current_stream(device)
        generator = torch.cuda.default_generators[device.index or 0]
        intact = generator.clone_state()
        # a stage reads the results of the one before
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        for _ in range(num_stages):
            graph = torch.cuda.CUDAGraph()
            try:
                with (
                    torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
                    _MadeOnDevice(),
                ):
                    self.results.append(next(stages))
            except RuntimeError:  # both may be unusable after a failed capture
                torch.cuda.set_stream(stream)
                generator.graphsafe_set_state(intact)
                raise
            self.graphs.append(graph)

    def replay(self, examples: Examples, *, begun: bool = False) -> list[Any]:
        """The results of the stages for these examples, at most ``size``.

        The next replay overwrites them.

        Args:
            examples: The examples.
            begun: Whether :meth:`begin` has replayed the first stage for them, and no other graph
                was replayed since.
        """
        if not begun:
            self.begin(examples)
        for graph in self.graphs[1:]:
            graph.replay()
        return self.results

    def begin(self, examples: Examples) -> Any:
        """The result of the first stage for these examples."""
        count = len(examples)
        pairs = zip(self.examples.tensors, examples.tensors, strict=True)
        for static, given in ((self.examples.z, examples.z), *pairs):
            static[:count] = given
            if count < self.size:
                static[count:] = given[:1]
        self.graphs[0].replay()
        return self.results[0]


class _MadeOnDevice(TorchFunctionMode):
    """Inside, constants that a model makes from Python numbers are filled in by the GPU: a capture
    cannot copy them.

    ``torch.tensor(0.0, device="cuda")`` in a model's mask is such a constant. The values are the
    same.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = torch.device(kwargs.get("device") or "cpu")
        if (
            func not in (torch.tensor, torch.as_tensor, torch.scalar_tensor)
            or device.type != "cuda"
        ):
            return func(*args, **kwargs)
        on_host = func(*args, **{**kwargs, "device": "cpu"})
        if any(isinstance(part, Tensor) for part in args) or on_host.requires_grad:
            return func(*args, **kwargs)
        numbers = [
            torch.full((), value, dtype=on_host.dtype, device=device)
            for value in on_host.flatten().tolist()
        ]
        return torch.stack(numbers).reshape(on_host.shape) if numbers else on_host.to(device)


def release_memory() -> None:
    """Free what passes have left behind: autograd graphs are reference cycles, which hold memory
    until collected.
    """
    gc.collect()
    torch.cuda.empty_cache()


def _filled(value: Tensor, size: int) -> Tensor:
    """A new tensor of that many rows, padded at the end with copies of the first row."""
    rows = torch.arange(size, device=value.device)
    return value[rows.where(rows < len(value), torch.zeros_like(rows))].clone()
