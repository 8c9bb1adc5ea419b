"""`headrace reward serve | new`: a reward service by itself, without a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import click

from headrace.cli.arg_types import PATH
from headrace.disk import write_new

ADDRESS = "127.0.0.1:7010"


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("scorer")
@click.option("--address", default=ADDRESS, show_default=True, help="host:port to listen on.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]")
def serve(scorer: str, address: str, words: Sequence[str]) -> int:
    """Serves SCORER until Ctrl-C: a function (file.py:fn, pkg.mod.fn), or one of headrace's own (math, judge, …).

    Further flags are those of a job's [reward] section, and --tls-dir, --tokens-file, --insecure.
    """
    is_function = ":" in scorer or "." in scorer
    named = ["--custom-rm-path" if is_function else "--rm-type", scorer]
    os.execv(sys.executable, [sys.executable, "-m", "services.reward", "--address", address, *named, *words])


@click.command()
@click.argument("folder", type=PATH)
def new(folder: Path) -> int:
    """Writes a reward service into FOLDER, to be changed: the function, its tests, a Containerfile."""
    template = files("headrace.templates").joinpath("reward")
    written = write_new(folder, {file.name: file.read_text() for file in template.iterdir() if file.is_file()})
    print(f"{folder}: {', '.join(written)}")
    print(f"next: cd {folder} && python -m pytest")
    print(f"      headrace reward serve reward.py:reward --address {ADDRESS}")
    return 0
