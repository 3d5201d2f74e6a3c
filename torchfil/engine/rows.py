"""Several rows of one example: the rows of a person, or the views of an example.

Their gradient is clipped once.

The loss of an example is the mean (or the sum) over its rows,

    ℓ_o(w) = (1/|R_o|) Σ_{r ∈ R_o} ℓ(f_w(x_r), y_r),

which is a function of the example like any other. So its gradient is clipped once, released and
accounted for exactly.

* **Owners** (``owner_of=``): the loop sees rows, [rows, …], as before. The engine's passes see
  owners, [batch, K, …], filled up with copies of their first row, which have weight 0 in the loss
  and no coordinates in z.
* **Views** (``views=``; De et al. 2022): a function makes K views of every example inside the
  model, and derivatives pass through them; or the data set draws K views, which are then all
  private. Random numbers of the views are recorded with the model's masks, and the attacker is
  assumed to know them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.accounting.owners import Owners
from torchfil.engine.losses import IdentifiedLoss
from torchfil.fisher.models import check_unweighted_mean
from torchfil.fisher.recording import losses_of
from torchfil.private import Examples
from torchfil.private.batches import ROWS
from torchfil.utils.given import Outputs, Targets
from torchfil.utils.trees import map_tensors, tensors_of

Views = int | Callable[[Tensor], Tensor]
_ROWS_OF_A_PASS = 64  # rows of padding that cost about as much as another pass


def many_rows(module: nn.Module, views: Views | None = None) -> nn.Module:
    """The module, which also takes several rows of each example, [batch, K, …], and returns outputs
    [batch, K, …].

    Both have the same weights, attributes, hooks and children.

    Args:
        module: Takes rows, [rows, …].
        views: A function that maps x [batch, …] to its views, [batch, K, …], with torch functions
            (its random numbers must have the batch first), or K if batches hold K views each. In
            training, an example's views are its rows, and other inputs are the same for all. None:
            an example has several rows if there is the input ``ROWS``.

    Example:
        >>> module = many_rows(nn.Linear(3, 2), lambda x: torch.stack([x, x.flip(-1)], dim=1))
        >>> module(torch.ones(5, 3)).shape, module.eval()(torch.ones(5, 3)).shape
        (torch.Size([5, 2, 2]), torch.Size([5, 2]))
    """
    kind = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Outputs:
        rows = kwargs.pop(ROWS, None)
        if views is not None and self.training:
            x = views(args[0]) if callable(views) else args[0]
            given = (*args[0].shape[:1], *(() if callable(views) else (views,)))
            if not (x.ndim >= 2 and x.shape[: len(given)] == given):
                raise ValueError(
                    f"views of shape {tuple(x.shape)} for inputs of shape {tuple(args[0].shape)}, "
                    f"views={views}: they must be [batch, K, …], with K of at least 1"
                )
            others = map_tensors(
                lambda leaf: leaf[:, None].expand(-1, x.shape[1], *leaf.shape[1:]),
                (args[1:], kwargs),
            )
            rows, args, kwargs = x, (x, *others[0]), others[1]
        if rows is None:
            return kind.__call__(self, *args, **kwargs)
        args, kwargs = map_tensors(lambda leaf: leaf.flatten(0, 1), (args, kwargs))
        outputs = kind.__call__(self, *args, **kwargs)
        return map_tensors(
            lambda leaf: leaf.unflatten(0, rows.shape[:2]) if leaf.ndim else leaf, outputs
        )

    alias: nn.Module = object.__new__(type(kind.__name__, (kind,), {"__call__": call}))
    object.__setattr__(alias, "__dict__", module.__dict__)
    return alias


class OverRows:
    """The loss of examples with several rows, [batch, K, …]: the mean or the sum of the rows'
    losses.

    Args:
        criterion: The loss of single rows.
        loss_reduction: "mean" or "sum", over the batch.
        row_reduction: "mean" or "sum", over an example's rows.
        views: Whether targets are [batch, …], the same for all views; False: (those of each row,
            ``ROWS``).

    Example:
        >>> loss = OverRows(nn.MSELoss(reduction="sum"), "sum", views=True)
        >>> loss(torch.ones(2, 4, 1), torch.zeros(2, 1)).item()
        2.0
    """

    def __init__(
        self,
        criterion: Callable[[Any, Any], Tensor] | None,
        loss_reduction: str = "mean",
        row_reduction: str = "mean",
        *,
        views: bool = False,
    ) -> None:
        if criterion is None:
            raise ValueError(
                "views= needs criterion=, the loss of single views, such as nn.CrossEntropyLoss()"
            )
        check_unweighted_mean(criterion)
        self.criterion, self.views = criterion, views
        self.loss_reduction, self.row_reduction = loss_reduction, row_reduction
        self._of_row = (
            criterion if isinstance(criterion, IdentifiedLoss) else IdentifiedLoss.of(criterion)
        )

    def __call__(self, outputs: object, targets: object) -> Tensor:
        """The batch's loss."""
        losses = self.by_example(outputs, targets)
        return losses.mean() if self.loss_reduction == "mean" else losses.sum()

    def by_example(self, outputs: Outputs, targets: Targets) -> Tensor:
        """ℓ of every example, [batch]."""
        batch, count = tensors_of(outputs)[0].shape[:2]
        own = torch.ones(batch, count, dtype=torch.bool, device=tensors_of(outputs)[0].device)
        if self.views:
            targets = map_tensors(
                lambda leaf: leaf[:, None].expand(-1, count, *leaf.shape[1:]), targets
            )
        else:
            targets, own = targets[0], targets[1] >= 0
        flat = map_tensors(lambda leaf: leaf.flatten(0, 1), (outputs, targets))
        by_row = losses_of(self._of_row, *flat).unflatten(0, (batch, count))
        losses = torch.where(own, by_row, 0.0).sum(dim=1)
        return losses / own.sum(dim=1).clamp(min=1) if self.row_reduction == "mean" else losses

    def share(self, part: Examples, whole: Examples) -> Tensor:
        """By what the loss of some rows is multiplied before it is added to that of others,
        [batch].
        """
        some, all_rows = ((each.public[1][ROWS] >= 0).sum(dim=1) for each in (part, whole))
        return some / all_rows if self.row_reduction == "mean" else torch.ones_like(some)

    def __repr__(self) -> str:
        return f"the {self.row_reduction} over an example's rows of {self.criterion!r}"


@dataclass(frozen=True)
class OwnedRows:
    """Some of a batch's rows by owner.

    Attributes:
        owners: The owners: their numbers, or keys in a stream, [batch].
        index: Where each owner's rows lie in the batch, [batch, K]; at padding, its first row.
        numbers: Which of its owner's rows each one is, [batch, K]; −1: padding.
    """

    owners: list[Any]
    index: Tensor
    numbers: Tensor

    @cached_property
    def places(self) -> Tensor:
        """Which of batch · K places have a row, in order.

        On the CPU, because a GPU would wait for their number.
        """
        return (self.numbers >= 0).flatten().nonzero()[:, 0]

    @cached_property
    def rows(self) -> Tensor:
        """The places of these rows in the batch, owner by owner."""
        return self.index.flatten()[self.places]

    @cached_property
    def counts(self) -> Tensor:
        """How many rows each owner has here, [batch]."""
        return (self.numbers >= 0).sum(dim=1)

    def grouped(self, tree: object) -> Any:
        """The owners' rows, [batch, K, …], from tensors by row, [rows, …]."""
        return map_tensors(lambda leaf: leaf[self.index.to(leaf.device, non_blocking=True)], tree)

    def in_order(self, outputs: object) -> Any:
        """Outputs of the owners, [batch, K, …], in the order of the batch's rows."""
        places = self.places[self.rows.argsort()]
        return map_tensors(
            lambda leaf: leaf.flatten(0, 1)[places.to(leaf.device, non_blocking=True)], outputs
        )


def rows_by_owner(
    ids: Sequence[Any],
    owners: Owners | None,
    largest: int | None = None,
    together: int | None = None,
) -> list[OwnedRows]:
    """The rows of a batch by owner, in parts in which owners have about as many rows, so that
    little is padding.

    A few sizes serve all batches: each has to be tried before it is used, and captured on a GPU.

    Args:
        ids: The rows' numbers, one owner after the other; or in a stream their owners' keys,
            [rows].
        owners: Who owns which row; None: a stream.
        largest: The largest number of rows that an owner brings; None: not known.
        together: K of a single part for all owners; None: several parts.
    """
    if owners is None:
        codes = {name: code for code, name in enumerate(dict.fromkeys(ids))}
        keys, code = list(codes), torch.tensor([codes[name] for name in ids], dtype=torch.long)
        counts, order = torch.bincount(code), code.argsort(stable=True)
    else:
        rows = torch.tensor(ids, dtype=torch.long)
        names, counts = owners.of_row[rows].unique_consecutive(return_counts=True)
        keys, order = names.tolist(), torch.arange(len(rows))
    starts = counts.cumsum(0) - counts
    places = (
        torch.arange(len(order)) - starts.repeat_interleave(counts)
        if owners is None
        else owners.place[rows]
    )

    parts: list[OwnedRows] = []
    by_size, sizes = counts.argsort(descending=True, stable=True).tolist(), counts.tolist()
    rooms = [min(_usual_size(sizes[each]), largest or max(sizes)) for each in by_size]
    while by_size:
        room, end = together or rooms[0], len(by_size)
        # rows of padding, by another part from k on
        saved = ((rooms[0] - rooms[k]) * (end - k) for k in range(1, end))
        count = next(
            (
                k
                for k, rows_saved in enumerate(saved, 1)
                if rows_saved > _ROWS_OF_A_PASS and not together
            ),
            end,
        )
        chosen, by_size, rooms = (
            torch.tensor(sorted(by_size[:count])),
            by_size[count:],
            rooms[count:],
        )
        column = torch.arange(room).expand(count, room)
        own = column < counts[chosen, None]
        place = starts[chosen, None] + column.where(own, 0)
        numbers = torch.where(own, places[place], -1)
        parts.append(OwnedRows([keys[each] for each in chosen.tolist()], order[place], numbers))
    return parts


def _usual_size(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power
