"""verl's Tinker worker in two actors of Ray: prints its log-probabilities, and how far one update moves a weight.

VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=train.integrations.verl python tests/support/verl_ray.py MODEL
"""

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    spec = importlib.util.spec_from_file_location("verl_flow", Path(__file__).with_name("verl_flow.py"))
    assert spec is not None and spec.loader is not None
    flow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(flow)
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker
    from verl.workers.utils.losses import sft_loss

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        os.environ.pop(name, None)  # verl sets those of each actor
    ray.init(num_cpus=20, include_dashboard=False, log_to_driver=False)
    config = flow.worker_config(Path(sys.argv[1]), {"strategy": "fnmodels"}, "language_model")
    made = RayClassWithInitArgs(ray.remote(TinkerTrainingWorker), config=config)
    group: Any = RayWorkerGroup(RayResourcePool([2], use_gpu=False), made, device_name="cpu")
    group.reset()
    group.set_loss_fn(functools.partial(sft_loss, config=None))
    asked = flow.batch(0, 1, sft=False, temperature=0.7, calculate_entropy=True, compute_loss=False)
    scored = group.infer_batch(asked).get()
    trained = group.forward_backward(flow.batch(0, 1, sft=True)).get()
    assert len(flow.jagged(trained, "log_probs")) == 8  # those of the pass with gradients
    before = weights(group)
    group.optimizer_step({"lr": 5e-4, "betas": (0.5, 0.7), "weight_decay": 0.0})
    moved = max(abs(x - y) for x, y in zip(weights(group), before, strict=True))
    print(json.dumps({"log_probs": [one.tolist() for one in flow.jagged(scored, "log_probs")], "moved": moved}))
    ray.shutdown()


def weights(group: Any) -> list[float]:
    """The elements of one matrix, exported by both actors together."""
    import ray

    def read(worker: Any) -> list[float]:
        tensors, _ = worker.engine.get_per_tensor_param()
        exported = {name: tensor.detach().flatten().tolist() for name, tensor in tensors}  # all ranks iterate alike
        found: list[float] = exported["lm_head.weight"]
        return found

    both = ray.get([worker.__ray_call__.remote(read) for worker in group.workers])
    assert both[0] == both[1]
    first: list[float] = both[0]
    return first


if __name__ == "__main__":
    main()
