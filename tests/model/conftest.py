from hypothesis import HealthCheck, settings

from model.cases import RUNS_WHOLE_SWEEPS

# Without a deadline: the machine may be busy.
settings.register_profile(
    "values",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=100 if RUNS_WHOLE_SWEEPS else 25,
)
settings.load_profile("values")
