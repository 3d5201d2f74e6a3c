"""Measure every table and figure of the four papers, and write the page.

    python -m reproduction                    # the rows that take two cores an hour: make reproduce
    python -m reproduction --gpu              # the rest: make reproduce-gpu
    python -m reproduction --only plis-figure1,guo-figure2
    python -m reproduction --write-page       # also docs/reproduction.md and docs/reproduction.json

A row's record is written as soon as it is done. Rows with a record are not measured again, except
with --again.
"""

from __future__ import annotations

import argparse
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from reproduction.page import PICTURES, joined, page
from reproduction.records import Record, read_records, run_rows, write_json
from reproduction.registry import ROWS, chosen
from reproduction.rows import Run

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    """Run the chosen rows, then write the page from the records."""
    parser = argparse.ArgumentParser(
        "python -m reproduction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="rows, separated by commas")
    parser.add_argument("--gpu", action="store_true", help="the rows that need a GPU")
    parser.add_argument("--device", help="cuda with --gpu, else cpu")
    parser.add_argument("--out", type=Path, default=Path("build/reproduction"))
    parser.add_argument("--again", action="store_true", help="also measure rows that have a record")
    parser.add_argument("--list", action="store_true", help="name the rows and run nothing")
    parser.add_argument(
        "--no-run", action="store_true", help="only write the page from the records"
    )
    parser.add_argument(
        "--write-page", action="store_true", help="write docs/reproduction.* and its pictures"
    )
    options = parser.parse_args()
    try:
        rows = chosen([name for name in options.only.split(",") if name], gpu=options.gpu)
    except ValueError as error:
        parser.error(str(error))

    if options.list:
        for row in ROWS:
            where = "nothing to run" if row.measure is None else "GPU" if row.gpu else "two cores"
            print(f"{row.id:<34}{row.item:<28}{where:<16}{row.minutes:g} min")
        return
    device = options.device or ("cuda" if options.gpu else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu runs the same, in hours")
    warnings.filterwarnings("ignore")
    if not options.no_run:
        run_rows(rows, Run(options.out, device=device), again=options.again)

    # The page in the output folder holds what was measured here; the documentation's also keeps
    # other machines' rows.
    records = read_records(options.out, ROWS)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "reproduction.md").write_text(page(ROWS, records, pictures=""))
    print(f"{options.out / 'reproduction.md'}, with pictures next to it")
    if options.write_page:
        write_page(records, options.out)


def write_page(records: Mapping[str, Record], pictures: Path) -> None:
    """docs/reproduction.json, the page made from it, and the pictures that the page shows."""
    known = joined(DOCS / "reproduction.json", records)
    write_json(known, DOCS / "reproduction.json")
    (DOCS / "reproduction.md").write_text(page(ROWS, known))
    for name in PICTURES:
        if (pictures / name).exists():
            shutil.copyfile(pictures / name, DOCS / "images" / name)
    print(f"{DOCS / 'reproduction.md'}, reproduction.json and pictures are written")


if __name__ == "__main__":
    main()
