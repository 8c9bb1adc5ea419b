"""Runs of several ranks whose processes die: the weights are the undisturbed run's."""
