"""The words of an error that says what was given by mistake and what to give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slipstream import SlipstreamError


@contextmanager
def refused(words: str) -> Iterator[pytest.ExceptionInfo[SlipstreamError]]:
    """Expects a SlipstreamError that says these words; ` .. ` between them stands for any others."""
    with pytest.raises(SlipstreamError, match="(?s)" + ".*".join(map(re.escape, words.split(" .. ")))) as problem:
        yield problem
