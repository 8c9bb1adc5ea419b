"""The commands of `headrace`, a file for each subject: click.Commands that return an exit code."""
