"""Writes the conversations and the prompts of tiny_chat.toml: sums, neighbours, counting, repeating and greetings.

python examples/recipes/tiny_chat_data.py examples/recipes/tiny_chat
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

WORDS = ("apple", "bread", "cloud", "door", "earth", "fish", "garden", "house", "island", "jacket", "kitten", "music")
GREETINGS = {
    "Hello!": "Hello! What can I do for you?",
    "Good morning.": "Good morning! What can I do for you?",
    "Who are you?": "I am a tiny model that can count a little.",
    "Thank you.": "You are welcome!",
}
Draw = random.Random


def total(draw: Draw) -> tuple[str, str]:
    one, two = draw.randrange(10), draw.randrange(10)
    return f"What is {one} plus {two}?", str(one + two)


def neighbour(draw: Draw) -> tuple[str, str]:
    number = draw.randrange(100)
    return (
        (f"What comes after {number}?", str(number + 1))
        if draw.random() < 0.5
        else (
            f"What comes before {number + 1}?",
            str(number),
        )
    )


def count(draw: Draw) -> tuple[str, str]:
    first = draw.randrange(90)
    last = first + draw.randrange(3, 7)
    return f"Count from {first} to {last}.", " ".join(map(str, range(first, last + 1)))


def repeat(draw: Draw) -> tuple[str, str]:
    word = draw.choice(WORDS)
    return f"Say {word} twice.", f"{word} {word}"


def greet(draw: Draw) -> tuple[str, str]:
    return draw.choice(list(GREETINGS.items()))


def lines(kinds: list[Callable[[Draw], tuple[str, str]]], number: int, seed: int, *, prompts: bool) -> str:
    """JSON lines of distinct questions: conversations, or prompts with the answer beside them."""
    draw, found = random.Random(seed), dict[str, str]()
    for _ in range(number):
        question, answer = draw.choice(kinds)(draw)
        user = {"role": "user", "content": question}
        record = {"messages": [user], "answer": answer}
        if not prompts:
            record = {"messages": [user, {"role": "assistant", "content": answer}]}
        found[question] = json.dumps(record)
    return "".join(f"{line}\n" for line in found.values())


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    everything = [total, neighbour, count, repeat, greet]
    (folder / "chats.jsonl").write_text(lines(everything, 2500, 0, prompts=False))
    (folder / "prompts.jsonl").write_text(lines([total, neighbour, count], 600, 1, prompts=True))
