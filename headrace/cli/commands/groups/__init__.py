"""Commands below `headrace buffer` about single groups."""
