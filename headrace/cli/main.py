"""`headrace COMMAND …`: finds the command, runs it, turns errors into one line.

A command is imported when it is called, so that `headrace --help` loads none.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from headrace.disk import FULL_DISK
from headrace.errors import HeadraceError, InvalidArgument, NothingToLearn
from headrace.limits import did_you_mean, encodable
from headrace.process.exit_status import NOTHING_TO_LEARN

_USAGE_EXIT_CODE = 2
_MAX_CHARACTERS = 16_384
_LISTED = ": headrace --help lists the commands"


@dataclass(frozen=True, slots=True)
class Command:
    """`module` of headrace/cli/commands has a function of the same name: the arguments → the exit code."""

    module: str
    usage: str
    help: str

    def __call__(self, argv: Sequence[str]) -> int:
        run: Callable[[Sequence[str]], int] = getattr(
            import_module(f"headrace.cli.commands.{self.module}"), self.module
        )
        return run(argv)


_COMMANDS: Mapping[str, Command] = {
    "train": Command("train", "train JOB.toml [flags]", "run a job to its end"),
    "replay": Command(
        "replay", "replay RUN [--from-step K] [flags]", "train the recorded steps of a run again, and compare"
    ),
    "check": Command("check", "check JOB.toml [flags] | check hook PATH", "show the plan of a job, or try a hook"),
    "models": Command("models", "models", "list the models that --model knows, with sizes and layouts"),
    "up": Command(
        "up", "up SERVICE --config JOB.toml [flags]", "run one service here: buffer, reward, rollout, trainer"
    ),
    "restart": Command(
        "restart",
        "restart SERVICE | all [RUN]",
        "restart services of a live run one after the other, without a failed call",
    ),
    "rollout": Command("rollout", "rollout scale N [RUN]", "change the number of engines of a live run"),
    "agent": Command("agent", "agent [RUN]", "play the tasks of a job with --agent-hosts here"),
    "status": Command("status", "status [RUN]", "show the state of a run and its services"),
    "samples": Command(
        "samples", "samples [RUN] [-n 5]", "show what the policy generated: by step, group, reward, text"
    ),
    "audit": Command("audit", "audit [RUN]", "compare the ledger with what the trainer was fed: 0 0 0, or the ids"),
    "buffer": Command(
        "buffer",
        "buffer backup | restore | export | retry | drop | delete-stream",
        "back up, restore or export a ledger; retry or drop groups; delete a stream",
    ),
    "submit": Command("submit", "submit [RUN] --prompt TEXT | --file PATH", "submit prompts to a stream"),
    "generate": Command("generate", "generate TEXT [RUN]", "ask the current policy"),
    "eval": Command("evaluate", "eval [RUN] [--data NAME PATH]", "evaluate the current policy"),
    "certs": Command("certs", "certs FOLDER [--client NAME --role ROLE]", "make or renew certificates for TLS"),
    "tokens": Command("tokens", "tokens add | list | revoke FILE", "tokens of callers, and their roles"),
    "export": Command("export", "export FOLDER [RUN]", "write the current weights as a Hugging Face folder"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code.

    0: done. 1: it failed. 2: a mistake in what was typed or in the job. 3: the run had nothing to learn from.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name, arguments = (words[0], words[1:]) if words else ("--help", [])
    try:
        if name in ("-h", "--help", "help"):
            print(_overview(), flush=True)
            return 0
        if name in ("-V", "--version"):
            from importlib.metadata import version  # takes longer to import than the overview to print

            print(f"headrace {version('headrace')}")
            return 0
        if name not in _COMMANDS:
            raise InvalidArgument(f"unknown command {name[:80]}{did_you_mean(name, _COMMANDS) or _LISTED}")
        return _COMMANDS[name](arguments)
    except HeadraceError as error:
        _say(error.message)
        return _exit_code(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        way = ": free some space there, or name a folder on another disk" if error.errno in FULL_DISK else ""
        _say(f"{error.filename or name}: {error.strerror or error}{way}")
        return 1
    except Exception as error:  # noqa: BLE001  # a person gets one line, not a traceback
        _say(f"this is a bug in headrace: {type(error).__name__}: {error}. Please report it with {_kept(error)}")
        return 1


def _exit_code(error: HeadraceError) -> int:
    if isinstance(error, NothingToLearn):
        return NOTHING_TO_LEARN
    return _USAGE_EXIT_CODE if isinstance(error, InvalidArgument) else 1


def _say(message: str) -> None:
    from rich.console import Console  # the overview needs neither
    from rich.text import Text

    printable = encodable(message[:_MAX_CHARACTERS])
    said = Text.assemble(("headrace: ", "bold red"), printable)
    Console(stderr=True).print(said, highlight=False, soft_wrap=True)


def _kept(error: Exception) -> str:
    """Writes the traceback to a file and returns its path."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="headrace-", suffix=".txt", delete=False, errors="backslashreplace"
    ) as file:
        traceback.print_exception(error, file=file)
        return file.name


def _overview() -> str:
    width = max(len(command.usage) for command in _COMMANDS.values())
    lines = [f"  headrace {command.usage:<{width}}  {command.help}" for command in _COMMANDS.values()]
    return "\n".join(
        ["usage:", *lines, "", "headrace train --help shows what a first run sets, --help-all every flag."]
    )


if __name__ == "__main__":
    sys.exit(main())
