"""Ready-made questions: what they make of a batch, in every form of inputs."""

from __future__ import annotations

from typing import Any

import torch

from tests.refused import all_refused
from torchfil.questions import (
    Absent,
    Change,
    Column,
    Label,
    OneHot,
    Question,
    Region,
    Token,
    check_questions,
)

TABLE = torch.tensor([[1.0, 0.0, 5.0], [0.0, 1.0, 6.0]])


def values(question: Question, inputs: Any = TABLE, targets: Any = None) -> list[Any]:
    return [
        None if other is None else other.inputs for other in question.alternatives(inputs, targets)
    ]


def test_columns() -> None:
    assert [v.tolist() for v in values(OneHot((0, 1)))] == [
        [[1.0, 0.0, 5.0], [1.0, 0.0, 6.0]],
        [[0.0, 1.0, 5.0], [0.0, 1.0, 6.0]],
    ]
    levels: dict[str, Any] = {"high": (2.0, 3.0), "low": (-2.0, -3.0)}
    standardised = OneHot((0, 1), names=("a", "b"), dropped="neither", **levels)
    assert standardised.answers == ("neither", "a", "b")
    assert [v[0, :2].tolist() for v in values(standardised)] == [[-2, -3], [2, -3], [-2, 3]]
    assert values(Column(2, values=(0.0, 9.0)))[1][:, 2].tolist() == [9.0, 9.0]
    assert values(Column(2, by=(10.0, -1.0)))[1][:, 2].tolist() == [4.0, 5.0]
    assert Column(2, by=(10.0, -1.0)).answers == ("+10", "-1")
    assert TABLE[0].tolist() == [1.0, 0.0, 5.0]


def test_labels_tokens_regions() -> None:
    numbers, shares = torch.tensor([0, 2]), torch.eye(3)[[0, 2]]
    for targets, second in ((numbers, [1, 1]), (shares, [[0, 1, 0]] * 2)):
        _, other, _ = Label(3).alternatives(TABLE, targets)
        assert other is not None
        assert other.targets.tolist() == second
    tokens = torch.tensor([[3, 4], [5, 6]])
    assert values(Token(1, (8, 9)), tokens)[1].tolist() == [[3, 9], [5, 9]]
    assert values(Region([0, 1], 0.5))[0].tolist() == [[0.5, 0.5, 5.0], [0.5, 0.5, 6.0]]
    assert Absent().alternatives(TABLE, None) == (None,)
    named = Change({"up": lambda x, y: (x + 1, y), "down": lambda x, y: (x - 1, y)})
    assert named.answers == ("up", "down")
    assert values(named)[1].tolist() == (TABLE - 1).tolist()


def test_what_cannot_be_asked() -> None:
    refused = {
        "either values= or by=": lambda: Column(0, values=(1.0,), by=(1.0,)),
        "at least two answers": lambda: OneHot((0,)),
        r"different names, got \[\]": lambda: check_questions({"a": Change({})}),
        "different names": lambda: check_questions({"a": Column(0, values=(1.0, 1.0))}),
        "1 positional inputs": lambda: values(Column(0, by=(1.0,), input=1)),
        r"are \['a'\]": lambda: values(Column(0, by=(1.0,), input="c"), {"a": TABLE}),
    }
    all_refused(refused)
