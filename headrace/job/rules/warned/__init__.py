"""Settings that are allowed and probably not intended.

In: a resolved job. Out: sentences for a person.
"""
