"""The optimizer that another training loop sees if the engine has already taken the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import optim

__all__ = ["OptimizerOfTheLoop"]


class OptimizerOfTheLoop(optim.Optimizer):
    """Shows an optimizer's parameter groups and state to schedulers and checkpoints; ``step()`` does nothing.

    Args:
        optimizer: The private optimizer, which ``engine.train_step`` calls.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> outer = OptimizerOfTheLoop(sgd)
        >>> outer.step()
        >>> torch.optim.lr_scheduler.StepLR(outer, 1).get_last_lr() == [sgd.param_groups[0]["lr"]]
        True
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The private optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The private optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The private optimizer's defaults."""
        return self.optimizer.defaults

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing: the engine has already taken the step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears gradients."""

    def state_dict(self) -> dict[str, Any]:
        """The private optimizer's ``state_dict()``."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the private optimizer's state."""
        self.optimizer.load_state_dict(state_dict)
