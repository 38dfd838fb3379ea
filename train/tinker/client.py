"""`Client`: Tinker's training and sampling interface in this process, over `train.engine.Engine`.

    client = Client(folder="runs")                                      # where weights are saved
    training = client.create_lora_training_client("checkpoint", rank=16)
    training.forward_backward(data, "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    sampling = training.save_weights_and_get_sampling_client("after-one-step")
    sampling.sample(prompt, 4, types.SamplingParams(max_tokens=20)).result().sequences

All training and sampling clients of a base model share its weights; each has adapters of its own. A call is computed
before it returns, so errors are raised by the call; `Future` is the form in which its result is handed out, and each
client is its own future, for releases of Tinker return either. Methods have twins with `_async` at the end.
"""

import dataclasses
import os
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

import params as P
from fnmodels import tree
from fnmodels.models.common.registry import DecoderConfig
from fnmodels.tree import Tree
from train import checkpoint
from train.data.token_budget import PackedRow, token_budget, unpacked
from train.engine import Engine
from train.eval import pretrained
from train.generation.loops import generate
from train.generation.sampling import Sampling
from train.losses.logprob_loss import logprob_loss
from train.losses.logprobs import token_logprobs
from train.losses.output_loss import OutputLoss
from train.optim.adamw import adamw
from train.state import State, init_state

from . import types
from .losses import LOSSES, LossFunction, NamedLoss, gradient_times_logp

T = TypeVar("T")
ALPHA = 32.0  # of every adapter, whatever its rank, as in Tinker
BUDGET = 4096  # tokens of a packed row; a longer sequence has a row of its own
CustomLoss = Callable[[list[Any], list[Tensor]], tuple[Tensor, dict[str, float]]]


class Future(Generic[T]):
    """A result that is there already."""

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> T:
        return self._value

    async def result_async(self, timeout: float | None = None) -> T:
        return self._value

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


class Ready:
    """What is its own future: releases of Tinker before 0.38 return clients, later ones futures of clients."""

    def result(self, timeout: float | None = None) -> Self:
        return self

    async def result_async(self, timeout: float | None = None) -> Self:
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.result_async().__await__()


class TextTokenizer:
    """A checkpoint's tokenizer.json with ids as plain lists."""

    def __init__(self, folder: Path) -> None:
        self.inner = pretrained.load_tokenizer(folder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        ids = [tokens] if isinstance(tokens, int) else list(tokens)
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))


@dataclasses.dataclass(frozen=True)
class Base:
    """A base model; its weights are read by all clients and written by none."""

    folder: Path
    config: DecoderConfig
    params: Tree


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """What is adapted: linear weights of MLPs (experts included), lm_head where the model has one,
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


class Client:
    """The service. folder: where saved weights and states go. dtype: of base models; adapters are fp32.

    A base model is the folder of a checkpoint; it is loaded once. user_metadata, project_id, display_name: labels,
    kept as attributes. ValueError for a base_url, for there is no server.
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        folder: str | os.PathLike[str] = "tinker",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if base_url is not None:
            raise ValueError(f"base_url is {base_url!r}; this service runs in this process and has none.")
        self.user_metadata, self.project_id, self.display_name = user_metadata, project_id, display_name
        self.folder, self.dtype = Path(folder), dtype
        self._bases: dict[Path, Base] = {}

    def base(self, base_model: str | os.PathLike[str]) -> Base:
        folder = Path(base_model)
        if folder not in self._bases:
            config, params = pretrained.load_model(folder, dtype=self.dtype)
            self._bases[folder] = Base(folder, config, params)
        return self._bases[folder]

    def create_lora_training_client(
        self, base_model: str | os.PathLike[str], *, user_metadata: Mapping[str, str] | None = None, **lora: Any
    ) -> "TrainingClient":
        """lora: fields of `LoraConfig`: rank, seed, train_mlp, train_attn, train_unembed. user_metadata: unused."""
        return TrainingClient(self, self.base(base_model), LoraConfig(**lora))

    async def create_lora_training_client_async(
        self, base_model: str | os.PathLike[str], **lora: Any
    ) -> "TrainingClient":
        return self.create_lora_training_client(base_model, **lora)

    def create_training_client_from_state(self, path: str | os.PathLike[str]) -> "TrainingClient":
        """The weights that `TrainingClient.save_state` left, with a new optimizer state."""
        made = self._like_saved(path)
        made.load_state(path)
        return made

    def create_training_client_from_state_with_optimizer(self, path: str | os.PathLike[str]) -> "TrainingClient":
        """The weights and the optimizer state that `TrainingClient.save_state` left."""
        made = self._like_saved(path)
        made.load_state_with_optimizer(path)
        return made

    def _like_saved(self, path: str | os.PathLike[str]) -> "TrainingClient":
        progress = _saved(path).progress
        return self.create_lora_training_client(progress["base"], **progress["lora"])

    def create_sampling_client(
        self, model_path: str | os.PathLike[str] | None = None, base_model: str | os.PathLike[str] | None = None
    ) -> "SamplingClient":
        """model_path: a folder of adapters that `save_weights_for_sampler` left; base_model: a plain base model."""
        if (model_path is None) == (base_model is None):
            raise ValueError("A sampling client needs one of model_path and base_model.")
        if model_path is None:
            base = self.base(str(base_model))
            return SamplingClient(base, base.params)
        base = self.base(pretrained.weights_folder(Path(model_path)))
        return SamplingClient(base, P.lora.load_adapters(model_path, base.config, base.params))

    async def create_sampling_client_async(self, **places: Any) -> "SamplingClient":
        return self.create_sampling_client(**places)


class TrainingClient(Ready):
    """Adapters over a base model, their gradients and their optimizer state. id: names its folder of saved weights."""

    def __init__(self, client: Client, base: Base, lora: LoraConfig) -> None:
        self._client, self.base, self.lora = client, base, lora
        self.id = uuid.uuid4().hex[:12]
        seed = int(self.id, 16) % 2**31 if lora.seed is None else lora.seed
        targets = lora.targets(base.config)
        params = P.lora.add(base.config, base.params, rank=lora.rank, alpha=ALPHA, targets=targets, seed=seed)
        params = P.lora.attach(params, tree.map(torch.Tensor.float, P.lora.adapters(params)))
        optimizer = adamw(1e-4, spec=P.lora.spec(base.config, params))
        self.engine = Engine(base.config, params, optimizer, copy=False)  # the base's weights stay shared
        self._losses: dict[Any, OutputLoss] = {}

    def get_tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self.base.folder)

    def forward_backward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> Future[types.ForwardBackwardOutput]:
        """Adds the gradients of the sum of the loss over `data`; the outputs are the log-probabilities of the targets.

        loss_fn: "cross_entropy" with weights; "importance_sampling", "ppo" and "cispo" with logprobs and advantages, of
        which the last two take loss_fn_config, by default {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}.
        ValueError for another name, and for a datum that lacks an entry or has one of another length.
        """
        loss, rows = self._loss(loss_fn, loss_fn_config), packed_data(data, loss_fn)
        found = self.engine.forward_backward([row.batch for row in rows], loss)
        return Future(_output(rows, [one["logp"] for one in found["outputs"]], float(found["total"])))

    def forward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> Future[types.ForwardBackwardOutput]:
        """The outputs and metrics of `forward_backward` without gradients."""
        loss, rows = self._loss(loss_fn, loss_fn_config), packed_data(data, loss_fn)
        found = self.engine.infer([row.batch for row in rows], lambda params, batch: loss(params, batch))
        total = sum(float(one[0]) for one in found)
        return Future(_output(rows, [one[3]["logp"] for one in found], total))

    def forward_backward_custom(self, data: Sequence[Any], loss_fn: CustomLoss) -> Future[types.ForwardBackwardOutput]:
        """Adds the gradients of loss_fn(data, log-probabilities [T] of each datum) -> (loss, metrics).

        It takes a forward pass more than a named loss: gradients by the log-probabilities come first.
        """
        rows = packed_data(data, None)
        config = self.base.config
        found = self.engine.infer(
            [row.batch for row in rows], lambda params, batch: token_logprobs(params, batch, config=config)[0]
        )
        logps = [logp.requires_grad_() for logp in unpacked(rows, found).values()]
        loss, metrics = loss_fn(list(data), logps)
        each = torch.autograd.grad(loss, logps, allow_unused=True)
        given = [torch.zeros_like(logp) if grad is None else grad for grad, logp in zip(each, logps, strict=True)]
        for row in rows:
            row.batch["gradient"] = torch.cat([given[number] for number in row.sequences])[None]
        self.engine.forward_backward([row.batch for row in rows], self._kept("custom", gradient_times_logp))
        output = _output(rows, found, float(loss.detach()))
        return Future(dataclasses.replace(output, metrics=output.metrics | metrics))

    def optim_step(self, adam_params: Any) -> Future[types.OptimStepResponse]:
        """One AdamW update with the sum of all gradients since the last one, divided by nothing."""
        if adam_params.grad_clip_norm:
            gradients = tree.leaves(self.engine.gradients())
            norm = torch.nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                gradient.mul_((adam_params.grad_clip_norm / (norm + 1e-6)).clamp(max=1))
        metrics = self.engine.optim_step(
            divide_by=1,
            lr=adam_params.learning_rate,
            betas=(adam_params.beta1, adam_params.beta2),
            eps=adam_params.eps,
            weight_decay=adam_params.weight_decay,
        )
        return Future(types.OptimStepResponse({"grad_norm": float(metrics["grad_norm"])}))

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Future[types.SaveWeightsResponse]:
        """Adapters and optimizer state, in a folder of this name. ttl_seconds: unused, for nothing expires."""
        path = self._client.folder / f"model-{self.id}" / "weights" / name
        progress = {"base": str(self.base.folder), "lora": dataclasses.asdict(self.lora)}
        checkpoint.save(path, int(self.engine.state.step), self._own_state(), progress)
        return Future(types.SaveWeightsResponse(str(path)))

    def load_state(self, path: str | os.PathLike[str]) -> Future[types.LoadWeightsResponse]:
        """The weights of a saved state; the optimizer state starts anew."""
        self.load_state_with_optimizer(path)
        state, optimizer = self.engine.state, self.engine.optimizer
        assert optimizer is not None
        self.engine.state = init_state(state.params, optimizer, copy=False)
        return Future(types.LoadWeightsResponse(str(path)))

    def load_state_with_optimizer(self, path: str | os.PathLike[str]) -> Future[types.LoadWeightsResponse]:
        """The weights and the optimizer state of a saved state; gradients that are held are discarded."""
        saved = checkpoint.load(_saved(path), like=self._own_state())
        params = P.lora.attach(self.engine.params, saved.params)
        self.engine.state = State(saved.step, params, saved.opt_state)
        self.engine.zero_grad()
        return Future(types.LoadWeightsResponse(str(path)))

    def _own_state(self) -> State:
        """Step, adapters and optimizer state, without the base's weights."""
        state = self.engine.state
        return State(state.step, P.lora.adapters(state.params), state.opt_state)

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Future[types.SaveWeightsResponse]:
        """The adapters in PEFT's format, in a folder of this name, for `Client.create_sampling_client`.

        ttl_seconds: unused, for nothing expires.
        """
        path = self._client.folder / f"model-{self.id}" / "sampler_weights" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        P.lora.save_adapters(path, self.base.config, self.engine.params, base=str(self.base.folder))
        return Future(types.SaveWeightsResponse(str(path)))

    def save_weights_and_get_sampling_client(
        self, name: str | None = None, *, record_stability_info: bool = False
    ) -> "SamplingClient":
        """A client that samples from the weights as they are now; with a name they are saved too.

        ValueError for record_stability_info, which the loss "stable_reinforce" of Tinker's servers alone reads.
        """
        if record_stability_info:
            raise ValueError('record_stability_info is for the loss "stable_reinforce", whose maths is not published.')
        if name is not None:
            self.save_weights_for_sampler(name)
        adapters = tree.map(torch.clone, P.lora.adapters(self.engine.params))  # the next update overwrites them
        return SamplingClient(self.base, P.lora.attach(self.base.params, adapters))

    async def save_weights_and_get_sampling_client_async(self, name: str | None = None) -> "SamplingClient":
        return self.save_weights_and_get_sampling_client(name)

    async def forward_backward_async(self, *args: Any, **options: Any) -> Future[types.ForwardBackwardOutput]:
        return self.forward_backward(*args, **options)

    async def forward_backward_custom_async(self, *args: Any, **options: Any) -> Future[types.ForwardBackwardOutput]:
        return self.forward_backward_custom(*args, **options)

    async def forward_async(self, *args: Any, **options: Any) -> Future[types.ForwardBackwardOutput]:
        return self.forward(*args, **options)

    async def optim_step_async(self, adam_params: Any) -> Future[types.OptimStepResponse]:
        return self.optim_step(adam_params)

    async def save_state_async(self, name: str, **unused: Any) -> Future[types.SaveWeightsResponse]:
        return self.save_state(name, **unused)

    async def save_weights_for_sampler_async(self, name: str, **unused: Any) -> Future[types.SaveWeightsResponse]:
        return self.save_weights_for_sampler(name, **unused)

    async def load_state_async(self, path: str | os.PathLike[str]) -> Future[types.LoadWeightsResponse]:
        return self.load_state(path)

    async def load_state_with_optimizer_async(self, path: str | os.PathLike[str]) -> Future[types.LoadWeightsResponse]:
        return self.load_state_with_optimizer(path)

    def _loss(self, name: str, given: Mapping[str, float] | None) -> OutputLoss:
        """The loss of a name and its numbers, one object each, for code is compiled per function."""
        loss = named_loss(name)
        if unknown := sorted((given or {}).keys() - loss.config.keys()):
            raise ValueError(f"The loss {name!r} has no {unknown[0]!r}; its numbers are {sorted(loss.config)}.")
        config = {**loss.config, **(given or {})}
        return self._kept((name, *sorted(config.items())), loss.make(config))

    def _kept(self, key: Any, function: LossFunction) -> OutputLoss:
        if key not in self._losses:
            self._losses[key] = logprob_loss(function, config=self.base.config)
        return self._losses[key]


class SamplingClient(Ready):
    """Draws answers from weights that no update changes. params: the base's, with adapters of their own."""

    def __init__(self, base: Base, params: Tree) -> None:
        self.base, self.params = base, params

    def get_tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self.base.folder)

    def sample(
        self, prompt: Any, num_samples: int, sampling_params: Any, include_prompt_logprobs: bool = False
    ) -> Future[types.SampleResponse]:
        """num_samples answers to a prompt, computed side by side. Without a seed each call draws with another."""
        tokens, config = prompt.to_ints(), self.base.config
        stop, texts, ids = sampling_params.stop, list[str](), list[int]()
        for one in [stop] if isinstance(stop, str) else stop or ():
            (texts if isinstance(one, str) else ids).append(one)  # type: ignore[arg-type]
        limit = sampling_params.max_tokens
        seed = sampling_params.seed
        found = generate(
            self.params,
            config,
            [tokens] * num_samples,
            max_new=config.max_position_embeddings - len(tokens) if limit is None else limit,
            sampling=Sampling(
                temperature=sampling_params.temperature,
                top_k=None if sampling_params.top_k == -1 else sampling_params.top_k,
                top_p=sampling_params.top_p,
            ),
            seeds=int(torch.randint(2**31, ())) if seed is None else seed,
            stop_ids=pretrained.end_ids(self.base.folder) if stop is None else ids,
            stop_texts=texts,
            tokenizer=self.get_tokenizer().inner if texts else None,
        )
        sequences = [
            types.SampledSequence("length" if reason == "max_new" else "stop", answer, logp.tolist(), uuid.uuid4().hex)
            for reason, answer, logp in zip(found.reasons, found.tokens, found.logp, strict=True)
        ]
        prompt_logprobs = self.compute_logprobs(prompt).result() if include_prompt_logprobs else None
        return Future(types.SampleResponse(sequences, prompt_logprobs))

    async def sample_async(self, *args: Any, **options: Any) -> types.SampleResponse:
        return self.sample(*args, **options).result()

    def compute_logprobs(self, prompt: Any) -> Future[list[float | None]]:
        """The log-probability of each token after those before it, None for the first."""
        tokens = torch.tensor(prompt.to_ints())
        (row,) = token_budget({"tokens": [tokens]}, len(tokens))[0]
        with torch.no_grad():
            logp = token_logprobs(self.params, row.batch, config=self.base.config)[0]
        return Future([None, *logp[0, :-1].tolist()])

    async def compute_logprobs_async(self, prompt: Any) -> list[float | None]:
        return self.compute_logprobs(prompt).result()


def named_loss(name: str) -> NamedLoss:
    """ValueError for an unknown name."""
    if name not in LOSSES:
        raise ValueError(f"There is no loss {name!r}; there are {', '.join(LOSSES)}, and forward_backward_custom.")
    return LOSSES[name]


def packed_data(data: Sequence[Any], loss_fn: str | None) -> list[PackedRow]:
    """The data in packed rows, with the inputs of the loss as entries. ValueError for a datum of another form."""
    needed = ("target_tokens", *(() if loss_fn is None else named_loss(loss_fn).inputs))
    if not data:
        raise ValueError("There is no datum: data is empty.")
    entries: dict[str, list[Tensor]] = {"tokens": [], **{name: [] for name in needed}}
    for number, datum in enumerate(data):
        tokens = datum.model_input.to_ints()
        entries["tokens"].append(torch.tensor(tokens, dtype=torch.int64))
        for name in needed:
            if name not in datum.loss_fn_inputs:
                given = sorted(datum.loss_fn_inputs)
                raise ValueError(f"Datum {number} has no {name!r}, which the loss {loss_fn!r} needs; it has {given}.")
            values = datum.loss_fn_inputs[name].to_torch()
            if values.shape != (len(tokens),):
                raise ValueError(
                    f"{name!r} of datum {number} has the shape {list(values.shape)}; it needs one number for each of "
                    f"the {len(tokens)} tokens."
                )
            entries[name].append(values if name == "target_tokens" else values.float())
    entries["labels"] = [values.long() for values in entries.pop("target_tokens")]
    return token_budget(entries, max(BUDGET, *map(len, entries["tokens"])))[0]


def _output(rows: Sequence[PackedRow], logps: Sequence[Tensor], total: float) -> types.ForwardBackwardOutput:
    each = unpacked(rows, [logp.detach() for logp in logps]).values()
    outputs = [{"logprobs": types.TensorData.from_torch(logp)} for logp in each]
    return types.ForwardBackwardOutput("TorchLossReturn", outputs, {"loss:sum": total})


def _saved(path: str | os.PathLike[str]) -> checkpoint.Checkpoint:
    found = checkpoint.latest(Path(path))
    if found is None:
        raise FileNotFoundError(f"{path} holds no saved state; TrainingClient.save_state makes one.")
    return found
