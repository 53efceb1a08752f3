"""Makes the pairs of `pairs.jsonl`: the same answers in small letters, which are preferred, and in capitals.

python examples/preferences/make_pairs.py > examples/preferences/pairs.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import TextIO

NUM_PAIRS = 200
WORDS = ("ant", "bee", "cat", "cow", "dog", "elk", "fox", "hen", "owl", "pig", "ram", "yak")


def make_pairs(seed: int = 0) -> Iterator[dict[str, str]]:
    """Yields pairs of answers, the same for the same seed."""
    draw = random.Random(seed)
    for _ in range(NUM_PAIRS):
        word, number = draw.choice(WORDS), draw.randint(1, 4)
        answer = " ".join([word] * number)
        yield {"prompt": f"{word} {number} times: ", "chosen": answer, "rejected": answer.upper()}


def write(file: TextIO) -> None:
    """Writes a line of JSON for each pair."""
    for pair in make_pairs():
        file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    write(sys.stdout)
