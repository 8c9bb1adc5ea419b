"""Rules over several settings: contradictions, missing files and devices, and warnings.

In: a whole job. Out: errors and warnings, each with the setting to change.
"""
