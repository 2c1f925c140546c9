"""Property tests look at results, never at the clock: other work on the machine must not make them fail."""

from hypothesis import settings

settings.register_profile("without-deadline", deadline=None)
settings.load_profile("without-deadline")
