"""Conversations by verl's agent loop with tools, answered by this package's rollout: prints JSON of what differs.

python tests/support/verl_turns.py MODEL FOLDER     MODEL, FOLDER: of verl_toy.py's or verl_looking.py's `write_task`

verl's `ToolAgentLoop` runs as it is; for verl's client, which finds servers through Ray, a class stands in that hands
its arguments to the one server and notes them.
"""

import asyncio
import json
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

DIRECT = runpy.run_path(str(Path(__file__).with_name("verl_pictures.py")))["direct"]
PROMPT, ANSWER = 24, 40
COUNT = 24  # conversations, at once


class Client:
    """Hands requests to one server, and keeps (prompt, answer) of each turn of a conversation by its id."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.turns: dict[str, list[tuple[list[int], Any]]] = {}

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **more: Any) -> Any:
        given = {name: more[name] for name in ("image_data", "video_data", "audio_data")}
        conversation, turn = int(request_id.removeprefix("det-")), len(self.turns.get(request_id, ()))
        self.server.count = 100 * conversation + turn  # which names the noise of a request, else by its arrival
        found = await self.server.generate(f"{request_id}-turn", prompt_ids, sampling_params, **given)
        self.turns.setdefault(request_id, []).append((list(prompt_ids), found))
        return found


def settings(folder: Path) -> Any:
    """The part of verl's configuration that its agent loop reads."""
    from omegaconf import OmegaConf

    turns = {"max_user_turns": None, "max_assistant_turns": None, "max_parallel_calls": 1, "format": "hermes"}
    turns |= {"max_tool_response_length": 256, "tool_response_truncate_side": "middle"}
    rollout = {"prompt_length": PROMPT, "response_length": ANSWER, "multi_turn": turns}
    rollout["full_determinism"] = True  # a conversation is named by its number, not at random
    data = {"cache_dir": str(folder / "cache"), "filter_overlong_prompts": False}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": data})


def server(model: Path, config: Any, params: Any) -> Any:
    """The rollout with the weights of the checkpoint, sent as verl's trainer sends them."""
    import params as P
    from train.handover.bucket import buckets
    from train.integrations.verl.rollout import Server

    fields = {"prompt_length": PROMPT, "response_length": ANSWER, "max_model_len": None, "max_num_seqs": 8}
    made = Server(str(model), SimpleNamespace(**fields, ignore_eos=False, free_cache_engine=True), seed=5)
    for bucket in buckets(P.export(config, params), 1 << 16):
        made.receive(bucket, 1)
    return made


async def converse(loop: Any, client: Client, number: int, row: dict[str, Any], ends: list[int]) -> tuple[Any, Any]:
    """(verl's output, the turns of the conversation). ends: tokens that end a turn beside the end of turns."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    output = await loop.run(sampling | {"stop_token_ids": ends}, priority=number, raw_prompt=row["raw_prompt"])
    return output, client.turns[f"det-{number}"]


def faults(output: Any, turns: list[Any]) -> tuple[int, int]:
    """(tokens that are not those of the turns, marks and log-probabilities that are not those of sampled tokens)."""
    history = output.prompt_ids + output.response_ids
    begin, wrong_tokens = len(output.prompt_ids), 0
    marks, logp = [0] * len(history), [0.0] * len(history)
    for prompt, answer in turns:
        known = prompt + answer.token_ids
        both = min(len(known), len(history))
        wrong_tokens += sum(a != b for a, b in zip(known[:both], history[:both], strict=True))
        for place, value in zip(range(len(prompt), both), answer.log_probs, strict=False):
            marks[place], logp[place] = 1, value
    wrong = sum(a != b for a, b in zip(marks[begin:], output.response_mask, strict=True))
    return wrong_tokens, wrong + sum(a != b for a, b in zip(logp[begin:], output.response_logprobs, strict=True))


def pictures_of(output: Any) -> list[Any]:
    return (output.multi_modal_data or {}).get("images") or []


def apart(output: Any, config: Any, params: Any, images: list[torch.Tensor] | None) -> float:
    """The largest difference of a sampled token's log-probability from the model's, over the history in one pass."""
    ids = torch.tensor(output.prompt_ids + output.response_ids)
    if images is None:
        import fnmodels

        logits = fnmodels.forward(params, *fnmodels.prepare(config, ids[None]), config=config)
        found = logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    else:
        found = DIRECT(config, params, params["text"], ids, images, len(ids))
    own = found[len(output.prompt_ids) - 1 :]
    sampled = torch.tensor(output.response_mask) == 1
    return float((own - torch.tensor(output.response_logprobs))[sampled].abs().max())


def actors_images_differ(output: Any, made: Any, tokenizer: Any) -> int:
    """How many images of the actor's `multi_modal_inputs`, as verl's worker makes them, the rollout read otherwise."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    from train.integrations.verl.pictures import images_of

    worker = SimpleNamespace(processor=made.processor, tokenizer=tokenizer)
    ids = torch.tensor(output.prompt_ids + output.response_ids)
    inputs = AgentLoopWorker._compute_multi_modal_inputs(worker, output, ids)
    inputs.pop("mm_token_type_ids", None)
    theirs, ours = images_of(inputs, made.config), made.read(pictures_of(output))
    return sum(not torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


async def refusals(made: Any, of_text: Any, output: Any) -> list[str]:
    """The errors for images where the weights are those of the text, and for other images than the prompt has."""
    said = []
    plain = {"temperature": 1.0, "max_tokens": 2}
    seen = pictures_of(output)
    for one, pictures in ((of_text, seen), (made, seen[:-1]), (made, [object()])):
        try:
            await one.generate("1", output.prompt_ids + output.response_ids[:-3], plain, pictures)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


async def run(model: Path, folder: Path) -> dict[str, Any]:
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.tool_registry import load_all_tools
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.tokenizer import hf_processor, hf_tokenizer

    import params as P

    config, params = P.load_pretrained(model, copy=True)
    client, tokenizer, given = Client(server(model, config, params)), hf_tokenizer(str(model)), settings(folder)
    reads = client.server.images
    tools = load_all_tools(tool_config_path=None, function_tool_path=str(folder / "tools.py"))
    loop: dict[str, Any] = {"trainer_config": DictConfigWrap(given), "server_manager": client, "tokenizer": tokenizer}
    loop |= {"processor": None if reads is None else hf_processor(str(model)), "dataset_cls": RLHFDataset}
    loop |= {"hf_model_type": config.model_type, "data_config": DictConfigWrap(given.data)}
    data = RLHFDataset(str(folder / "train.parquet"), tokenizer, given.data, loop["processor"], COUNT)
    ends = [token for word, token in tokenizer.get_vocab().items() if "tool_call" in word]
    calls = [
        converse(ToolAgentLoop(**loop, tools=ToolListWrap(tools)), client, number, data[number], ends[: number % 2 * 8])
        for number in range(COUNT)
    ]
    found = await asyncio.gather(*calls)
    wrong = [faults(output, turns) for output, turns in found]
    result: dict[str, Any] = {"turns": [len(turns) for _, turns in found]}
    result |= {"tokens": sum(one for one, _ in wrong), "marks": sum(other for _, other in wrong)}
    result["observed"] = sum(len(output.response_mask) - sum(output.response_mask) for output, _ in found)
    seen = [None if reads is None else reads.read(pictures_of(output)) for output, _ in found]
    pairs = list(zip((output for output, _ in found), seen, strict=True))
    result["log_probs"] = max(apart(output, config, params, images) for output, images in pairs)
    if reads is not None:
        blank = [(output, [0 * one for one in images]) for output, images in pairs if images]
        result["blank"] = max(apart(output, config, params, images) for output, images in blank)
        result["refused"] = await refusals(
            client.server, server(model, config.text, params["text"]), max(pairs, key=lambda pair: len(pair[1]))[0]
        )
        result["images"] = [len(pictures_of(output)) for output, _ in found]
        result["other_images"] = sum(actors_images_differ(output, reads, tokenizer) for output, _ in found)
        drawn = [token for _, turns in found for _, answer in turns for token in answer.token_ids]
        result["placeholders"] = sum(token in reads.placeholders for token in drawn)
    return result


if __name__ == "__main__":
    import verl  # noqa: F401 - registers the platform

    torch.set_num_threads(1)
    random.seed(0)
    print(json.dumps(asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2])))))
