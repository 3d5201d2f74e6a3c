"""What happens now and then while a run trains: its file is written, a page shows it, bars show two
numbers.

Reading a run changes neither its weights nor its noise, draws or sums. It takes time, so work may
be given a share of the time that it keeps to.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchfil.engine.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torchfil.gate.policy import Policy


def surviving(what: str, work: Callable[..., object]) -> Callable[..., None]:
    """``work``, a function of the step and more, whose errors become warnings, one for each cause.

    Hours of training must not end with a dashboard or a disk. ``what`` says what then did not
    happen.
    """
    warned = set[object]()

    def call(step: int, *args: object) -> None:
        try:
            work(step, *args)
        except Exception as error:
            cause = type(error), getattr(error, "errno", None)
            if cause not in warned:
                warned.add(cause)
                warnings.warn(
                    f"{what} at step {step} ({type(error).__name__}: {error}); "
                    "training is not affected, and the next turn tries again",
                    stacklevel=2,
                )

    return call


class TimeShare:
    """Work that may take at most a share of the time; all ranks decide alike.

    Work is done if what was spent, and once more what the last piece took, is within the share of
    the time since this was made. The first piece always is, because its cost is not known.

    Args:
        share: The share, in (0, 1]; 1: work is always done.
        ranks: The processes that train together; None: a single one.
    """

    def __init__(self, share: float, ranks: Ranks | None) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} must lie in (0, 1]; 0.02 is 2 % of the time")
        self.share, self.ranks = share, ranks
        self._start, self._spent, self._last = time.perf_counter(), 0.0, 0.0

    def call(self, work: Callable[[], object]) -> None:
        """Work, if it is time (collective)."""
        start = time.perf_counter()
        late = self._spent + self._last - self.share * (start - self._start)
        if self.ranks is not None and self.share < 1:
            late = float(self.ranks.maximum(torch.tensor(late, dtype=torch.float64)))
        if self.share == 1 or late <= 0:
            work()
            self._last = time.perf_counter() - start
            self._spent += self._last


def show_every(
    engine: Any,
    show: Callable[[dict[str, str]], object],
    delta: float | None,
    steps: int = 10,
    share: float = 0.01,
) -> Callable[[], None]:
    """Give ``show`` ε (with δ), the smallest MSE bound and their step, now and then (collective).

    Returns a stop.
    """
    names = {
        "epsilon": ("ε", ".3g"),
        "smallest_mse_bound": ("smallest bound", ".3g"),
        "steps": ("at step", ".0f"),
    }

    def read(_: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # every few steps they would say the same
            numbers = engine.metrics(delta=delta, prefix="")
        show(
            {
                text: f"{numbers[name]:{form}}"
                for name, (text, form) in names.items()
                if name in numbers
            }
        )

    stop: Callable[[], None] = engine.call_every(
        steps, surviving("the bar was not updated", read), share=share
    )
    return stop


class Watch(contextlib.ExitStack):
    """A page that follows a run while it trains; :meth:`FILPrivacyEngine.watch` makes it and
    describes its arguments.

    Attributes:
        path: The run file.
        url: The page's address, for browsers on this machine; whoever has it can read the page.
            None on other ranks.
    """

    def __init__(
        self,
        engine: Any,
        path: Path | None = None,
        policy: Policy | None = None,
        port: int = 0,
        **options: Any,
    ) -> None:
        from torchfil.report.live import LivePage, LiveServer

        super().__init__()
        try:
            folder = self.enter_context(tempfile.TemporaryDirectory(prefix="torchfil-watch-"))
            self.path, self.url, self._shown = (
                Path(path or f"{folder}/run.parquet"),
                None,
                list[Callable[[], object]](),
            )
            self._page = LivePage(self.path, policy, share=0.02)
            ranks = engine._training.run.ranks
            if server := LiveServer(self._page, port) if ranks is None or ranks.rank == 0 else None:
                self.callback(server.server_close)
            self.callback(engine.save_every(self.path, **{"share": 0.02, **options}))
            renew = surviving(
                "the page was not renewed", lambda _: [renew() for renew in self._shown]
            )
            self.callback(engine.call_every(options["steps"], renew))
        except BaseException:
            self.close()  # neither the port nor the folder stays taken
            raise
        if server is not None:
            server.start()
            self.callback(server.shutdown)
            self.url = server.url
            print(
                f"torchfil: this run, live and confidential: {self.url}",
                file=sys.stderr,
                flush=True,
            )

    def stop(self) -> None:
        """End the saves and the page.

        A temporary run file is removed. With several processes, on all ranks.
        """
        self.close()

    def __repr__(self) -> str:
        return f"Watch({self.url or 'on rank 0'})"

    def _repr_html_(self) -> str:
        return self._page.frame()

    def _ipython_display_(self) -> None:
        from IPython import display, get_ipython

        if hasattr(get_ipython(), "kernel"):
            if not self._shown:
                warnings.warn(
                    "torchfil: this page is confidential, and the notebook's file (.ipynb) keeps "
                    "it; clear the outputs before you share it, or show nothing here and open "
                    "watch.url in a browser",
                    stacklevel=2,
                )
            handle = display.display(display.HTML(self._repr_html_()), display_id=True)
            self._shown.append(lambda: handle.update(display.HTML(self._repr_html_())))
        else:  # a terminal, which would print every update
            print(self)
