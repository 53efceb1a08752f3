"""Builds one layer of twelve; prints by how much the process has grown, and the bytes of the layer."""

from __future__ import annotations

import resource

from slipstream.model.anatomy import find_anatomy
from slipstream.model.loading import random_model
from support.architectures import llama

config = llama(hidden_size=1024, intermediate_size=2816, num_attention_heads=8, num_hidden_layers=12, head_dim=128)
anatomy = find_anatomy(config)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
part = random_model(config, 0, anatomy, [3])
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(grown, sum(parameter.nbytes for parameter in part.parameters()))
