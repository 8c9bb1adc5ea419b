"""The buffer service: the ledger of prompts and samples.

In: prompts, groups of samples from producers, and the trainer's steps. Out: leases, batches, samples and events.
A call goes servicer → wire → runtime → ledger, and its transaction goes to the store before it is answered.
"""
