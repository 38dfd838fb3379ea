"""`--replay-routing`: both passes of an update train on the experts that computed the answers, bit for bit."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from tests.support.cases import cases, generic_params, routing_of
from tests.support.served import CONFIG as DENSE
from tests.support.served import write_checkpoint
from tests.train.rl import scene
from train.data.chat import read_template
from train.data.token_budget import token_budget
from train.engine import Engine
from train.eval import pretrained
from train.losses.logprobs import token_logprobs
from train.losses.policy import group_advantages, policy_loss
from train.optim.adamw import adamw
from train.rl import command, loop
from train.rl.conversation import microbatches
from train.rl.many_turns import Groups, ManyTurns, task_seeds
from train.rl.rollouts import Draws, rollouts

CONFIG = dataclasses.replace(next(case.config for case in cases() if case.name == "qwen3_moe"), vocab_size=260)
RECORDS: list[Any] = [{"messages": [{"role": "user", "content": f"say {n}"}], "answer": "e"} for n in range(6)]


def _checker(answer: str, record: Any) -> float:
    return float(sum(letter in "aeiou" for letter in answer) + len(answer) / 100)


def _setup(folder: Path, **changes: Any) -> loop.Setup:
    tokenizer = pretrained.load_tokenizer(folder)
    setup = loop.Setup(CONFIG, tokenizer, read_template(folder), (257,), _checker, 2, 4, 8, 3)
    return dataclasses.replace(setup, **changes)


def _engine() -> Engine:
    return Engine(CONFIG, generic_params(CONFIG), adamw(0.02, weight_decay=0.0), clip=1.0)


def _written_out(setup: loop.Setup, engine: Engine) -> None:
    """The update, with the experts of one forward of the old weights over each sequence."""
    places = loop.sample_rows([len(RECORDS)], [1], setup.seed, 0, setup.prompts)
    chosen = [RECORDS[row] for _, row, _ in places for _ in range(setup.answers)]
    prompts = loop.seen(setup, chosen)
    found = loop.draw(setup, engine.params, prompts, seed=setup.seed * 1_000_003)
    rewards = torch.tensor(loop.rewards_of(setup, chosen, found))
    gains = group_advantages(rewards.reshape(setup.prompts, setup.answers)).flatten()
    entries: dict[str, list[Tensor]] = {name: [] for name in ("tokens", "learnt", "advantages", "routing")}
    for prompt, answer, gain in zip(prompts, found.tokens, gains, strict=True):
        tokens = torch.tensor([*prompt.ids, *answer])
        learnt = torch.tensor([False] * (len(prompt.ids) - 1) + [True] * len(answer) + [False])
        routing = routing_of(engine.params, fnmodels.prepare(CONFIG, tokens[None]), CONFIG)[0]
        for name, value in zip(entries, (tokens, learnt, gain * learnt, routing), strict=True):
            entries[name].append(value)
    ((row,),) = token_budget(entries, loop.BUDGET)
    with torch.no_grad():
        old = token_logprobs(engine.params, row.batch, config=CONFIG)[0]

    def loss(params: Any, batch: Any) -> Any:
        logp, entropy, _ = token_logprobs(params, batch, config=CONFIG)
        return policy_loss(logp, old, batch["advantages"], batch["learnt"], clip=(0.2, 0.28), entropy=entropy)

    for _ in range(loop.PASSES):
        engine.forward_backward([row.batch], loss)
        engine.optim_step()


def test_an_update_replays_the_samplers_experts_to_the_bit(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", CONFIG)
    replayed, plain, wanted = _engine(), _engine(), _engine()
    row = loop.update(_setup(folder, replay_routing=True), replayed, RECORDS, 0)
    assert row["grad_norm"] > 0.01
    loop.update(_setup(folder), plain, RECORDS, 0)
    _written_out(_setup(folder), wanted)
    leaves = [tree.leaves(engine.params) for engine in (replayed, wanted, plain)]
    assert all(torch.equal(a, b) for a, b in zip(leaves[0], leaves[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(leaves[0], leaves[2], strict=True))  # the second pass chose anew


TALKING = dataclasses.replace(CONFIG, vocab_size=scene.CONFIG.vocab_size)
GROUPS = Groups(2, 4, 5)


def _talker() -> Engine:
    return Engine(TALKING, generic_params(TALKING), adamw(0.02, weight_decay=0.0), clip=1.0)


def _many_turns(*, replay_routing: bool, **more: Any) -> ManyTurns:
    own = dataclasses.replace(scene.scene(), config=TALKING, replay_routing=replay_routing)
    return ManyTurns(own, GROUPS, updates=2, **more)


def _written_out_turns(engine: Engine) -> None:
    """The update, with the experts of one forward of the old weights over each conversation."""
    own = dataclasses.replace(scene.scene(), config=TALKING)
    found, _ = rollouts(own, engine.params, Draws(GROUPS.seed * 1_000_003, task_seeds(GROUPS, 0)))
    gains = group_advantages(torch.tensor([one.reward for one in found]).reshape(2, 4)).flatten()
    assert all(one.routing is None and len(one.rewards) > 1 for one in found)
    forced = []
    for one in found:
        tokens = torch.tensor(one.tokens[:-1])
        routing = routing_of(engine.params, fnmodels.prepare(TALKING, tokens[None]), TALKING)[0]
        forced.append(dataclasses.replace(one, routing=routing))
    batches = microbatches(forced, gains, loop.BUDGET)
    for _ in range(loop.PASSES):
        engine.forward_backward(batches, functools.partial(loop.loss, config=TALKING))
        engine.optim_step()


def test_conversations_replay_the_experts_of_all_their_turns_to_the_bit() -> None:
    replayed, plain, wanted = _talker(), _talker(), _talker()
    row = _many_turns(replay_routing=True).update(replayed, 0)
    assert row["turns"] > 2 and row["grad_norm"] > 0.01
    _many_turns(replay_routing=False).update(plain, 0)
    _written_out_turns(wanted)
    leaves = [tree.leaves(engine.params) for engine in (replayed, wanted, plain)]
    assert all(torch.equal(a, b) for a, b in zip(leaves[0], leaves[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(leaves[0], leaves[2], strict=True))  # the second pass chose anew


def test_conversations_made_ahead_are_saved_with_their_experts() -> None:
    engine = _talker()
    learner = _many_turns(replay_routing=True, staleness=1)
    learner.update(engine, 0)
    saved = json.loads(json.dumps(learner.saved()))
    rows = [learner.update(engine, 1)]
    learner.close()
    (values, _) = saved["1"]
    assert all(len(one["routing"]) == len(one["tokens"]) - 1 for one in values)
    again = _talker()
    first = _many_turns(replay_routing=True)
    first.update(again, 0)
    resumed = _many_turns(replay_routing=True, staleness=1, pending=saved)
    rows.append(resumed.update(again, 1))
    first.close(), resumed.close()
    assert rows[0] == rows[1]
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(engine.params), tree.leaves(again.params), strict=True))


def test_the_flag_is_kept_with_the_run_and_refused_without_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS * 2))

    def reinforce(model: Path, run: Path, *flags: str) -> int:
        sizes = [
            "--prompts",
            "2",
            "--answers",
            "2",
            "--tokens",
            "3",
            "--checker",
            "contains",
            "--learning-rate",
            "0.01",
        ]
        data = ["--data", str(tmp_path / "prompts.jsonl")]
        return command.main(["--run", str(run), "--init", str(model), *data, *sizes, *flags])

    routed, dense = (write_checkpoint(tmp_path / name, config) for name, config in (("moe", CONFIG), ("llama", DENSE)))
    assert reinforce(dense, tmp_path / "dense", "--updates", "1", "--replay-routing") == 2
    assert "--replay-routing is for models with experts; a llama has none" in capsys.readouterr().err
    assert reinforce(routed, tmp_path / "run", "--updates", "1", "--replay-routing") == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["replay_routing"] is True
    assert reinforce(routed, tmp_path / "run", "--updates", "1", "--resume") == 2
    assert "--replay-routing differs from that of the run" in capsys.readouterr().err
    P.load_pretrained(tmp_path / "run")
