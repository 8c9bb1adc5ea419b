"""From a leased prompt to a group of samples in the buffer.

In: leases, the job's sampling parameters, engines, rewards. Out: puts, released leases, and groups in part.
"""
