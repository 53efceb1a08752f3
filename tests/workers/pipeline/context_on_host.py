"""Steps of one rank with keys and values on the host, in files of a folder: context_on_host.py FOLDER STEPS; says the
last loss."""

from __future__ import annotations

import sys
import tempfile

from support.architectures import build, llama, tokens
from support.pipelines import make_pipe

tempfile.tempdir = sys.argv[1]
pipe = make_pipe(build(llama()), slices=8, context="host", recompute="stage")
inputs = tokens()
for _ in range(int(sys.argv[2])):
    for parameter in pipe.parameters():
        parameter.grad = None
    loss = pipe.step(inputs, inputs)
print(float(loss))
