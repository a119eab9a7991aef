"""Runs the vLLM servers of ``make grpo`` on this machine: each has a GPU of its own, or all share the CPU."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from examples.serving import write_byte_tokenizer
from examples.vllm_process import ON_A_CPU, RunningServer, new_process, starting_server


class Servers:
    """Servers that have been told to start; :func:`start_servers` makes and ends them.

    Attributes:
        urls: their base URLs.
    """

    def __init__(
        self, folder: Path, length: int, number: int, gpus: Sequence[str], python: str, stack: ExitStack
    ) -> None:
        self._folder, self._length, self._gpus, self._python, self._stack = folder, length, gpus, python, stack
        self._servers = [self._start(at, f"vllm{at}.log") for at in range(number)]
        self.urls = [server.url for server in self._servers]

    def _start(self, at: int, log: str, port: int = 0) -> RunningServer:
        arguments = [
            *f"--enforce-eager --max-model-len {self._length}".split(),
            *("--middleware", "megatron_patches.refit.vllm.version_header.WeightsVersionHeader"),
            *("--worker-extension-cls", "megatron_patches.refit.vllm.worker.RefitWorker"),
        ]
        if self._gpus:
            arguments += ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.5"]  # the rest is for new weights
            variables = {"CUDA_VISIBLE_DEVICES": self._gpus[at]}
        else:
            arguments += ["--dtype", "float32", "--block-size", "32"]
            # Compiling is not worthwhile for such a small model, and vLLM would start compilers first.
            variables = {**ON_A_CPU, "TORCH_COMPILE_DISABLE": "1"}
        launch = functools.partial(new_process, python=self._python)
        server = starting_server(
            self._folder, "sums", "etp", arguments, variables, self._folder / log, launch, port=port
        )
        return self._stack.enter_context(server)

    def kill(self, url: str) -> None:
        """Kill a server as if its machine were lost, and begin to start another one on its port."""
        at = self.urls.index(url)
        lost = self._servers[at].process
        os.killpg(lost.pid, signal.SIGKILL)
        lost.wait(60.0)
        self._servers[at] = self._start(at, "vllm-back.log", int(url.rpartition(":")[2]))

    def look(self) -> None:
        """Look after servers that are starting; raises ServerError if one does not start."""
        for server in self._servers:
            server.is_up()

    def wait(self) -> None:
        """Wait until all servers answer; raises ServerError if one does not start."""
        for server in self._servers:
            server.wait()


@contextmanager
def start_servers(
    folder: Path,
    config: Mapping[str, Any],
    length: int,
    number: int,
    gpus: Sequence[str] = (),
    python: str = sys.executable,
) -> Iterator[Servers]:
    """Start servers with random weights, without waiting; they end with the context.

    Args:
        folder: for the model's files and logs.
        config: content of the model's ``config.json``; its tokens are bytes.
        length: most tokens of a prompt and its answer.
        number: of servers.
        gpus: one for each, as ``CUDA_VISIBLE_DEVICES`` names them; none for a build of vLLM for CPUs.
        python: the interpreter of vLLM's environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_byte_tokenizer(folder, config["eos_token_id"])
    with ExitStack() as stack:
        yield Servers(folder, length, number, gpus, python, stack)
