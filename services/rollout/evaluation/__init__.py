"""Evaluation sends data sets through engines, or another's server, and the reward service, beside production.

In: data sets as they are asked for, files of prompts, samplers, rewards. Out: samples as they finish, then estimates.
"""
