"""The exceptions that the command line prints: what a user can put right, and a rank that failed."""


class SlipstreamError(ValueError):
    """Bad input, found before anything runs. The command line prints it and exits with code 2."""


class RankFailedError(RuntimeError):
    """A rank ended early; the message names it and its cause."""
