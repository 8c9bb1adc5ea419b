"""Text that commands show: a run's live table, plans, failures, and steps as lines.

In: status messages and jobs. Out: text for a terminal; nothing here calls a service except `follow`.
"""
