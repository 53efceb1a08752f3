"""The one exception for what a user can put right: what was given, what is allowed, what to type."""


class SlipstreamError(ValueError):
    """Bad input, found before anything runs. The command line prints it and exits with code 2."""
