"""The report's pictures in docs/images: ``python -m docs.pictures``. Needs Chromium and axe-core.

Six reports on made-up data, each on a wide screen, on a narrow one, in dark colours and on paper.
No picture is kept if axe-core finds a fault on a page that is shot.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from docs.reports import six_reports
from tests.report.accessibility import violations
from tests.report.in_browser import opened, screen, started

IMAGES = Path(__file__).parent / "images"
MARGIN = 38  # pixels of white around paper
BELOW = 12  # pixels below the last block
WHOLE_BLOCKS = """
  const blocks = [...document.querySelectorAll("main > *")];
  const bottoms = blocks.map((block) => block.getBoundingClientRect().bottom);
  return Math.max(...bottoms.filter((bottom) => bottom + arguments[0] <= innerHeight));
"""
LARGEST = 120_000  # bytes of a picture
SHOTS: dict[str, dict[str, Any]] = {
    "wide": {"width": 1280, "height": 1360},
    "narrow": {"width": 400, "height": 1640},
    "dark": {"width": 1280, "height": 900, "dark": True},
    "print": {"width": 720, "height": 1018, "printed": True},  # A4 within its margins
}


def shot(browser: Any, margin: int) -> bytes:
    """The blocks that are wholly on the screen, with so many white pixels around them, as a small
    PNG.
    """
    end = int(browser.execute_script(WHOLE_BLOCKS, BELOW)) + BELOW
    image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    image = ImageOps.expand(image.crop((0, 0, image.width, end)), margin, "white")
    for colours in (256, 128, 64, 32):
        small = io.BytesIO()
        image.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            small, "PNG", optimize=True
        )
        if small.tell() <= LARGEST:
            break
    return small.getvalue()


def main() -> None:
    """Draw all of them anew."""
    faults, pictures = list[str](), dict[str, bytes]()
    with tempfile.TemporaryDirectory() as name:
        browser = started(Path(name) / "profile")
        try:
            for report, page in six_reports(Path(name)).items():
                for how, settings in SHOTS.items():
                    with screen(browser, **settings):
                        opened(browser, page)
                        found = [] if how == "print" else violations(browser)
                        faults += [f"{report}, {how}: {fault}" for fault in found]
                        pictures[f"report_{report}_{how}.png"] = shot(
                            browser, MARGIN * (how == "print")
                        )
        finally:
            browser.quit()
    print(*faults, f"{len(faults)} faults on {len(pictures)} screens", sep="\n")
    if faults:
        sys.exit(1)
    for file, content in pictures.items():
        (IMAGES / file).write_bytes(content)
        print(f"{file}: {len(content) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
