"""``demo``: private training on small digits, watched by the engine, and its report."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil.cli.output import FILE, Output, with_output
from torchfil.cli.runs import summary

DELTA, HELD_OUT = 1e-4, 297
# 3 columns and 5 rows of each digit
_GLYPHS = (
    *(
        "111101101101111",
        "010110010010111",
        "111001111100111",
        "111001111001111",
        "101101111001001",
    ),
    *(
        "111100111001111",
        "111100111101111",
        "111001010010010",
        "111101111101111",
        "111101111001111",
    ),
)


@click.command()
@click.option(
    "-o",
    "--out",
    "directory",
    type=FILE,
    default="out/demo",
    show_default=True,
    help="Folder to write.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=20, show_default=True)
@click.option(
    "--noise",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="σ.",
)
@click.option("--device", default="cpu", show_default=True)
@with_output
def demo(directory: Path, epochs: int, noise: float, device: str, out: Output) -> None:
    """Train privately on handwritten digits, save the run and write its report, with a verdict.

    \b
    Examples:
      torchfil demo
      torchfil demo --noise 4 -o quiet
    """
    from torchfil.gate.gate import check, decision, default_policy, in_words
    from torchfil.report.page import check_replaceable, write_report
    from torchfil.run.file import load

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {device!r} cannot be used: {str(error).splitlines()[0]}"
        ) from error
    check_replaceable(directory / "report")
    directory.mkdir(parents=True, exist_ok=True)

    with warnings.catch_warnings():  # of Opacus, about nothing that a newcomer could change
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        warnings.filterwarnings("ignore", message="Optimal order is the")
        path = _train(directory / "run.parquet", epochs, noise, device, out)
    saved = load(path)
    page = write_report(saved, directory / "report")
    verdicts = check(saved, default_policy(saved))
    out.say(f"\n{summary(saved, 5)[0]}\n")
    out.say(f"{decision(verdicts)}, by torchfil’s default policy:")
    broken = [f"  {in_words(verdict)}" for verdict in verdicts if not verdict.passed]
    out.say("\n".join(broken or ["  all rules are kept."]))
    out.say("These numbers depend on private data: keep them confidential.\n")
    out.say(f"run:    {path}")
    out.result(str(page) if out.quiet else f"report: {page}", {"run": str(path), "page": str(page)})


def _train(path: Path, epochs: int, noise_multiplier: float, device: str, out: Output) -> Path:
    """An ordinary Opacus loop with the engine in it.

    The run is saved, digits as groups and pixels as attributes.
    """
    from torchfil.engine import FILPrivacyEngine
    from torchfil.engine.watching import show_every
    from torchfil.questions import Absent

    torch.manual_seed(0)  # of weights and probes; batches and noise differ at every call
    images, labels, origin = small_digits()
    out.say(f"Data: {origin}, {HELD_OUT} of them held out; nothing is downloaded.")
    held_out = images[:HELD_OUT].to(device), labels[:HELD_OUT].to(device)
    images, labels = images[HELD_OUT:], labels[HELD_OUT:]
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(network.to(device).parameters(), lr=1.0, momentum=0.5)
    engine = FILPrivacyEngine()
    loader = DataLoader(TensorDataset(images, labels), batch_size=128)
    options: dict[str, Any] = {"noise_multiplier": noise_multiplier, "track": ("diagonal",)}
    options["questions"] = {"was it in the data?": Absent()}
    model, optimizer, loader = engine.make_private(network, optimizer, loader, **options)
    bar = out.progress(range(epochs), desc="epochs")
    show_every(engine, bar.set_postfix, DELTA)
    for epoch in bar:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = float((model(held_out[0]).argmax(1) == held_out[1]).double().mean())
        epsilon = engine.get_epsilon(DELTA)
        out.say(
            f"epoch {epoch + 1}: accuracy {100 * accuracy:.0f} %, ε = {epsilon:.2f} at δ = "
            f"{DELTA:g}"
        )
    return engine.save_run(
        path,
        delta=DELTA,
        title="Small digits, trained privately",
        attribute_names=[f"pixel {row},{column}" for row in range(8) for column in range(8)],
        attribute_units=["grey value"] * 64,
        unit_of_inputs="grey value, 0 to 1",
        input_range=(0.0, 1.0),
        groups={"digit": labels.tolist()},
        metrics={"accuracy": (accuracy, f"{HELD_OUT} held out")},
    )


def small_digits() -> tuple[Tensor, Tensor, str]:
    """1,797 digits, [1797, 1, 8, 8] in [0, 1], their labels, and which they are: handwritten, or
    drawn by rule.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        drawn = (
            "1,797 digits drawn by rule (scikit-learn, which has handwritten ones, is not "
            "installed)"
        )
        return *_drawn_digits(1797), drawn
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(data.target), "scikit-learn's 1,797 handwritten digits"


def _drawn_digits(count: int) -> tuple[Tensor, Tensor]:
    """Glyphs at one of four places, in ink of different strength, on noise."""
    draws = torch.Generator().manual_seed(0)
    glyphs = torch.tensor([[float(pixel) for pixel in glyph] for glyph in _GLYPHS]).reshape(
        10, 5, 3
    )
    margins = ((1 + right, 4 - right, 1 + down, 2 - down) for right in (0, 1) for down in (0, 1))
    placed = torch.stack([nn.functional.pad(glyphs, margin) for margin in margins])  # [4, 10, 8, 8]
    labels, places = (torch.randint(most, (count,), generator=draws) for most in (10, 4))
    paper, ink = torch.rand(2, count, 1, 8, 8, generator=draws)
    return 0.1 * paper + (0.6 + 0.3 * ink) * placed[places, labels, None], labels
