"""Marks of tests that need a later transformers than the package does: docs/models.md says for which architectures."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, masking_utils

counts_within_documents = pytest.mark.skipif(
    not hasattr(masking_utils, "remap_positions_for_packed_sequence"),
    reason=f"blocks count from the sequence's start in transformers {transformers.__version__}",
)


def since(version: str) -> pytest.MarkDecorator:
    """Skips a test where transformers is older."""
    is_older = Version(transformers.__version__) < Version(version)
    return pytest.mark.skipif(is_older, reason=f"needs transformers {version}, here is {transformers.__version__}")


def provided(model_type: str) -> pytest.MarkDecorator:
    """Skips a test where transformers has no such architecture yet."""
    return pytest.mark.skipif(
        model_type not in CONFIG_MAPPING, reason=f"no {model_type} in transformers {transformers.__version__}"
    )
