"""What a divergence D = KL(P ‖ P') between two transcripts means for an attacker who guesses an
answer.

P is the law of everything that a run releases if the true answer is in the data, P' if an
alternative is. The bounds follow from data processing (nothing computed from a release
distinguishes P from P' better than the release itself), so they bind **every attacker**, biased or
not, whatever else it knows; with Poisson sampling, except which steps drew the example. The run
(batches and noise) and the attacker's own dice are random. :func:`normal_limit_true_positive_rate`
is the exception: it is an estimate.

D from one run is an estimate of E_P Σ_t KL_t, and a bound computed from it is an estimate of the
bound; :meth:`Guess.upper` takes the conservative end of D's interval. These values depend on
private data: keep them secret.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from torchfil.fisher.results import Estimate

__all__ = [
    "Guess",
    "divergence_from_mixture",
    "divergence_of_rate",
    "expected_log_posterior_bound",
    "expected_posterior_bound",
    "fano_success",
    "largest_naming_rate",
    "largest_success",
    "largest_total_variation",
    "largest_true_positive_rate",
    "normal_limit_true_positive_rate",
]

Numbers = float | Sequence[float] | Tensor
# of an interval in [0, 1]: more than rounding leaves, so even small rates keep their digits
_HALVINGS = 64


@dataclass(frozen=True)
class Guess:
    """How well any attacker can guess the answer to a question about each example, from one run.

    D is measured along one run, so it is an estimate of its mean over runs (its error includes the
    random choice of batches and the path of the weights only if the estimate says so). The bounds
    are concave in D: at an estimate they are too small on average, not too large. Quote them from
    :meth:`upper`.

    Attributes:
        divergence: D = KL(P ‖ P') of each example, [ids], or of each of several alternatives, [ids,
            alternatives].
        alternatives: The names of the alternatives, one per column of D; empty: no names.
        complete: Whether the alternatives are all possible answers, including the true one (with D
            = 0).
        largest: The most that D can be, whatever the gradients are: that of gradients at the
            clipping threshold.

    Example:
        >>> guess = Guess(
        ...     Estimate(torch.tensor([0.2354]), torch.tensor([0.01]), "estimate"), ("absent",)
        ... )
        >>> guess.true_positive_rate([0.01, 0.05])
        tensor([[0.1353, 0.2556]], dtype=torch.float64)
        >>> guess.upper(0.95).true_positive_rate(0.05)
        tensor([0.2659], dtype=torch.float64)
    """

    divergence: Estimate
    alternatives: tuple[str, ...] = ()
    complete: bool = False
    largest: float = math.inf

    def __post_init__(self) -> None:
        shape, names = tuple(self.divergence.value.shape), len(self.alternatives)
        if len(shape) not in (1, 2):
            raise ValueError(
                f"divergence has shape {shape}; it must be [ids] or [ids, alternatives]"
            )
        columns = shape[1] if len(shape) == 2 else 1
        if names not in (0, columns):
            raise ValueError(f"alternatives has {names} names for {columns} columns of divergence")

    def upper(self, confidence: float = 0.95) -> Guess:
        """The same at the upper end of D's interval, which D exceeds with probability (1 −
        confidence)/2.

        It is never above ``largest``, so that it holds for examples that were hardly drawn, too.
        """
        high = self.divergence.interval(confidence)[1].clamp(max=self.largest)
        return replace(
            self, divergence=Estimate(high, torch.zeros_like(high), "upper bound", positive=True)
        )

    @property
    def _positive(self) -> Tensor:
        """D, at least 0: an estimate from few draws may lie below."""
        return self.divergence.value.clamp(min=0)

    def true_positive_rate(self, false_positive_rate: Numbers) -> Tensor:
        """For every attacker: :func:`largest_true_positive_rate`.

        D's shape, then the rates' shape.
        """
        return largest_true_positive_rate(*_beside(self._positive, false_positive_rate))

    def normal_limit(self, false_positive_rate: Numbers) -> Tensor:
        """An estimate for the best attacker, not a bound: :func:`normal_limit_true_positive_rate`.

        Shapes as above.
        """
        return normal_limit_true_positive_rate(*_beside(self._positive, false_positive_rate))

    def total_variation(self) -> Tensor:
        """For every attacker: :func:`largest_total_variation`, D's shape."""
        return largest_total_variation(self._positive)

    def success(self, prior: Numbers) -> Tensor:
        """For every attacker: :func:`largest_success` with prior(s) of the truth.

        D's shape, then the priors' shape.
        """
        return largest_success(*_beside(self._positive, prior))

    def posterior(self, prior: Numbers) -> Tensor:
        """For every attacker with this prior: :func:`expected_posterior_bound`.

        D's shape, then the priors' shape.
        """
        return expected_posterior_bound(*_beside(self._positive, prior))

    def several(self, priors: Numbers, overall_rate: Numbers) -> Tensor:
        """For every attacker: :func:`largest_naming_rate` of the true answer among all, [ids], then
        the rates' shape.

        Args:
            priors: The prior of each alternative in turn, [answers] or [ids, answers]; the true
                answer's prior comes first unless the alternatives are complete.
            overall_rate: β, how often the attacker names this answer over runs whose answer is
                drawn with the prior.
        """
        return largest_true_positive_rate(*_beside(self.mixture_divergence(priors), overall_rate))

    def mixture_divergence(self, priors: Numbers) -> Tensor:
        """:func:`divergence_from_mixture` of the true answer and all alternatives, [ids].

        Priors as in `several`.

        :func:`fano_success` takes its mean over records whose answers follow the prior.
        """
        value = self._positive
        columns = value if value.ndim == 2 else value[:, None]
        return divergence_from_mixture(columns if self.complete else F.pad(columns, (1, 0)), priors)


def largest_true_positive_rate(divergence: Numbers, false_positive_rate: Numbers) -> Tensor:
    """The largest t with kl(t ‖ α) = t log(t/α) + (1−t) log((1−t)/(1−α)) ≤ D; binds every attacker.

    If an attacker says "this answer" in at most α of the runs where it is false, it says so in at
    most t of the runs where it is true: by data processing, kl(P(yes) ‖ P'(yes)) ≤ KL(P ‖ P').

    Args:
        divergence: D = KL(P ‖ P') ≥ 0, P of the true answer.
        false_positive_rate: α in [0, 1]; broadcast against D.

    Returns:
        t in [α, 1], float64, to 1e-12. D = 0 gives α, D = ∞ gives 1, and α = 0 gives 0 for every
        finite D.

    Example:
        >>> largest_true_positive_rate([0.0, 0.2354, float("inf")], 0.05)
        tensor([0.0500, 0.2556, 1.0000], dtype=torch.float64)
    """
    limit, alpha = _checked(divergence, false_positive_rate, "false_positive_rate")
    gain = _largest(lambda gain: _binary_divergence(alpha, gain), 1 - alpha, limit)
    return alpha + gain


def divergence_of_rate(rate: float, false_positive_rate: float) -> float:
    """kl(t ‖ α): the D at which the largest true-positive rate of any attacker at α is t.

    The inverse of :func:`largest_true_positive_rate`.

    Example:
        >>> round(float(largest_true_positive_rate(divergence_of_rate(0.25, 0.01), 0.01)), 6)
        0.25
    """
    return rate * math.log(rate / false_positive_rate) + (1 - rate) * math.log(
        (1 - rate) / (1 - false_positive_rate)
    )


def normal_limit_true_positive_rate(divergence: Numbers, false_positive_rate: Numbers) -> Tensor:
    """Φ(Φ⁻¹(α) + sqrt(2D)): an **estimate** of the best attacker's true-positive rate at α, not a
    bound.

    It is exact if log p/p' is normal: in the limit of many steps that each reveal little, and for a
    Gaussian release.

    Example:
        >>> normal_limit_true_positive_rate(0.5, [0.01, 0.1])  # 1 standard deviation apart
        tensor([0.0924, 0.3891], dtype=torch.float64)
    """
    limit, alpha = _checked(divergence, false_positive_rate, "false_positive_rate")
    return torch.where(
        limit.isinf(), 1.0, torch.special.ndtr(torch.special.ndtri(alpha) + (2 * limit).sqrt())
    )


def largest_total_variation(divergence: Numbers) -> Tensor:
    """min( sqrt(D/2), sqrt(1 − e^{−D}) ): the bounds of Pinsker and of Bretagnolle and Huber.

    For every attacker, the true-positive rate is at most this much above the false-positive rate,
    at any threshold.

    Example:
        >>> largest_total_variation([0.0, 0.02, 4.0])
        tensor([0.0000, 0.1000, 0.9908], dtype=torch.float64)
    """
    (limit,) = _tensors(divergence)
    _check_divergence(limit)
    return torch.minimum((limit / 2).sqrt(), (-torch.expm1(-limit)).sqrt())


def largest_success(divergence: Numbers, prior: Numbers) -> Tensor:
    """How often any attacker picks the right one of two answers: at most π₀ + π₁·TV, with priors π₀
    ≥ π₁.

    The truth is drawn with the prior here: π P(A) + (1−π)(1 − P'(A)) ≤ max(π, 1−π) + min(π, 1−π)·TV
    for every set A of releases that makes the attacker say "the true one".

    Args:
        divergence: D = KL(P ‖ P') ≥ 0.
        prior: π in [0, 1], of either answer; broadcast against D.

    Example:
        >>> largest_success([0.0, 0.02, float("inf")], 0.4)
        tensor([0.6000, 0.6400, 1.0000], dtype=torch.float64)
    """
    limit, true = _checked(divergence, prior, "prior")
    return torch.maximum(true, 1 - true) + torch.minimum(true, 1 - true) * largest_total_variation(
        limit
    )


def expected_posterior_bound(divergence: Numbers, prior: Numbers) -> Tensor:
    """The largest mean, over runs on the truth, of the probability that a Bayesian attacker assigns
    to the truth.

    Proof: let the attacker say yes with probability T, its posterior; then kl(E_P T ‖ E_P' T) ≤ D
    by data processing. Posteriors average to the prior: π E_P T + (1−π) E_P' T = π. The result is
    the largest E_P T under both conditions; it binds every attacker with this prior. In a single
    run the posterior may be higher.

    Args:
        divergence: D = KL(P ‖ P') ≥ 0, P of the true answer.
        prior: π of the true answer, strictly between 0 and 1; broadcast against D.

    Example:
        >>> expected_posterior_bound([0.0, 0.1, float("inf")], 0.39)
        tensor([0.3900, 0.5214, 1.0000], dtype=torch.float64)
    """
    limit, true = _checked(divergence, prior, "prior")
    _check_open(true)

    # with d = E_P T − E_P' T, the second equation becomes E_P' T = π(1 − d)
    gap = _largest(
        lambda gap: _binary_divergence(true * (1 - gap), gap), torch.ones_like(true), limit
    )
    return true + (1 - true) * gap


def expected_log_posterior_bound(divergence: Numbers, prior: Numbers) -> Tensor:
    """The largest mean log posterior of the truth, over runs on the truth: log π − log(π + (1−π)
    e^{−D}).

    Proof: log T = log π − log(π + (1−π) e^{−L}) with L = log p/p' is concave in L, and E_P L = D
    (Jensen). So the posterior's geometric mean is at most the posterior at e^D times the prior
    odds. Binds every attacker with this prior.

    Example:
        >>> expected_log_posterior_bound([0.0, 0.1], 0.39).exp()
        tensor([0.3900, 0.4140], dtype=torch.float64)
    """
    limit, true = _checked(divergence, prior, "prior")
    _check_open(true)
    return F.logsigmoid(torch.logit(true) + limit)


def divergence_from_mixture(divergences: Numbers, priors: Numbers) -> Tensor:
    """−log Σ_a π_a e^{−D_a} ≥ KL(P ‖ Σ_a π_a P_a), D_a = KL(P ‖ P_a): how far the truth is from all
    answers together.

    Proof: log p/Σ_a π_a p_a = −log Σ_a π_a e^{−L_a} is concave in L_a = log p/p_a, and E_P L_a =
    D_a (Jensen).

    Args:
        divergences: D_a ≥ 0, [..., answers], including the true answer (its D is 0).
        priors: π_a ≥ 0 with sum 1, [answers] or [..., answers].

    Returns:
        [...], at most log 1/π of the true answer.

    Example:
        >>> divergence_from_mixture([0.0, float("inf"), float("inf")], [0.5, 0.25, 0.25])
        tensor(0.6931, dtype=torch.float64)
    """
    limits, shares = _tensors(divergences, priors)
    _check_divergence(limits)
    _check_priors(shares)
    if limits.shape[-1:] != shares.shape[-1:]:
        raise ValueError(
            f"divergences has shape {tuple(limits.shape)} and priors {tuple(shares.shape)}; both "
            "need one entry per answer, the true one included"
        )
    return (-torch.logsumexp(shares.log() - limits, dim=-1)).clamp(min=0)


def largest_naming_rate(divergences: Numbers, priors: Numbers, overall_rate: Numbers) -> Tensor:
    """How often any attacker names the true one of several answers, if it names it β of the time
    overall: at most t.

    kl(t ‖ β) ≤ KL(P ‖ Σ_a π_a P_a), by data processing; "overall" means over runs whose answer is
    drawn with the prior.

    Args:
        divergences: D_a, [..., answers], as in :func:`divergence_from_mixture`.
        priors: π_a, [answers] or [..., answers].
        overall_rate: β in [0, 1]; broadcast against [...].

    Example:
        >>> largest_naming_rate([0.0, 0.3, 0.5], [0.2, 0.3, 0.5], 0.2)
        tensor(0.5645, dtype=torch.float64)
    """
    return largest_true_positive_rate(divergence_from_mixture(divergences, priors), overall_rate)


def fano_success(mean_information: Numbers, prior: int | Sequence[float] | Tensor) -> Tensor:
    """The largest share of records whose answer, drawn with the prior, any attacker names
    correctly: Fano's inequality.

    With I the mutual information between answer and release, kl(success ‖ max_a π_a) ≤ I by data
    processing, and kl(success ‖ 1/m) ≤ I + log m − H(π) (Fano); the result is the smaller of the
    two bounds. Both are concave in I, so I may be a mean over records. Binds every attacker, **on
    average over people**; one record may be named more often.

    Args:
        mean_information: I in nats: the mean of KL(P ‖ Σ_a π_a P_a), or of a bound on it
            (:func:`divergence_from_mixture`), over records whose answers follow the prior.
        prior: π, [answers], or the number m of answers that are equally likely.

    Example:
        >>> fano_success([0.0, 0.1, 2.0], 4)
        tensor([0.2500, 0.4567, 1.0000], dtype=torch.float64)
        >>> fano_success(0.1, [0.7, 0.2, 0.1])
        tensor(0.7684, dtype=torch.float64)
    """
    if isinstance(prior, int):
        if not prior >= 1:
            raise ValueError(
                f"prior={prior} must be a number of answers, at least 1, or one prior per answer"
            )
        prior = torch.full((prior,), 1 / prior, dtype=torch.float64)
    information, shares = _tensors(mean_information, prior)
    _check_divergence(information, "mean_information")
    _check_priors(shares)

    likely = shares[shares > 0]
    spare = (math.log(len(likely)) + torch.xlogy(likely, likely).sum()).clamp(min=0)  # log m − H(π)
    processed = largest_true_positive_rate(information, likely.max())
    return torch.minimum(
        processed, largest_true_positive_rate(information + spare, 1 / len(likely))
    )


def _binary_divergence(rate: Tensor, gain: Tensor) -> Tensor:
    """kl(rate + gain ‖ rate), which keeps its digits if the gain is small."""
    up, down = (torch.where(gain > 0, gain / part, 0.0) for part in (rate, 1 - rate))
    return torch.special.xlog1py(rate + gain, up) + torch.special.xlog1py((1 - rate) - gain, -down)


def _largest(increasing: Callable[[Tensor], Tensor], most: Tensor, limit: Tensor) -> Tensor:
    """The largest x in [0, most] with increasing(x) ≤ limit, by bisection."""
    low, high = torch.zeros_like(most), most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        inside = increasing(middle) <= limit
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return torch.where(increasing(most) <= limit, most, torch.where(limit == 0, 0.0, low))


def _tensors(*values: Numbers) -> list[Tensor]:
    """All values as float64 tensors, on the device of the first tensor among them."""
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    return [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]


def _beside(divergence: Tensor, other: Numbers) -> tuple[Tensor, Tensor]:
    """Each entry of the divergence with each of the others, as shapes that broadcast."""
    limit, beside = _tensors(divergence, other)
    return limit.reshape(limit.shape + (1,) * beside.ndim), beside


def _checked(divergence: Numbers, rate: Numbers, name: str) -> tuple[Tensor, Tensor]:
    """D and a probability, broadcast against each other."""
    limit, probability = torch.broadcast_tensors(*_tensors(divergence, rate))
    _check_divergence(limit)
    _check_all(
        probability,
        (probability >= 0) & (probability <= 1),
        name,
        "lie in [0, 1]: it is a probability",
    )
    return limit, probability


def _check_all(values: Tensor, fine: Tensor, name: str, rule: str) -> None:
    if not fine.all():
        raise ValueError(f"{name}={values[~fine].flatten().tolist()[:1]} must {rule}")


def _check_divergence(limit: Tensor, name: str = "divergence") -> None:
    _check_all(limit, limit >= 0, name, "be ≥ 0; if an estimate came out negative, clamp it at 0")


def _check_open(prior: Tensor) -> None:
    rule = (
        "lie strictly between 0 and 1: no release changes the odds of what is impossible or certain"
    )
    _check_all(prior, (prior > 0) & (prior < 1), "prior", rule)


def _check_priors(priors: Tensor) -> None:
    if not (
        priors.ndim > 0
        and bool((priors >= 0).all())
        and bool(((priors.sum(dim=-1) - 1).abs() <= 1e-6).all())
    ):
        raise ValueError(
            f"priors={priors.tolist()} must hold one probability ≥ 0 for each answer and sum to 1"
        )
