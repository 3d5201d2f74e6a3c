"""The report's pictures in docs/images, on made-up patients: ``python -m docs.pictures``. Needs Chromium."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.report.in_browser import opened, started
from torchfil.gate.gate import template
from torchfil.gate.policy import load_policy
from torchfil.report import write_report
from torchfil.run.saved_run import Attributes, Baselines, QuestionRecord, SavedRun, Spread

IMAGES = Path(__file__).parent / "images"
COUNT, STEPS = 3855, 600
GENOTYPES, SITES = ["CC", "CT", "TT"], [f"site {k}" for k in range(1, 7)]
PAPER, DESK = (255, 255, 255), (216, 212, 202)
MECHANISM = {"max_grad_norm": 1.0, "clip": "smooth", "steps": STEPS, "sample_rate": 1 / 15, "poisson": True}
MECHANISM |= {"amplification": "poisson", "estimator": "weight-probes", "num_probes": 2, "fil_rate": 1.0}
ABOUT: dict[str, Any] = {
    "title": "Warfarin doses, made-up patients",
    "model": {"name": "Sequential", "num_parameters": 129},
    "dataset": {"num_examples": COUNT, "num_coordinates": 14, "input_shape": [14]},
    "delta": 1e-5,
    "accountant": "rdp",
    "versions": {"torchfil": "0.1.0"},
    "created": "2026-11-17T12:00:00+00:00",
    "exact": False,
}


def patients(noise: float = 1.0) -> SavedRun:
    """Warfarin patients that nobody is, trained on with so many times the noise of the run that fails its policy."""
    rng = np.random.default_rng(7)
    race = rng.choice(["Asian", "Black", "White"], p=[0.31, 0.12, 0.57], size=COUNT)
    fil = rng.lognormal(-0.62, 0.42, size=COUNT) / noise * np.where(race == "Black", 1.35, 1.0)
    epsilon = 6.4 / noise**1.2

    # attributes in their own units, and how they are spread
    deviations = np.array([14.4, 10.6, 21.8, 0.3])
    lowest, highest = np.array([0.75, 1.2, 0.9, 1.55]), np.array([1.3, 1.8, 1.5, 2.1])
    error = deviations * rng.uniform(lowest, highest, size=(COUNT, 4)) / fil[:, None]
    attributes = Attributes(["age", "height", "weight", "smokes"], ["years", "cm", "kg", ""], error * 1.2, error)
    means, ends = [60.0, 168.0, 78.0, 0.1], [[18.0, 130.0, 35.0, 0.0], [98.0, 203.0, 180.0, 1.0]]
    spread = Spread(np.array(means), deviations, *map(np.array, ends))
    inputs = Spread(*(np.asarray(value) for value in (0.0, 1.0, -3.1, 4.2)))
    baselines = Baselines(COUNT, inputs, spread, {"smokes": {"no": 0.9, "yes": 0.1}})

    # questions: whoever leaks more is told more easily from other answers
    genotype = rng.choice(3, p=[0.37, 0.35, 0.28], size=COUNT)
    apart = fil[:, None] ** 2 * rng.uniform(0.02, 0.09, size=(COUNT, 3))
    divergence = np.where(np.arange(3) == genotype[:, None], 0.0, apart)
    questions = [
        QuestionRecord("genotype", GENOTYPES, True, divergence, 1.25 * divergence),
        QuestionRecord("member", ["absent"], False, 0.008 * fil[:, None] ** 2, 0.011 * fil[:, None] ** 2),
    ]

    looks = np.arange(1, STEPS + 1, 40)
    columns = {
        "fil": fil,
        "fil_error": 0.04 * fil,
        "sampling_error": 0.09 * fil,
        "mse_bound": fil**-2,
        "mse_bound_low": fil**-2 * rng.uniform(0.72, 0.86, size=COUNT),
        "participations": rng.poisson(40, size=COUNT),
        "missed": np.zeros(COUNT, int),
        "epsilon": epsilon * np.clip(fil / fil.max(), 0.1, 1) ** 0.6,
    }
    rero = {"prior": [0.01, 0.1, 0.3, 0.5], "success": [0.3, 0.6, 0.8, 0.9]}
    return SavedRun(
        about=ABOUT | {"mechanism": MECHANISM | {"noise_multiplier": 0.8 * noise}, "epsilon": epsilon},
        ids=np.asarray([f"P{1000 + k}" for k in range(COUNT)]),
        columns=columns,
        attributes=attributes,
        groups={"race": race, "site": rng.choice(SITES, size=COUNT)},
        questions=questions,
        baselines=baselines,
        bounds={"rdp_mse_bound": {"replace_one": 0.004}, "rero": rero},
        history={"step": looks, "epsilon": epsilon * np.sqrt(looks / STEPS)},
    )


def main() -> None:
    """Draw all of them anew."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "policy.toml").write_text(template())
        policy = load_policy(folder / "policy.toml")
        fails = write_report(patients(), folder / "fails", policy=policy)
        passes = write_report(patients(3.5), folder / "passes", policy=policy)
        browser = started(folder / "profile")
        try:
            shots(browser, fails, passes, folder)
        finally:
            browser.quit()
        beside(folder / "narrow.png", folder / "print.png", folder / "report_narrow_and_print.png")
        for each in ("report", "report_dark", "report_table", "report_narrow_and_print"):
            small = Image.open(folder / f"{each}.png").convert("RGB").quantize(128, dither=Image.Dither.NONE)
            small.save(IMAGES / f"{each}.png", optimize=True)


def shots(browser: Any, fails: Path, passes: Path, folder: Path) -> None:
    """The first screen in light and dark, on a narrow screen and in print, and the table."""

    def page(path: Path, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        opened(browser, path)

    def media(**settings: Any) -> None:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", settings)

    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    page(fails, 1200, 1215)
    browser.save_screenshot(str(folder / "report.png"))
    media(features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page(passes, 1200, 720)
    browser.save_screenshot(str(folder / "report_dark.png"))
    media(features=[{"name": "prefers-color-scheme", "value": "light"}])
    page(fails, 400, 1100)
    browser.save_screenshot(str(folder / "narrow.png"))

    # the table of who is exposed, with the help of a column open
    page(fails, 1200, 800)
    browser.get("about:blank")
    browser.get(f"{fails.as_uri()}#show-exposed")
    time.sleep(2)
    browser.execute_script("document.querySelector('[data-key=mse_bound_low] .help').click()")
    browser.execute_script("document.getElementById('examples').scrollIntoView({behavior: 'instant'})")
    time.sleep(0.5)
    browser.save_screenshot(str(folder / "report_table.png"))
    page(fails, 658, 980)
    media(media="print")
    browser.save_screenshot(str(folder / "print.png"))


def beside(narrow: Path, printed: Path, path: Path) -> None:
    """A narrow screen and a sheet of paper in one picture."""
    left, right = (Image.open(each).convert("RGB") for each in (narrow, printed))
    sheet = Image.new("RGB", (778, 1100), PAPER)
    sheet.paste(right.crop((0, 0, 658, 860)), (60, 60))
    both = Image.new("RGB", (left.width + 40 + sheet.width, 1100), DESK)
    both.paste(left, (0, 0))
    both.paste(sheet, (left.width + 40, 0))
    both.save(path)


if __name__ == "__main__":
    main()
