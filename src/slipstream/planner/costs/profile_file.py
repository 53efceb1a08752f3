"""Reads the file of a profile, as `slipstream profile` and planned runs write it."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.planner.costs.profile import FORMAT, Profile


def load_profile(path: Path) -> Profile:
    """Reads a profile.

    Raises:
        SlipstreamError: for a file that doesn't exist, is incomplete, or isn't a profile of this format.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = values.get("format") if isinstance(values, dict) else None
        if found != FORMAT:
            raise SlipstreamError(
                f"{path} has format={found!r}, this version reads {FORMAT}; measure again with `slipstream profile`."
            )
        return TypeAdapter(Profile).validate_python(values)
    except SlipstreamError:
        raise
    except OSError as error:
        raise SlipstreamError(f"can't read the profile {path}: {error.strerror}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise SlipstreamError(f"{path} isn't a profile: {where}: {problem['msg'].lower()}.") from error
    except ValueError as error:
        raise SlipstreamError(f"{path} isn't a profile: {error}. Write one with `slipstream profile`.") from error
