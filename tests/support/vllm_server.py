"""A vLLM server in a process of its own, started as the documentation says, for tests of what comes over HTTP.

Its processes are copies of a template (:mod:`tests.support.template`) unless a test says otherwise.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from examples.serving import write_byte_tokenizer
from examples.vllm_process import ON_A_CPU, ServerProcess, new_process, starting_server
from megatron_patches.refit.control.credentials import Credentials
from tests.support.completion import Completion
from tests.support.prepared import engine_python, template_of, vllm_on_cpu

MODEL = "under-test"
PACED = ("--logits-processors", "tests.support.vllm_paced:Paced")
"""Arguments of a server that :func:`complete` can ask to be slow."""
_SOME = 4


class VllmServer:
    """A running server.

    Args:
        url: its base.
        log: where its output goes.
        headers: of requests for inference.
        process: number of the process that answers requests; its engines are children of it.

    Attributes:
        url: its base.
        process: as given.
    """

    def __init__(
        self, url: str, log: Path, headers: Mapping[str, str] = MappingProxyType({}), process: int = 0
    ) -> None:
        self.url, self._log, self._headers, self.process = url, log, headers, process

    def log_probabilities(
        self, prompts: Sequence[Sequence[int]], timeout_s: float = 120.0, replica: int = 0, model: str = MODEL
    ) -> list[list[float]]:
        """Of each prompt's tokens after the first; waits while the server is paused."""
        return [self._ask(list(prompt), timeout_s, replica, model) for prompt in prompts]

    def post(self, route: str) -> None:
        """Post to a route without a body; raises if it answers with an error."""
        request = urllib.request.Request(  # noqa: S310 - as below
            f"{self.url}/{route}", b"", Credentials().headers(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=60.0):  # noqa: S310 - as below
            pass

    def get(self, route: str) -> object:
        """What a route answers."""
        request = urllib.request.Request(f"{self.url}/{route}", headers=Credentials().headers())  # noqa: S310 - as below
        with urllib.request.urlopen(request, timeout=60.0) as answer:  # noqa: S310 - as below
            found: object = json.load(answer)
        return found

    def log(self) -> str:
        """All that it has said."""
        return self._log.read_text()

    def parameters(self) -> list[dict[str, str]]:
        """Digest of each parameter and buffer, by name, for every worker; if it has ``vllm_digests.EXTENSION``."""
        found: list[dict[str, str]] = self.rpc("digests")
        return found

    def rpc(self, method: str) -> Any:
        """What a method of each worker returns."""
        request = urllib.request.Request(  # noqa: S310 - as below
            f"{self.url}/collective_rpc",
            json.dumps({"method": method}).encode(),
            {"Content-Type": "application/json", **Credentials().headers()},
        )
        with urllib.request.urlopen(request, timeout=60.0) as answer:  # noqa: S310 - as below
            return json.load(answer)["results"]

    def was_asked(self, route: str) -> int:
        """How many requests for a route it has answered."""
        return self.log().count(f'"POST /{route} ') + self.log().count(f'"POST /{route}?')

    def _ask(self, prompt: list[int], timeout_s: float, replica: int, model: str) -> list[float]:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(replica), **self._headers}
        request = urllib.request.Request(  # noqa: S310 - this machine's own server
            f"{self.url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - as above
            found = json.load(answer)["choices"][0]["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], found[1:], strict=True)]


def complete(
    url: str,
    prompt: Sequence[int],
    length: int,
    begun: threading.Event | None = None,
    *,
    salt: str = "",
    pace_s: float | None = None,
    timeout_s: float = 120.0,
    model: str = MODEL,
) -> Completion:
    """What a server adds to a prompt; it may read its prefix cache, which it does not for probabilities of a prompt.

    Args:
        url: the server's base.
        prompt: the prompt's tokens.
        length: how many tokens to ask for.
        begun: is set once some tokens have come.
        salt: of the cache; nothing is read from it that was cached with another.
        pace_s: how much longer each token takes, of a server with :data:`PACED`.
        timeout_s: how long to wait for the next tokens.
        model: name of the model, or of an adapter.
    """
    asked = {"model": model, "prompt": list(prompt), "max_tokens": length, "temperature": 0.0, "logprobs": 1}
    how = {"ignore_eos": True, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
    more: dict[str, object] = {"cache_salt": salt} if salt else {}
    if pace_s is not None:
        more["vllm_xargs"] = {"pace_s": pace_s}
    request = urllib.request.Request(  # noqa: S310 - this machine's own server
        f"{url}/v1/completions", json.dumps(asked | how | more).encode(), {"Content-Type": "application/json"}
    )
    tokens: list[int] = []
    log_probabilities: list[float] = []
    cached, ended = -1, ""
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - as above
        for line in answer:
            event = line.decode().removeprefix("data: ").strip()
            if not event or event == "[DONE]":
                continue
            part = json.loads(event)
            for choice in part["choices"]:
                tokens += choice["token_ids"]
                log_probabilities += choice["logprobs"]["token_logprobs"]
                ended = choice["finish_reason"] or ended
            if part.get("usage"):
                cached = part["usage"]["prompt_tokens_details"]["cached_tokens"]
            if begun is not None and len(tokens) >= _SOME:
                begun.set()
    return Completion(tokens, log_probabilities, cached, ended)


def copied_process(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ServerProcess:
    """:func:`examples.vllm_process.new_process`, but a copy of a template, and what it starts are copies of it."""
    template = template_of(vllm_on_cpu)
    if template is None:
        return new_process(arguments, environment, log, engine_python())
    return template.start(_run_module, (arguments,), variables=environment, output=log, leads_session=True)


def _run_module(arguments: Sequence[str]) -> None:
    # What is forked from an event loop would wake it with signals of its own, as if they were the loop's.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    sys.argv[:] = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


@contextmanager
def vllm_server(
    config: Mapping[str, object], folder: Path, *arguments: str, api_key: str = "", spawned: bool = False
) -> Iterator[VllmServer]:
    """Starts a server of a model with random weights; it ends with the context.

    Args:
        config: content of the model's ``config.json``.
        folder: for the model and the log.
        arguments: further ones of the command line.
        api_key: what requests for inference must show; none by default.
        spawned: whether each of its processes is a new Python, which imports everything itself, as it is for users.
    """
    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder, 255)
    log = folder / "server.log"
    more = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "64", "--block-size", "32"]
    more += ["--num-gpu-blocks-override", "64"]  # vLLM fills all of its cache with zeros, a gigabyte otherwise
    more += ["--enable-prompt-tokens-details", *arguments]
    # vLLM compiles what counts likelier tokens, and starts a compiler and two Pythons to see what they can do.
    variables = ON_A_CPU | {"TORCH_COMPILE_DISABLE": "1"}
    if api_key:
        variables = {**variables, "VLLM_API_KEY": api_key}
    launch = functools.partial(new_process, python=engine_python()) if spawned else copied_process
    with starting_server(folder, MODEL, "etp", more, variables, log, launch) as server:
        server.wait()
        shown = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        yield VllmServer(server.url, log, shown, server.process.pid)
