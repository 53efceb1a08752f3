"""Marks of tests that need a later transformers than the package does: docs/models.md says for which architectures."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version


def since(version: str) -> pytest.MarkDecorator:
    """Skips a test where transformers is older."""
    is_older = Version(transformers.__version__) < Version(version)
    return pytest.mark.skipif(is_older, reason=f"needs transformers {version}, here is {transformers.__version__}")
