"""Model cards: public numbers alone, in Markdown, on the Hub and as CycloneDX.

Existing cards keep what they have.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report import test_disclosure as disclosure
from tests.report.prepared_runs import KINDS, POLICY, bare, of_kind, some
from tests.report.run_cases import AUDIT, REFUTED, audited, made_up, owned
from tests.report.test_redaction import bytes_of_examples, numbers_of_examples, planted
from tests.test_cli import call, refused
from torchfil.gate.policy import Policy
from torchfil.report import SavedRun, save
from torchfil.report.card import BEGIN, END, Card, NotReleasedError, card_of, merged
from torchfil.report.summary import summarise

yaml = pytest.importorskip("yaml")

HOSTILE = "a | b\n# <script>alert(1)</script> [x](http://e) `c` ${\\d} \x1b[2J" + END + "'\": {%"
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w.])")


def cases() -> dict[str, SavedRun]:
    hostile = made_up(60, groups={HOSTILE: np.asarray([HOSTILE, "b"] * 30)})
    question = dataclasses.replace(hostile.questions[0], name=HOSTILE, answers=[HOSTILE, "m"])
    about = hostile.about | {"title": HOSTILE, "unit_of_inputs": HOSTILE}
    free = made_up(30)
    columns = free.columns | {"epsilon": np.full(30, math.inf)}
    merged_runs = of_kind("table", safe=True)
    merged_runs.about["merged"] = {"runs": 3, "epsilon_of_all": 4.1}
    return {
        **{kind: of_kind(kind, safe=True) for kind in KINDS},
        "merged": merged_runs,
        "owner": owned(200),
        "audit refutes": audited(REFUTED, 40),
        "nine": made_up(9),
        "hostile": dataclasses.replace(hostile, about=about, questions=[question]),
        "silent": made_up(30, about={}, questions=[], groups={}, attacks=[], history={}, rounds={}),
        "no noise": dataclasses.replace(
            free, about=free.about | {"epsilon": math.inf}, columns=columns
        ),
    }


CASES = cases()


def texts_of(card: Card) -> list[str]:
    return [
        merged("", card),
        json.dumps(card.metadata, ensure_ascii=False),
        json.dumps(card.bom, ensure_ascii=False),
    ]


def metrics_of(card: Card) -> list[dict[str, Any]]:
    return card.metadata["model-index"][0]["results"][0]["metrics"]


def by_type(card: Card, kind: str) -> list[Any]:
    return [each["value"] for each in metrics_of(card) if each["type"] == kind]


def performance_of(card: Card) -> list[dict[str, Any]]:
    return card.bom["components"][0]["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]


# ---------------------------------------------------------------------- what it must not tell


def test_no_document_holds_anything_of_one_example() -> None:
    run = planted()
    values = numbers_of_examples(run)
    wanted = bytes_of_examples(run)
    for text in texts_of(card_of(run)):
        content = text.encode()
        assert [item for item in wanted if item in content] == []
        assert not re.search("PLANTED|rare-|feedc0de|918273645", text)
        for found in (float(number.replace(",", "")) for number in NUMBER.findall(text)):
            assert not np.any(np.abs(values - found) <= 1e-7 * np.abs(values)), found
            assert found < 0.01 * 7654321, "one example shows through"


def test_the_same_card_whoever_the_examples_are() -> None:
    run, others = planted(), disclosure.TestOutliers()
    about = run.about | {
        "probe_seed": 1,
        "dataset": run.about["dataset"] | {"data_sha256": "0" * 64},
    }
    assert card_of(run) == card_of(planted(ids=np.arange(len(run)), records=None, about=about))
    assert card_of(others.run(1e2)) == card_of(others.run(1e4)) == card_of(others.run(1e6))
    assert card_of(others.run(1e2)) != card_of(others.run(1.0)), "the comparison can fail"


# ---------------------------------------------------------------------- the decision


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_release_is_told(kind: str) -> None:
    card = card_of(CASES[kind], policy=POLICY)
    properties = {each["name"]: each["value"] for each in card.bom["components"][0]["properties"]}
    assert properties["torchfil:decision"] == "May be released"
    assert "Decision" in card.section
    assert "min_error_share = 0.5" in card.section
    assert "Decision" not in card_of(CASES[kind]).section

    rare = of_kind(kind, safe=True)
    rare.columns["mse_bound_low"][:90] = 0.0  # too few draws to tell
    untold = "Do not release" if kind == "linear" else "Cannot tell yet"
    for run, told in ((of_kind(kind, safe=False), "Do not release"), (rare, untold)):
        with pytest.raises(NotReleasedError, match=told) as refused:
            card_of(run, policy=POLICY)
        assert not NUMBER.search(str(refused.value)), "no number of what broke a rule"


def test_limits_stand_with_their_settings_and_none_is_empty() -> None:
    run = CASES["text"]
    policy = Policy(
        max_epsilon=8.0, min_error_share=0.5, blind_error=0.001, levels={"max_epsilon": "warn"}
    )
    section = card_of(run, policy=policy).section
    assert "blind_error = 0.001" in section
    assert "max_epsilon" not in section
    with pytest.raises(ValueError, match="no limit of its own"):
        card_of(run, policy=Policy(max_epsilon=0.1, levels={"max_epsilon": "warn"}))
    with pytest.raises(ValueError, match="max_worsening"):
        card_of(run, policy=Policy(max_epsilon=8.0, max_worsening=0.1))


def test_a_decision_tells_nothing_of_how_narrowly_a_rule_is_kept() -> None:
    """Of two runs whose closest example differs, and which both keep the policy, the cards are the
    same.
    """
    policy, cards = Policy(min_error_share=0.5), []
    for worst in (0.55, 0.6, 0.9, 2.9):
        run = bare("Notes", some(2.5, (worst * 0.5) ** 2 / 0.9, [17]))
        cards.append(card_of(run, policy=policy))
    limits = [re.search(r"\*\*Decision.*?### ", card.section, re.DOTALL)[0] for card in cards]
    assert len(set(limits)) == 1
    assert (
        cards[0].bom["components"][0]["properties"] == cards[3].bom["components"][0]["properties"]
    )


# ---------------------------------------------------------------------- the numbers


def test_every_number_is_one_of_the_public_page() -> None:
    run = dataclasses.replace(
        owned(200), about=owned(200).about | {"dataset": {"input_range": [0, 1]}}
    )
    card, summary = card_of(run), summarise(run, redacted=True)
    assert by_type(card, "epsilon") == [2.5]
    assert by_type(card, "audited-epsilon") == [1.1]
    lower = audited(AUDIT | {"epsilon": 1.199}, 200)
    assert by_type(card_of(lower), "audited-epsilon") == [1.1]
    assert by_type(card, "exposure") == list(summary.classes.values())
    assert len(summary.classes) == 4
    assert by_type(card, "true-positive-rate") == [summary.questions[0].rate["0"]]
    errors = [
        (each["value"], each["args"]["lower_end"])
        for each in metrics_of(card)
        if each["type"] == "least-error"
    ]
    wanted = [(row.mse_bound**0.5, row.mse_bound_low**0.5) for row in summary.exposure]
    assert len(errors) >= 3
    assert np.allclose(errors, wanted, rtol=0.05)  # two digits

    groups = [each for each in performance_of(card) if each["type"].startswith("typical FIL (")]
    rows = [group for grouping in summary.groupings for group in grouping.groups]
    assert [float(each["value"]) for each in groups] == [row.fil for row in rows]
    ends = [tuple(map(float, each["confidenceInterval"].values())) for each in groups]
    assert ends == [(row.low, row.high) for row in rows]


# -------------------------------------------------------------------- for the Hub, and as CycloneDX


@pytest.mark.parametrize("name", ["owner", "hostile", "nine"])
def test_huggingface_hub_reads_the_card(name: str, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.repocard_data import model_index_to_eval_results

    card = card_of(CASES[name])
    path = tmp_path / "README.md"
    path.write_text(merged("", card), encoding="utf-8")
    assert hub.metadata_load(path) == card.metadata
    read = hub.ModelCard.load(path)
    assert read.data.tags == ["differential-privacy", "torchfil"]
    assert len(read.data.eval_results) == len(metrics_of(card))
    _, results = model_index_to_eval_results(card.metadata["model-index"])
    assert [each.metric_value for each in results] == [each["value"] for each in metrics_of(card)]


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_bill_of_materials_fits_its_schema(name: str) -> None:
    pytest.importorskip("cyclonedx")
    pytest.importorskip("jsonschema")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    bom = card_of(CASES[name]).bom
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(bom)) is None
    broken = json.loads(json.dumps(bom))
    broken["components"][0]["modelCard"]["quantitativeAnalysis"]["performanceMetrics"][0][
        "value"
    ] = 3
    assert validator.validate_str(json.dumps(broken)) is not None, "the validator sees model cards"


def test_texts_of_strangers_do_not_act() -> None:
    card = card_of(CASES["hostile"])
    text = merged("", card)
    assert (card.section.count(BEGIN), card.section.count(END)) == (1, 1)
    assert merged(text, card) == text
    assert "\x1b" not in "".join(texts_of(card))
    assert not re.search(r"(?<!\\)<script", text.split("---\n")[-1])
    rows = [
        re.sub(r"\\\\|\\\|", "", line) for line in card.section.splitlines() if line.startswith("|")
    ]
    assert {row.count("|") for row in rows} <= {4, 5}, "no cell ends early"
    assert card.bom["components"][0]["name"].startswith("a | b # <script>")


# ---------------------------------------------------------------------- into existing cards

OTHERS = """---
license: mit  # chosen by the board
tags: [vision, torchfil]  # ours
# what it was measured on
model-index:
- name: digits
  results:
  - task: {type: image-classification}
    dataset: {type: digits, name: Digits}
    metrics: [{type: accuracy, value: 0.93}]
datasets:
  - digits   # public
---
# Digits

Some text,  with   spaces.
"""


def front_of(text: str) -> Mapping[str, Any]:
    return yaml.safe_load(text.replace("\r\n", "\n").lstrip().split("---\n")[1])


def outside(text: str) -> str:
    return text[: text.index(BEGIN)] + text[text.index(END) + len(END) :]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_an_existing_card_keeps_everything_else(line_end: str) -> None:
    before, card = OTHERS.replace("\n", line_end), card_of(CASES["owner"])
    after = merged(before, card)
    front, body = front_of(after), after.partition(f"{line_end}---{line_end}")[2]
    assert body.startswith(f"# Digits{line_end}{line_end}Some text,  with   spaces.{line_end}")
    for line in ("license: mit  # chosen by the board", "  - digits   # public", "  # ours"):
        assert line + line_end in after
    assert front["tags"] == ["vision", "torchfil", "differential-privacy"]
    (model,) = front["model-index"]
    assert [each["task"]["type"] for each in model["results"]][1:] == ["privacy-leakage"]
    assert ("\r" in after) == (line_end == "\r\n")
    assert after.count("\r\n") in (0, after.count("\n"))

    # once more nothing changes; another run's card replaces this one, and the first comes back as
    # it was
    assert merged(after, card) == after
    moved = (
        after.replace(f"{line_end}# Digits", f"{line_end}Behind it.{line_end}# Digits")
        + f"A tail{line_end}"
    )
    other = merged(moved, card_of(CASES["linear"]))
    assert outside(other).partition("# Digits")[2] == outside(moved).partition("# Digits")[2]
    assert merged(other, card) == moved


@pytest.mark.parametrize(
    ("before", "noun"),
    [
        ("---\nlicense: mit\ntext", "front matter"),
        ("---\ntags: vision\n---\n", "tags"),
        ("---\nmodel-index:\n- name: x\n  results: [7]\n---\n", "front matter"),
        (f"text {BEGIN}", "torchfil: end"),
        (f"{BEGIN} {END} {BEGIN} {END}", "torchfil: end"),
    ],
)
def test_a_broken_card_is_refused(before: str, noun: str) -> None:
    with pytest.raises(ValueError, match=noun):
        merged(before, card_of(CASES["nine"]))


# ---------------------------------------------------------------------- the command


def test_the_command(tmp_path: Path) -> None:
    run, readme, bom, policy = (
        tmp_path / name for name in ("run.parquet", "README.md", "card.cdx.json", "clinic.toml")
    )
    save(CASES["text"], run)
    readme.write_text(OTHERS)
    readme.chmod(0o644)
    policy.write_text("max_epsilon = 0.1\n")

    # a decision that may not be told: nothing is written
    written = ("card", run, "--into", readme, "--cyclonedx", bom, "--policy", policy)
    found = call(*written)
    assert (found.exit_code, found.output[:11]) == (1, "NOT WRITTEN")
    assert readme.read_text() == OTHERS
    assert not bom.exists()

    policy.write_text("max_epsilon = 8.0\nmin_error_share = 0.5\n")
    assert call(*written).exit_code == 0
    card = card_of(
        CASES["text"], policy=Policy(name="clinic", max_epsilon=8.0, min_error_share=0.5)
    )
    assert readme.read_text() == merged(OTHERS, card)
    assert json.loads(bom.read_text()) == card.bom
    assert readme.stat().st_mode & 0o777 == 0o644, "a card of others keeps its permissions"
    assert bom.stat().st_mode & 0o777 == 0o600

    # over what it reads, and into a broken card
    refused("card", run, "--into", run)
    readme.write_text("---\nlicense: mit\n")
    refused("card", run, "--into", readme, "--cyclonedx", tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()
