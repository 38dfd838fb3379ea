"""What the loaders of vLLM and SGLang do with our names, kept in tests/train/handover/SAMPLER.json.xz.

    python -m tests.support.sampler_loaders vllm FOLDER...

writes that file with the released classes of models, on a CPU. The folders hold the unpacked wheel of the sampler
(`pip download --no-deps vllm`) and what it needs from its import on. Compiled and optional packages that loading does
not use are replaced by empty ones, and nothing is computed with the models. For each bucket of one module: the names
that were sent, and the elements of each of the loader's parameters that were written. Written parameters are those
that were NaN before.
"""

import importlib.abc
import importlib.machinery
import json
import lzma
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
from torch import Tensor

import params as P
from fnmodels.models.vision_language import qwen2_5_vl
from tests.support.cases import cases, generic_params
from tests.support.pictured import VALUES
from train.handover.bucket import buckets

FOLDER = Path(__file__).parents[1] / "train" / "handover"
CASES = """
    llama llama_tied qwen2 qwen3 qwen3_moe mixtral deepseek_v3 glm4_moe gemma2 gemma3_text gpt_oss olmoe phi3
    ernie4_5_moe olmo2 granite
"""
# Fields of published files, or of the samplers' own classes of configs, which they read and ours need not have. Fields
# of a wrapper's text are put beside it too, as the published files have them.
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"moe_layer_freq": 1},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "qwen2_5_vl": {"encoder_only": False, "language_only": False},
}
EMPTY = """
    aiter anthropic av cuda cutlass decord deep_ep deep_gemm diskcache fastsafetensors flash_attn flashinfer gguf
    instanttensor IPython kernels llguidance lmformatenforcer mcp mistral_common modelscope msgpack numba openai
    openai_harmony outlines outlines_core pynvml quack runai_model_streamer sentencepiece sgl_kernel soundfile tilelang
    timm torch_memory_saver torchao torchaudio torchcodec torchvision triton xformers
"""
PORT = "29777"
Load = Callable[[list[tuple[str, Tensor]]], Any]


class _Empty(types.ModuleType):
    """A package in which every name is there and does nothing."""

    __path__: ClassVar[list[str]] = []
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in EMPTY.split():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Empty(spec.name)

    def exec_module(self, module: Any) -> None: ...


def in_vllm(folder: str) -> tuple[Any, Load]:
    """(an empty model, the function that loads pairs into it)."""
    import vllm.distributed.parallel_state as groups
    import vllm.model_executor.models.registry as registry
    import vllm.platforms
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    registry._run_in_subprocess = lambda inspect: inspect()
    how: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 16, "enforce_eager": True}
    model_config = ModelConfig(model=folder, tokenizer=folder, **how)
    config = VllmConfig(model_config=model_config, device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            groups.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{PORT}", 0, "gloo")
            groups.initialize_model_parallel(1, 1)
            groups._EP = groups._EP or groups._TP
        model = initialize_model(config, model_config=model_config)

    def load(pairs: list[tuple[str, Tensor]]) -> None:
        with set_current_vllm_config(config):
            model.load_weights(iter(pairs))

    return model, load


def in_sglang(folder: str) -> tuple[Any, Load]:
    """(an empty model, the function that loads pairs into it)."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs
    from transformers import AutoConfig

    settings = ServerArgs(model_path=folder, device="cpu", disable_shared_experts_fusion=True)
    publish(settings, role="scheduler", ranks=SpawnRanks(world_rank=0))
    if not torch.distributed.is_initialized():
        where = {"distributed_init_method": f"tcp://127.0.0.1:{PORT}", "backend": "gloo"}
        init_distributed_environment(world_size=1, rank=0, local_rank=0, **where)
        initialize_model_parallel()
    config = AutoConfig.from_pretrained(folder)
    model = ModelRegistry.resolve_model_cls(config.architectures)[0](config)
    return model, lambda pairs: model.load_weights(iter(pairs))


def configs() -> Iterator[tuple[str, Any]]:
    yield from ((case.name, case.config) for case in cases() if case.name in CASES.split())
    yield "qwen2_5_vl", qwen2_5_vl.Config.from_hf(VALUES)


def recorded(make: Callable[[str], tuple[Any, Load]], name: str, config: Any) -> dict[str, Any]:
    """{"parameters": {name: elements}, "modules": [[names sent, {parameter: elements written}]]}."""
    params = generic_params(config)
    with tempfile.TemporaryDirectory() as folder:
        P.save_pretrained(folder, config, params)
        path = Path(folder) / "config.json"
        values = json.loads(path.read_text())
        values = {**values.get("text_config", {}), **FIELDS.get(name, {}), **values}
        path.write_text(json.dumps(values))
        model, load = make(folder)
        parameters = {name: leaf.data for name, leaf in model.named_parameters()}
        for leaf in parameters.values():
            leaf.fill_(torch.nan)
        modules = []
        for bucket in buckets(P.export(config, params), 1):
            before = {name: int(leaf.isnan().sum()) for name, leaf in parameters.items()}
            load(bucket.tensors())
            written = {name: before[name] - int(leaf.isnan().sum()) for name, leaf in parameters.items()}
            names = {entry.name: torch.Size(entry.shape).numel() for entry in bucket.entries}
            padded = {"embed_tokens.weight", "lm_head.weight"}  # to a multiple of 64 rows, of zeros
            found = {
                name: next(iter(names.values())) if name.endswith(tuple(padded)) else count
                for name, count in written.items()
                if count
            }
            modules.append([list(names), found])
        assert not any(bool(leaf.isnan().any()) for leaf in parameters.values()), f"{name}: a parameter is not filled"
    return {"parameters": {name: leaf.numel() for name, leaf in parameters.items()}, "modules": modules}


def main(sampler: str, *folders: str) -> None:
    import transformers  # before packages are replaced, because it looks which of them are there

    assert transformers
    for name in ("tvm_ffi", "xgrammar"):
        sys.path += folders
        __import__(name)
    sys.meta_path.append(_Finder())
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "SGLANG_USE_CPU_ENGINE": "1"}
    found: dict[str, Any] = {"version": version(sampler)}
    refused = {}
    for name, config in configs():
        try:
            found[name] = recorded({"vllm": in_vllm, "sglang": in_sglang}[sampler], name, config)
        except Exception as error:  # of the sampler, which does not run everything on a CPU
            refused[name] = f"{type(error).__name__}: {error}"[:200]
    (FOLDER / f"{sampler}.json.xz").write_bytes(lzma.compress(json.dumps(found).encode(), preset=9))
    print(sampler, found["version"], "recorded", *(name for name in found if name != "version"))
    print(*(f"refused {name}: {why}" for name, why in refused.items()), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
