"""Who was spared: by id in the private page, as a number in the public one, as a note of the gate."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.report.run_cases import SPARED, made_up
from torchfil.cli import main
from torchfil.gate.gate import check, notes
from torchfil.gate.policy import PolicyError, parse_policy
from torchfil.report import SavedRun, load, save, write_report
from torchfil.report.formats import number
from torchfil.report.summary import summarise
from torchfil.run.spared import is_spared, summarise_spared
from torchfil.utils.errors import RunFileError


def without_weights(run: SavedRun) -> SavedRun:
    """The run as an earlier torchfil, or a training without weights, saves it."""
    columns = {name: values for name, values in run.columns.items() if name not in ("clip_weight", "fil_before")}
    about = {name: value for name, value in run.about.items() if name not in ("noise_choice", "equalised")}
    return dataclasses.replace(run, columns=columns, about=about, rounds={})


def section(page: Path, slug: str) -> str:
    """The text of a section, without its elements."""
    content = re.search(rf"<section id=\"{slug}\">(.*?)</section>", page.read_text(), flags=re.DOTALL)
    assert content is not None
    return re.sub(r"<[^>]+>", " ", content[1])


class TestPrivatePage:
    def test_ids_and_weights_stand_there_the_most_spared_first(self, tmp_path: Path) -> None:
        run = made_up(text_ids=True)
        text = section(write_report(run, tmp_path / "report"), "spared")
        weights = run.columns["clip_weight"]
        assert "3 of 40 examples (7.5 %)  were trained with a weight ω below 1" in text
        assert f"The smallest ω is {number(weights[2])}." in text
        places = [text.index(f"Zoë {row} ") for row in sorted(SPARED, reverse=True)]
        assert places == sorted(places)
        assert all(f"Zoë {row}" not in text for row in range(3, 40))
        for row in SPARED:
            assert number(weights[row]) in text
            assert number(run.columns["fil_before"][row]) in text
        assert "bind unbiased attackers, ε every attacker, with the weights held fixed" in text

    def test_a_long_list_is_cut_aloud(self, tmp_path: Path) -> None:
        run = made_up(100, text_ids=True)
        run.columns["clip_weight"][:] = np.linspace(0.2, 0.9, 100)
        text = section(write_report(run, tmp_path / "report"), "spared")
        assert len(re.findall("Zoë", text)) == 20
        assert "80 more: sort the table of every example" in text

    def test_equal_weights_are_ordered_by_exposure_and_the_unmeasured_say_so(self, tmp_path: Path) -> None:
        run = made_up(text_ids=True)
        run.columns["clip_weight"][:3] = 0.5
        run.columns["fil"][:3], run.columns["participations"][1] = (1.0, 9.0, 2.0), 0
        text = section(write_report(run, tmp_path / "report"), "spared")
        assert text.index("Zoë 2") < text.index("Zoë 0") < text.index("Zoë 1")
        assert text.count("not measured") == 3

    def test_the_table_of_every_example_and_the_csv_have_the_weight(self, tmp_path: Path) -> None:
        run = made_up()
        run.columns["fil_before"][7] = math.nan
        page = write_report(run, tmp_path / "report")
        spec = re.search(r"id=\"spec\">(.*?)</script>", page.read_text())
        assert spec is not None
        assert {"clip_weight", "fil_before"} <= {column["key"] for column in json.loads(spec[1])["columns"]}
        with open(page.parent / "leakage.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [float(row["clip_weight"]) for row in rows] == pytest.approx(run.columns["clip_weight"], rel=1e-6)
        assert rows[7]["fil_before"] == ""

    def test_what_the_weights_mean_is_said(self, tmp_path: Path) -> None:
        page = write_report(made_up(), tmp_path / "report")
        text = section(page, "assumptions")
        assert "All numbers here take these weights as fixed: the bounds on unbiased attackers" in text
        assert "new batches and noise, as well as ε and the numbers that hold for every attacker" in text
        assert "Weights that were set from public attributes alone tell nothing." in text
        assert "3 examples were spared" in section(page, "findings")

    def test_rounds(self, tmp_path: Path) -> None:
        text = section(write_report(made_up(), tmp_path / "report"), "spared")
        assert "the aim was a smallest MSE bound (unbiased attackers) of 0.1. The aim was met." in text
        words = text[text.index("What equalising did") :].split()
        assert all(shown in words for shown in ("0.0123", "0.0987", "1.87", "1.04", "0.9835", "0.9836", "61", "62"))
        assert "2, fresh" in text
        assert " ε  " not in text[text.index("Training") :]  # no round has one

    def test_a_question_binds_every_attacker(self, tmp_path: Path) -> None:
        aimed = {"question": "<sex>", "target": 0.05, "met": False, "stopped": "floor", "epsilon_of_all_rounds": 7.25}
        text = section(
            write_report(made_up(about=made_up().about | {"equalised": aimed}), tmp_path / "report"), "spared"
        )
        assert "a largest true-positive rate on “&lt;sex&gt;” (every attacker) of 0.05. The aim was not met." in text
        assert "all rounds together have ε = 7.25" in text

    def test_without_weights_there_is_no_word_of_it(self, tmp_path: Path) -> None:
        page = write_report(without_weights(made_up()), tmp_path / "report")
        text = page.read_text()
        assert 'id="spared"' not in text
        assert "clip_weight" not in text
        assert "pilots" not in text
        assert "before examples were spared" not in text
        assert json.loads((page.parent / "summary.json").read_text())["spared"] is None

    def test_weights_of_one_spare_nobody(self, tmp_path: Path) -> None:
        run = made_up()
        run.columns["clip_weight"][:] = 1.0
        page = write_report(run, tmp_path / "report")
        assert "No example has a weight below 1." in section(page, "spared")
        assert "were spared:" not in section(page, "findings")


class TestPublicPage:
    @staticmethod
    def written(run: SavedRun, folder: Path) -> tuple[Path, str]:
        page = write_report(run, folder, redacted=True)
        return page, "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in folder.iterdir())

    def test_no_id_no_weight_and_nothing_of_the_worst(self, tmp_path: Path) -> None:
        run = made_up(240, text_ids=True)
        page, everything = self.written(run, tmp_path / "public")
        private = "\n".join(
            path.read_text(encoding="utf-8", errors="replace")
            for path in write_report(run, tmp_path / "private").parent.iterdir()
        )
        weights = run.columns["clip_weight"][list(SPARED)].tolist()
        single = [f"Zoë {row}" for row in SPARED]
        single += [form for weight in weights for form in (number(weight), f"{weight:.7g}")]
        single += ["0.0123", "0.0987", "0.0876", "0.595", "1.87", "0.9835", "7 pilots", "at least 0.125"]
        assert [text for text in single if text not in private] == []  # the search can find them
        assert [text for text in single if text in everything] == []
        assert "Fewer than 10 of 240 examples  were trained with a weight ω below 1" in section(page, "spared")
        assert "Fewer than 10 examples were spared" in section(page, "findings")
        assert "nothing that rests on single examples" in section(page, "spared")
        assert "0.1" not in section(page, "spared")  # a target may come from a share, and so from an example

    def test_counts_are_rounded(self, tmp_path: Path) -> None:
        run = made_up(240, rounds={**made_up().rounds, "num_spared": np.asarray([0, 127])})
        run.columns["clip_weight"][:127] = 0.5
        page, _ = self.written(run, tmp_path / "public")
        assert "About 130 of 240 examples (54 %)" in section(page, "spared")
        spared = summarise_spared(run, 10)
        assert spared is not None
        assert spared.rounds == {"num_spared": [0, 130], "fresh": [False, True]}
        assert spared.smallest_weight is None

    def test_who_it_was_does_not_reach_it(self, tmp_path: Path) -> None:
        run = made_up(240)
        other = made_up(240)
        other.columns["clip_weight"][:] = np.where(np.isin(np.arange(240), (100, 101)), 0.3, 1.0)
        first, second = (self.written(each, tmp_path / name)[0].parent for name, each in (("a", run), ("b", other)))
        assert {path.name: path.read_bytes() for path in first.iterdir()} == {
            path.name: path.read_bytes() for path in second.iterdir()
        }


class TestPilots:
    def test_private_tells_target_number_and_verdict(self, tmp_path: Path) -> None:
        text = section(write_report(made_up(), tmp_path / "report"), "training")
        assert (
            "By 7 pilots, trainings of copies on the same data, for this target: every MSE bound at least 0.1" in text
        )
        assert "(confidence 95 %). This run met it (smallest bound 0.13, at least 0.125 (95 %))." in text

    @pytest.mark.parametrize(
        ("headroom", "told"),
        [
            (0.8, "This run missed it by a factor of 1.25"),
            (0, "cannot tell whether it met it"),
            (None, "was not saved"),
        ],
    )
    def test_a_missed_target(self, tmp_path: Path, headroom: float | None, told: str) -> None:
        choice = made_up().about["noise_choice"] | {"headroom": headroom}
        run = made_up(about=made_up().about | {"noise_choice": choice})
        assert told in section(write_report(run, tmp_path / "report"), "training")

    def test_public_tells_the_target_alone(self, tmp_path: Path) -> None:
        page = write_report(made_up(240), tmp_path / "public", redacted=True)
        text = section(page, "training")
        assert "By pilots, trainings of copies on the same data, for this target: every MSE bound at least 0.1" in text
        assert "is not part of this version" in text
        about = json.loads((page.parent / "summary.json").read_text())["about"]
        assert about["noise_choice"] == {"target": "every MSE bound at least 0.1", "confidence": 0.95}
        assert "equalised" not in about


class TestGroups:
    @staticmethod
    def two_groups(n: int = 240) -> SavedRun:
        """Before, one half leaked four times as much as the other; now 1.5 times."""
        half = np.arange(n) < n // 2
        run = made_up(n, groups={"sex": np.where(half, "f", "m")})
        run.columns["fil"][:] = np.where(half, 0.3, 0.2)
        run.columns["fil_before"][:] = np.where(half, 0.8, 0.2)
        run.columns["mse_bound"][:] = run.columns["fil"] ** -2
        return run

    @pytest.mark.parametrize("redacted", [False, True])
    def test_before_and_after(self, tmp_path: Path, redacted: bool) -> None:
        run = self.two_groups()
        (grouping,) = summarise(run, redacted=redacted).groupings
        assert grouping.disparity.ratio == pytest.approx(1.5)
        assert grouping.disparity_before.ratio == pytest.approx(4.0)
        assert [group.fil_before for group in grouping.groups] == pytest.approx([0.8, 0.2])
        text = section(write_report(run, tmp_path / "report", redacted=redacted), "groups")
        assert "The most over the least exposed group: 1.5; before examples were spared, 4 (typical FIL)." in text
        assert "FIL η̄ before sparing" in text

    def test_those_who_were_not_measured_before_do_not_count(self) -> None:
        run = self.two_groups()
        run.columns["fil_before"][:100] = math.nan
        (grouping,) = summarise(run).groupings
        assert grouping.disparity_before.ratio == pytest.approx(4.0)
        run.columns["fil_before"][:115] = math.nan  # five of a group are left, too few to speak for it
        assert summarise(run).groupings[0].disparity_before is None
        assert summarise(run, redacted=True).groupings[0].disparity_before is None

    def test_without_a_run_before(self, tmp_path: Path) -> None:
        run = without_weights(self.two_groups())
        text = section(write_report(run, tmp_path / "report"), "groups")
        assert "The most over the least exposed group: 1.5 (typical FIL)." in text
        assert summarise(run).groupings[0].disparity_before is None


class TestGate:
    def test_it_is_noted(self) -> None:
        spared, pilots = notes(made_up())
        assert spared == "3 examples were trained with a smaller weight, of 40: bounds and ε take the weights as fixed"
        assert pilots.startswith("σ was chosen by pilots, for this target: every MSE bound at least 0.1;")
        assert notes(without_weights(made_up())) == []

    def test_the_command_prints_it(self, tmp_path: Path) -> None:
        path, policy = save(made_up(), tmp_path / "run.fil"), tmp_path / "policy.toml"
        policy.write_text("max_share_spared = 0.05\n")

        def call(*options: str) -> Any:
            return CliRunner().invoke(main, ["gate", str(path), "--policy", str(policy), *options])

        failed = call()
        assert failed.exit_code == 1
        assert "note: 3 examples were trained with a smaller weight, of 40" in failed.stdout
        assert "FAIL" in failed.stdout
        data = json.loads(call("--json").stdout)
        assert data["notes"] == notes(made_up())
        assert "note:" not in call("--quiet").stdout
        assert "3 examples: trained with a smaller weight" in CliRunner().invoke(main, ["inspect", str(path)]).stdout

    def test_a_share_may_be_asked_for(self) -> None:
        def verdict(run: SavedRun, limit: float) -> Any:
            (found,) = [v for v in check(run, parse_policy({"max_share_spared": limit})) if "spared" in v.rule]
            return found

        assert verdict(made_up(), 0.075).passed
        failed = verdict(made_up(), 0.07)
        assert (failed.passed, failed.offending, failed.found) == (False, 3, 0.075)
        assert verdict(without_weights(made_up()), 0.0).passed
        with pytest.raises(PolicyError, match="max_share_spared = 2 must be a share"):
            parse_policy({"max_share_spared": 2})


class TestFile:
    def test_round_trip(self, tmp_path: Path) -> None:
        run = made_up()
        loaded = load(save(run, tmp_path / "run.fil"))
        assert list(loaded.rounds) == list(run.rounds)
        for name, values in run.rounds.items():
            np.testing.assert_array_equal(loaded.rounds[name], values)
        assert loaded.about == run.about
        assert is_spared(loaded).sum() == 3

    def test_an_earlier_file_has_none_of_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def as_before(value: Any) -> str:
            kept = {key: inner for key, inner in value.items() if key != "rounds"} if isinstance(value, dict) else value
            return json.JSONEncoder().encode(kept)

        with monkeypatch.context() as patch:
            patch.setattr("torchfil.run.arrays.json.dumps", as_before)
            path = save(without_weights(made_up()), tmp_path / "old.fil")
        assert b"rounds" not in path.read_bytes()
        loaded = load(path)
        assert loaded.rounds == {}
        assert not is_spared(loaded).any()
        write_report(loaded, tmp_path / "report")

    def test_what_does_not_fit_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="rounds's columns must have one length"):
            made_up(rounds={"worst": np.ones(2), "score": np.ones(3)})
        for wrong in ({"noise_choice": "three"}, {"noise_choice": {"headroom": "much"}}, {"equalised": {"met": 1}}):
            with pytest.raises(ValueError, match="about: '"):
                made_up(about=made_up().about | wrong)
        with pytest.raises(RunFileError):
            (tmp_path / "cut.fil").write_bytes(save(made_up(), tmp_path / "run.fil").read_bytes()[:-9])
            load(tmp_path / "cut.fil")
