"""Why a test of Opacus's does not pass with torchfil's engine: each documented reason, and what it is told by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reason:
    """A documented reason.

    Attributes:
        name: As in expected.json.
        title: What happens, for the table.
        why: Why it is right, in plain English; Markdown.
        error: What "class: first line of the text" must match, anywhere.
        tests: What the test's name must match, anywhere; needed where the error is a bare assertion.
    """

    name: str
    title: str
    why: str
    error: str
    tests: str = ""

    def explains(self, test: str, record: Mapping[str, Any]) -> bool:
        """Whether the failure that the plugin recorded is this one."""
        text = f"{record.get('error')}: {record.get('text')}"
        return bool(re.search(self.tests, test) and re.search(self.error, text))


# In this order: the first that explains a failure is its reason.
REASONS = (
    Reason(
        "batch-first",
        "refused: `batch_first=False`",
        "The accounting needs examples along the first dimension. (The inputs of these tests are integers, too.)",
        r"batch_first|examples were seen in 1 forward pass",
        r"PrivacyEngineText",
    ),
    Reason(
        "per-layer-clipping",
        'refused: `clipping="per_layer"`',
        "One clip factor per layer changes the Jacobian of the clipped gradient; the accounting does not differentiate "
        "that.",
        r"clipping='per_layer'",
    ),
    Reason(
        "adaptive-clipping",
        'refused: `clipping="adaptive"`',
        "It counts how many gradients were clipped, which has no meaning with a smooth clip function.",
        r"clipping='adaptive'|target_unclipped_quantile",
    ),
    Reason(
        "integer-inputs",
        "refused: nothing private by default",
        "By default every floating-point input is private, and these models take integers only. Integers have no "
        'derivative: name the layer whose output is private, `private=Private(submodule="emb")`.',
        r"nothing private to measure",
    ),
    Reason(
        "other-loss",
        "refused: the loss is not a standard one",
        "The loops use `(y - out).mean()` with `y` of another shape than `out`, or `out.sum()` with a gradient of zero."
        " The accounting differentiates the loss of each example, so it must know it: pass `criterion=`.",
        r"LossMismatchError: the (loss in the training loop is none|gradient at the model's output differs)",
        r"test_noise_level|BatchMemoryManagerTest",
    ),
    Reason(
        "no-targets",
        "refused: batches without targets",
        "The data set has one tensor and the loop's loss is `out.sum()`. Without targets the loss cannot be identified:"
        " pass `criterion=` and `batch_to_inputs=`.",
        r"cannot tell the targets",
    ),
    Reason(
        "left-in-the-middle",
        "refused with another error class",
        "The loop is left in the middle of a logical batch and another one begins: going on would add its examples to "
        "the unfinished batch under one draw of noise. Opacus goes on; the `ValueError` that the test waits for is the "
        "one for a missing `zero_grad`, a step later.",
        r"left in the middle of a logical batch",
    ),
    Reason(
        "zero-noise",
        "refused: `noise_multiplier=0`",
        "Without noise a step releases its gradients exactly, and the Fisher information is infinite.",
        r"noise_multiplier=0\.0 must be positive",
    ),
    Reason(
        "error-class",
        "refused with another error class",
        "Opacus's `UnsupportedModuleError` is expected; ours has the same name and is another class.",
        r"UnsupportedModuleError",
        r"test_model_validator$",
    ),
    Reason(
        "error-text",
        "refused with another text",
        'The text "Module parameters are different than optimizer Parameters" is expected.',
        r"Module parameters are different",
        r"test_validator_weight_update_check",
    ),
)
