"""The table that the integrations write."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine
from torchfil.integrations.table import write_table


def test_ids_are_no_formulas_and_numbers_are_those_of_the_engine(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = ["=cmd()", "-cmd()", "@x", "patient 3"]
    dataset = TensorDataset(torch.randn(4, 3), torch.randint(2, (4,)))
    model = nn.Linear(3, 2)
    engine = FILPrivacyEngine()
    _, _, loader = engine.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(dataset, batch_size=4),
        poisson_sampling=False,
        criterion=nn.CrossEntropyLoss(),
        id_of=ids,
    )
    for x, y in loader:
        engine.train_step(x, y)
    write_table(engine, tmp_path / "leakage.csv", delta=1e-5)
    with (tmp_path / "leakage.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["'=cmd()", "'-cmd()", "'@x", "patient 3"]
    assert [float(row["fil"]) for row in rows] == engine.get_fil().value.tolist()
    assert [row["fil_kind"] for row in rows] == engine.leakage_columns()[1]["fil_kind"]
    assert float(rows[0]["individual_epsilon"]) == pytest.approx(engine.get_individual_epsilon(delta=1e-5).value[0])
