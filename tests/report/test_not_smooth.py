"""A model whose gradient jumps: what rests on Fisher information cannot be answered, and every
reader learns so.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.loops import SIGMA, C, data, make, train
from tests.report.run_cases import made_up, owned, worrying
from tests.test_cli import call
from torchfil.gate.gate import check, decision
from torchfil.gate.pipelines import sarif
from torchfil.gate.policy import Policy, parse_policy
from torchfil.gate.rules import RULES
from torchfil.questions import Absent
from torchfil.report import load, save
from torchfil.report.card import NotReleasedError, card_of
from torchfil.run.saved_run import SavedRun

JUMPS = ["layer 1 (ReLU)", "layer <b>pool</b> (MaxPool2d)"]
OF_FISHER = {
    "min_error_share": 0.0,
    "max_share_exposed": 1.0,
    "min_attribute_error_share": 0.0,
    "min_mse_bound": 0.0,
    "max_share_of_concern": 1.0,
    "max_group_disparity": 1e9,
    "min_attribute_error": {"age": 0.0},
}
OTHERS = {
    "max_gain_over_guessing": 0.5,
    "unit": "person",
    "max_epsilon": 8.0,
    "max_individual_epsilon": 8.0,
    "audited_epsilon_below_claimed": True,
    "min_attacks": 0,
    "max_violated_bounds": 0,
    "max_share_spared": 1.0,
    "max_share_too_few_draws": 1.0,
    "max_examples_missed": 0,
    "allow_seeded_noise": False,
    "max_true_positive_rate": {"sex": 1.0},
}


class Calls(nn.Module):
    """The same function without a layer that could be named."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(x)))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.pool, self.two = nn.Linear(5, 6), nn.MaxPool1d(2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.pool(self.one(x).tanh()[:, None])[:, 0])


def jumping(run: SavedRun, jumps: list[str] = JUMPS) -> SavedRun:
    return dataclasses.replace(
        run, about=run.about | {"model": {"name": "Net", "not_smooth": jumps}}
    )


def smooth(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), layer, nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (smooth(nn.Tanh()), []),
        (smooth(nn.GELU()), []),
        (smooth(nn.ReLU()), ["layer 1 (ReLU)"]),
        (Pooled(), ["layer pool (MaxPool1d)"]),
        (Calls(), ["a call of relu"]),
    ],
)
@pytest.mark.filterwarnings("ignore:the model calls")
def test_a_run_says_what_of_its_model_is_not_smooth(
    model: nn.Module, named: list[str], tmp_path: Path
) -> None:
    one = train(data(60), steps=20, module=model.double(), questions={"member": Absent()})
    run = load(one.engine.save_run(tmp_path / "run.parquet", delta=1e-3))
    assert run.about["model"]["not_smooth"] == named

    # a run that was resumed, and has taken no step itself
    resumed, *_ = make(
        data(60),
        copy.deepcopy(model),
        noise_multiplier=SIGMA,
        max_grad_norm=C,
        questions={"member": Absent()},
        seed=3,
    )
    resumed.load_state_dict(one.engine.state_dict())
    again = load(resumed.save_run(tmp_path / "resumed.parquet", delta=1e-3))
    assert again.about["model"]["not_smooth"] == named

    # by the policy of the template, the least error cannot be answered; ε and the question are
    policy = Policy(
        min_error_share=0.5,
        max_gain_over_guessing=0.5,
        max_epsilon=1000.0,
        max_share_too_few_draws=1.0,
    )
    states = {verdict.key: verdict.state for verdict in check(run, policy)}
    assert states["max_epsilon"] == states["max_gain_over_guessing"] == "kept"
    assert (states["min_error_share"] == "unknown") is bool(named)
    assert not named or decision(check(run, policy)) == "Cannot tell yet"


def test_rules_on_fisher_information_cannot_be_answered_and_others_can() -> None:
    assert {rule.key for rule in RULES.values() if rule.fisher} == OF_FISHER.keys()
    assert RULES.keys() == OF_FISHER.keys() | OTHERS.keys() | {"max_worsening"}
    policy = parse_policy(
        {
            **OF_FISHER,
            **OTHERS,
            "mse_bound_of_concern": 1.0,
            "min_group_size": 2,
            "blind_error": 1.0,
        }
    )
    run = owned(20)
    before = {verdict.rule: verdict for verdict in check(run, policy)}
    after = {verdict.rule: verdict for verdict in check(jumping(run), policy)}
    for key in OTHERS:
        kept = [(v.passed, v.found, v.rule) for v in before.values() if v.key == key]
        assert kept == [(v.passed, v.found, v.rule) for v in after.values() if v.key == key]
    for key in OF_FISHER:
        assert {verdict.state for verdict in before.values() if verdict.key == key} <= {
            "kept",
            "unknown",
        }
        found = [verdict for verdict in after.values() if verdict.key == key]
        assert found
        for verdict in found:
            assert (verdict.state, verdict.found) == ("unknown", None)
            assert verdict.detail.startswith("the model is not smooth: replace layer 1 (ReLU)")
            assert "softplus" in RULES[key].remedy(verdict)
    assert "min_attribute_error.age" in after
    assert "max_group_disparity (sex)" in after
    assert check(jumping(run, []), policy)[0].state == check(run, policy)[0].state


def test_a_comparison_with_an_earlier_run_is_of_d_and_epsilon_alone() -> None:
    policy = Policy(max_worsening=0.1)
    for before, after in ((made_up(), jumping(made_up())), (jumping(made_up()), made_up())):
        states = {
            v.subject: v.state for v in check(after, policy, before) if v.key == "max_worsening"
        }
        assert states == {
            "all examples together": "unknown",
            "the 5 % most exposed": "unknown",
            "the most exposed": "unknown",
            "question “sex”": "kept",
            "ε for everybody": "kept",
        }


def test_cards_and_the_command_line_say_it(tmp_path: Path) -> None:
    run, policy = jumping(worrying(safe=True)), parse_policy({"extends": "default"})
    card = card_of(run)
    assert "Warning" in card.section
    assert "not smooth" in card.section
    assert "binds unbiased attackers" not in json.dumps(card.bom) + card.section
    assert "not smooth" in json.dumps(card.bom)
    card_of(worrying(safe=True), policy=policy)
    with pytest.raises(NotReleasedError, match="Cannot tell yet"):
        card_of(run, policy=policy)

    path = save(run, tmp_path / "run.parquet")
    assert "not smooth" in call("inspect", path).stdout
    gated = call("gate", path, "--preset", "default", "--json")
    found = json.loads(gated.stdout)
    assert (gated.exit_code, found["not_smooth"]) == (3, JUMPS)
    assert found["notes"][0].startswith("the model is not smooth (layer 1 (ReLU), ")
    told: list[Any] = sarif(check(run, policy), None)["runs"][0]["results"]
    assert {each["ruleId"] for each in told} == {"min_error_share", "max_share_exposed"}
    assert all(
        "the model is not smooth: replace layer 1 (ReLU)" in each["message"]["text"]
        for each in told
    )
    earlier = save(worrying(safe=True), tmp_path / "earlier.parquet")
    assert "The second run’s model is not smooth" in call("compare", earlier, path).stdout


@pytest.mark.parametrize("wrong", ["layer 1", [1], {"a": "b"}])
def test_what_is_no_list_of_names_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="not_smooth"):
        jumping(made_up(), wrong)
