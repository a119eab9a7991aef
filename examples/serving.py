"""vLLM on this machine's CPU, for the quick start: a server of the exported model, and requests to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 300.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # opens the routes that weights are replaced through
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


class ServerError(Exception):
    """The server did not start, or did not answer."""


def write_byte_tokenizer(folder: Path, end: int) -> None:
    """A tokenizer in ``folder`` whose tokens are the 256 bytes, with ``end`` to end a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel writes each byte as a character of its own; in what order is known from the alphabet's definition:
    # printable bytes stand for themselves, the others for characters from 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=letters[end]).save_pretrained(folder)


class Server:
    """A running server.

    Attributes:
        url: its base URL.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def complete(self, prompt: str, length: int) -> tuple[str, str]:
        """``length`` tokens after ``prompt``, always the likeliest, and the version of the weights that wrote them.

        Raises:
            ServerError: if there is no answer.
        """
        body = {"model": "quickstart", "prompt": prompt, "max_tokens": length, "temperature": 0.0}
        request = urllib.request.Request(  # noqa: S310 - this machine's own server
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120.0) as answer:  # noqa: S310 - as above
                version = answer.headers.get("x-weights-version", "unknown")
                text: str = json.load(answer)["choices"][0]["text"]
        except OSError as error:
            raise ServerError(f"{self.url} does not answer: {error}") from error
        return text, version

    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5.0):  # noqa: S310 - as above
                return True
        except OSError:
            return False


@contextmanager
def serve(model: Path, length: int, log: Path) -> Iterator[Server]:
    """Start a server with random weights in the shapes of ``model``; it ends with the context.

    Args:
        model: folder with a configuration and a tokenizer.
        length: longest text, in tokens.
        log: where its output goes.

    Raises:
        ServerError: if it does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        server = Server(probe.getsockname()[1])
    where = f"--host 127.0.0.1 --port {server.url.rpartition(':')[2]}"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *f"--model {model} --served-model-name quickstart {where}".split(),
        *f"--load-format dummy --dtype float32 --enforce-eager --max-model-len {length} --block-size 32".split(),
        *("--weight-transfer-config", json.dumps({"backend": "etp"})),
        *("--middleware", "megatron_patches.refit.vllm.version_header.WeightsVersionHeader"),
        *("--worker-extension-cls", "megatron_patches.refit.vllm.worker.RefitWorker"),
    ]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(  # noqa: S603
            command, env=os.environ | ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.is_up():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"vLLM did not start; see {log}")
            time.sleep(0.5)
        yield server
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=30.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=30.0)
