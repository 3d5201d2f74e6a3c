"""Where noise and Poisson draws come from.

Whoever knows the noise subtracts it, and whoever knows the draws gets back what subsampling hides.
So both come from generators that belong to one run in one process. The operating system seeds them
at every start, load, copy and fork, ``torch.manual_seed`` does not reach them, and no file holds
their state. Seeding them is for tests (:class:`Seeded`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

NoiseKind = Literal["OS-seeded", "cryptographic", "seeded"]
_STATE_WORDS = 624  # of the Mersenne Twister
_WORDS_AT = 24  # bytes before them in torch's CPU state: seed, left, seeded, next


class NoiseSource:
    """Generators of torch, seeded by the operating system: Mersenne Twister on CPUs, Philox on
    GPUs.

    Neither is cryptographic. The Mersenne Twister gets all of its 19,968 bits of state from the
    operating system, because torch's own seed reaches it with 32 bits only, which can be tried one
    by one; Philox gets 64.

    Guarantees:
        * No two sources share numbers, and a copy, a pickle or a forked process draws afresh.
        * Numbers do not depend on ``torch.manual_seed``, and torch's own generators do not advance.
    """

    kind: NoiseKind = "OS-seeded"

    def __init__(self) -> None:
        self.renew()

    def __reduce__(self) -> Any:
        return type(self), ()

    def renew(self) -> None:
        """Draw afresh from now on."""
        self._process = os.getpid()
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        """The source of the noise on a device."""
        if os.getpid() != self._process:  # forked: the other process goes on with the same state
            self.renew()
        if device not in self._generators:
            self._generators[device] = _from_the_system(device)
        return self._generators[device]

    def normal_(self, out: Tensor, std: float) -> Tensor:
        """Fill a tensor with N(0, std²)."""
        return out.normal_(0, std, generator=self.generator(out.device))

    def uniform(self, count: int) -> Tensor:
        """Numbers in [0, 1), [count], on the CPU."""
        return torch.rand(count, generator=self.generator(torch.device("cpu")))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint may hold: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume, with fresh numbers."""
        self.renew()


class Secure(NoiseSource):
    """Noise and draws from the operating system's cryptographic generator, made on the CPU and
    copied to the device.

    Normal numbers are made from pairs of 53-bit uniform numbers in float64 (Box and Muller), so |z|
    ≤ 8.6.
    """

    kind: NoiseKind = "cryptographic"

    def normal_(self, out: Tensor, std: float) -> Tensor:
        """Fill a tensor with N(0, std²)."""
        pairs = self.uniform(2 * math.ceil(out.numel() / 2)).view(2, -1)
        radius, angle = (-2 * torch.log1p(-pairs[0])).sqrt(), 2 * math.pi * pairs[1]
        normal = torch.cat([radius * angle.cos(), radius * angle.sin()])[: out.numel()]
        return out.copy_(std * normal.view(out.shape))

    def uniform(self, count: int) -> Tensor:
        """Numbers in [0, 1), [count], on the CPU, in float64."""
        return torch.from_numpy(
            (np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> 11) * 2.0**-53
        )


class Seeded(NoiseSource):
    """Noise and draws that can be repeated, for tests and replays: bit for bit after resuming, too.

    Whoever has the seed or a checkpoint can subtract the noise, so a run file says that its noise
    was seeded.

    Args:
        noise: The source of the noise, on the parameters' device; None: torch's own, as in Opacus.
        draws: The source of the draws, on the CPU; None: torch's own.
        seed: Instead of both.
        device: The parameters' device.
        rank: The number of this process, if several train together: their draws must not be alike.
    """

    kind: NoiseKind = "seeded"

    def __init__(
        self,
        noise: torch.Generator | None = None,
        draws: torch.Generator | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        rank: int | None = None,
    ) -> None:
        if seed is not None:
            noise = torch.Generator(device).manual_seed(derived_seed(seed, "noise", 0))
            draws = torch.Generator().manual_seed(derived_seed(seed, "draws", rank or 0))
        elif rank is not None:
            first = int(torch.empty((), dtype=torch.int64).random_(generator=draws))
            draws = torch.Generator().manual_seed(derived_seed(first, "draws", rank))
        self._noise, self._draws = noise, draws

    def __reduce__(self) -> Any:
        raise TypeError(
            "a seeded noise source cannot be copied: both copies would draw the same noise"
        )

    def renew(self) -> None:
        """Nothing: it repeats what it drew."""

    def generator(self, device: torch.device) -> Any:
        """The source of the noise on a device; None: torch's own."""
        return self._noise

    def uniform(self, count: int) -> Tensor:
        """Numbers in [0, 1), [count], on the CPU."""
        return torch.rand(count, generator=self._draws)

    def state_dict(self) -> dict[str, Any]:
        """The states of both generators, with which a run resumes bit for bit."""
        both = {"noise": self._noise, "draws": self._draws}
        return {
            name: generator.get_state() for name, generator in both.items() if generator is not None
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name, generator in (("noise", self._noise), ("draws", self._draws)):
            if generator is not None and name in state:
                generator.set_state(state[name].cpu())


def noise_source(
    *,
    secure: bool = False,
    seed: int | None = None,
    noise: torch.Generator | None = None,
    **more: Any,
) -> NoiseSource:
    """The source for one run: seeded if a seed or a generator of noise is given, as for
    :class:`Seeded`.

    Args:
        secure: Whether it must be cryptographic.
        seed: For noise and draws.
        noise: A generator for the noise, as in Opacus; draws then come from ``draws``, else from
            torch's own.
        **more: ``draws`` (the loader's generator; without a generator of noise it is not used),
            ``device`` and ``rank`` of :class:`Seeded`.
    """
    given = [
        name
        for name, value in (("noise_seed", seed), ("noise_generator", noise))
        if value is not None
    ]
    if secure and given:
        raise ValueError(
            f"secure_mode=True draws noise that nobody can repeat; leave out {given[0]}="
        )
    if len(given) > 1:
        raise ValueError(
            f"noise_seed={seed} and noise_generator= both seed the noise; keep one of them"
        )
    if given:
        return Seeded(noise, seed=seed, **more)
    return Secure() if secure else NoiseSource()


def log_line(source: NoiseSource) -> tuple[int, str]:
    """What a log says about the source, once, and how loudly."""
    if source.kind == "seeded":
        return logging.WARNING, (
            "noise and Poisson draws are seeded: whoever has the seed or a checkpoint can "
            "subtract the noise. This is for tests; for a model that you release, leave out "
            "noise_seed= and noise_generator="
        )
    return (
        logging.INFO,
        f"noise and Poisson draws come from a generator of their own ({source.kind})",
    )


def derived_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A seed that is unrelated to others derived from the same seed or its neighbours, and does not
    give it away.

    Example:
        >>> derived_seed(0, "probes", 1) == derived_seed(1, "probes", 0)
        False
    """
    text = " ".join(map(str, (seed, purpose, *numbers)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _from_the_system(device: torch.device) -> torch.Generator:
    """A new generator with as much of the operating system's randomness as it can hold."""
    generator = torch.Generator(device).manual_seed(secrets.randbits(63))
    if device.type == "cpu":
        state = generator.get_state().numpy()
        words = np.frombuffer(secrets.token_bytes(4 * _STATE_WORDS), dtype=np.uint32)
        state[_WORDS_AT : _WORDS_AT + 8 * _STATE_WORDS] = words.astype(np.uint64).view(np.uint8)
        generator.set_state(torch.from_numpy(state))
    return generator


def random_state() -> dict[str, Any]:
    """The state of torch's own generators, which dropout and shuffling use, but neither noise nor
    Poisson draws.
    """
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """The inverse of :func:`random_state`."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([part.cpu() for part in state["cuda"]])


@contextlib.contextmanager
def preserve_rng(
    generators: Sequence[torch.Generator] = (), seed: int | None = None
) -> Iterator[None]:
    """Afterwards torch, NumPy, Python and the given generators continue as if nothing had been
    drawn inside.

    Args:
        generators: Further generators.
        seed: Inside, all of them draw from it, torch on GPUs included; None: they go on, and GPUs
            are left alone.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> with preserve_rng(seed=1):
        ...     other = torch.rand(1)
        >>> torch.rand(1), torch.manual_seed(0).initial_seed()
        (tensor([0.4963]), 0)
    """
    states = [generator.get_state() for generator in generators]
    numpys, pythons = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(
            devices=[] if seed is None else range(torch.cuda.device_count())
        ):
            if seed is not None:
                # manual_seed takes a millisecond where there is no GPU
                torch.default_generator.manual_seed(seed)
                if torch.cuda.is_available():
                    torch.cuda.manual_seed_all(seed)
                np.random.seed(seed % 2**32)
                random.seed(seed)
                for place, generator in enumerate(generators):
                    generator.manual_seed((seed + place + 1) % 2**63)
            yield
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
