"""The command line, `headrace …`. In: words that a person types. Out: text and an exit code."""
