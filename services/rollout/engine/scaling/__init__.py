"""Changes the number of engines while they serve.

In: a number. Out: engines that are added to the fleet, or taken out of it once their requests are done.
"""
