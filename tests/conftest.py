"""What holds for every test: none assumes a calm machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")
