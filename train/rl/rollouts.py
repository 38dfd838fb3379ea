"""Rollouts of conversations over continuous batching: one goes on as soon as its environment answers, as others decode.

A later turn computes only what is new: its last sampled token and the observation behind it. What a conversation
draws is a function of the seed, its number and the turn, so that tokens do not depend on which environment is first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fnmodels.errors import UserError
from fnmodels.tree import Tree
from train.data.chat import Template, render_prompt
from train.eval.scoring import tables_depend_on_length
from train.generation.batching import BatchSettings, ContinuousBatch
from train.generation.checks import check_request, learned_positions
from train.generation.sampling import Sampling

from .conversation import Conversation, Limits, Trajectory
from .environment import MakeEnvironment, Message
from .helpers import Helpers
from .turns import Turns

SLOTS = 128  # conversations that decode at once


@dataclass(frozen=True)
class Scene:
    """What conversations have in common.

    Args:
        config: Of the model.
        template: Its chat template, which renders the first messages.
        turns: The markers around observations, with the tokenizer and the tokens that end an answer.
        environment: Makes the environment of a conversation.
        limits: Of a conversation.
        workers: Threads in which environments run; 0: none, for those that only compute.
        replay_routing: Whether conversations have the experts that computed them, of a model with experts.
    """

    config: Any
    template: Template
    turns: Turns
    environment: MakeEnvironment
    limits: Limits
    workers: int = 0
    replay_routing: bool = False


@dataclass(frozen=True)
class Draws:
    """What the draws of some conversations follow from.

    Args:
        seed: Of the noise, together with the conversation and the turn.
        tasks: The seed of each conversation's task.
        version: The updates that the weights have seen.
        greedy: Whether the likeliest tokens are taken.
    """

    seed: int
    tasks: Sequence[int]
    version: int = 0
    greedy: bool = False


def check_scene(scene: Scene) -> None:
    """UserError where the model cannot have conversations of this length."""
    context, learned = scene.limits.context, learned_positions(scene.config)
    if learned is not None and context > learned:
        raise UserError(f"--context is {context}, but the model has learned {learned} positions")
    if tables_depend_on_length(scene.config, [([0] * context, 1)]):
        raise UserError(
            f"--context is {context}, beyond the original length of the model, whose rotary tables depend on the "
            "length there: the trainer would have other tables than the sampler"
        )


@torch.no_grad()
def rollouts(
    scene: Scene, params: Tree, draws: Draws, *, stopped: Callable[[], bool] = lambda: False
) -> tuple[list[Trajectory], int]:
    """Conversations from their first messages to their ends, with one set of weights.

    Args:
        scene: What they have in common.
        params: The weights. Each conversation has them from its first to its last turn: the cache holds keys and values
            of these, and its log-probabilities are those of one policy.
        draws: The seeds.
        stopped: Whether to give up.

    Returns:
        The conversations in the order of the tasks, and the tokens that were computed for prompts and observations.

    Raises:
        UserError: The first messages have no room in the context.
        InterruptedError: `stopped` is true.
    """
    talks = [Conversation(number, draws.version, scene.environment()) for number in range(len(draws.tasks))]
    slots = min(len(talks), SLOTS)
    settings = BatchSettings(scene.turns.tokenizer, skip_special_tokens=False)  # a call's markers may be special tokens
    batch = ContinuousBatch(
        params, scene.config, slots=slots, capacity=scene.limits.context, allocated=slots, settings=settings
    )
    helpers = Helpers(scene.workers)
    try:
        _drive(scene, batch, talks, draws, helpers, stopped)
    finally:
        helpers.close()
    return [talk.trajectory() for talk in talks], batch.computed


def _drive(
    scene: Scene,
    batch: ContinuousBatch,
    talks: Sequence[Conversation],
    draws: Draws,
    helpers: Helpers,
    stopped: Callable[[], bool],
) -> None:
    sampling = Sampling(temperature=0.0) if draws.greedy else Sampling()
    rendered: dict[str, list[int]] = {}
    ready, begun, under_way = list[Conversation](), set[int](), len(talks)
    for talk, task in zip(talks, draws.tasks, strict=True):
        helpers.submit(talk.number, partial(talk.environment.reset, task))
    while under_way:
        if stopped():
            raise InterruptedError("the rollouts were stopped")
        for number, result in helpers.finished(wait=not batch.busy and not ready):
            talk = talks[number]
            if number in begun:
                talk.observe(result, scene.turns, scene.limits)
            else:
                talk.begin(_first(scene, result, rendered))
                begun.add(number)
            ready += [] if talk.ended else [talk]
            under_way -= talk.ended is not None
        if ready and (room := batch.room()):
            ready.sort(key=lambda talk: talk.number)
            taken, ready = ready[:room], ready[room:]
            how = (scene.limits, sampling, draws.seed, scene.turns.ends, scene.replay_routing and not draws.greedy)
            requests = [talk.request(*how) for talk in taken]
            for talk, request in zip(taken, requests, strict=True):  # above all: the history is what the cache holds
                check_request(talk.number, request, scene.config, tokenizer=scene.turns.tokenizer)
            batch.take([(talk.number, request) for talk, request in zip(taken, requests, strict=True)])
        for event in batch.advance(shrink=4 * under_way <= 3 * batch.allocated):
            text = talks[event.row].push(event)
            if text is not None:
                helpers.submit(event.row, partial(talks[event.row].environment.step, text))


def _first(scene: Scene, messages: Sequence[Message], rendered: dict[str, list[int]]) -> list[int]:
    """The ids of the first messages; those of a group are rendered once."""
    key = repr(messages)
    if key not in rendered:
        scene.turns.tokenizer.encode_special_tokens = False  # the template writes special tokens as text
        text = render_prompt(scene.template, list(messages))
        ids = scene.turns.tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= scene.limits.context:
            raise UserError(f"the first messages have {len(ids)} tokens; --context is {scene.limits.context}")
        rendered[key] = ids
    return rendered[key]
