"""The error of slices that run in a wrong order."""


class ContextError(RuntimeError):
    """Raised where the slices of a microbatch run in an order that their attention doesn't allow: a schedule's
    mistake."""
