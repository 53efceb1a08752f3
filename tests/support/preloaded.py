"""Loads what programs import only when they need it, where the process that forks them imports this module."""

from __future__ import annotations

import datasets  # noqa: F401
from numba.core.registry import cpu_target

# Numba would load its own functions in each process, at the first call of a compiled one, for half a second.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
