"""The trainer of ``benchmarks.refit_vllm --adapter-rank``: pushes all weights, merged weights, and an adapter alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.refit_vllm_trainer import LENGTH, PROMPT, Outcome, Task, draw, k3
from benchmarks.vllm_server import ServerError, VllmServer
from megatron_patches.refit import AdapterPublisher, RefitOptions, WeightPublisher
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.trainer.engines import HttpEngine

WAYS = ("merged", "whole", "adapter")
"""``whole`` comes after ``merged``, as the adapter needs a server with its own base weights."""
_NAME = "adapter"


def run_rank(rank: int, task: Task, meeting: str, results: Connection) -> None:
    """Runs all measurements of a trainer of one rank."""
    del rank, meeting
    trainer = AdapterTrainer(task)
    for way in task.ways:
        results.send(trainer.measure(way))


class AdapterTrainer:
    """A model of transformers with an adapter of PEFT on all linear layers of its decoder, in bfloat16.

    Args:
        task: what to measure.
    """

    def __init__(self, task: Task) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(1)
        self._task, self._version = task, task.served
        device = torch.device("cuda", task.gpus[0]) if task.gpus else torch.device("cpu")
        settings = {key: value for key, value in task.config.items() if key != "model_type"}
        config = AutoConfig.for_model(task.config["model_type"], **settings)
        self._sent = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()
        lora = LoraConfig(
            r=task.adapter_rank,
            lora_alpha=2 * task.adapter_rank,
            target_modules="all-linear",
            init_lora_weights=False,
        )
        self._model = get_peft_model(copy.deepcopy(self._sent), lora).eval()
        self._factors = [value for name, value in self._model.named_parameters() if "lora_" in name]
        self._server = VllmServer(task.server_port, task.timeout_s)

    def measure(self, way: str) -> Outcome:
        """Pushes versions one way."""
        found = Outcome(way)
        options = RefitOptions(staging_bytes=self._task.staging_bytes, timeout_s=self._task.timeout_s)
        try:
            made = (
                AdapterPublisher(self._model, _NAME, keep=1, options=options)
                if way == "adapter"
                else WeightPublisher(self._sent, options=options)
            )
            with closing(HttpEngine(self._server.url, self._task.timeout_s)) as engine, made as publisher:
                began = time.perf_counter()
                publisher.attach(engine)
                for push in range(self._task.repeats + 1):
                    self._version += 1
                    seconds = self._push(publisher, found, way)
                    if push:  # the first joins, plans and makes links
                        for part, value in seconds.items():
                            found.seconds.setdefault(part, []).append(value)
                    else:
                        found.prepare_s = time.perf_counter() - began
                model = f"{_NAME}@{self._version}" if way == "adapter" else "benchmark"
                self._compare(found, model, adapted=way != "whole")
        except (RefitError, ServerError) as error:
            found.failure = str(error)[:400]
        return found

    def _push(self, publisher: WeightPublisher, found: Outcome, way: str) -> dict[str, float]:
        """Changes the weights and pushes them. Returns the seconds of each part."""
        with torch.no_grad():
            for factor in self._factors:
                factor.copy_(factor.flatten().roll(1).view(factor.shape))
        if way != "merged":
            self._put_together(merged=False)  # as they are from one version to the next: no part of the push
        self._finish()
        began = time.perf_counter()
        if way == "merged":
            self._put_together(merged=True)
            self._finish()
        merged = time.perf_counter()
        handle = publisher.publish(self._version)
        sent = time.perf_counter()
        (report,) = handle.result(self._task.timeout_s).engines.values()
        if report.reason is not None:
            raise RefitError(report.reason)
        found.nbytes = report.nbytes
        parts = {"merge": merged - began} if way == "merged" else {}
        return {"push": time.perf_counter() - began, "send": sent - merged, **parts}

    def _finish(self) -> None:
        if self._task.gpus:
            torch.cuda.synchronize(self._task.gpus[0])

    def _layers(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """The layers with factors, and the weights that are sent of them."""
        from peft.tuners.lora import LoraLayer

        for name, layer in self._model.get_base_model().named_modules():
            if isinstance(layer, LoraLayer):
                yield layer, self._sent.get_parameter(f"{name}.weight")

    @torch.no_grad()
    def _put_together(self, *, merged: bool) -> None:
        """Makes the weights that are sent those of the base model, or those with the adapter."""
        for layer, weight in self._layers():
            weight.copy_(layer.base_layer.weight)
            if merged:
                weight.add_(layer.get_delta_weight("default"))

    def _compare(self, found: Outcome, name: str, *, adapted: bool) -> None:
        """KL of what the server generates against the model, and against that with or without its adapter."""
        drawn = draw(self._server, name)
        theirs = torch.tensor([sample.log_probs for sample in drawn], dtype=torch.float64)
        texts = torch.tensor([sample.tokens for sample in drawn], device=self._sent.device)
        ours, other = (self._log_probs(texts, adapted=with_it) for with_it in (adapted, not adapted))
        errors = (ours - theirs).abs()
        found.kl, found.untouched_kl = k3(theirs, ours), k3(theirs, other)
        found.log_prob_error, found.largest_error = float(errors.mean()), float(errors.max())

    @torch.no_grad()
    def _log_probs(self, texts: torch.Tensor, *, adapted: bool) -> torch.Tensor:
        with nullcontext() if adapted else self._model.disable_adapter():
            scores = self._model(input_ids=texts).logits.float().log_softmax(-1)
        found = scores[:, PROMPT - 1 : PROMPT + LENGTH - 1].gather(2, texts[:, PROMPT:, None])[:, :, 0]
        return found.double().cpu()
