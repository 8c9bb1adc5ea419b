"""A whole run that is hurt in a named phase: full disks, jumping clocks, the kernel's out-of-memory kill, kill -9.

`python -m tests.chaos.survival` prints the table of faults × phases; test_survival.py is the short form.
The services, the launcher and the ranks are the real ones; the engine has no model.
"""
