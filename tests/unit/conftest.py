from hypothesis import HealthCheck, settings

# A busy machine is no counterexample.
settings.register_profile("nereus", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nereus")
