"""`VerlEngine`: the methods of verl's BaseEngine, by `train.engine.Engine`.

verl's losses are functions (model_output, microbatch) -> (loss, metrics). They are divided by the tokens of the global
batch and multiplied by the number of data-parallel ranks already, because verl takes the mean of their gradients; so an
update here divides by that number and not by a count.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import params as P
from fnmodels.tree import Tree
from train.engine import Engine
from train.generation.routing import expert_layers
from train.handover.offload import offload
from train.losses.logprobs import token_logprobs
from train.losses.output_loss import OutputLoss
from train.losses.values import token_values
from train.parallel.mesh import DataParallel, data_parallel

from . import settings
from .batches import NUMBER, TEMPERATURE, entry, has_temperature, jagged, microbatches, packed_row
from .loading import Placement, load, with_head
from .pictures import ImageReader

STATE, ADAPTERS, WEIGHTS = "fnmodels", "lora_adapter", "huggingface"  # folders of a saved step
PARTS = {"model": "params", "optimizer": "opt_state"}  # what verl moves by itself, and the field of a State

Outputs = dict[str, Tensor]  # verl's name: [1, T]


def logprob_outputs(params: Tree, batch: Mapping[str, Tensor], **how: Any) -> Outputs:
    """{"log_probs", "entropy"} of the next tokens, from a language model."""
    logp, entropy, _ = token_logprobs(params, batch, temperature=batch.get(TEMPERATURE, 1.0), **how)
    return {"log_probs": logp, "entropy": entropy}


def value_outputs(params: Tree, batch: Mapping[str, Tensor], **how: Any) -> Outputs:
    """{"values"} of the tokens, from a value model."""
    return {"values": token_values(params, batch, **how)}


class VerlEngine:
    """An engine of verl for one role. Its arguments are verl's configurations.

    After `initialize`, `engine` is the `train.engine.Engine`.
    """

    outputs: ClassVar[Callable[..., Outputs]]
    head: ClassVar[str] = "lm"  # a checkpoint with the head "lm" is given this one

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        settings.check_supported(model_config, engine_config, optimizer_config, checkpoint_config)
        if engine_config.full_determinism:
            settings.determinism(engine_config.seed)
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        world = dist.get_world_size()
        self.mesh, self.strategy = settings.mesh_and_strategy(engine_config, world)
        self.devices = self.mesh.device_mesh(_device_type()) if world > 1 else None
        alone = DataParallel(0, 1, dist.group.WORLD, True)
        self.shares = alone if self.devices is None else data_parallel(self.devices)
        self._away: dict[str, Callable[[], None]] = {}  # part of the state on the host -> the way back
        self._losses: dict[bool, tuple[OutputLoss, Callable[..., Outputs]]] = {}  # with temperatures, without
        self._saved: list[Path] = []
        self._replays = settings.replays_routing(engine_config)

    # Who computes what

    def get_data_parallel_rank(self) -> int:
        return self.shares.rank

    def get_data_parallel_size(self) -> int:
        return self.shares.size

    def get_data_parallel_group(self) -> Any:
        return self.shares.group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this is the one rank of its rows that returns outputs: first along cp and tp, in the last stage."""
        if self.devices is None:
            return True
        at = {name: self.devices.get_local_rank(name) for name in ("pp", "cp", "tp")}
        return at == {"pp": self.mesh.pp - 1, "cp": 0, "tp": 0}

    # The model

    def initialize(self) -> None:
        """Loads the checkpoint of the model configuration; each rank reads its shards."""
        folder, dtype = Path(self.model_config.local_path), settings.dtype_of(self.engine_config)
        where = Placement(self.mesh, self.strategy, self.devices, _device_type())
        self.config, base = with_head(*load(folder, dtype, where), self.head, self.engine_config.seed, where)
        params = settings.with_adapters(self.config, base, self.model_config, self.engine_config.seed)
        self._reads = self._image_reader(folder, dtype)
        self._common: dict[str, Any] = {"mesh": self.mesh, "strategy": self.strategy} if self.devices else {}
        optimizer = None
        if not self.engine_config.forward_only:
            optimizer = settings.optimizer_of(self.config, params, self.optimizer_config)
            self.optimizer = settings.hyperparameters(self.optimizer_config)
            self.lr_scheduler = settings.schedule_of(self.optimizer_config, self.optimizer)
        if self._replays and not expert_layers(self.config):
            raise ValueError(f"engine.router_replay.mode is R3, and a {self.config.model_type} has no experts.")
        remat = "full" if self.model_config.enable_gradient_checkpointing else "none"
        clip = None if optimizer is None else self.optimizer_config.clip_grad
        self.engine = Engine(self.config, params, optimizer, copy=False, clip=clip, remat=remat, **self._common)
        self._set_base()
        self._leave("model", self.is_param_offload_enabled)
        self._leave("optimizer", self.is_optimizer_offload_enabled)

    def _image_reader(self, folder: Path, dtype: torch.dtype) -> ImageReader | None:
        if not self.engine_config.images:
            return None
        if self.head != "lm" or self.mesh.cp > 1 or self.mesh.pp > 1:
            raise NotImplementedError(
                f"engine.images is true, with the mesh {self.mesh} and the head {self.head!r}: images are there for "
                "language models without cp and pp."
            )
        return ImageReader.load(folder, dtype, _device_type())

    def _set_base(self) -> None:
        """`_base`: an engine of the weights without adapters, which are those of `engine`."""
        self._inferring, self._base = self.engine, self.engine
        if settings.is_adapted(self.model_config):
            self._base = Engine(self.config, P.lora.weights(self.engine.params), None, **self._common)

    # Passes

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> dict[str, Any]:
        """Passes over the microbatches of a batch: {model_output, loss: [float], metrics: {name: [value]}}."""
        from verl.utils import tensordict_utils as tu
        from verl.utils.device import get_device_id
        from verl.workers.engine.utils import postprocess_batch_func

        _check_supported(data)
        tokens = data["loss_mask"].sum().to(get_device_id())
        dist.all_reduce(tokens, group=self.shares.group)
        tu.assign_non_tensor(data, sp_size=self.mesh.cp, batch_num_tokens=tokens.item(), dp_size=self.shares.size)
        found, order = microbatches(data, self.mesh.cp, self.shares.group)
        micros = [micro.to(get_device_id()) for micro in found]
        run = self._infer if forward_only else self._train
        results = run(micros, loss_function)
        if not forward_only and not entry(data, "return_model_output", False):
            for result in results:
                del result["model_output"]
        mine = results if self.is_mp_src_rank_with_outputs() else []
        outputs: dict[str, Any] = postprocess_batch_func(output_lst=mine, indices=order, data=data)
        return outputs

    def _train(self, micros: list[Any], function: Any) -> list[dict[str, Any]]:
        loss, _ = self._functions(micros[0])
        judged: dict[int, tuple[float, Any]] = {}
        self._judge = lambda outputs, batch: self._judged(outputs, batch, micros, function, judged)
        rows = self._rows(micros)
        found = self.engine.forward_backward(rows, loss)["outputs"]
        return [
            {"model_output": _jagged(outputs, micro), "loss": value, "metrics": metrics}
            for outputs, micro, (value, metrics) in zip(
                found, micros, (judged.get(number, (0.0, {})) for number in range(len(micros))), strict=True
            )
        ]

    def _rows(self, micros: list[Any]) -> list[dict[str, Tensor]]:
        multiple = self.mesh.cp * (self.mesh.tp if self.strategy.sequence else 1)
        replays = self.config if self._replays else None
        how: dict[str, Any] = {"replays": replays, "reads": self._reads}
        return [packed_row(micro, number, multiple, **how) for number, micro in enumerate(micros)]

    def _judged(
        self, outputs: Outputs, batch: Mapping[str, Tensor], micros: list[Any], function: Any, judged: dict[int, Any]
    ) -> tuple[Tensor, Tensor]:
        """(loss, 1) by verl's function, whose value and metrics are noted in `judged` by the microbatch's number."""
        number = int(batch[NUMBER][0, 0])
        loss, metrics = function(
            model_output=_jagged(outputs, micros[number]), data=micros[number], dp_group=self.shares.group
        )
        judged[number] = float(loss.detach()), metrics
        return loss, torch.ones((), dtype=torch.int64, device=loss.device)

    def _infer(self, micros: list[Any], function: Any) -> list[dict[str, Any]]:
        _, outputs = self._functions(micros[0])
        rows = self._rows(micros)
        results = []
        for micro, found in zip(micros, self._inferring.infer(rows, outputs), strict=True):
            result: dict[str, Any] = {"model_output": _jagged(found, micro), "loss": 1.0, "metrics": {}}
            if function is not None:
                loss, metrics = function(model_output=result["model_output"], data=micro, dp_group=self.shares.group)
                result |= {"loss": float(loss), "metrics": metrics}
            results.append(result)
        return results

    def _functions(self, micro: Any) -> tuple[OutputLoss, Callable[..., Outputs]]:
        """(the loss, its outputs) for a microbatch; one object each, for what is compiled."""
        divides = has_temperature(micro)
        if divides not in self._losses:
            how: dict[str, Any] = {"config": self.config if self._reads is None else self._reads.config}
            how |= {"kernel": self.engine_config.kernel} if self.engine_config.kernel else {}

            def outputs(params: Tree, batch: Mapping[str, Tensor]) -> Outputs:
                return type(self).outputs(params, batch, **how)

            self._losses[divides] = OutputLoss(outputs, lambda found, batch: self._judge(found, batch)), outputs
        return self._losses[divides]

    # Updates

    def optimizer_zero_grad(self) -> None:
        self.engine.zero_grad()

    def optimizer_step(self) -> float:
        """One update with the numbers in `optimizer`; returns the norm of the gradient before clipping."""
        self._check_trains()
        group = self.optimizer.param_groups[0]
        numbers = {name: group[name] for name in settings.HYPERPARAMETERS}
        metrics = self.engine.optim_step(divide_by=self.shares.size, **numbers | {"betas": tuple(group["betas"])})
        self.optimizer.step()  # without gradients: nothing but what the schedule counts
        return float(metrics["grad_norm"])

    def lr_scheduler_step(self) -> float:
        self._check_trains()
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def _check_trains(self) -> None:
        if self.engine_config.forward_only:
            raise RuntimeError("engine.forward_only is true, so the engine has no optimizer and no schedule.")

    # Modes and memory

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload) and not self.engine_config.forward_only

    @contextmanager
    def train_mode(self, *, disable_auto_offload: bool = False, zero_grad_on_exit: bool = True) -> Iterator[None]:
        """Parameters and optimizer state are on the device inside; gradients are discarded at the end and by errors."""
        with self._mode("train", () if disable_auto_offload else tuple(PARTS)):
            done = False
            try:
                yield
                done = True
            finally:
                if zero_grad_on_exit or not done:
                    self.optimizer_zero_grad()

    @contextmanager
    def eval_mode(self, *, disable_auto_offload: bool = False, **_: Any) -> Iterator[None]:
        """Parameters are on the device inside."""
        with self._mode("eval", () if disable_auto_offload else ("model",)):
            yield

    @contextmanager
    def _mode(self, mode: str, parts: tuple[str, ...]) -> Iterator[None]:
        self.mode = mode
        try:
            with self._on_device(*parts):
                yield
        finally:
            self.mode = None

    @contextmanager
    def _on_device(self, *parts: str) -> Iterator[None]:
        """The named parts of the state are on the device inside, and on the host again after, if they were."""
        moved = [part for part in parts if part in self._away]
        for part in moved:
            self._away.pop(part)()
        try:
            yield
        finally:
            for part in moved:
                self._leave(part, True)

    def _leave(self, part: str, wanted: bool) -> None:
        """Moves a part of the state to the host, if it is wanted and on an accelerator."""
        if wanted and part not in self._away and _device_type() != "cpu":
            self._away[part] = offload(getattr(self.engine.state, PARTS[part]))

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves parameters and optimizer state to "cpu" or back; gradients stay, as `Engine.offload` leaves them."""
        wanted = {"model": model, "optimizer": optimizer and not self.engine_config.forward_only}
        for part in (name for name, move in wanted.items() if move):
            if device == "cpu":
                self._leave(part, True)
            elif part in self._away:
                self._away.pop(part)()

    # Weights out, and steps in and out of folders

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """((name on disk, full tensor) one at a time, None); adapters are merged into the weights that they belong to.

        All ranks call it alike. Tensors may be the live parameters: copy what is read after the next update.
        """
        return self._exported(), None

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        with self._on_device("model"):
            text = self.engine
            yield from text.export() if self._reads is None else self._reads.exported(text.params)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """`infer_batch` runs the model without its adapters inside: the reference policy of a LoRA actor."""
        self._inferring = self._base
        try:
            yield
        finally:
            self._inferring = self.engine

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Saves the state (weights alone where there is no optimizer) in the folder `local_path`, on any mesh loadable.

        Beside it "huggingface" has config and tokenizer, with "hf_model" in the configuration's save_contents also the
        weights, adapters merged; "lora_adapter" has adapters in PEFT's format. verl copies folders to hdfs by itself.
        """
        if local_path is None:
            return
        folder = Path(local_path)
        progress: dict[str, Any] = {"global_step": global_step}
        if not self.engine_config.forward_only:
            group = self.optimizer.param_groups[0]
            progress |= {name: group[name] for name in settings.HYPERPARAMETERS} | {"betas": list(group["betas"])}
            progress |= {"schedule": self.lr_scheduler.last_epoch}
        with self._on_device(*PARTS):
            folder.mkdir(parents=True, exist_ok=True)
            self.engine.save(folder / STATE, progress, keep=1)
            self._write_model(folder)
        dist.barrier()
        self._saved = [*(path for path in self._saved if path != folder), folder]
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            oldest = self._saved.pop(0)
            if dist.get_rank() == 0:
                shutil.rmtree(oldest, ignore_errors=True)

    def _write_model(self, folder: Path) -> None:
        first = dist.get_rank() == 0
        if "hf_model" in self.checkpoint_config.save_contents:
            tensors: list[tuple[str, Tensor]] = []
            for name, tensor in self._exported():  # gathered by all ranks
                if first:
                    tensors.append((name, tensor.cpu()))
            if first:
                config = self.config if self._reads is None else self._reads.config
                P.save_pretrained(folder / WEIGHTS, config, P.from_tensors(config, tensors))
        if first and (tokenizer := self.model_config.get_processor()) is not None:
            tokenizer.save_pretrained(folder / WEIGHTS)

    def load_checkpoint(self, local_path: str | None, *_: Any, **__: Any) -> None:
        """Loads what `save_checkpoint` left in the folder: parameters, optimizer state and the schedule."""
        if local_path is None:
            return
        with self._on_device(*PARTS):
            progress = self.engine.load(Path(local_path) / STATE)
            self._set_base()  # of the tensors that were read: the old ones are freed
        if not self.engine_config.forward_only:
            self.lr_scheduler.last_epoch = progress["schedule"] - 1
            self.lr_scheduler.step()
            numbers = {name: progress[name] for name in settings.HYPERPARAMETERS} | {"betas": tuple(progress["betas"])}
            self.optimizer.param_groups[0].update(numbers)
        dist.barrier()


def _jagged(outputs: Outputs, micro: Any) -> dict[str, Tensor]:
    """The outputs as jagged [N, T*]; entropies only where the microbatch asks for them."""
    wanted = entry(micro, "calculate_entropy", False)
    return {name: jagged(row, micro) for name, row in outputs.items() if name != "entropy" or wanted}


def _check_supported(data: Any) -> None:
    for name in ("distillation_use_topk", "calculate_sum_pi_squared"):
        if entry(data, name, False):
            raise NotImplementedError(f"The batch requests {name}, which train.integrations.verl does not have.")


def _device_type() -> str:
    from verl.utils.device import get_device_name

    return str(get_device_name())
