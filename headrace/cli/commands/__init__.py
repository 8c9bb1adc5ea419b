"""The commands of `headrace`, one in each file. In: arguments. Out: an exit code."""
