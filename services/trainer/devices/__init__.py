"""Devices that the trainer shares with engines, with --colocate.

In: who wants the devices. Out: every rank's memory on them or in the host's memory, and engines that gave theirs up.
"""
