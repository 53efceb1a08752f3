"""Runs `slipstream`, and notes what each process reads of some folders, and what it makes of the data and the model.

counted_readings.py LOG FOLDER[,FOLDER...] ARGUMENTS...

A line of the log has the process, and either the file that it opened or the class that it made. Of weights, which are
opened in Rust, the calls of `safe_open` are noted. A tokenizer, of which transformers opens several files, some of them
more than once, is noted as one, FOLDER/tokenizer, and so is an array that numpy maps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from transformers import AutoTokenizer

from slipstream.cli import main
from slipstream.pipeline.families.causal_lm import CausalLMFamily
from slipstream.train.data.sequences import TextSequences
from slipstream.train.data.streams import StreamedSequences


def note_all(log: Path, folders: Sequence[str]) -> None:
    """Notes from now on, in this process and in those that it forks."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(what: str) -> None:
        os.write(file, f"{os.getpid()} {what}\n".encode())

    def note_file(path: object) -> None:
        if isinstance(path, (str, os.PathLike)) and any(f"{os.fspath(path)!s}".startswith(each) for each in folders):
            note(os.fspath(path))

    depth = 0  # of calls that are noted as one reading, whatever they open

    def hear(event: str, arguments: Any) -> None:
        is_read = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY)
        if is_read and depth == 0:
            note_file(arguments[0])

    def as_one(read: Callable[..., Any], of: Callable[[Any], object]) -> Callable[..., Any]:
        def reading(path: Any, *given: Any, **named: Any) -> Any:
            nonlocal depth
            note_file(of(path))
            depth += 1
            try:
                return read(path, *given, **named)
            finally:
                depth -= 1

        return reading

    def noted(call: Callable[..., Any], of: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*given: Any, **named: Any) -> Any:
            of(*given, **named)
            return call(*given, **named)

        return calling

    AutoTokenizer.from_pretrained = as_one(AutoTokenizer.from_pretrained, lambda name: f"{name}/tokenizer")
    np.load = as_one(np.load, lambda path: path)
    safe_open = safetensors.safe_open
    for module in [*sys.modules.values()]:
        if getattr(module, "safe_open", None) is safe_open:
            module.safe_open = noted(safe_open, lambda path, *_, **__: note_file(path))  # type: ignore[attr-defined]
    for kind in (CausalLMFamily, StreamedSequences):
        kind.__init__ = noted(kind.__init__, lambda made, *_, **__: note(type(made).__name__))  # type: ignore[misc]
    # Held-out text is taken in its order, without a seed.
    TextSequences.__init__ = noted(  # type: ignore[method-assign]
        TextSequences.__init__,
        lambda made, text, seq_len, seed, *_: None if seed is None else note(type(made).__name__),
    )
    sys.addaudithook(hear)


if __name__ == "__main__":
    note_all(Path(sys.argv[1]), sys.argv[2].split(","))
    sys.argv = ["slipstream", *sys.argv[3:]]
    main()
