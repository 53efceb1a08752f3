"""How many examples a property is tried with: a fifth in `make test`, all in `make exactness`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_FEWEST = 5


def register_profiles() -> None:
    """Registers "full", which is the default, and "thin", which `--hypothesis-profile=thin` chooses."""
    settings.register_profile("full", deadline=None, max_examples=100)  # seconds say how busy the machine is
    settings.register_profile("thin", deadline=None, max_examples=20)
    settings.load_profile("full")


def examples(number: int, thin: int | None = None) -> settings:
    """The settings of a property that is tried with `number` examples; under a profile of fewer with `thin`, or with
    the profile's share."""
    share = settings().max_examples / 100
    fewer = max(min(number, _FEWEST), int(number * share)) if thin is None else thin
    return settings(max_examples=fewer if share < 1 else number, suppress_health_check=[HealthCheck.too_slow])
