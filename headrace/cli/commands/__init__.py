"""The commands of `headrace`, one a file: arguments in, an exit code out."""
