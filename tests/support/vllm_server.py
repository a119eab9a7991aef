"""A vLLM server in a process of its own, started as the documentation says, for tests of what comes over HTTP."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from examples.serving import write_byte_tokenizer
from examples.vllm_process import ON_A_CPU, running_server

MODEL = "under-test"


class VllmServer:
    """A running server.

    Attributes:
        url: its base.
    """

    def __init__(self, url: str, log: Path) -> None:
        self.url, self._log = url, log

    def log_probabilities(
        self, prompts: Sequence[Sequence[int]], timeout_s: float = 120.0, replica: int = 0
    ) -> list[list[float]]:
        """Of each prompt's tokens after the first; waits while the server is paused."""
        return [self._ask(list(prompt), timeout_s, replica) for prompt in prompts]

    def post(self, route: str) -> None:
        """Post to a route without a body; raises if it answers with an error."""
        request = urllib.request.Request(f"{self.url}/{route}", b"", method="POST")  # noqa: S310 - as below
        with urllib.request.urlopen(request, timeout=60.0):  # noqa: S310 - as below
            pass

    def was_asked(self, route: str) -> int:
        """How many requests for a route it has answered."""
        return self._log.read_text().count(f'"POST /{route} ') + self._log.read_text().count(f'"POST /{route}?')

    def _ask(self, prompt: list[int], timeout_s: float, replica: int) -> list[float]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(replica)}
        request = urllib.request.Request(  # noqa: S310 - this machine's own server
            f"{self.url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - as above
            found = json.load(answer)["choices"][0]["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], found[1:], strict=True)]


@contextmanager
def vllm_server(config: Mapping[str, object], folder: Path, *arguments: str) -> Iterator[VllmServer]:
    """Starts a server of a model with random weights; it ends with the context.

    Args:
        config: content of the model's ``config.json``.
        folder: for the model and the log.
        arguments: further ones of the command line.
    """
    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder, 255)
    log = folder / "server.log"
    more = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "64", "--block-size", "32", *arguments]
    # vLLM compiles what counts likelier tokens, and starts a compiler and two Pythons to see what they can do.
    variables = ON_A_CPU | {"TORCH_COMPILE_DISABLE": "1"}
    with running_server(folder, MODEL, "etp", more, variables, log) as url:
        yield VllmServer(url, log)
