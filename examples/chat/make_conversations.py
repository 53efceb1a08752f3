"""Makes the conversations of `conversations.jsonl`: small tasks that are always answered in the same form.

python examples/chat/make_conversations.py > examples/chat/conversations.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import TextIO

NUM_CONVERSATIONS = 400
WORDS = ("ant", "bee", "cat", "cow", "dog", "elk", "fox", "hen", "owl", "pig", "ram", "yak")


def make_task(draw: random.Random) -> tuple[str, str]:
    """Returns a question and its answer."""
    word, other, number = draw.choice(WORDS), draw.choice(WORDS), draw.randint(2, 4)
    return draw.choice(
        [
            (f"repeat {word} {number} times", f"<answer>{' '.join([word] * number)}</answer>"),
            (f"join {word} and {other}", f"<answer>{word}-{other}</answer>"),
            (f"shout {word}", f"<answer>{word.upper()}!</answer>"),
            (f"first letter of {word}", f"<answer>{word[0]}</answer>"),
        ]
    )


def make_conversations(seed: int = 0) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yields conversations of one to three questions, the same for the same seed."""
    draw = random.Random(seed)
    for _ in range(NUM_CONVERSATIONS):
        messages = []
        for _ in range(draw.randint(1, 3)):
            question, answer = make_task(draw)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"messages": messages}


def write(file: TextIO) -> None:
    """Writes a line of JSON for each conversation."""
    for conversation in make_conversations():
        file.write(json.dumps(conversation) + "\n")


if __name__ == "__main__":
    write(sys.stdout)
