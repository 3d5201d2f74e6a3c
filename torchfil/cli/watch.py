"""``watch``: the report of a run that still trains, in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from torchfil.cli.output import FILE, Output, with_output
from torchfil.gate.policy import load_policy


@click.command()
@click.argument("run", type=FILE)
@click.option(
    "--policy", type=FILE, help="Thresholds, a TOML file (gate --init); otherwise the default ones."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of 127.0.0.1; a free one if not given.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@with_output
def watch(run: Path, policy: Path | None, port: int, opens: bool, out: Output) -> None:
    """Follow a run file while training writes it (engine.save_every): the first screens of its
    report, in a browser.

    The page is served to this machine alone, at an address that nobody can guess. Ctrl-C ends it.

    \b
    Examples:
      torchfil watch run.parquet
      torchfil watch run.parquet --policy policy.toml --open
    """
    from torchfil.report.live import LivePage, LiveServer

    server = LiveServer(LivePage(run, None if policy is None else load_policy(policy)), port)
    try:
        out.result(server.url, {"url": server.url, "run": str(run)})
        out.say(
            "The page depends on private data: keep it and its address confidential. Ctrl-C ends "
            "it."
        )
        if opens:
            webbrowser.open(server.url)
        server.serve_forever(0.1)
    except KeyboardInterrupt:
        out.say()
    finally:
        server.server_close()
