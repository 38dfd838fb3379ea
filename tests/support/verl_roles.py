"""Engines of verl's roles, asked directly: prints JSON of what they answer. Started as `verl_flow.py` is.

python tests/support/verl_roles.py alone MODEL FOLDER      settings, a forward-only engine, adapters
torchrun --nproc-per-node 2 ... ranks MODEL FOLDER         how two ranks agree on microbatches
"""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FLOW = runpy.run_path(str(Path(__file__).with_name("verl_flow.py")))
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
# (section, fields): verl's configurations with one setting each that is not there
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("model", {"use_liger": True}),
    ("model", {"exclude_modules": "q_proj"}),
    ("model", {"enable_activation_offload": True}),
    ("model", {"tiled_mlp": {"enabled": True, "num_shards": 4}}),
    ("model", {"override_config": {"rope_theta": 5.0}}),
    ("model", {"override_config": {"model_config": {"rms_norm_eps": 1.0}}}),
    ("model", {"mtp": {"enable": True}}),
    ("model", {"hf_config_path": "elsewhere"}),
    ("engine", {"router_replay": {"mode": "R2"}}),
    ("engine", {"of_a_later_release": 3}),
    ("optim", {"optimizer": "SGD"}),
    ("optim", {"optimizer_impl": "torchao.optim"}),
    ("checkpoint", {"save_lora_only": True}),
    ("checkpoint", {"async_save": True}),
    ("checkpoint", {"load_contents": ["model"]}),
)


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def with_changes(config: Any, changes: dict[str, Any]) -> Any:
    """A configuration with other fields, also ones that its class does not have; verl freezes them."""
    kind = type(config)
    if unknown := changes.keys() - {*kind.__dataclass_fields__}:
        import dataclasses

        kind = dataclasses.make_dataclass("Later", [(name, Any, None) for name in unknown], bases=(kind,))
    made = object.__new__(kind)
    made.__dict__.update(config.__dict__ | changes)
    return made


def engine_of(model: Path, model_changes: dict[str, Any] | None = None, **settings: Any) -> Any:
    """An initialized engine."""
    settings = {"strategy": "fnmodels", "model": model_changes or {}, **settings}
    config = FLOW["worker_config"](model, settings, "language_model")
    made = build(config)
    made.initialize()
    return made


def build(config: Any, **changed: Any) -> Any:
    from train.integrations.verl import LanguageModelEngine

    return LanguageModelEngine(*(sections(config) | changed).values())


def sections(config: Any) -> dict[str, Any]:
    found = {"model": config.model_config, "engine": config.engine_config, "optim": config.optimizer_config}
    return found | {"checkpoint": config.checkpoint_config}


def refusals(model: Path) -> dict[str, str]:
    from types import SimpleNamespace

    config = FLOW["worker_config"](model, {"strategy": "fnmodels"}, "language_model")
    found = {}
    for section, fields in REFUSED:
        values = {
            name: SimpleNamespace(**value) if name in ("mtp", "router_replay") else value
            for name, value in fields.items()
        }
        changed = {section: with_changes(sections(config)[section], values)}
        found[json.dumps([section, fields])] = said(lambda changed=changed: build(config, **changed).initialize())
    return found


def exported(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def forward_only(model: Path, folder: Path) -> dict[str, Any]:
    """A reference policy saves and loads weights; an actor's step is loaded by it too or refused in a sentence."""
    reference, actor = engine_of(model, forward_only=True), engine_of(model)
    found = {name: said(getattr(reference, name)) for name in ("optimizer_step", "lr_scheduler_step")}
    before = exported(reference)
    reference.save_checkpoint(str(folder / "reference"))
    with torch.no_grad():
        reference.engine.params["norm"].add_(1.0)
    changed = difference(before, exported(reference))
    reference.load_checkpoint(str(folder / "reference"))
    actor.save_checkpoint(str(folder / "actor"))
    found["other"] = said(lambda: reference.load_checkpoint(str(folder / "actor")))
    return found | {"changed": changed, "restored": difference(before, exported(reference))}


def adapters(model: Path, folder: Path) -> dict[str, Any]:
    """Adapters are drawn by the seed; after loading, the reference policy reads the tensors that adapters are over."""
    import params as P
    from fnmodels import tree

    drawn = [P.lora.adapters(engine_of(model, LORA, seed=seed).engine.params) for seed in (1, 1, 2)]
    first, same, other = (list(tree.leaves(one)) for one in drawn)
    engine = engine_of(model, LORA)
    engine.save_checkpoint(str(folder / "lora"))
    engine.load_checkpoint(str(folder / "lora"))
    weights, base = tree.flatten(P.lora.weights(engine.engine.params)), tree.flatten(engine._base.params)
    return {
        "same": all(map(torch.equal, first, same)),
        "other": all(map(torch.equal, first, other)),
        "shared": all(weights[path].data_ptr() == leaf.data_ptr() for path, leaf in base.items()),
    }


def temperatures(model: Path) -> dict[str, int]:
    """How many functions an engine keeps for 5 temperatures."""
    from verl.utils import tensordict_utils as tu

    engine = engine_of(model)
    for value in (1.0, 0.5, 0.6, 0.7, torch.full((8,), 0.8)):
        data = FLOW["batch"](0, 1, sft=False)
        tu.assign_non_tensor(data, temperature=value) if isinstance(value, float) else data.update(
            {"temperature": value}
        )
        engine.forward_backward_batch(data, None, forward_only=True)
    return {"functions": len(engine._losses)}


def determinism(model: Path) -> list[bool]:
    found = []
    for value in (False, True):
        engine_of(model, full_determinism=value)
        found.append(torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(False)
    return found


def ranks() -> dict[str, Any]:
    """Microbatches of two ranks with other lengths: equally many, none empty; refusals alike."""
    from train.integrations.verl.batches import agreed_rows, microbatches

    rank, group, cpu = torch.distributed.get_rank(), torch.distributed.group.WORLD, torch.device("cpu")

    def rows(budget: int, *lengths: list[int]) -> list[list[int]]:
        return agreed_rows(lengths[rank], budget, group, cpu)

    whole = FLOW["batch"](rank, 2, sft=False, max_token_len_per_gpu=32, force_group_size=2)
    micros, numbers = microbatches(whole, 1, group)
    mine = [
        rows(8, [8, 8, 8], [2, 3, 2]),
        said(lambda: rows(8, [8, 8, 8], [2, 3])),
        said(lambda: rows(8, [8, 1], [2, 9])),
        numbers,
        [int(micro["input_ids"].offsets()[-1]) for micro in micros],
    ]
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, mine)
    return {"ranks": every}


def main() -> None:
    how, model, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    import verl  # noqa: F401 - registers the platform

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    if how == "ranks":
        found = ranks()
    else:
        found = {"refusals": refusals(model), "forward_only": forward_only(model, folder)}
        found |= {"adapters": adapters(model, folder), "temperatures": temperatures(model)}
        found["determinism"] = determinism(model)
    print(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
