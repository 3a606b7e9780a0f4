from hypothesis import settings

settings.register_profile("nereus", deadline=None, print_blob=True)  # a busy machine is no counterexample
settings.load_profile("nereus")
