"""A random model with a chat template, and environments without a task, for the tests of conversations."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import params as P
from fnmodels import llama
from train.data.chat import Template
from train.data.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, tokenizer_config, train_tokenizer
from train.rl.conversation import Limits
from train.rl.environment import MakeEnvironment, Outcome
from train.rl.rollouts import Scene
from train.rl.turns import turns_of

WORDS = "say yes or no, and count the letters of what was said"
TOKENIZER = train_tokenizer([WORDS] * 2, 300)
TEMPLATE = Template(CHAT_TEMPLATE, {"eos_token": END_OF_TEXT})
CONFIG = llama.Config(
    TOKENIZER.get_vocab_size(),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
PARAMS = P.init(CONFIG, seed=0)
ENDS = (0, *range(40, 90))  # the end of a turn, and others: random answers end by each of them, or are cut off


class Counting:
    """Three turns, whose observations follow from the task and the answer; delays: seconds of each turn's step."""

    def __init__(self, delays: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self.heard, self._delays = list[str](), delays

    def reset(self, seed: int) -> list[dict[str, str]]:
        self.seed = seed
        return [{"role": "user", "content": f"say a word of {seed} letters"}]

    def step(self, text: str) -> Outcome:
        time.sleep(self._delays[len(self.heard)])
        self.heard.append(text)
        turn = len(self.heard)
        return Outcome(f"turn {turn} of {self.seed}: {len(text)} letters", len(text) / 8, turn == 3)


def scene(make: MakeEnvironment = Counting, *, workers: int = 0, **limits: int) -> Scene:
    """Conversations of the random model."""
    turns = turns_of(TOKENIZER, TEMPLATE, ENDS, "tool")
    return Scene(CONFIG, TEMPLATE, turns, make, Limits(**({"turns": 4, "tokens": 6, "context": 160} | limits)), workers)


def write_checkpoint(folder: Path) -> Path:
    """The random model as a checkpoint with its tokenizer and chat template."""
    P.save_pretrained(folder, CONFIG, PARAMS)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = tokenizer_config(context=256)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
