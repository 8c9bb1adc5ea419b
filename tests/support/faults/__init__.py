"""Disks, networks, databases and processes that fail where and when a test says."""
