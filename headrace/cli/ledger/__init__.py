"""Commands on the groups of a ledger, by its run or its address. In: what was typed. Out: what the buffer then did."""
