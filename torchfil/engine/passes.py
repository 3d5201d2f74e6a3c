"""The passes of a run: the layers of :mod:`torchfil.engine.measure` together, with what they share,
and the halves of passes that a training loop begins.
"""

from __future__ import annotations

from dataclasses import replace

from torchfil.engine.captured import Graphs, captured
from torchfil.engine.forward import StartedGraph
from torchfil.engine.measure import (
    Bound,
    Half,
    Measure,
    Memory,
    StepValues,
    Wanted,
    bytes_mapped,
    bytes_recorded,
    exceeds,
    finished,
    halved,
    in_chunks,
    mapped,
    recorded,
    recorded_or_mapped,
)
from torchfil.engine.plans import Plans
from torchfil.engine.replica import Replica
from torchfil.fisher.estimators import Draws
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.masks import RandomWatch
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import Plan, RecordedForward, UnsupportedCallError, forward_pass
from torchfil.utils.errors import ran_out


def fast(plans: Plans, graphs: Graphs, memory: Memory) -> Measure:
    """All layers, from the outside in."""
    by_recording = in_chunks(recorded, bytes_recorded, memory)
    by_recording = captured(finished(by_recording, plans), graphs, memory)
    by_example = in_chunks(mapped, bytes_mapped, memory)
    return halved(recorded_or_mapped(by_recording, by_example, plans, memory), memory)


class Passes:
    """Runs passes over batches of at least one example; the next pass may overwrite the values.

    Args:
        replica: The model.
        expected_batch: The mean batch size.
        max_memory: For temporary tensors, in bytes.
        cuda_graphs: Whether to capture recorded passes on a GPU.
        recorded: As in :class:`Plans`.
    """

    def __init__(
        self,
        replica: Replica,
        expected_batch: int,
        max_memory: int,
        *,
        cuda_graphs: bool,
        recorded: bool = True,
    ) -> None:
        self.replica, self.memory = replica, Memory(max_memory)
        self.plans = Plans(replica, recorded=recorded)
        self.graphs = Graphs(replica, expected_batch, wanted=cuda_graphs)
        self.measure = fast(self.plans, self.graphs, self.memory)

    def run(
        self,
        gradients: ExampleGradients,
        tried: Plan,
        mechanism: Mechanism,
        seeds: tuple[int, ...],
        wanted: Wanted,
        forward: Half = None,
    ) -> StepValues:
        """The wanted values for a batch.

        Args:
            gradients: The examples with their model.
            tried: The plan of such examples.
            mechanism: How their gradients are released.
            seeds: Of the probes; none: the step is not measured.
            wanted: What to compute.
            forward: The loop's own forward pass over these examples, which is used up.
        """
        bound = Bound(replace(gradients, facts=tried.facts), tried, forward, self.replica.live)
        return self.measure(bound, mechanism, Draws(seeds, 1), wanted)

    def in_pieces(self, count: int, tried: Plan) -> bool:
        """Whether a batch is mapped over or cut into chunks, so that the forward pass runs more
        than once.
        """
        return not tried.fits or count > self.memory.room(tried.bytes_per_example)

    # ------------------------------------------------------------------ the loop's half

    def begin(self, gradients: ExampleGradients) -> RecordedForward | None:
        """The forward half of a recorded pass of the live model.

        None if it could not be completed to a whole pass.
        """
        tried = self._fitting(gradients)
        if (
            tried is None
            or self.graphs.serve(gradients)
            or not self.plans.serves_live(gradients)
            or self.in_pieces(len(gradients), tried)
        ):
            return None
        drawn = RandomWatch(self.replica.device)
        try:
            z = gradients.examples.z.detach().requires_grad_()
            return forward_pass(replace(gradients, facts=tried.facts), z, once=True)
        except UnsupportedCallError:
            self.plans.refuse_live(gradients)
        except RuntimeError as error:
            if not ran_out(error):  # otherwise the step's own pass finds out how many examples fit
                raise
        drawn.rewind()  # the loop then runs a plain pass from the same random numbers
        return None

    def begin_graph(self, gradients: ExampleGradients) -> StartedGraph | None:
        """The forward half of a CUDA graph over the examples, with their masks.

        None if there is no such graph.
        """
        tried = self._fitting(gradients)
        if tried is None or not self.graphs.serve(gradients):
            return None
        return self.graphs.begin(gradients, self.memory.room(tried.bytes_per_example))

    def _fitting(self, gradients: ExampleGradients) -> Plan | None:
        """The plan of such examples, if a recorded pass takes them."""
        tried = self.plans.known(gradients) if len(gradients) else None
        if tried is None or not tried.fits or exceeds(gradients, tried, self.memory):
            return None
        return tried
