"""A platform of verl for machines without an accelerator: VERL_PLATFORM=cpu, processes joined by gloo.

verl has platforms for accelerators only. Set VERL_USE_EXTERNAL_MODULES=train.integrations.verl too, so that every
process registers this one before it asks for a platform.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

NAME = "cpu"


class CpuPlatform:
    """The methods of verl's PlatformBase; those that drive a device do nothing."""

    device_name = NAME
    vendor_name = "generic"

    @property
    def device_module(self) -> Any:
        """The functions that verl calls of a module such as torch.cuda."""
        zero = dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated"), _zero)
        zero |= dict.fromkeys(("memory_reserved", "current_device"), _zero)
        nothing = dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), _nothing)
        found = SimpleNamespace(**zero, **nothing, is_available=lambda: True, device_count=self.device_count)
        found.mem_get_info = lambda *_: (0, 0)
        found.get_rng_state, found.set_rng_state = torch.get_rng_state, torch.set_rng_state
        found.get_device_name = lambda *_: NAME
        return found

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # so it is chosen by VERL_PLATFORM alone

    def current_device(self) -> str:
        return NAME

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...


def register_cpu() -> None:
    """Registers the platform "cpu"; where VERL_PLATFORM chooses it, a process group can be made for it."""
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    if PlatformRegistry.get(NAME) is None:
        PlatformRegistry.register(platform=NAME)(type("PlatformCpu", (CpuPlatform, PlatformBase), {}))
        if os.environ.get("VERL_PLATFORM", "").strip().lower() == NAME:
            torch.distributed.init_process_group = _once_per_device(torch.distributed.init_process_group)


def _once_per_device(init: Callable[..., Any]) -> Callable[..., Any]:
    """`init_process_group` that takes verl's "cpu:gloo,cpu:gloo", which torch refuses, for "cpu:gloo"."""

    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> Any:
        if backend is not None:
            backend = ",".join(dict.fromkeys(backend.split(",")))
        return init(backend, *args, **options)

    return init_process_group


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _nothing(*_: Any, **__: Any) -> None: ...
