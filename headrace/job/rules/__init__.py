"""Rules over several settings: which contradict each other, which need a file or a device, which deserve a warning.

In: a whole job. Out: errors and warnings, each with the setting to change.
"""
