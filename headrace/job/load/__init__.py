"""Reads a job from a TOML file, the environment and flags, and writes it back as TOML.

In: text from the three places, each overriding the one before. Out: a job with absolute paths and batch arithmetic.
"""
