"""Requests samples from running vLLM servers, and reports which version of the weights generated each."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_patches.refit.control.credentials import Credentials

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy, as for pushes
_HOW_TO_SAY_VERSIONS = (
    "start it with --middleware megatron_patches.refit.vllm.version_header.WeightsVersionHeader and "
    "--worker-extension-cls megatron_patches.refit.vllm.worker.RefitWorker"
)


class GrpoError(Exception):
    """An error that ends the run; its message is one line that says what to change."""


class EngineError(Exception):
    """An engine does not answer; another engine may."""


@dataclass(frozen=True)
class Answer:
    """One sample of an engine.

    Attributes:
        prompt_ids: tokens of the prompt.
        token_ids: tokens that the engine generated, including the end-of-text token.
        log_probabilities: those of ``token_ids`` under the engine's sampling distribution.
        text: the same as text, without the end-of-text token.
        versions: versions of the weights that generated it, oldest first; several if weights changed during generation.
        engine: URL of the engine.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    log_probabilities: list[float]
    text: str
    versions: tuple[int, ...]
    engine: str


class Engine:
    """One server.

    Args:
        url: its base.
        timeout_s: maximum seconds per answer.
        credentials: credentials sent with each request.

    Attributes:
        url: its base.
    """

    def __init__(self, url: str, timeout_s: float, credentials: Credentials) -> None:
        self.url = url.rstrip("/")
        self._timeout_s, self._credentials = timeout_s, credentials
        self._model = ""

    def sample(self, prompt: str, number: int, most_tokens: int, *, seed: int, greedy: bool = False) -> list[Answer]:
        """Sample answers to one prompt from the model's own distribution.

        Args:
            prompt: the exact text for the model.
            number: number of samples.
            most_tokens: maximum answer length, in tokens.
            seed: seed of the samples.
            greedy: whether to decode greedily instead.

        Raises:
            EngineError: if the engine does not answer.
            GrpoError: if it refuses the request, or does not report which version answered.
        """
        # Override everything that generation_config.json may set: samples must come from the trained distribution.
        plain = {"temperature": 0.0 if greedy else 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1}
        body = {"prompt": prompt, "n": number, "max_tokens": most_tokens, "seed": seed, "logprobs": 0, **plain}
        answer, headers = self._complete({**body, "return_token_ids": True})
        said = headers.get("x-weights-version")
        if said is None:
            raise GrpoError(
                f"{self.url} does not say which version of the weights has answered; {_HOW_TO_SAY_VERSIONS}"
            )
        versions = tuple(map(int, said.split(",")))
        return [
            Answer(
                choice["prompt_token_ids"],
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                choice["text"],
                versions,
                self.url,
            )
            for choice in answer["choices"]
        ]

    def log_probabilities(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token after the first.

        Raises:
            EngineError: if the engine does not answer.
            GrpoError: if it refuses the request.
        """
        answer, _ = self._complete({"prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0})
        found = answer["choices"][0]["prompt_logprobs"][1:]
        return [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], found, strict=True)]

    def _complete(self, body: dict[str, Any]) -> tuple[Any, Mapping[str, str]]:
        if not self._model:
            self._model = self._call("v1/models", None)[0]["data"][0]["id"]
        return self._call("v1/completions", {"model": self._model, **body})

    def _call(self, route: str, body: dict[str, Any] | None) -> tuple[Any, Mapping[str, str]]:
        request = urllib.request.Request(  # noqa: S310 - the scheme of --refit-engines is checked
            f"{self.url}/{route}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", **self._credentials.headers()},
        )
        try:
            with _OPENER.open(request, timeout=self._timeout_s) as answer:
                return json.load(answer), answer.headers
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())[:500]
            if error.code >= 500:
                raise EngineError(f"{self.url} answered {error.code}: {said}") from error
            raise GrpoError(f"{self.url} refused a request with {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise EngineError(f"{self.url} does not answer: {error}") from error
