"""An ``LLM`` in a process of its own, which others drive over a local socket.

Run as ``python -m tests.support.vllm_host ADDRESS LLM_OPTIONS_JSON``, or from a template. :class:`VllmHost` starts it
and waits until it answers; :class:`VllmConnection` is how any process calls it, and is an engine for a refit session.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.trainer.engine_client import PauseMode
from tests.support.completion import Completion
from tests.support.prepared import engine_python, template_of, variables_of, vllm_on_cpu
from tests.support.template import Process
from tests.support.vllm_digests import digests_of

_KEY = b"tests"
_LOG = "host.log"
_START_S = 240.0
_END_S = 20.0

LLM_OPTIONS: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 64,
    "block_size": 32,
    "num_gpu_blocks_override": 64,  # vLLM fills all of its cache with zeros, a gigabyte otherwise
    "weight_transfer_config": {"backend": "etp"},
}


class VllmHost:
    """Starts the process; ends it on leaving the context.

    Args:
        model: directory of the model.
        folder: where the socket and the log go.
        spawned: whether the engine and its workers are started as vLLM starts them: each as a new Python, which
            imports everything itself. Otherwise the engine is a copy of a template, and its workers copies of it.
        options: of ``LLM``, beside those above.
    """

    def __init__(self, model: Path, folder: Path, *, spawned: bool = False, **options: Any) -> None:
        self.address = str(folder / "host.sock")
        self._log = folder / _LOG
        merged = {**LLM_OPTIONS, "model": str(model), **options}
        workers = int(merged.get("tensor_parallel_size", 1)) * int(merged.get("pipeline_parallel_size", 1))
        merged.setdefault("distributed_executor_backend", "uni" if workers == 1 else "mp")
        self._options = json.dumps(merged)
        self._template = None if spawned else template_of(vllm_on_cpu)
        self._starts_left = 3
        self.process = self._start()

    def connect(self) -> VllmConnection:
        """Waits until the engine is up."""
        deadline = time.monotonic() + _START_S
        while True:
            # It makes the file of its socket a moment before it listens.
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return VllmConnection(self.address)
            if self.process.poll() is not None or time.monotonic() > deadline:
                log = self._log.read_text()
                # It looks for a free port and takes it later: on a busy machine another process may be first.
                if "EADDRINUSE" not in log or not self._starts_left or time.monotonic() > deadline:
                    raise RuntimeError(f"vLLM did not start:\n{log[-4000:]}")
                self._end()
                self.process = self._start()
            time.sleep(0.2)

    def _start(self) -> Process:
        self._starts_left -= 1
        variables = variables_of(vllm_on_cpu)
        if self._template is not None:
            arguments = (self.address, self._options)
            return self._template.start(serve, arguments, variables=variables, output=self._log, leads_session=True)
        with self._log.open("w") as log:
            return subprocess.Popen(
                [engine_python(), "-m", "tests.support.vllm_host", self.address, self._options],
                env=os.environ | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        # By itself it leaves nothing in /dev/shm.
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # Killed, it still has to give back its memory: on a busy machine that took more than half a minute.
        self.process.wait(180)


class VllmConnection:
    """Calls the process; an :class:`megatron_patches.refit.EngineClient`."""

    name = "the engine under test"

    def __init__(self, address: str) -> None:
        try:
            self._connection = Client(address, "AF_UNIX", _KEY)
        except ConnectionRefusedError as error:
            said = Path(address).with_name(_LOG).read_text(errors="replace")
            raise ConnectionRefusedError(f"the engine of {address} has ended, or not begun:\n{said[-4000:]}") from error
        # A session may still be ending in another thread when its caller asks for something else.
        self._lock = threading.Lock()

    def call(self, call: dict[str, Any]) -> None:
        self.run("call", call)

    def commit(self, version: int, *, reset_cache: bool) -> None:
        self.run("commit", version, reset_cache)

    def run(self, command: str, *args: Any) -> Any:
        """Runs a command of :class:`_Served`; raises RefitError with its reason if it fails."""
        with self._lock:
            self._connection.send((command, args))
            good, value = self._connection.recv()
        if not good:
            raise RefitError(value)
        return value

    def check_up(self) -> None:
        self.world_size()

    def world_size(self) -> int:
        return int(self.run("world_size"))

    def add_adapter(self, adapter: str, version: int, folder: Path, keep: int) -> list[int]:
        """See :class:`megatron_patches.refit.trainer.engine_client.AdapterServer`."""
        found: list[int] = self.run("add_adapter", adapter, version, str(folder), keep)
        return found

    def pause(self, mode: PauseMode) -> None:
        self.run("pause", mode.value)

    def resume(self, *, reset_cache: bool) -> None:
        self.run("resume", reset_cache)

    def parameters(self) -> list[dict[str, str]]:
        """Digest of each parameter and buffer, by name, for every worker."""
        found: list[dict[str, str]] = self.run("parameters")
        return found

    def sabotage(self, rank: int, where: str) -> None:
        """Lets the next refit fail on worker ``rank``; see :func:`sabotage`."""
        self.run("sabotage", rank, where)

    def log_probabilities(self, prompts: Sequence[Sequence[int]], adapter: str = "") -> list[list[float]]:
        """Of each prompt's tokens after the first; with an adapter, by name or from its folder."""
        if not adapter:
            found: list[list[float]] = self.run("log_probabilities", [list(prompt) for prompt in prompts], adapter)
            return found
        # With adapters vLLM 0.26.0 computes them of one prompt at a time alone.
        return [self.run("log_probabilities", [list(prompt)], adapter)[0] for prompt in prompts]

    def complete(self, prompt: Sequence[int], length: int, adapter: str = "") -> Completion:
        """What follows a prompt; it may read the prefix cache, which :meth:`log_probabilities` does not."""
        found: Completion = self.run("complete", list(prompt), length, adapter)
        return found


class _Served:
    """What the process can do."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        from megatron_patches.refit.trainer.engines import LocalEngine

        # A call that has failed for its caller may still be under way when another one comes.
        self.lock = threading.Lock()
        self._llm = LLM(**options)
        self._engine = LocalEngine(self._llm)

    def close(self) -> None:
        """Ends the workers."""
        self._llm.llm_engine.engine_core.shutdown()

    def world_size(self) -> int:
        return self._engine.world_size()

    def call(self, call: dict[str, Any]) -> None:
        self._engine.call(call)

    def commit(self, version: int, reset_cache: bool) -> None:
        self._engine.commit(version, reset_cache=reset_cache)

    def add_adapter(self, adapter: str, version: int, folder: str, keep: int) -> list[int]:
        return self._engine.add_adapter(adapter, version, Path(folder), keep)

    def pause(self, mode: str) -> None:
        self._engine.pause(PauseMode(mode))

    def resume(self, reset_cache: bool) -> None:
        self._engine.resume(reset_cache=reset_cache)

    def parameters(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self._llm.collective_rpc(digests_of)
        return found

    def sabotage(self, rank: int, where: str) -> None:
        self._llm.collective_rpc(sabotage, args=(rank, where))

    def kv_scales(self) -> list[tuple[float, ...]]:
        found: list[tuple[float, ...]] = self._llm.collective_rpc(_kv_scales)[0]
        return found

    def set_kv_scales(self, scales: list[tuple[float, float, float]]) -> None:
        self._llm.collective_rpc(_kv_scales, args=(scales,))

    def _adapter(self, adapter: str) -> Any:
        """The request for an adapter: a name that was added, or a folder."""
        from vllm.lora.request import LoRARequest

        if not adapter.startswith("/"):
            return self._engine.adapter(adapter) if adapter else None
        return LoRARequest(adapter, 1 + zlib.crc32(adapter.encode()) % (1 << 30), adapter)

    def log_probabilities(self, prompts: list[list[int]], adapter: str) -> list[list[float]]:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
        answers = self._llm.generate(
            [TokensPrompt(prompt_token_ids=p) for p in prompts],
            sampling,
            use_tqdm=False,
            lora_request=self._adapter(adapter),
        )
        return [
            [entry[token].logprob for token, entry in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def complete(self, prompt: list[int], length: int, adapter: str) -> Completion:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(max_tokens=length, temperature=0.0, logprobs=1, ignore_eos=True, detokenize=False)
        (answer,) = self._llm.generate(
            [TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False, lora_request=self._adapter(adapter)
        )
        (output,) = answer.outputs
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        log_probabilities = [entry[token].logprob for token, entry in pairs]
        return Completion(list(output.token_ids), log_probabilities, answer.num_cached_tokens, output.finish_reason)


def sabotage(worker: Any, rank: int, where: str) -> None:
    """Lets the next refit fail on one worker.

    When it makes ``memory``, when it has come to ``verify``, when it would ``convert`` what came, in ``build`` or,
    half done, in ``apply``; in place, half done in ``replace``. Or when it puts an ``adapter`` in its place.
    """
    from megatron_patches.refit.memory.unpacker import Unpacker
    from megatron_patches.refit.vllm import worker_session
    from megatron_patches.refit.vllm.adapter_files import StagedAdapter
    from megatron_patches.refit.vllm.reload import Replacement
    from megatron_patches.refit.vllm.version_memory import VersionMemory

    if worker.rank != rank:
        return
    places: dict[str, tuple[Any, str]] = {
        "memory": (VersionMemory, "make"),
        "convert": (worker_session, "finish"),
        "verify": (Unpacker, "verify"),
        "adapter": (StagedAdapter, "apply"),
    }
    owner, name = places.get(where, (Replacement, where))
    original = getattr(owner, name)

    def fail(*args: Any) -> None:
        setattr(owner, name, original)
        if where in ("apply", "replace"):
            original(*args)
        raise MemoryError(f"sabotaged {where}")

    setattr(owner, name, fail)


def _kv_scales(worker: Any, scales: list[tuple[float, float, float]] | None = None) -> list[tuple[float, ...]]:
    """Scales of queries, keys and values of every attention layer, in every form that vLLM keeps.

    Args:
        worker: the worker.
        scales: what they shall be, if not what they are.
    """
    from vllm.model_executor.layers.attention import Attention

    layers: list[Any] = [layer for layer in worker.get_model().modules() if isinstance(layer, Attention)]
    for layer, values in zip(layers, scales or (), strict=scales is not None):
        for kind, value in zip(("q", "k", "v"), values, strict=True):
            getattr(layer, f"_{kind}_scale").fill_(value)
            setattr(layer, f"_{kind}_scale_float", float(getattr(layer, f"_{kind}_scale")))
        layer._k_scale_cpu.copy_(layer._k_scale)
        layer._v_scale_cpu.copy_(layer._v_scale)
    return [
        tuple(
            float(getattr(layer, name))
            for name in (
                *("_q_scale", "_q_scale_float"),
                *("_k_scale", "_k_scale_float", "_k_scale_cpu"),
                *("_v_scale", "_v_scale_float", "_v_scale_cpu"),
            )
        )
        for layer in layers
    ]


def _serve(connection: Connection, served: _Served) -> None:
    while True:
        try:
            command, args = connection.recv()
        except (EOFError, OSError):
            return
        try:
            with served.lock:
                answer = True, getattr(served, command)(*args)
        except Exception as error:  # noqa: BLE001 - carried to the caller
            answer = False, f"{type(error).__name__}: {error}"
        # The caller may have been killed.
        with contextlib.suppress(OSError):
            connection.send(answer)


def serve(address: str, options: str) -> None:
    """Starts the engine with the options, and answers at the address."""
    served = _Served(json.loads(options))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        with Listener(address, "AF_UNIX", backlog=16, authkey=_KEY) as listener:
            while True:
                threading.Thread(target=_serve, args=(listener.accept(), served), daemon=True).start()
    finally:
        served.close()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
