"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# A busy machine is no bug: neither a slow example nor slow generation fails a property.
settings.register_profile("whale-tui", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whale-tui")
