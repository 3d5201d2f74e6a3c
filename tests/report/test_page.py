"""The report's folder: what is in it, who may read it, that it is whole, and that strings from data stay strings."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import json
import os
import re
import stat
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import torchfil
from tests.report.run_cases import made_up
from torchfil.attacks import AttackResult
from torchfil.report import SavedRun, load, register_section, save, write_report
from torchfil.report.aggregates import rounded_count
from torchfil.report.page import sections as chapters
from torchfil.report.page.html import number, tag
from torchfil.report.page.payload import pack, pack_text
from torchfil.report.page.png import as_data_url, overlay, thumbnail
from torchfil.report.status import LOWER_BOUND, MEASURED, NOT_MEASURED, status_of
from torchfil.report.summary import summarise

EVIL = '<script>alert("x")</script>'


@pytest.fixture(autouse=True)
def no_png(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing PNGs takes most of a report's time; one test draws them."""
    if "complete_and_only" not in request.node.name:
        monkeypatch.setattr("torchfil.report.figures.find_spec", lambda name: None)


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements(page: Path) -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(page.read_text())
    return parser.found


def with_unmeasured(n: int = 40) -> SavedRun:
    """Example 7 never drawn, example 8 drawn only where nothing was measured, example 9 measured in part."""
    run = made_up(n)
    columns = {name: values.copy() for name, values in run.columns.items()}
    columns["participations"][[7, 8, 9]] = [0, 2, 5]
    columns["missed"][[8, 9]] = [2, 1]
    columns["fil"][[7, 8]], columns["mse_bound"][[7, 8]], columns["sampling_error"][7] = 0, np.inf, np.inf
    return made_up(n, columns=columns)


def test_the_folder_is_complete_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    page = write_report(made_up(), tmp_path / "report")
    folder = page.parent
    assert page == tmp_path / "report" / "index.html"
    names = {path.name for path in folder.iterdir()}
    assert {"index.html", "leakage.csv", "leakage.parquet", "summary.json", "mse_bounds.png", "groups_1.png"} <= names
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["confidential"]
    assert set(summary["files"]) == names - {"index.html"}


def test_the_page_stands_alone_and_says_on_every_section_that_it_is_private(tmp_path: Path) -> None:
    page = write_report(made_up(), tmp_path / "report")
    text = page.read_text()
    assert not re.search(r"(src|href|action)\s*=\s*[\"'](?!data:|#)", text)
    assert not re.search(r"url\((?!data:)|@import|fetch\(|XMLHttpRequest|WebSocket", text)
    script = re.search(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    sections = re.findall(r"<section id=\"(\w+)\">(.*?)</section>", text, flags=re.DOTALL)
    others = ("linear", "merged")  # of other kinds of runs
    assert [name for name, _ in sections] == [s.slug for s in chapters.sections() if s.slug not in others]
    assert all("Confidential" in content for _, content in sections)
    assert 'content: "Confidential: made from private data"' in text  # in the margin of printed pages
    digest = hashlib.sha256((page.parent / "leakage.csv").read_bytes()).hexdigest()
    assert digest in dict(sections)["decision"]


def test_strings_from_data_stay_strings(tmp_path: Path) -> None:
    run = made_up(text_ids=True)
    ids = run.ids.astype("<U80")
    ids[int(np.argmax(run.columns["fil"]))] = EVIL
    ids[0], ids[1] = '"><img src=x onerror=alert(1)>', "{{script}} </script> \u2028"
    assert run.attributes is not None
    attributes = type(run.attributes)([EVIL, "b&b", "c"], ["<i>", "", ""], run.attributes.error)
    labels = np.where(np.arange(len(ids)) % 2 == 0, EVIL, "b")
    evil = made_up(
        text_ids=True,
        ids=ids,
        attributes=attributes,
        groups={EVIL: labels},
        about=run.about | {"title": EVIL, "accountant": EVIL, "model": {"name": EVIL}},
        attacks=[
            type(run.attacks[0])(
                EVIL, EVIL, *[getattr(run.attacks[0], f) for f in ("rows", "predicted", "achieved", "violated")]
            )
        ],
    )
    plain = elements(write_report(made_up(text_ids=True), tmp_path / "plain"))
    found = elements(write_report(evil, tmp_path / "evil"))
    scripts = [attributes.get("id") for name, attributes in found if name == "script"]
    assert len(scripts) == len(set(scripts))
    assert {name for name, _ in found} == {name for name, _ in plain}
    assert all(str(attributes["src"]).startswith("data:") for name, attributes in found if name == "img")
    assert not [key for _, attributes in found for key in attributes if key.startswith("on")]
    assert EVIL not in (tmp_path / "evil" / "index.html").read_text()


def test_what_was_not_measured_is_not_called_safe(tmp_path: Path) -> None:
    run = with_unmeasured()
    status = status_of(run)
    assert status[[7, 8, 9]].tolist() == [NOT_MEASURED, NOT_MEASURED, LOWER_BOUND]
    assert set(np.delete(status, [7, 8, 9])) == {MEASURED}
    page = write_report(run, tmp_path / "report")
    rows = {row["id"]: row for row in csv.DictReader((page.parent / "leakage.csv").open())}
    for name in ("7", "8"):
        assert rows[name]["status"] == "not measured"
        assert rows[name]["fil"] == rows[name]["mse_bound"] == ""
    assert rows["9"]["status"] == "lower bound"
    assert float(rows["9"]["fil"]) == pytest.approx(run.columns["fil"][9], rel=1e-6)
    assert "2 examples were not measured" in page.read_text()
    summary = summarise(run)
    assert summary.not_measured == 2
    assert all(0 < row.mse_bound < np.inf for row in summary.exposure)


def test_skipped_steps_are_not_safety() -> None:
    run = made_up()
    run.columns["fil"][3] = 0
    assert status_of(run)[3] == MEASURED
    run.about["mechanism"]["fil_rate"] = 0.25
    assert status_of(run)[3] == NOT_MEASURED


def test_the_parquet_file_holds_the_run(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run = with_unmeasured()
    table = parquet.read_table(write_report(run, tmp_path / "report").parent / "leakage.parquet").to_pydict()
    assert table["id"] == run.ids.tolist()
    assert table["fil"][7] is None
    assert table["fil"][6] == run.columns["fil"][6]
    assert table["least error of age"][6] == run.attributes.error[6, 0]  # type: ignore[union-attr]
    assert table["group sex"] == run.groups["sex"].tolist()


def test_texts_are_no_formulas_in_spreadsheets(tmp_path: Path) -> None:
    run = made_up(text_ids=True)
    run.ids[:3] = ["=cmd()", "@cmd()", "-7"]
    run.groups["sex"] = np.asarray(["=f()", *run.groups["sex"][1:]])
    page = write_report(run, tmp_path / "report")
    rows = list(csv.DictReader((page.parent / "leakage.csv").open()))
    assert [row["id"] for row in rows[:4]] == ["'=cmd()", "'@cmd()", "-7", "Zoë 3"]
    assert rows[0]["group sex"] == "'=f()"


def test_an_older_report_stays_until_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report"
    write_report(made_up(), target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("torchfil.report.writer.render", lambda report: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_report(made_up(seed=1), target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    with monkeypatch.context() as patch:
        rename = Path.rename
        patch.setattr(Path, "rename", lambda self, to: rename(self, to) if self.name != "new" else os.stat("/no/such"))
        with pytest.raises(FileNotFoundError):
            write_report(made_up(seed=1), target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    write_report(made_up(seed=1), target, redacted=True)
    assert "leakage.csv" not in {path.name for path in target.iterdir()}


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="holds chapter.tex, which is no part of a report, and is not replaced"):
        write_report(made_up(), tmp_path / "thesis")
    report = write_report(made_up(), tmp_path / "report").parent
    (report / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds notes.txt, which"):
        write_report(made_up(), report)
    assert (report / "notes.txt").read_text() == "mine"
    with pytest.raises(FileExistsError, match="is a file"):
        write_report(made_up(), report / "notes.txt")
    with pytest.raises(FileNotFoundError, match="does not exist; create it"):
        write_report(made_up(), tmp_path / "no" / "where")
    (tmp_path / "empty").mkdir()
    assert write_report(made_up(), tmp_path / "empty").exists()


def test_a_bare_run_gives_a_page_without_empty_chapters(tmp_path: Path) -> None:
    run = made_up()
    bare = SavedRun(about={}, ids=run.ids, columns={name: run.columns[name] for name in ("fil", "mse_bound")})
    text = write_report(bare, tmp_path / "report").read_text()
    slugs = re.findall(r"<section id=\"(\w+)\">", text)
    assert slugs == [
        "verdict",
        "findings",
        "training",
        "assumptions",
        "distribution",
        "exposed",
        "attacks",
        "examples",
        "decision",
    ]
    assert "No attack was run." in text
    assert "does not say between which values its inputs lie" in text
    nobody = SavedRun(about={}, ids=run.ids[:0], columns={"fil": np.zeros(0), "mse_bound": np.zeros(0)})
    assert "Too few examples were measured" in write_report(nobody, tmp_path / "report").read_text()
    with pytest.raises(ValueError, match="no column 'mse_bound'"):
        write_report(SavedRun(about={}, ids=run.ids, columns={"fil": run.columns["fil"]}), tmp_path / "report")


def test_optional_packages_are_missed_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchfil.report.tables.find_spec", lambda name: None)
    monkeypatch.setattr("torchfil.report.figures.find_spec", lambda name: None)
    page = write_report(made_up(), tmp_path / "report")
    assert {path.name for path in page.parent.iterdir()} == {"index.html", "leakage.csv", "summary.json"}
    assert "leakage.parquet was not written: pyarrow is not installed." in page.read_text()
    assert "not written as PNG: matplotlib is not installed." in page.read_text()


def test_a_violated_bound_is_the_first_thing_said(tmp_path: Path) -> None:
    run = made_up()
    attack = run.attacks[0]
    broken = type(attack)(
        attack.name, attack.threat_model, attack.rows, attack.predicted, attack.achieved / 9, np.ones(3, bool)
    )
    text = write_report(made_up(attacks=[broken]), tmp_path / "report").read_text()
    findings = re.search(r"<section id=\"findings\">(.*?)</section>", text, flags=re.DOTALL)
    assert findings is not None
    assert "A bound was violated" in findings[1]


def test_an_example_without_a_bound_breaks_none(tmp_path: Path) -> None:
    attack = made_up().attacks[0]
    predicted = np.asarray([1.0, np.inf, 1.0])
    half = type(attack)(attack.name, attack.threat_model, attack.rows, predicted, attack.achieved, attack.violated)
    (found,) = summarise(made_up(attacks=[half])).attacks
    assert found.ratio["0"] == pytest.approx(2.0)
    none = type(attack)(
        attack.name, attack.threat_model, attack.rows, predicted * np.inf, attack.achieved, half.violated
    )
    (found,) = summarise(made_up(attacks=[none])).attacks
    assert (found.targets, found.ratio) == (3, {})
    assert "not shown" in write_report(made_up(attacks=[none]), tmp_path / "report").read_text()


def with_one_uncertain(**about: bool) -> SavedRun:
    """The lowest lower end is not that of the most exposed example."""
    run = made_up(about=made_up().about | about)
    order = np.argsort(-run.columns["fil"])
    run.columns["mse_bound_low"][order[1]] = 0.1 * run.columns["mse_bound"][order[0]]
    return run


def sentences(page: Path, slug: str) -> str:
    """The text of a section, without its elements."""
    section = re.search(rf"<section id=\"{slug}\">(.*?)</section>", page.read_text(), flags=re.DOTALL)
    assert section is not None
    return re.sub(r"<[^>]+>", "", section[1])


def test_an_estimated_bound_is_called_an_estimate(tmp_path: Path) -> None:
    run = with_one_uncertain()
    least, low = run.columns["mse_bound"].min(), run.columns["mse_bound_low"].min()
    assert summarise(run).lowest_end == pytest.approx(low)
    text = sentences(write_report(run, tmp_path / "report"), "findings")
    estimate = (
        f"An unbiased guess of the most exposed example has a mean squared error of an estimated {number(least)} "
    )
    low_end = (
        "an estimate from one run; no measured example’s lower end (95 %, each example by itself) is below "
        f"{number(low)}."
    )
    assert estimate in text
    assert low_end in text
    assert "These bounds bind unbiased attackers: those whose guesses are right on average" in text
    run.columns["mse_bound_low"][3] = 0  # drawn once, for example
    text = sentences(write_report(run, tmp_path / "report"), "findings")
    assert "for some examples, drawn too rarely, one run does not tell how far below its estimate" in text
    run.columns["mse_bound_low"][3] = np.nan
    unknown = "an estimate from one run; how far below it the truth may lie is not known."
    assert unknown in sentences(write_report(run, tmp_path / "report"), "findings")
    without = made_up(columns={name: v for name, v in run.columns.items() if name != "mse_bound_low"})
    assert summarise(without).lowest_end is None
    assert unknown in sentences(write_report(without, tmp_path / "report"), "findings")

    # no probes, but still the batches and the noise of one run
    text = sentences(write_report(with_one_uncertain(exact=True), tmp_path / "report"), "findings")
    assert estimate in text
    assert low_end in text


def test_few_measured_participations_are_warned_of(tmp_path: Path) -> None:
    def findings(**mechanism: float) -> str:
        run = made_up(about=made_up().about | {"mechanism": mechanism})
        return sentences(write_report(run, tmp_path / "report"), "findings")

    warning = "About 5 measured participations stand behind each example: 25 % of the steps were measured"
    assert warning in findings(fil_rate=0.25, sample_rate=0.1, steps=200)
    assert "the safest-looking are so by luck" in findings(fil_rate=0.5, steps=10)
    assert "stand behind" not in findings(fil_rate=0.25, sample_rate=0.1, steps=2000)
    assert "stand behind" not in findings(fil_rate=1.0, sample_rate=0.1, steps=20)


@pytest.mark.parametrize("pictures", [True, False])
def test_the_least_exposed_are_not_called_safe(tmp_path: Path, pictures: bool) -> None:
    run = made_up() if pictures else made_up(pictures=None)
    text = sentences(write_report(run, tmp_path / "report"), "exposed")
    assert "Least exposedThey look safe partly by luck." in text
    assert "low end" in text


def test_attributes_show_the_lower_end(tmp_path: Path) -> None:
    run = made_up()
    assert run.attributes is not None
    error = np.full((len(run), 3), 6.0)
    low = error - 1
    low[3, 0] = 4.0
    names, units = run.attributes.names, run.attributes.units
    both = made_up(attributes=type(run.attributes)(names, units, error, low))
    text = sentences(write_report(both, tmp_path / "report"), "attributes")
    assert "± 4 years" in text.replace("\u00a0", " ")
    assert "6" not in text
    assert "is off by at least this on average" in text
    assert "Each number is the lower end of a 95 % interval, of each example by itself." in text
    one = made_up(attributes=type(run.attributes)(names, units, error))
    text = sentences(write_report(one, tmp_path / "report"), "attributes")
    assert "± 6 years" in text.replace("\u00a0", " ")
    assert "These are estimates from one run; how far below them the truth may lie is not known." in text


def test_every_place_shows_the_lower_end_of_an_attribute(tmp_path: Path) -> None:
    run = made_up(pictures=None)
    assert run.attributes is not None
    names, units = run.attributes.names, run.attributes.units
    low = np.full((len(run), 3), 4.0)
    page = write_report(
        made_up(pictures=None, attributes=type(run.attributes)(names, units, np.full((len(run), 3), 6.0), low)),
        tmp_path / "report",
    )
    exposed = sentences(page, "exposed").replace("\u00a0", " ")
    assert "unbiased guesses are off by at least, on average" in exposed
    assert "age ± 4 years" in exposed
    assert "± 6" not in exposed
    (first, *_) = csv.DictReader((page.parent / "leakage.csv").open())
    assert float(first["least error of age"]) == 4
    packed = re.search(r'id="data-attribute0">([^<]+)<', page.read_text())
    assert packed is not None
    assert set(unpacked(packed[1], "Float32")) == {4.0}


def test_the_blind_guess_is_explained_and_counted(tmp_path: Path) -> None:
    run = made_up()
    run.about["dataset"]["input_range"] = [-1.0, 1.0]
    summary = summarise(run)
    assert summary.guess == 1.0
    assert summary.below_guess == int((run.columns["mse_bound"] < 1).sum())
    assert summary.mse_histogram is not None
    left = sum(
        count
        for count, edge in zip(summary.mse_histogram.counts, summary.mse_histogram.edges[1:], strict=True)
        if edge <= 1 + 1e-9
    )
    assert left == summary.below_guess  # the line is an edge of the bars
    text = write_report(run, tmp_path / "report").read_text()
    assert "always answering 0 is off by at most 1, a squared error of at most 1." in text


def test_a_section_is_one_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chapters, "_SECTIONS", list(chapters._SECTIONS))
    register_section("weather", "The weather", lambda report: tag("p", "fair & <mild>"), before="groups")
    text = write_report(made_up(), tmp_path / "report").read_text()
    assert text.index('id="weather"') < text.index('id="groups"')
    assert "fair &amp; &lt;mild&gt;" in text
    with pytest.raises(ValueError, match="'weather' is taken"):
        register_section("weather", "again", lambda report: None)
    with pytest.raises(ValueError, match="before='nothing' is no section"):
        register_section("new", "new", lambda report: None, before="nothing")


def test_what_does_not_fit_is_left_out_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_report(made_up(text_ids=True), tmp_path / "whole").read_text()
    assert 'id="data-ids"' in whole
    assert 'id="data-attribute2"' in whole
    assert "leaves out" not in whole
    monkeypatch.setattr("torchfil.report.page.sections.every_example.ID_BUDGET", 10)
    monkeypatch.setattr("torchfil.report.page.sections.every_example.BUDGET", 2000)
    cut = write_report(made_up(text_ids=True), tmp_path / "cut").read_text()
    assert 'id="data-ids"' not in cut
    assert 'id="data-fil"' in cut
    assert 'id="data-attribute2"' not in cut
    assert "leaves out the ids (examples are numbered from 0, as in leakage.csv), " in cut
    assert "vkorc1=CT; the files beside it hold everything" in cut


@pytest.mark.parametrize("kind", ["float", "small", "large", "negative", "text"])
def test_packed_columns_come_back(kind: str) -> None:
    rng = np.random.default_rng(0)
    values = {
        "float": np.concatenate([rng.lognormal(size=50), [np.inf, np.nan, 0.0]]),
        "small": rng.integers(0, 200, 50),
        "large": rng.integers(0, 2**31, 50),
        "negative": rng.integers(-(2**40), 2**40, 50),
    }
    if kind == "text":
        texts = np.array(["a", "", "Zoë", "𝔘nicode", "a\nb"])
        packed, lengths = pack_text(texts)
        joined = gzip.decompress(base64.b64decode(packed.data)).decode()
        units = joined.encode("utf-16-le")
        ends = np.cumsum(np.concatenate([[0], unpacked(lengths.data, "Uint8")])) * 2
        assert [units[a:b].decode("utf-16-le") for a, b in pairwise(ends)] == texts.tolist()
        return
    packed = pack(values[kind])
    assert packed.kind == {"float": "Float32", "small": "Uint8", "large": "Uint32", "negative": "Float64"}[kind]
    np.testing.assert_allclose(unpacked(packed.data, packed.kind), values[kind], rtol=1e-7)
    if kind == "float":
        short = pack(values[kind], short=True)
        np.testing.assert_allclose(unpacked(short.data, short.kind), values[kind], rtol=2**-12)


def unpacked(data: str, kind: str) -> np.ndarray:
    dtype = np.dtype(kind.lower()).newbyteorder("<")
    planes = np.frombuffer(gzip.decompress(base64.b64decode(data)), np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype)[:, 0]


def test_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for shape in ((5, 7), (5, 7, 3)):
        pixels = rng.integers(256, size=shape, dtype=np.uint8)
        (tmp_path / "x.png").write_bytes(base64.b64decode(as_data_url(pixels).split(",")[1]))
        np.testing.assert_array_equal(np.asarray(image.open(tmp_path / "x.png")), pixels)
    heat = np.array([[1.0, -1.0, 0.0]])
    over = overlay(np.full((1, 3), 255, np.uint8), heat).astype(int)[0]
    assert over[0, 0] > over[0, 2]  # orange
    assert over[1, 2] > over[1, 1]  # purple
    assert over[2].tolist() == [255, 255, 255]  # nothing: the image, paled
    assert thumbnail(np.full((300, 200, 3), 9, np.uint8)).shape == (100, 66, 3)
    assert thumbnail(np.full((30, 20), 9, np.uint8)).shape == (30, 20)


def test_numbers_keep_their_size() -> None:
    for value in (1e-9, 0.000999, 0.00999999, 0.5, 999.9, 99_999.0, 123_456.0):
        text = number(value).replace("\u00a0", " ").replace(",", "")
        match = re.fullmatch(r"(?:([\d.]+)( × )?)?(?:(?<![\d.])10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?", text)
        assert match is not None, text
        power = int((match[3] or "0").translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")))
        assert float(match[1] or 1) * 10.0**power == pytest.approx(value, rel=6e-3)


def test_the_page_is_installed_with_the_package() -> None:
    assets = resources.files("torchfil.report") / "assets"
    assert {path.name for path in assets.iterdir()} == {"page.html", "page.css", "page.js", "policy.toml"}
    assert "torchfil.report = assets/*" in (Path(__file__).parents[2] / "setup.cfg").read_text()


def test_questions_have_a_section_where_they_were_asked(tmp_path: Path) -> None:
    text = write_report(made_up(), tmp_path / "asked").read_text()
    assert "What any attacker can tell" in text
    assert "bind every attacker" in text
    summary = summarise(made_up()).questions[0]
    assert summary.above["0.05"] > summary.above["0.5"] > 0
    assert "What any attacker can tell" not in write_report(made_up(questions=[]), tmp_path / "none").read_text()
    public = summarise(made_up(), redacted=True).questions[0]
    assert public.above["0.5"] == rounded_count(summary.above["0.5"], 10)


def test_one_trial_is_not_testable_and_never_held(tmp_path: Path) -> None:
    one = AttackResult("a guess", "knows all else", [0, 1], np.array([1e-9, 5.0]), "mse", trials=1)
    compared = torchfil.compare_with_bounds([1.0, 1.0], one)
    assert compared.verdicts == ["not testable"] * 2
    assert np.isnan(compared.violations)
    record = compared.record(range(40))
    assert not record.testable
    run = made_up(attacks=[record])
    assert not load(save(run, tmp_path / "run.fil")).attacks[0].testable
    page = write_report(run, tmp_path / "report").read_text()
    assert "not testable" in page
    assert "the bound held" not in page
    many = AttackResult(
        "a guess", "all", [0, 1], np.array([1e-9, 5.0]), "mse", trials=9, standard_error=np.full(2, 1e-12)
    )
    assert torchfil.compare_with_bounds([1.0, 1.0], many).verdicts == ["violated", "held"]


def test_attacks_that_tested_nothing_are_called_so(tmp_path: Path) -> None:
    """They were counted among those that did not beat the bound, and a blind guess below it as a violation."""
    errors = np.full(3, 0.5)
    blind = AttackResult("the mean", "no model", [0, 1, 2], errors, "mse", 9, np.zeros(3), saw_model=False)
    record = torchfil.compare_with_bounds([1.0, 1.0, 0.2], blind).record(range(40))
    page = write_report(made_up(attacks=[record]), tmp_path / "report")
    found = sentences(page, "findings")
    assert "No attack tested the bounds: the mean (never saw the model). They stand on theory alone." in found
    assert "did better than" not in found
    assert "A bound was violated" not in found
    assert "never saw the model" in sentences(page, "attacks")

    real = AttackResult(
        "inversion", "all", [0, 1, 2], errors, "mse", 9, np.full(3, 9.0), blind=np.asarray([0.1, 5.0, 0.1])
    )
    both = [record, torchfil.compare_with_bounds([1.0, 1.0, 0.2], real).record(range(40))]
    page = write_report(made_up(attacks=both), tmp_path / "both")
    assert "No attack that tested the bounds (inversion) did better than they allow." in sentences(page, "findings")
    rows = [summary for summary in summarise(made_up(attacks=both)).attacks if summary.testable]
    assert [(row.below, row.blind_below) for row in rows] == [(2, 2)]
    assert "67 %" in sentences(page, "attacks")


def test_words_are_shaded_by_their_leakage_and_left_out_of_the_public_version(tmp_path: Path) -> None:
    run = made_up()
    section = re.search(
        r"<section id=\"words\">(.*?)</section>", write_report(run, tmp_path / "full").read_text(), flags=re.DOTALL
    )
    assert section is not None
    assert re.findall(r"--share: (\d+)%", section[1]) == ["4", "16", "100", "100"]  # of the text's largest share
    assert "&lt;gout&gt;: 83 % of the text, η = 0.5" in section[1]
    assert "unbiased attacker" in section[1]
    public = write_report(run, tmp_path / "public", redacted=True)
    assert not any("gout" in path.read_text(errors="ignore") for path in public.parent.rglob("*") if path.is_file())
