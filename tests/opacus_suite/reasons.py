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
        "refused: examples along the second dimension",
        "The inputs are [positions, batch], but the test does not pass `batch_first=False`, so Opacus takes positions "
        "for examples.",
        r"examples in 1 forward pass",
        r"PrivacyEngineText",
    ),
    Reason(
        "adaptive-clipping",
        'refused: `clipping="adaptive"`',
        "It counts how many gradients were clipped, which has no meaning with a smooth clip function.",
        r"clipping='adaptive'|target_unclipped_quantile",
    ),
    Reason(
        "other-loss",
        "refused: the loss is not a standard one",
        "The loops use `(y - out).mean()` with `y` of another shape than `out`. The accounting differentiates the loss "
        "of each example, so it must know it: pass `criterion=`.",
        r"LossMismatchError: the (loss in the training loop is not one of|gradient at the model's output differs)",
        r"test_noise_level",
    ),
    Reason(
        "other-data",
        "refused: resumed with other data",
        "The test draws its data at random, and again for the engine that loads the checkpoint. A ledger belongs to "
        "the examples that it was measured on, and a run resumes on them only.",
        r"other data: its examples differ from those of the saved run",
        r"test_checkpoints",
    ),
    Reason(
        "diverged",
        "refused: the training diverges",
        "With noise of standard deviation 1e20 the weights overflow in the first step, and the outputs of the second "
        "are infinite. Opacus continues with NaN; here the step is refused.",
        r"training has diverged",
        r"test_compare_to_vanilla",
    ),
    Reason(
        "smooth-clip",
        "differs by the smooth clip",
        "Some gradients have a norm near the threshold, where the default clip function is below hard clipping (by "
        '0.1 % at half the threshold); the tests allow 0.01 % and 0.0005. They pass with `clip="hard"`.',
        r"Per sample gradients don't sum up|within 3 places",
        r"TiedWeights.*test_sample_grad_aggregation|test_per_layer_clipping",
    ),
    Reason(
        "ew-is-hooks",
        'runs: "ew" means "hooks"',
        'Opacus\'s "ew" cannot expand bare parameters and fails in the forward pass. Here "ew" is another name of '
        '"hooks", which supports them.',
        r"RuntimeError not raised",
        r"test_(extra_param|unsupported)_ew",
    ),
)
