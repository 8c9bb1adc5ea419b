"""A job: one typed, frozen tree of all settings of a run. Imports neither torch nor any service.

In: a TOML file, the environment, flags. Out: a checked `Job`, or an error that says what to change.
"""
