"""An adapter of `train.engine.Engine` to verl (0.9.1 or newer): backend "fnmodels" of verl's engine registry.

    engine:                                  # YAML of verl; importing the class registers the backend
      _target_: train.integrations.verl.EngineConfig
      mesh: fsdp=2,tp=2

verl has its own virtual environment (`make verl`), because it needs an older transformers than this package's tests.
Nothing here imports verl before the names below are used; without verl they raise a ModuleNotFoundError.

engine    `VerlEngine`, the methods that verl calls       settings    from verl's configurations to ours
batches   from verl's microbatches to packed rows         cpu         a verl platform for machines without accelerator
rollout   `train.serve` as a rollout of verl              mailbox     weights to rollouts in other processes
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

__all__ = ["ActorConfig", "CriticConfig", "EngineConfig", "LanguageModelEngine", "ValueModelEngine"]

if find_spec("verl") is None:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise ModuleNotFoundError(
            f"train.integrations.verl.{name} needs verl 0.9.1 or newer, which is not installed: "
            "`make verl` installs it in a virtual environment of its own."
        )

else:
    from train.integrations.verl.cpu import register_cpu

    register_cpu()  # before verl's engines are imported, which look up the platform

    from verl.workers.config import ActorConfig as _ActorConfig
    from verl.workers.config import CriticConfig as _CriticConfig
    from verl.workers.config import EngineConfig as _EngineConfig
    from verl.workers.engine.base import BaseEngine, EngineRegistry

    from train.integrations.verl.engine import VerlEngine, logprob_outputs, value_outputs
    from train.integrations.verl.mailbox import register_mailbox
    from train.integrations.verl.rollout import register_rollout

    register_rollout()
    register_mailbox()

    _REGISTERED: dict[str, Any] = {"backend": "fnmodels", "device": ["cpu", "cuda"]}

    @dataclass
    class EngineConfig(_EngineConfig):
        """The section `engine` of verl's configuration.

        mesh: sizes of the mesh dimensions, as `Mesh.parse` reads them; empty: fsdp over all processes.
        sharing: fields of `train.parallel.Strategy`, such as {sequence: true}; `rows` is set here.
        dtype: "float32", or "bfloat16" with fp32 master weights in the optimizer.
        kernel: attention kernel, see `fnmodels.forward`; empty: the default.
        images: whether the model reads images, whose tower is not trained.
        """

        strategy: str = "fnmodels"
        mesh: str = ""
        sharing: dict[str, Any] = field(default_factory=dict)
        kernel: str = ""
        images: bool = False

    @dataclass
    class ActorConfig(_ActorConfig):
        """The sections `actor` and `ref` with `model_engine=fnmodels`; the engine's is `fnmodels` within."""

        strategy: str = "fnmodels"
        fnmodels: EngineConfig = field(default_factory=EngineConfig)
        use_remove_padding: bool = True
        use_rollout_log_probs: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            self.engine = self.fnmodels

    @dataclass
    class CriticConfig(_CriticConfig):
        """The section `critic` with `model_engine=fnmodels`; the engine's is `fnmodels` within."""

        strategy: str = "fnmodels"
        fnmodels: EngineConfig = field(default_factory=EngineConfig)

        def __post_init__(self) -> None:
            super().__post_init__()
            self.engine = self.fnmodels

    @EngineRegistry.register(model_type="language_model", **_REGISTERED)
    class LanguageModelEngine(VerlEngine, BaseEngine):
        """Actor, reference policy and SFT: log-probabilities and entropies."""

        outputs = staticmethod(logprob_outputs)

    @EngineRegistry.register(model_type="value_model", **_REGISTERED)
    class ValueModelEngine(VerlEngine, BaseEngine):
        """Critic: a value per token. A checkpoint of a language model is given a head, which begins at random."""

        outputs = staticmethod(value_outputs)
        head = "tokens"
