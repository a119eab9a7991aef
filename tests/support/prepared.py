"""What the tests' processes have imported when they start: torch and what is built on it, by one template each."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

import torch

from tests.support.template import Template


def torch_alone() -> None:
    """Import what every body needs; not Triton, which bodies tell first that it is to interpret kernels."""
    import torch.distributed.checkpoint  # noqa: F401


def transformers_models() -> None:
    """Import what models and trainers of Hugging Face transformers are built on, and the engine."""
    import torch._dynamo  # noqa: F401 - the first optimizer of a process would import it
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    import etp  # noqa: F401


def patched_megatron() -> None:
    """Import and patch Megatron, as bodies do that build or train its models."""
    import megatron_patches

    megatron_patches.apply()
    _import_what_trainings_need()


def stock_megatron() -> None:
    """Import Megatron as it is, given only what it cannot start without on this machine.

    Without CUDA that are the stand-ins for it, and from a wheel the missing Makefile's.
    """
    from megatron_patches import cpu, registry
    from megatron_patches.fixes import dataset_build

    if cpu.needed():
        cpu.prepare_environment()
        registry.install_records(cpu.records())
    registry.install_records([dataset_build.RECORD])
    _import_what_trainings_need()


def megatron_with_te_on_cpu() -> None:
    """Import and patch Megatron with Transformer Engine's layers, which :func:`te_on_cpu` describes."""
    from tests.integration import te_on_cpu
    from tests.support.te_site import SHARED

    te_on_cpu.prepare(str(SHARED))
    _import_what_trainings_need()


def _import_what_trainings_need() -> None:
    import megatron.core.tokenizers.text  # imports transformers; the first tokenizer of a process would
    import megatron.training.training  # noqa: F401
    import torch._dynamo  # noqa: F401 - the first optimizer of a process would import it


def te_on_cpu() -> None:
    """Import Transformer Engine, where :func:`tests.support.te_site.on_path` has put it, and give it CPU kernels."""
    from tests.support.te_site import SHARED

    sys.path.append(str(SHARED))
    import te_cpu_shim  # type: ignore[import-not-found]  # noqa: F401


def vllm_on_cpu() -> None:
    """Import what a server, an engine and its workers need; the modules of models are left to the engine.

    The processes that a copy starts are copies as well: by itself vLLM starts them anew on CPUs.
    """
    import setproctitle
    import vllm.entrypoints.llm
    import vllm.entrypoints.openai.api_server
    import vllm.envs
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.structured_output.backend_guidance
    import vllm.v1.structured_output.backend_xgrammar
    import vllm.v1.worker.cpu_worker

    import megatron_patches.refit.vllm.engine  # noqa: F401

    setproctitle.getproctitle()  # it finds the place of a title now or never: copies replace their environment
    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    _leave_convolutions_as_loaded()


def _leave_convolutions_as_loaded() -> None:
    """Keep vLLM from packing the weights of Mamba mixers' convolutions, as it does on CPUs with AMX.

    The mixers keep the loaded ones, so an engine then refuses new weights (docs/live_refit.md). Tests are to find the
    same on every CPU.
    """
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(dispatch)
    def dispatch_matrices(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            dispatch(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch_matrices


MEGATRON: Mapping[str, str] = {
    # Otherwise Megatron compiles its fused element-wise functions, for tens of seconds.
    "TORCH_COMPILE_DISABLE": "1",
    # With tensor parallelism it demands that kernels start in the order in which they are given to the device.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
VARIABLES: Mapping[Callable[[], None], Mapping[str, str]] = {
    torch_alone: {},
    transformers_models: {"HF_HUB_OFFLINE": "1"},
    patched_megatron: MEGATRON,
    stock_megatron: MEGATRON,
    megatron_with_te_on_cpu: MEGATRON,
    te_on_cpu: {"NVTE_TORCH_COMPILE": "0"},
    vllm_on_cpu: {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM 0.26.0 has no multi-latent attention for CPUs; without, it computes the same with whole heads.
        "VLLM_MLA_DISABLE": "1",
        # vLLM compiles what counts likelier tokens, and starts a compiler and two Pythons to see what they can do.
        "TORCH_COMPILE_DISABLE": "1",
    },
}
"""Environment variables, most of which are read while a module is imported."""

OF_ALL = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # torch asks for the names of loopback addresses when a TCPStore connects; a name server may not answer at all.
    "RES_OPTIONS": "timeout:1 attempts:1",
}


ENGINE_PYTHON_VARIABLE = "ETP_TESTS_ENGINE_PYTHON"


def engine_python() -> str:
    """The interpreter of engines: this one, or that of another environment, which has another vLLM."""
    return os.environ.get(ENGINE_PYTHON_VARIABLE, sys.executable)


@functools.cache
def engine_release() -> str:
    """The release of vLLM in the environment of engines; empty if there is none."""
    code = (
        "from importlib.metadata import distributions as all; "
        "print(*[one.version for one in all() if one.name in ('vllm', 'vllm-cpu')])"
    )
    said = subprocess.run([engine_python(), "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return said.stdout.strip()


def variables_of(prepare: Callable[[], None]) -> dict[str, str]:
    """Environment variables of a process in which ``prepare`` has run."""
    return {**OF_ALL, **VARIABLES[prepare]}


def template_of(prepare: Callable[[], None]) -> Template | None:
    """The session's template; None where there are GPUs and it cannot be copied, as most that makes CUDA ready."""
    if not torch.cuda.is_available():
        return _template_of(prepare)
    if prepare is not torch_alone or _template_of(prepare).obstacle():
        return None
    return _template_of(prepare)


@functools.cache
def _template_of(prepare: Callable[[], None]) -> Template:
    python = engine_python() if prepare is vllm_on_cpu else sys.executable
    template = Template(prepare, variables_of(prepare), python)
    atexit.register(template.close)
    return template
