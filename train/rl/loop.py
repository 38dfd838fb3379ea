"""GRPO (arXiv 2402.03300): answers in groups, rewards relative to the group's mean, and clipped updates.

All that is drawn is a function of the seed and the update, so that a resumed run has the bits of an uninterrupted one.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.tree import Tree
from train.data.chat import Template, render_prompt
from train.data.sampling import sample_rows
from train.data.token_budget import token_budget
from train.engine import Engine
from train.eval.pretrained import check_tokens
from train.generation.loops import generate
from train.generation.requests import Generations
from train.generation.routing import replayable
from train.generation.sampling import Sampling
from train.losses.logprobs import token_logprobs
from train.losses.policy import group_advantages, policy_loss

from .pictures import Pictures, Seen
from .prompts import Checker, Prompts, Record

BUDGET = 8192  # tokens of a microbatch at most
PASSES = 2  # updates on the same answers; the second is off-policy, which is what the clip is for


@dataclass(frozen=True)
class Setup:
    """The constants of a run.

    Attributes:
        config: Of the model.
        tokenizer: Its tokenizer.
        template: Its chat template.
        ends: Tokens that end an answer.
        checker: Judges answers.
        prompts: Prompts of an update.
        answers: Answers to each.
        tokens: Tokens of an answer, at most.
        seed: Of all draws.
        replay_routing: Whether training replays the experts that computed the answers, of a model with experts.
        pictures: The model around the text that `config` is of, where prompts have pictures.
    """

    config: Any
    tokenizer: Any
    template: Template
    ends: tuple[int, ...]
    checker: Checker
    prompts: int
    answers: int
    tokens: int
    seed: int
    replay_routing: bool = False
    pictures: Pictures | None = None

    @property
    def of_losses(self) -> Any:
        """The config that losses take."""
        return self.config if self.pictures is None else self.pictures.config


class OneTurn:
    """GRPO of a run whose conversations end with the first answer.

    Args:
        setup: Its constants.
        prompts: What is answered.
    """

    def __init__(self, setup: Setup, prompts: Prompts) -> None:
        self._setup, self._prompts = setup, prompts

    def update(self, engine: Engine, number: int) -> dict[str, Any]:
        """Update `number`, from 0; returns its row of metrics."""
        return update(self._setup, engine, self._prompts.train, number)

    def judged(self, params: Tree) -> tuple[float, list[dict[str, Any]]]:
        """(mean reward, samples) of the likeliest answers to the held-out prompts."""
        reward, answers = judged(self._setup, params, self._prompts.heldout)
        shown = zip(self._prompts.heldout, answers, strict=True)
        return reward, [{"messages": record["messages"], "answer": answer} for record, answer in shown]

    def saved(self) -> dict[str, Any]:
        """What a resumed run needs beside the engine's state: nothing."""
        return {}

    def close(self) -> None:
        """Nothing is under way between updates."""


def update(setup: Setup, engine: Engine, records: Sequence[Record], number: int) -> dict[str, Any]:
    """Update `number` (from 0): draws answers, judges them, and trains on them; returns its row of metrics."""
    places = sample_rows([len(records)], [1], setup.seed, number, setup.prompts)
    chosen = [records[row] for _, row, _ in places for _ in range(setup.answers)]
    prompts = seen(setup, chosen)
    found = draw(
        setup, engine.params, prompts, seed=setup.seed * 1_000_003 + number, record_routing=setup.replay_routing
    )
    rewards = torch.tensor(rewards_of(setup, chosen, found))
    gains = group_advantages(rewards.reshape(setup.prompts, setup.answers)).flatten()
    batches = microbatches(prompts, found.tokens, gains, found.routing, setup.pictures)
    old = engine.infer(batches, functools.partial(token_logprobs, config=setup.of_losses))
    batches = [batch | {"old_logp": logp} for batch, (logp, _, _) in zip(batches, old, strict=True)]
    loss_fn = functools.partial(loss, config=setup.of_losses)
    row: dict[str, Any] = {}
    for _ in range(PASSES):
        engine.forward_backward(batches, loss_fn)
        row = {name: float(value) for name, value in engine.optim_step().items() if name in ("grad_norm", "lr")}
    lengths = [len(tokens) for tokens in found.tokens]
    return {"reward": float(rewards.mean()), "answer_tokens": sum(lengths) / len(lengths), **row}


def judged(setup: Setup, params: Tree, records: Sequence[Record]) -> tuple[float, list[str]]:
    """(mean reward, answers) of the likeliest answers to the records."""
    found = draw(setup, params, seen(setup, records), seed=0, greedy=True)
    rewards = rewards_of(setup, records, found)
    return sum(rewards) / len(rewards), found.texts


def seen(setup: Setup, records: Sequence[Record]) -> list[Seen]:
    """The prompts, rendered by the chat template, and their images."""
    setup.tokenizer.encode_special_tokens = False  # the template writes special tokens as text
    if setup.pictures is not None:
        return setup.pictures.prompts(setup.template, records)
    texts = [render_prompt(setup.template, record["messages"]) for record in records]
    found = [Seen(setup.tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    for prompt in found:
        check_tokens(setup.tokenizer, prompt.ids, setup.config)
    return found


def draw(
    setup: Setup,
    params: Tree,
    prompts: Sequence[Seen],
    *,
    seed: int,
    greedy: bool = False,
    record_routing: bool = False,
) -> Generations:
    """Answers to the prompts, at temperature 1 or the likeliest."""
    options: dict[str, Any] = {"tokenizer": setup.tokenizer, "stop_ids": setup.ends, "max_new": setup.tokens}
    options["record_routing"] = record_routing
    options["sampling"] = Sampling(temperature=0.0) if greedy else Sampling()
    ids, slots = [prompt.ids for prompt in prompts], min(len(prompts), 128)
    if setup.pictures is None:
        return generate(params, setup.config, ids, seeds=seed, slots=slots, **options)
    images, whole = [prompt.images for prompt in prompts], setup.pictures.whole(params)
    return generate(whole, setup.pictures.config, ids, images=images, seeds=seed, slots=slots, **options)


def rewards_of(setup: Setup, records: Sequence[Record], found: Generations) -> list[float]:
    return [float(setup.checker(text, record)) for text, record in zip(found.texts, records, strict=True)]


def microbatches(
    prompts: Sequence[Seen],
    answers: Sequence[Sequence[int]],
    gains: Tensor,
    routing: Sequence[Tensor] = (),
    pictures: Pictures | None = None,
) -> list[dict[str, Tensor]]:
    """Packed rows under a token budget, with the advantage of each token that the policy chose.

    routing: the experts of each prompt and answer, see `Generations`, which the losses replay; empty for none.
    pictures: the model around the text, where prompts have images.
    """
    tokens = [torch.tensor([*prompt.ids, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    drawn = [torch.arange(1, len(row) + 1) for row in tokens]  # the place of each label, which is the next token
    learnt = [
        (places >= len(prompt.ids)) & (places < len(row))
        for places, prompt, row in zip(drawn, prompts, tokens, strict=True)
    ]
    advantages = [gain * chosen for gain, chosen in zip(gains, learnt, strict=True)]
    entries = {"tokens": tokens, "learnt": learnt, "advantages": advantages}
    if routing:
        entries["routing"] = [replayable(own, len(row)) for own, row in zip(routing, tokens, strict=True)]
    entries |= {} if pictures is None else pictures.entries(tokens, prompts)
    (rows,) = token_budget(entries, BUDGET)
    return [row.batch if pictures is None else pictures.batch(row, prompts) for row in rows]


def loss(
    params: Tree, batch: dict[str, Tensor], *, config: Any, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The clipped policy loss. options: keywords that the engine passes to losses."""
    logp, entropy, _ = token_logprobs(params, batch, config=config, **options)
    return policy_loss(logp, batch["old_logp"], batch["advantages"], batch["learnt"], clip=(0.2, 0.28), entropy=entropy)
