"""What became of a model that was trained privately: it runs and is right, or it is refused, or it ends in an error."""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torchfil
from tests.opacus_suite.vision import import_torchvision

from . import hugging_face, plain, vision
from .model import Model
from .truth import WAYS, assert_true, trained

# Beside the environment, not in it, as the Makefile says why; torchvision comes before what looks for it.
sys.path.append(str(Path(sys.prefix) / "vision"))
import_torchvision()
MODELS = {model.name: model for model in (*hugging_face.MODELS, *vision.MODELS, *plain.MODELS)}

RECORDED, MAPPED, REFUSED, FAILED, WRONG = "runs", "runs (vmap)", "refused", "fails", "wrong"


@dataclass(frozen=True)
class Case:
    """A cell of the table.

    Attributes:
        name: Of the model.
        way: How it is trained, one of :data:`WAYS`.
        dropout: Whether it drops.
    """

    name: str
    way: str
    dropout: bool

    @property
    def model(self) -> Model:
        """What is trained."""
        return MODELS[self.name]

    def __str__(self) -> str:
        return f"{self.name}, {self.way}, {'with' if self.dropout else 'without'} dropout"


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        kind: "runs" (a recorded pass), "runs (vmap)" (mapped over examples), "refused" (by torchfil, with a reason) or
            "fails" (in an error of another package).
        reason: The text of the error, numbers left out.
    """

    kind: str
    reason: str = ""


CASES = tuple(
    Case(name, way, dropout)
    for name, model in MODELS.items()
    for way in WAYS
    for dropout in (True, False)
    if (way != "loss" or model.loss_inside) and (model.drops or not dropout)
)


def outcome_of(case: Case) -> Outcome:
    """Train the case and compare it with brute force.

    Raises:
        AssertionError: A number is wrong.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run = trained(case.model, case.way, dropout=case.dropout)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            is_ours = Path(last).is_relative_to(Path(torchfil.__file__).parent)
            text = " ".join(f"{type(error).__name__}: {error}".split())
            reason = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "N", text.replace("|", "/"))  # machines' numbers differ
            return Outcome(REFUSED if is_ours else FAILED, reason)
        assert_true(run)
    return Outcome(MAPPED if run.mapped else RECORDED)
