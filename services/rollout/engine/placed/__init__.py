"""Engines on other machines.

In: a function that makes an engine's process. Out: that process elsewhere, started and watched from here.
"""
