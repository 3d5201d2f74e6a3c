"""A ledger kept in parts against the same ledger kept by one process."""

from __future__ import annotations

import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.quantities import path_additions
from torchfil.engine.distributed.ranks import whole_ledger

N, STEPS = 12, 40


class Together:
    """All parts at hand: a value of the first stands for those of the same name."""

    def __init__(self, parts: list[Ledger]) -> None:
        self.parts = parts

    def each(self, value: Tensor) -> list[Tensor]:
        name = next(name for name, held in self.parts[0].sums.items() if held.data_ptr() == value.data_ptr())
        return [part.sums[name].clone() for part in self.parts]

    def sum(self, value: Tensor) -> Tensor:
        return torch.stack(self.each(value)).sum(dim=0)

    def maximum(self, value: Tensor) -> Tensor:
        return torch.stack(self.each(value)).amax(dim=0)


def kept(size: int, *, moving: bool) -> tuple[Ledger, Ledger]:
    """The ledger of one process, and that of so many parts; an example stays with one part unless ``moving``."""
    generator = torch.Generator().manual_seed(1)
    alone, parts = Ledger(N, 3), [Ledger(N, 3) for _ in range(size)]
    for _ in range(STEPS):
        rows = (torch.rand(N, generator=generator) < 0.5).nonzero().flatten()
        trace = 1 + torch.rand(len(rows), generator=generator, dtype=torch.float64)
        noise = torch.full_like(trace, 0.01)
        added = {"trace": trace, "variance": noise, **path_additions("trace", trace, noise, 1.0)}
        owner = torch.randint(size, (len(rows),), generator=generator) if moving else rows % size
        for ledger, mask in [(alone, owner >= 0), *((part, owner == k) for k, part in enumerate(parts))]:
            ledger.add(Contribution(rows[mask], trace[mask], True, {k: v[mask] for k, v in added.items()}))
            ledger.steps += 1
    return alone, whole_ledger(parts[0], Together(parts))  # type: ignore[arg-type]


def test_examples_that_stay_with_a_part_have_the_same_sums() -> None:
    alone, whole = kept(3, moving=False)
    assert whole.steps == alone.steps == STEPS
    assert whole.sums.keys() == alone.sums.keys()
    for name, value in alone.sums.items():
        torch.testing.assert_close(whole.sums[name], value, rtol=1e-12, atol=0, msg=name)


def test_examples_that_move_keep_their_sums_and_have_no_narrower_intervals() -> None:
    alone, whole = kept(3, moving=True)
    for name, value in alone.sums.items():
        if name not in ("trace_changes", "trace_last"):
            tolerance = 1e-6 if value.dtype == torch.float32 else 1e-12  # of errors
            torch.testing.assert_close(whole.sums[name], value, rtol=tolerance, atol=0, msg=name)
    errors = [Leakage(ledger, ExampleIds(N)).get_trace().run_error for ledger in (whole, alone)]
    assert errors[0] is not None
    assert errors[1] is not None
    assert bool(errors[0].isfinite().all())
    assert float(errors[0].mean()) > 0.9 * float(errors[1].mean())  # as many changes, of values in another order
