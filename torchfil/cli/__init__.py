"""The ``torchfil`` command.

Each module holds the commands of one purpose, thin over the library.
"""

import click

from torchfil._version import __version__
from torchfil.cli.audit import audit
from torchfil.cli.card import card
from torchfil.cli.demo import demo
from torchfil.cli.gate import gate
from torchfil.cli.linear import glm
from torchfil.cli.output import OneLineGroup
from torchfil.cli.runs import compare, inspect, report, sign, verify
from torchfil.cli.watch import watch

__all__ = ["main"]


@click.group("torchfil", cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="torchfil")
def main() -> None:
    """For every single training example: how much does the trained model leak about it?

    \b
    Examples:
      torchfil demo                                      # trains on digits, ends with a report
      torchfil inspect run.parquet                       # a saved run in the terminal
      torchfil report run.parquet -o report              # its report; --redacted for one to share
      torchfil watch run.parquet                         # the same while it trains
      torchfil gate run.parquet --policy policy.toml     # exit code 1: a threshold is broken
      torchfil card run.parquet --into README.md         # what may be published, into a model card
      torchfil sign run.parquet --key ~/.ssh/id_ed25519  # vouch for a run (verify: who did)
      torchfil compare before.parquet after.parquet      # two runs: what a change did
      torchfil audit training:train --data training:dataset  # is each step as private as accounted?
      torchfil glm patients.csv --target dose --sigma 0.01 --private vkorc1,age

    A run is saved by engine.save_run("run.parquet", delta=1e-5) after training with
    torchfil.FILPrivacyEngine. Exit codes: 0 done, 1 a policy is broken, a signature does not hold,
    an audit found a fault, 2 bad input, 3 cannot tell (gate: no rule is broken, but one cannot be
    answered).
    """


for command in (demo, audit, report, gate, inspect, watch, sign, verify, compare, card, glm):
    main.add_command(command)
