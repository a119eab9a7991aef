"""Serves the exported model with vLLM on this machine's CPU, for the quick start, and sends requests to it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.vllm_process import ON_A_CPU, ServerError, starting_server


def write_byte_tokenizer(folder: Path, end: int) -> None:
    """Write a tokenizer to ``folder`` whose tokens are the 256 bytes, with ``end`` as the end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel maps each byte to a separate character. The alphabet's definition gives the order: printable bytes map
    # to themselves, the others to characters from 256 on.
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

    def __init__(self, url: str) -> None:
        self.url = url

    def complete(self, prompt: str, length: int) -> tuple[str, str]:
        """``length`` tokens sampled after ``prompt``, and the version of the weights that generated them.

        The seed is fixed, so the text differs only if the weights do.

        Raises:
            ServerError: if there is no answer.
        """
        sampling = {"temperature": 0.6, "top_k": 40, "seed": 0}
        body = {"model": "quickstart", "prompt": prompt, "max_tokens": length} | sampling
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


@contextmanager
def serve(model: Path, length: int, log: Path) -> Iterator[Server]:
    """Start a server with random weights in the shapes of ``model``; it ends with the context.

    Args:
        model: folder with a configuration and a tokenizer.
        length: maximum text length, in tokens.
        log: file for its output.

    Raises:
        ServerError: if it does not start.
    """
    arguments = [
        *f"--dtype float32 --enforce-eager --max-model-len {length} --block-size 32".split(),
        *("--middleware", "megatron_patches.refit.vllm.version_header.WeightsVersionHeader"),
        *("--worker-extension-cls", "megatron_patches.refit.vllm.worker.RefitWorker"),
    ]
    with starting_server(model, "quickstart", "etp", arguments, ON_A_CPU, log) as server:
        server.wait()
        yield Server(server.url)
