"""Requests to a vLLM server that take as long as a test wants, so that the test finds them in progress on any machine.

vLLM imports this module in a server that is started with ``vllm_server.PACED``.
"""

from __future__ import annotations

import time

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class Paced(AdapterLogitsProcessor):
    """Each token of a request with ``vllm_xargs={"pace_s": SECONDS}`` takes that much longer."""

    def is_argmax_invariant(self) -> bool:
        """It is, but vLLM would leave it out of greedy requests if told so."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """What waits before each token; None for requests that ask for no pace."""
        pace_s = (params.extra_args or {}).get("pace_s")
        if pace_s is None:
            return None

        def wait(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            del output
            time.sleep(float(pace_s))
            return logits

        return wait
