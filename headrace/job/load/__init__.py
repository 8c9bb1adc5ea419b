"""From a TOML file, the environment and flags to a resolved job, and back to TOML.

In: text from the three places, each overriding the one before. Out: a job with absolute paths and batch arithmetic.
"""
