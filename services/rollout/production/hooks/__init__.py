"""Asks the user's functions: what makes samples, what keeps groups, what looks at all of them."""
