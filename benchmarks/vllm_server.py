"""A vLLM server for ``benchmarks.refit_vllm``: started with dummy weights, and asked for samples."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.vllm_process import ON_A_CPU, ServerError, starting_server, visible_gpus
from megatron_patches.refit.control.credentials import Credentials

__all__ = ["ALPHABET", "Sample", "ServerError", "VllmServer", "serve"]

ALPHABET = 256
"""Tokens that samples consist of: those of the tokenizer that comes with the model."""


@dataclass(frozen=True)
class Sample:
    """What the server wrote.

    Attributes:
        tokens: the prompt and what follows.
        log_probs: of the tokens after the prompt, as the server computed them.
    """

    tokens: list[int]
    log_probs: list[float]


class VllmServer:
    """A running server.

    Args:
        port: of this machine.
        timeout_s: seconds that an answer may take.

    Attributes:
        url: its base URL.
    """

    def __init__(self, port: int, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
        self.url = f"http://127.0.0.1:{port}"

    def sample(self, prompt: Sequence[int], length: int, seed: int, model: str = "benchmark") -> Sample:
        """Draws ``length`` tokens of a model or an adapter at temperature 1.

        Log-probabilities are those of the model's whole distribution, though only tokens of the alphabet are drawn.

        Raises:
            ServerError: if there is no answer.
        """
        answer = self.post(
            "v1/completions",
            {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": length,
                "temperature": 1.0,
                "seed": seed,
                "logprobs": 1,
                "return_token_ids": True,
                "ignore_eos": True,
                "allowed_token_ids": list(range(ALPHABET)),
            },
        )
        choice = answer["choices"][0]
        return Sample([*prompt, *choice["token_ids"]], choice["logprobs"]["token_logprobs"])

    def post(self, route: str, body: dict[str, Any] | None = None) -> Any:
        """Calls a route.

        Raises:
            ServerError: with what the server said.
        """
        request = urllib.request.Request(  # noqa: S310 - this machine's own server
            f"{self.url}/{route}",
            b"" if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", **Credentials().headers()},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:  # noqa: S310 - as above
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise ServerError(f"{self.url}/{route} answered {error.code}: {error.read()[:400]!r}") from error
        except OSError as error:
            raise ServerError(f"{self.url}/{route} does not answer: {error}") from error
        return json.loads(content) if content else {}


@contextmanager
def serve(model: Path, backend: str, gpus: Sequence[int], arguments: Sequence[str], log: Path) -> Iterator[VllmServer]:
    """Starts a server with weights that mean nothing; it ends with the context.

    Args:
        model: folder with a configuration and a tokenizer.
        backend: vLLM's name of the way weights are to come.
        gpus: those it may use, one a worker, as PyTorch numbers them here; none for a build of vLLM for CPUs.
        arguments: of the command line, beside those that the benchmark needs.
        log: where its output goes.

    Raises:
        ServerError: if it does not start.
    """
    names = visible_gpus() if gpus else []
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus), **({} if gpus else ON_A_CPU)}
    more = ["--dtype", "bfloat16", "--tensor-parallel-size", str(max(1, len(gpus))), *arguments]
    with starting_server(model, "benchmark", backend, more, variables, log) as server:
        server.wait()
        yield VllmServer(int(server.url.rpartition(":")[2]))
