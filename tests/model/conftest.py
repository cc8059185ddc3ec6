from hypothesis import HealthCheck, settings

# A property is about values, not about how busy the machine is.
settings.register_profile("values", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("values")
