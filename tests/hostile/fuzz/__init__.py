"""Calls that nobody meant, to every method of every service: generated from the descriptors, seeded, repeatable."""
