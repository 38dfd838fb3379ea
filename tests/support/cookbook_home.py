"""A folder in which the recipes of Tinker's cookbook find a model, its tokenizer and their data sets under the names of
the Hub, for the loaders look for local folders first."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import fnmodels
import params as P
import train
from fnmodels import llama
from train.engine import Engine

MODEL = "meta-llama/Llama-3.2-1B"  # whose conversations the cookbook writes as "User: ...", "Assistant: ..."
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have "
    "r's at positions 3, 8, and 9. \\boxed{3}"
)
SHOT = [("How many r's are in strawberry?" + SUFFIX, SPELLED)]
ANSWER, PLEASANT = 7, "Let's spell the word out."
QUESTIONS = [
    f"How many {thing} are in the {place}?" for thing in ("cats", "pots", "hats") for place in ("house", "car")
]


def write_home(folder: Path) -> Path:
    """The folder, with a model that answers each question by a digit of its own choice.

    The data set of sums has one answer, which a policy finds; that of chats has a sentence that the model never says.
    """
    rows = [{"question": QUESTIONS[i % len(QUESTIONS)], "answer": f"#### {ANSWER}"} for i in range(96)]
    _write(folder / "openai" / "gsm8k" / "main", rows)
    named = "configs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train.jsonl}\n"
    (folder / "openai" / "gsm8k" / "README.md").write_text(f"---\n{named}---\n")
    chats = [_chat(QUESTIONS[i % len(QUESTIONS)], PLEASANT) for i in range(96)]
    _write(folder / "HuggingFaceH4" / "no_robots", chats)
    asked = [_chat(QUESTIONS[i % len(QUESTIONS)] + SUFFIX, "") for i in range(192)]
    _write(folder / "allenai" / "tulu-3-sft-mixture", asked)
    tokenizer = _tokenizer()
    config, params = _pretrained(tokenizer)
    model = folder / MODEL
    P.save_pretrained(model, config, params)
    tokenizer.save(str(model / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "eos_token": "<eos>"}
    (model / "tokenizer_config.json").write_text(json.dumps(kind))
    return folder


def _chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _pieces(turns: list[tuple[str, str]]) -> list[str]:
    """A conversation in the pieces that the cookbook encodes, up to the header of the next question."""
    each = [("User:", f" {question}\n\n", "Assistant:", f" {answer}\n\n") for question, answer in turns]
    return [*(piece for turn in each for piece in turn), "User:"]


def _tokenizer() -> Tokenizer:
    """Words of these texts, and bytes for all others."""
    made = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?[A-Za-z']+|\d| ?[^\sA-Za-z\d]+|\s+"), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([words, letters]), decoders.ByteLevel()
    texts = [piece for question in QUESTIONS for piece in _pieces([*SHOT, (question + SUFFIX, "\\boxed{7}")])]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    made.train_from_iterator(texts, trainer)
    return made


def _pretrained(tokenizer: Tokenizer, steps: int = 300) -> tuple[Any, Any]:
    """(config, params) of a model that has read such conversations, in which each digit is as likely."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    config = llama.Config(vocab_size=tokenizer.get_vocab_size(), **sizes, **heads, tie_word_embeddings=True)
    engine = Engine(config, P.init(config, seed=0), train.adamw(lambda step: 5e-3 * max(0.05, 1 - step / steps)))
    draw, loss = random.Random(0), functools.partial(train.next_token_loss, config=config)
    for _ in range(steps):
        documents = [torch.tensor(_document(tokenizer, draw)) for _ in range(8)]
        engine.forward_backward([fnmodels.pack(documents, max(map(len, documents))).batch()], loss)
        engine.optim_step()
    return config, engine.params


def _document(tokenizer: Tokenizer, draw: random.Random) -> list[int]:
    turns = [(draw.choice(QUESTIONS) + draw.choice((SUFFIX, "")), f"\\boxed{{{draw.randrange(10)}}}")]
    pieces = _pieces(SHOT * draw.randrange(2) + turns)
    return [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]
