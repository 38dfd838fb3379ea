"""An engine of verl over experts that a rollout recorded, in vLLM's form: prints JSON of differences from a loop.

torchrun --nproc-per-node N tests/support/verl_replay.py MODEL FOLDER MESH     MODEL: of tests/support/verl_flow.py
"""

import functools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

SUPPORT = Path(__file__).parent
FLOW = runpy.run_path(str(SUPPORT / "verl_flow.py"))
ROLES = runpy.run_path(str(SUPPORT / "verl_roles.py"))


def recorded(config: Any, params: Any, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """vLLM's form of the experts that these parameters choose for all tokens but the last of each sequence."""
    import fnmodels
    from train.generation.routing import TAPS
    from train.generation.routing import recorded as stacked
    from train.integrations.verl.routing import layers_of

    found = []
    for tokens in sequences:
        prepared = fnmodels.prepare(config, tokens[None])
        _, tapped = fnmodels.forward(params, *prepared, config=config, taps=TAPS)
        routed = layers_of(stacked(tapped)[0], config)
        routed[-1] = 0
        found.append(routed)
    return found


def batch(rank: int, size: int, budget: int, experts: list[torch.Tensor] | None) -> Any:
    data = FLOW["batch"](rank, size, sft=False, calculate_entropy=False, max_token_len_per_gpu=budget)
    if experts is not None:
        share = experts[rank * 8 // size : (rank + 1) * 8 // size]
        data["routed_experts"] = torch.nested.as_nested_tensor(share, layout=torch.jagged)
    return data


def loss_of(model_output: Any, data: Any, dp_group: Any) -> Any:
    """The sum over all answers of log-probabilities times a number per sequence, averaged over ranks."""
    logp = model_output["log_probs"].values()
    lengths = data["input_ids"].offsets().diff()
    ends = data["input_ids"].offsets()[1:] - 1
    kept = torch.ones_like(logp)
    kept[ends] = 0
    weights = (data["input_ids"].values() % 5 - 2.0) * kept
    assert int(lengths.sum()) == len(logp)
    return -(logp * weights).sum() * data["dp_size"] / 50, {}


def written_out(config: Any, params: Any, sequences: list[torch.Tensor], experts: list[torch.Tensor] | None) -> Any:
    """(log-probabilities of each sequence, the gradients) by one packed row without verl."""
    from fnmodels import tree
    from train.data.token_budget import token_budget, unpacked
    from train.losses.logprobs import token_logprobs

    entries: dict[str, Any] = {"tokens": sequences}
    if experts is not None:
        first = torch.arange(experts[0].shape[-1])
        entries["routing"] = [torch.cat((one[:-1].long(), first.expand(1, *one.shape[1:]))) for one in experts]
    ((row,),) = token_budget(entries, 4096)
    leaves = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), params)
    logp, _, valid = token_logprobs(leaves, row.batch, config=config)
    loss = -(logp * (row.batch["tokens"] % 5 - 2.0) * valid).sum() / 50
    gradients = torch.autograd.grad(loss, tree.leaves(leaves))
    return list(unpacked([row], [logp.detach()]).values()), gradients


def main() -> None:
    model, folder, mesh = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
    import verl  # noqa: F401 - registers the platform

    import params as P
    from fnmodels import tree

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    config, params = P.load_pretrained(model, copy=True)
    other = P.init(config, 1)  # the rollout's weights are others, so that it chooses other experts
    whole = FLOW["batch"](0, 1, sft=False)["input_ids"].unbind()
    experts = recorded(config, other, list(whole))
    settings: dict[str, Any] = {"strategy": "fnmodels", "mesh": mesh}
    settings["router_replay"] = _r3()
    engine = FLOW["worker_config"](model, settings, "language_model")
    made = ROLES["build"](engine)
    made.initialize()
    rank, size = made.get_data_parallel_rank(), made.get_data_parallel_size()
    own = functools.partial(batch, rank, size, 40 if mesh else 4096)
    found: dict[str, Any] = {"missing": ROLES["said"](lambda: made.forward_backward_batch(own(None), None, True))}
    with made.eval_mode():
        scored = made.forward_backward_batch(own(experts), None, True)["model_output"]
    with made.train_mode():
        made.optimizer_zero_grad()
        made.forward_backward_batch(own(experts), loss_of)
        gradients = [one.clone() for one in tree.leaves(made.engine.gradients(full=True))]  # before they are clipped
        norm = made.optimizer_step()
    wanted, wanted_gradients = written_out(config, params, list(whole), experts)
    wanted_norm = float(torch.stack([one.double().square().sum() for one in wanted_gradients]).sum().sqrt())
    plain, _ = written_out(config, params, list(whole), None)
    share = slice(rank * 8 // size, (rank + 1) * 8 // size)
    found["without"] = max(float((a - b).abs().max()) for a, b in zip(wanted, plain, strict=True))
    found["other_bits"] = 0 if mesh else sum(map(_differ, gradients, wanted_gradients))
    found["norm"] = abs(norm - wanted_norm) / wanted_norm
    found["log_probs"] = 0.0
    if made.is_mp_src_rank_with_outputs():
        pairs = zip(scored["log_probs"].unbind(), wanted[share], strict=True)
        found["log_probs"] = max(float((a - b)[:-1].abs().max()) for a, b in pairs)
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, found)
    joined = {name: max(one[name] for one in every) for name in found}
    place = folder / f"dense-{torch.distributed.get_rank()}"
    FLOW["write_model"]("llama", place)
    dense = FLOW["worker_config"](place, {"strategy": "fnmodels", "router_replay": _r3()}, "language_model")
    joined["dense"] = ROLES["said"](lambda: ROLES["build"](dense).initialize())
    if torch.distributed.get_rank() == 0:
        print(json.dumps(joined))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _differ(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((one != other).sum())


def _r3() -> Any:
    from verl.workers.config import EngineRouterReplayConfig

    return EngineRouterReplayConfig(mode="R3")


if __name__ == "__main__":
    main()
