"""Hypothesis without deadlines: how long an example takes says nothing on a machine that is busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
