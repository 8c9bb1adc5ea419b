"""The ledger at work: commands run on the event loop, waits end on change, leases end at their deadline.

In: commands from the servicer, prompts from the readers, a store. Out: answers, once their transaction is durable.
"""
