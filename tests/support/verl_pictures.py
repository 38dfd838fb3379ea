"""An engine of verl over sequences with images, as verl's batches have them: prints JSON of differences from a loop.

torchrun --nproc-per-node N tests/support/verl_pictures.py MODEL MESH        MODEL: of tests/support/pictured.py
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

SUPPORT = Path(__file__).parent
FLOW = runpy.run_path(str(SUPPORT / "verl_flow.py"))
ROLES = runpy.run_path(str(SUPPORT / "verl_roles.py"))
GRIDS = [[(2, 3)], [], [(1, 2), (2, 2)], [(3, 1)]]  # cells of the images of each sequence; one is of text alone
IMAGE, CELL = 60, 8


def sequences() -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[int]]:
    """(ids, images [3, H, W], tokens of the prompt) of each sequence; an answer has the id of image tokens as text."""
    draw = torch.Generator().manual_seed(3)
    ids, images, prompts = [], [], []
    for number, grids in enumerate(GRIDS):
        tokens = [1, 2]
        for rows, columns in grids:
            tokens += [58, *[IMAGE] * (rows * columns), 57]
        prompts.append(len(tokens))
        tokens += torch.randint(1, 40, (3 + number,), generator=draw).tolist() + [IMAGE, 5]
        ids.append(torch.tensor(tokens))
        images.append([torch.randn(3, CELL * rows, CELL * columns, generator=draw) for rows, columns in grids])
    return ids, images, prompts


def patches(image: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """(pixel_values, its row of image_grid_thw), written out: cells of 2 x 2 patches of 4 x 4, two frames of each."""
    rows = []
    for down in range(0, image.shape[1], CELL):
        for across in range(0, image.shape[2], CELL):
            for y in (0, 4):
                for x in (0, 4):
                    patch = image[:, down + y : down + y + 4, across + x : across + x + 4]
                    rows.append(torch.stack((patch, patch), 1).flatten())
    return torch.stack(rows), [1, image.shape[1] // 4, image.shape[2] // 4]


def batch(rank: int, size: int) -> Any:
    from verl.utils import tensordict_utils as tu

    ids, images, prompts = sequences()
    share = slice(rank * 4 // size, (rank + 1) * 4 // size)
    given = []
    for own in images[share]:
        parts = [patches(image) for image in own]
        grids = torch.tensor([grid for _, grid in parts])
        given.append({"pixel_values": torch.cat([p for p, _ in parts]), "image_grid_thw": grids} if parts else {})
    masks = [torch.tensor([0] * n + [1] * (len(one) - n)) for one, n in zip(ids, prompts, strict=True)]
    axes = [torch.arange(len(one)).expand(4, -1) for one in ids]  # which the engine makes anew, with the images' grids
    nested = {"input_ids": ids, "loss_mask": masks}
    tensors = {
        name: torch.nested.as_nested_tensor(values[share], layout=torch.jagged) for name, values in nested.items()
    }
    tensors["position_ids"] = torch.nested.as_nested_tensor(
        [one.T.contiguous() for one in axes[share]], layout=torch.jagged
    )
    plain = {"temperature": 1.0, "global_batch_size": 4, "use_dynamic_bsz": True, "max_token_len_per_gpu": 40}
    return tu.get_tensordict(tensors | {"multi_modal_inputs": given}, plain)


def loss_of(model_output: Any, data: Any, dp_group: Any) -> Any:
    logp = model_output["log_probs"].values()
    kept = torch.ones_like(logp)
    kept[data["input_ids"].offsets()[1:] - 1] = 0
    weights = (data["input_ids"].values() % 5 - 2.0) * kept
    return -(logp * weights).sum() * data["dp_size"] / 50, {}


def direct(config: Any, params: Any, text: Any, ids: torch.Tensor, images: list[torch.Tensor], prompt: int) -> Any:
    """The log-probabilities of one sequence by the model called with its images."""
    import fnmodels
    from fnmodels.image_text import image_features, with_features
    from fnmodels.inputs.image_places import image_places

    tokens, options = ids[None], dict[str, Any]()
    if images:
        found = image_features(params, images, config=config)
        shown = torch.where(torch.arange(len(ids)) < prompt, ids, 0)[None]
        places = image_places(shown, IMAGE, torch.ones(found.values[0].shape[:2], dtype=torch.bool))
        prepared = fnmodels.prepare(config, tokens, places=places, grids=found.grids)
        prepared, options = with_features({"text": text}, found, places, prepared, config=config)
    else:
        prepared = fnmodels.prepare(config, tokens)
    logits = fnmodels.forward(text, *prepared, config=config.text, **options)
    return logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def main() -> None:
    model, mesh = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    import verl  # noqa: F401 - registers the platform

    import params as P
    from fnmodels import tree

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    config, params = P.load_pretrained(model, copy=True)
    settings: dict[str, Any] = {"strategy": "fnmodels", "mesh": mesh}
    refusing = ROLES["build"](FLOW["worker_config"](model, settings, "language_model"))
    refusing.initialize()
    made = ROLES["build"](FLOW["worker_config"](model, settings | {"images": True}, "language_model"))
    if mesh.startswith("cp"):
        said = ROLES["said"](made.initialize)
        if torch.distributed.get_rank() == 0:
            print(json.dumps({"refused": said}))
        torch.distributed.destroy_process_group()
        return
    made.initialize()
    rank, size = made.get_data_parallel_rank(), made.get_data_parallel_size()
    data = batch(rank, size)
    found: dict[str, Any] = {}
    found["off"] = ROLES["said"](lambda: refusing.forward_backward_batch(batch(rank, size), None, True))
    with made.eval_mode():
        scored = made.forward_backward_batch(data, None, True)["model_output"]
    with made.train_mode():
        made.optimizer_zero_grad()
        made.forward_backward_batch(batch(rank, size), loss_of)
        gradients = tree.flatten(made.engine.gradients(full=True))
    leaves = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), params["text"])
    wanted, total = [], torch.zeros(())
    for ids, images, prompt in zip(*sequences(), strict=True):
        wanted.append(direct(config, params, leaves, ids, images, prompt))
        total = total - (wanted[-1] * (ids[:-1] % 5 - 2.0)).sum() / 50
    total.backward()
    each = tree.flatten(leaves)
    scale = max(float(one.grad.abs().max()) for one in each.values() if one.grad is not None)
    off = [float((gradients[path] / size - one.grad).abs().max()) for path, one in each.items() if one.grad is not None]
    found["gradients"] = max(off) / scale
    share = slice(rank * 4 // size, (rank + 1) * 4 // size)
    found["log_probs"] = 0.0
    if made.is_mp_src_rank_with_outputs():
        pairs = zip(scored["log_probs"].unbind(), wanted[share], strict=True)
        found["log_probs"] = max(float((a[:-1] - b).abs().max()) for a, b in pairs)
    exported = dict(made.get_per_tensor_param()[0])
    stored = dict(P.export(config, params))
    same = exported.keys() == stored.keys() and all(torch.equal(exported[name], stored[name]) for name in stored)
    found["exported"] = float(not same)
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, found)
    if torch.distributed.get_rank() == 0:
        print(json.dumps({name: max(one[name] for one in every) for name in found}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
