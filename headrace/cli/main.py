"""`headrace COMMAND …`: finds the command, runs it, turns errors into one line.

A command is imported when it is called, so that `headrace --help` loads none.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import cast

import click
from click.shell_completion import CompletionItem, shell_complete

from headrace.cli.arg_types import Group
from headrace.disk import FULL_DISK
from headrace.errors import HeadraceError, InvalidArgument, NothingToLearn
from headrace.limits import encodable

_MAX_CHARACTERS = 16_384
_COMPLETE = "_HEADRACE_COMPLETE"
"""A shell sets it: `eval "$(_HEADRACE_COMPLETE=bash_source headrace)"`."""


@dataclass(frozen=True, slots=True)
class Command:
    """`path` is module:name of a click.Command in headrace/cli/commands."""

    path: str
    usage: str
    help: str

    def load(self) -> click.Command:
        module, _, name = self.path.partition(":")
        return cast(click.Command, getattr(import_module(f"headrace.cli.commands.{module}"), name))


_COMMANDS: Mapping[str, Command] = {
    "quickstart": Command("init:quickstart", "quickstart [FOLDER]", "train a small model here, and see what it learns"),
    "init": Command("init:init", "init [FOLDER] [--template sums]", "write a job of your own, to change and to train"),
    "doctor": Command("doctor:doctor", "doctor", "look at this machine, and say what mends each finding"),
    "migrate": Command(
        "migrate:migrate", "migrate slime | verl | trl | prime-rl FILE", "write a job from another project's"
    ),
    "train": Command("jobs:train", "train [JOB.toml] [flags]", "run a job to its end"),
    "replay": Command(
        "jobs:replay", "replay RUN [--from-step K] [flags]", "train the recorded steps of a run again, and compare"
    ),
    "check": Command(
        "jobs:check", "check [JOB.toml] [flags] | check hook PATH", "show the plan of a job, or try a hook"
    ),
    "models": Command("policy:models", "models", "list the models that --model knows, with sizes and layouts"),
    "serve": Command(
        "jobs:serve", "serve tinker [flags]", "let clients of the package tinker train and sample on this machine"
    ),
    "up": Command(
        "jobs:up", "up SERVICE --config JOB.toml [flags]", "run one service here: buffer, reward, rollout, trainer"
    ),
    "restart": Command(
        "live:restart",
        "restart SERVICE | all [RUN]",
        "restart services of a live run one after the other, without a failed call",
    ),
    "rollout": Command("live:rollout", "rollout scale N [RUN]", "change the number of engines of a live run"),
    "reward": Command(
        "reward:reward",
        "reward set | shadow | canary | promote | rollback | stop | status | diff | rescore",
        "score a live run with another function, or try one beside it",
    ),
    "agent": Command("live:agent", "agent [RUN]", "play the tasks of a job with --agent-hosts here"),
    "env": Command("env:env", "env list | export | train TASKSET", "environments of the package verifiers"),
    "runs": Command("runs:runs", "runs [RUN RUN]", "list the runs here, or compare two"),
    "watch": Command("control:watch", "watch [RUN]", "show a live run until it ends"),
    "pause": Command("control:pause", "pause [RUN]", "pause training before the next step"),
    "resume": Command("control:resume", "resume [RUN]", "continue a paused run"),
    "save": Command("control:save", "save [RUN]", "write a checkpoint now"),
    "stop": Command("control:stop", "stop [RUN]", "save a run and end it"),
    "down": Command("control:down", "down [RUN]", "end all services of a run on this machine"),
    "status": Command("live:status", "status [RUN]", "show the state of a run and its services"),
    "samples": Command(
        "samples:samples", "samples [RUN] [-n 5]", "show what the policy generated: by step, group, reward, text"
    ),
    "trace": Command("trace:trace", "trace [RUN] [SAMPLE] > trace.json", "where time went, for Perfetto and Chrome"),
    "view": Command("view:view", "view [RUN] [--to FOLDER]", "show groups, tokens, ledger and curves in the browser"),
    "conformance": Command(
        "conformance:conformance",
        "conformance SERVICE ADDRESS",
        "try what the protos promise on a service in any language",
    ),
    "audit": Command(
        "ledger:audit", "audit [RUN]", "compare the ledger with what the trainer was fed: 0 0 0, or the ids"
    ),
    "buffer": Command(
        "ledger:buffer",
        "buffer backup | restore | export | retry | drop | delete-stream",
        "back up, restore or export a ledger; retry or drop groups; delete a stream",
    ),
    "submit": Command("ledger:submit", "submit [RUN] --prompt TEXT | --file PATH", "submit prompts to a stream"),
    "generate": Command("policy:generate", "generate TEXT [RUN]", "ask the current policy"),
    "eval": Command("evaluate:evaluate", "eval [RUN] [--data NAME PATH]", "evaluate the current policy"),
    "certs": Command("access:certs", "certs FOLDER [--client NAME --role ROLE]", "make or renew certificates for TLS"),
    "tokens": Command("access:tokens", "tokens add | list | revoke FILE", "tokens of callers, and their roles"),
    "export": Command("policy:export", "export FOLDER [RUN]", "write the current weights as a Hugging Face folder"),
}


class _Headrace(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _COMMANDS[cmd_name].load() if cmd_name in _COMMANDS else None

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(command.usage) for command in _COMMANDS.values())
        lines = [f"  headrace {command.usage:<{width}}  {command.help}" for command in _COMMANDS.values()]
        last = "headrace train --help shows what a first run sets, --help-all every flag."
        formatter.write("\n".join(["usage:", *lines, "", last]))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands' names, without loading one."""
        return [CompletionItem(name, help=each.help) for name, each in _COMMANDS.items() if name.startswith(incomplete)]


_headrace = click.version_option(None, "-V", "--version", package_name="headrace", message="%(prog)s %(version)s")(
    _Headrace("headrace", context_settings={"help_option_names": ["-h", "--help"]})
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code.

    0: done. 1: it failed. 2: a mistake in what was typed or in the job. 3: the run had nothing to learn from.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if asked := os.environ.get(_COMPLETE):
        return shell_complete(_headrace, {}, "headrace", _COMPLETE, asked)
    try:
        with _headrace.make_context("headrace", ["--help"] if words == ["help"] else words) as context:
            return _headrace.invoke(context) or 0
    except click.exceptions.Exit as ended:  # --help, --version
        return ended.exit_code
    except click.exceptions.NoArgsIsHelpError as asked_nothing:
        print(asked_nothing.format_message())
        return 0
    except click.ClickException as error:
        typed = error.ctx if isinstance(error, click.UsageError) else None
        _say("\n".join([error.format_message(), *([typed.get_usage()] if typed else [])]))
        return error.exit_code
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
        _say(f"{error.filename or words[0]}: {error.strerror or error}{way}")
        return 1
    except Exception as error:  # noqa: BLE001  # a person gets one line, not a traceback
        _say(f"this is a bug in headrace: {type(error).__name__}: {error}. Please report it with {_kept(error)}")
        return 1


def _exit_code(error: HeadraceError) -> int:
    from headrace.process.exit_status import NOTHING_TO_LEARN  # loads pydantic, which --help does not need

    if isinstance(error, NothingToLearn):
        return NOTHING_TO_LEARN
    return click.UsageError.exit_code if isinstance(error, InvalidArgument) else 1


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


if __name__ == "__main__":
    sys.exit(main())
