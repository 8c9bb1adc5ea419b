"""Devices that trainer and engines share, while either side dies."""
