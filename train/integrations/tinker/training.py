"""`TrainingClient`: gradients and updates of adapters over a base model, by `train.engine.Engine`."""

import dataclasses
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import params as P
from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig
from train import checkpoint
from train.data.token_budget import PackedRow
from train.engine import Engine
from train.losses.output_loss import OutputLoss
from train.optim.adamw import adamw
from train.optim.base import clip_factor, global_norm
from train.state import State, init_state

from . import packed, types
from .base import Base, Future, Ready, TextTokenizer
from .losses import LossFunction, gradient_times_logp, of_each_datum
from .sampling import SamplingClient
from .targets import logprobs_of, loss_of
from .traced import TracedLoss
from .traced_calls import Budget

ALPHA = 32.0  # of every adapter, whatever its rank, as in Tinker
CustomLoss = Callable[[list[Any], list[Tensor]], tuple[Tensor, dict[str, float]]]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The weights that are adapted: linear ones of MLPs (experts included), lm_head where the model has one,
    and with train_attn all others: those of attention and recurrent layers."""

    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    def targets(self, config: DecoderConfig) -> list[str]:
        """The paths of the weights. ValueError where there are none."""
        kinds = {"mlp": self.train_mlp, "lm_head": self.train_unembed}
        chosen = []
        for path in P.lora.targets(config):
            kind = next((kind for kind in kinds if kind in path.split(".")), None)
            if self.train_attn if kind is None else kinds[kind]:
                chosen.append(path)
        if not chosen:
            raise ValueError("No weight has an adapter: set one of train_mlp, train_attn and train_unembed.")
        return chosen


class TrainingClient(Ready):
    """Adapters over a base model, their gradients and their optimizer state.

    Args:
        folder: The client's folder, where states and weights are saved.
        base: The base model.
        lora: The rank and the kinds of weights of the adapters.
    """

    def __init__(self, folder: Path, base: Base, lora: LoraConfig) -> None:
        self._folder, self.base, self.lora = folder, base, lora
        self.id = uuid.uuid4().hex[:12]
        seed = int(self.id, 16) % 2**31 if lora.seed is None else lora.seed
        targets = lora.targets(base.config)
        params = P.lora.add(base.config, base.params, rank=lora.rank, alpha=ALPHA, targets=targets, seed=seed)
        params = P.lora.attach(params, tree.map(torch.Tensor.float, P.lora.adapters(params)))
        optimizer = adamw(1e-4, spec=P.lora.spec(base.config, params))
        self.engine = Engine(base.config, params, optimizer, copy=False)  # the base's weights stay shared

    def _loss(self, function: LossFunction, rows: Sequence[PackedRow]) -> OutputLoss:
        return loss_of(function, rows[0].batch, self.base.run)  # a new one for each call: nothing is compiled

    def _named(self, data: Sequence[Any], name: str, numbers: Any) -> tuple[OutputLoss, list[PackedRow]]:
        rows = packed.packed_data(data, name, self.base)
        return self._loss(packed.function_of(name, numbers), rows), rows

    def get_tokenizer(self) -> TextTokenizer:
        """The tokenizer of the base model's folder.

        Returns:
            An object with `encode(text)` to a list of ids and `decode(ids)` to text.
        """
        return TextTokenizer(self.base.folder)

    def forward_backward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> Future[types.ForwardBackwardOutput]:
        """Adds the gradients of the sum of a loss over `data` to those since the last update.

        Args:
            data: `Datum`s, each with the entries that the loss reads.
            loss_fn: "cross_entropy" with weights, [T] or of several targets [T, K]; "importance_sampling", "ppo",
                "cispo", "dro" and "gspo" with logprobs and advantages, "gspo" also with sequence_ratio_mask.
            loss_fn_config: The numbers of a loss; None: its defaults. Those of "ppo" and "cispo" are
                {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, those of "gspo" 0.9997 and 1.0004 (its
                paper's), that of "dro" {"beta": 0.05}. Clips may be entries of the data instead, a number per token.

        Returns:
            A future of the targets' log-probabilities in nats, and of the summed loss.

        Raises:
            ValueError: The loss is unknown, or a datum lacks an entry or has one of another length.
        """
        loss, rows = self._named(data, loss_fn, loss_fn_config)
        found = self.engine.forward_backward([row.batch for row in rows], loss)
        return Future(packed.output_of(rows, [one["logp"] for one in found["outputs"]], float(found["total"]), data))

    def forward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> Future[types.ForwardBackwardOutput]:
        """The outputs and metrics of `forward_backward` without gradients.

        Args:
            data: `Datum`s, each with the entries that the loss reads.
            loss_fn: The name of a loss, as for `forward_backward`.
            loss_fn_config: The numbers of a loss; None: as for `forward_backward`.

        Returns:
            A future of the targets' log-probabilities in nats, and of the summed loss.
        """
        loss, rows = self._named(data, loss_fn, loss_fn_config)
        found = self.engine.infer([row.batch for row in rows], lambda params, batch: loss(params, batch))
        logps, total = [one[3]["logp"] for one in found], sum(float(one[0]) for one in found)
        return Future(packed.output_of(rows, logps, total, data))

    def forward_backward_custom(
        self, data: Sequence[Any], loss_fn: CustomLoss | TracedLoss
    ) -> Future[types.ForwardBackwardOutput]:
        """Adds the gradients of a loss of one's own of the log-probabilities.

        A function takes a forward pass more than a named loss: gradients by the log-probabilities come first. A traced
        loss does not.

        Args:
            data: `Datum`s with target_tokens, and for a traced loss with its inputs.
            loss_fn: (data, log-probabilities of each datum, in the shape of its targets) -> (loss, metrics), or the
                result of `Client.create_custom_loss`.

        Returns:
            A future of the log-probabilities in nats, and of the metrics.

        Raises:
            ValueError: A datum lacks an entry or has one of another shape, or a traced loss fails.
        """
        if isinstance(loss_fn, TracedLoss):
            return self._forward_backward_traced(data, loss_fn)
        rows = packed.packed_data(data, None, self.base)
        batches = [row.batch for row in rows]
        found = self.engine.infer(batches, lambda params, batch: logprobs_of(params, batch, self.base.run))
        logps = [logp.requires_grad_() for logp in packed.of_targets(rows, found, data)]
        loss, metrics = loss_fn(list(data), logps)
        each = torch.autograd.grad(loss, logps, allow_unused=True)
        packed.add_gradients(rows, logps, each)
        self.engine.forward_backward(batches, self._loss(gradient_times_logp, rows))
        output = packed.output_of(rows, found, float(loss.detach()), data)
        return Future(dataclasses.replace(output, metrics=output.metrics | metrics))

    def _forward_backward_traced(self, data: Sequence[Any], loss: TracedLoss) -> Future[types.ForwardBackwardOutput]:
        rows = packed.packed_inputs(data, loss, self.base)
        function = of_each_datum(loss, Budget())
        found = self.engine.forward_backward([row.batch for row in rows], self._loss(function, rows))
        output = packed.output_of(rows, [one["logp"] for one in found["outputs"]], float(found["total"]), data)
        means = {name: len(data) if name.endswith(":mean") else 1 for name in found["aux"]}
        metrics = {name: float(value) / means[name] for name, value in found["aux"].items()}
        return Future(dataclasses.replace(output, metrics=output.metrics | metrics))

    def optim_step(self, adam_params: Any) -> Future[types.OptimStepResponse]:
        """One AdamW update with the sum of all gradients since the last one, clipped but divided by nothing else.

        Args:
            adam_params: An `AdamParams`.

        Returns:
            A future of {"grad_norm": the norm before clipping}.

        Raises:
            ValueError: A hyperparameter is out of range; the gradients are then those from before.
        """
        limit, divisor = adam_params.grad_clip_norm, 1.0
        if not limit >= 0:
            raise ValueError(f"grad_clip_norm is {limit!r}; it must be a number above 0, or 0 for no clipping.")
        if limit and (norm := global_norm(self.engine.gradients())).isfinite():
            divisor /= float(clip_factor(norm, limit))
        metrics = self.engine.optim_step(
            divide_by=divisor,
            lr=adam_params.learning_rate,
            betas=(adam_params.beta1, adam_params.beta2),
            eps=adam_params.eps,
            weight_decay=adam_params.weight_decay,
        )
        return Future(types.OptimStepResponse({"grad_norm": float(metrics["grad_norm"]) * divisor}))

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Future[types.SaveWeightsResponse]:
        """Saves adapters and optimizer state, in place of an older state of this name.

        Args:
            name: The name of the folder inside the client's.
            ttl_seconds: Unused, for nothing expires.

        Returns:
            A future of the folder's path.

        Raises:
            ValueError: The name leads out of the client's folder.
        """
        path = self._place("weights", name)
        progress = {"base": str(self.base.folder), "lora": dataclasses.asdict(self.lora)}
        number = max(checkpoint.steps(path), default=-1) + 1  # of the save: two of one step may differ, after a load
        checkpoint.save(path, number, self._own_state(), progress, keep=1)
        return Future(types.SaveWeightsResponse(str(path)))

    def _place(self, kind: str, name: str) -> Path:
        return packed.saved_place(self._folder / f"model-{self.id}" / kind, name)

    def load_state(self, path: str | os.PathLike[str]) -> Future[types.LoadWeightsResponse]:
        """Loads the weights of a saved state; the optimizer state starts anew.

        Args:
            path: The folder that `save_state` wrote.

        Returns:
            A future of the folder's path.
        """
        self.load_state_with_optimizer(path)
        state, optimizer = self.engine.state, self.engine.optimizer
        assert optimizer is not None
        self.engine.state = init_state(state.params, optimizer, copy=False)
        return Future(types.LoadWeightsResponse(str(path)))

    def load_state_with_optimizer(self, path: str | os.PathLike[str]) -> Future[types.LoadWeightsResponse]:
        """Loads the weights and the optimizer state of a saved state; gradients since the last update are discarded.

        Args:
            path: The folder that `save_state` wrote.

        Returns:
            A future of the folder's path.
        """
        saved = checkpoint.load(packed.saved_state(path), like=self._own_state())
        params = P.lora.attach(self.engine.params, saved.params)
        self.engine.state = State(saved.step, params, saved.opt_state)
        self.engine.zero_grad()
        return Future(types.LoadWeightsResponse(str(path)))

    def _own_state(self) -> State:
        """Step, adapters and optimizer state, without the base's weights."""
        state = self.engine.state
        return State(state.step, P.lora.adapters(state.params), state.opt_state)

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Future[types.SaveWeightsResponse]:
        """Saves the adapters in PEFT's format, for `Client.create_sampling_client`.

        Args:
            name: The name of the folder inside the client's.
            ttl_seconds: Unused, for nothing expires.

        Returns:
            A future of the folder's path.

        Raises:
            ValueError: The name leads out of the client's folder.
        """
        path = self._place("sampler_weights", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        P.lora.save_adapters(path, self.base.config, self.engine.params, base=str(self.base.folder))
        return Future(types.SaveWeightsResponse(str(path)))

    def save_weights_and_get_sampling_client(
        self, name: str | None = None, *, record_stability_info: bool = False
    ) -> SamplingClient:
        """A client that samples from a copy of the current weights.

        Args:
            name: The name of a folder into which they are saved too; None: they are not saved.
            record_stability_info: Whether sequences have the experts of their tokens, of a model with experts.

        Returns:
            The client.

        Raises:
            ValueError: The name leads out of the client's folder.
        """
        if name is not None:
            self.save_weights_for_sampler(name)
        adapters = tree.map(torch.clone, P.lora.adapters(self.engine.params))  # the next update overwrites them
        return SamplingClient(self.base, P.lora.attach(self.base.params, adapters), record_stability_info)

    async def save_weights_and_get_sampling_client_async(self, *args: Any, **options: Any) -> SamplingClient:
        """`save_weights_and_get_sampling_client` for code that awaits; the work is done when it returns.

        Args:
            *args: Those of `save_weights_and_get_sampling_client`.
            **options: Those of `save_weights_and_get_sampling_client` by name.

        Returns:
            The client.
        """
        return self.save_weights_and_get_sampling_client(*args, **options)

    async def forward_backward_async(self, *args: Any, **options: Any) -> Future[types.ForwardBackwardOutput]:
        """`forward_backward` for code that awaits; the work is done when it returns.

        Args:
            *args: Those of `forward_backward`.
            **options: Those of `forward_backward` by name.

        Returns:
            A future of its result.
        """
        return self.forward_backward(*args, **options)

    async def forward_backward_custom_async(self, *args: Any, **options: Any) -> Future[types.ForwardBackwardOutput]:
        """`forward_backward_custom` for code that awaits; the work is done when it returns.

        Args:
            *args: Those of `forward_backward_custom`.
            **options: Those of `forward_backward_custom` by name.

        Returns:
            A future of its result.
        """
        return self.forward_backward_custom(*args, **options)

    async def forward_async(self, *args: Any, **options: Any) -> Future[types.ForwardBackwardOutput]:
        """`forward` for code that awaits; the work is done when it returns.

        Args:
            *args: Those of `forward`.
            **options: Those of `forward` by name.

        Returns:
            A future of its result.
        """
        return self.forward(*args, **options)

    async def optim_step_async(self, adam_params: Any) -> Future[types.OptimStepResponse]:
        """`optim_step` for code that awaits; the work is done when it returns.

        Args:
            adam_params: An `AdamParams`.

        Returns:
            A future of its result.
        """
        return self.optim_step(adam_params)

    async def save_state_async(self, name: str, **unused: Any) -> Future[types.SaveWeightsResponse]:
        """`save_state` for code that awaits; the work is done when it returns.

        Args:
            name: The name of the folder inside the client's.
            **unused: ttl_seconds.

        Returns:
            A future of the folder's path.
        """
        return self.save_state(name, **unused)

    async def save_weights_for_sampler_async(self, name: str, **unused: Any) -> Future[types.SaveWeightsResponse]:
        """`save_weights_for_sampler` for code that awaits; the work is done when it returns.

        Args:
            name: The name of the folder inside the client's.
            **unused: ttl_seconds.

        Returns:
            A future of the folder's path.
        """
        return self.save_weights_for_sampler(name, **unused)

    async def load_state_async(self, path: str | os.PathLike[str]) -> Future[types.LoadWeightsResponse]:
        """`load_state` for code that awaits; the work is done when it returns.

        Args:
            path: The folder that `save_state` wrote.

        Returns:
            A future of the folder's path.
        """
        return self.load_state(path)

    async def load_state_with_optimizer_async(self, path: str | os.PathLike[str]) -> Future[types.LoadWeightsResponse]:
        """`load_state_with_optimizer` for code that awaits; the work is done when it returns.

        Args:
            path: The folder that `save_state` wrote.

        Returns:
            A future of the folder's path.
        """
        return self.load_state_with_optimizer(path)
