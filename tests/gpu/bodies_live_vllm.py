"""Trainers that push into a vLLM server on the same GPU, for :mod:`tests.gpu.test_live_vllm`."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_patches.refit import AdapterPublisher, Fate, KVScales, RefitOptions
from megatron_patches.refit.checkpoints.export import ExportOptions, export_checkpoint
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.family import build_config
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.source.describe import describe_model
from megatron_patches.refit.trainer.engine_client import SleepMode
from megatron_patches.refit.trainer.engines import HttpEngine
from megatron_patches.refit.trainer.session import RefitSession
from tests.integration.live_refit import LONG_PROMPT, PROMPTS
from tests.support.launch import device
from tests.support.vllm_server import MODEL, VllmServer, complete

if TYPE_CHECKING:
    from benchmarks.refit_vllm_model import TrainerModel

LENGTH = 256
ANSWER = 24
TAGS = ("weights", "kv_cache")
_ALL_PROMPTS = [*PROMPTS, LONG_PROMPT]


class State(NamedTuple):
    """What a server holds and answers."""

    parameters: list[dict[str, str]]
    probabilities: list[list[float]]
    completions: list[tuple[list[int], list[float]]]


class Push(NamedTuple):
    """A version and what it has: the number of the model, and scales of the KV cache."""

    version: int
    model: int
    kv_scales: Mapping[int | str, KVScales] | None = None


class After(NamedTuple):
    """A server after a push, KL(engine || trainer) before and after it, in nats per token, and why no session began."""

    state: State
    kl_before: float = math.nan
    kl: float = math.nan
    reason: str = ""


class Woken(NamedTuple):
    """A server that slept at a level, after a push.

    Attributes:
        slept: whether it said that it slept, before.
        sleeps: whether it does after the push.
        state: once it is awake.
        memory: GiB of the GPU in use, by stage.
    """

    slept: bool
    sleeps: bool
    state: State
    memory: dict[str, float]


def state_of(server: VllmServer, model: str = MODEL) -> State:
    # With a salt of its own nothing is read from the prefix cache, so that equal weights take equal steps.
    done = [complete(server.url, prompt, ANSWER, model=model, salt=secrets.token_hex(4)) for prompt in _ALL_PROMPTS]
    return State(
        server.parameters(),
        server.log_probabilities(_ALL_PROMPTS, model=model),
        [(one.tokens, one.log_probabilities) for one in done],
    )


class Trainer:
    """Megatron's model, of Transformer Engine's layers on a GPU; it has a number, and other weights for each number."""

    def __init__(self, config: Mapping[str, object]) -> None:
        import megatron_patches

        megatron_patches.apply()
        from megatron.core import parallel_state

        from benchmarks.refit_vllm_model import TrainerModel

        parallel_state.destroy_model_parallel()  # those of an earlier body in this process
        settings = dict(build_config(family_from_config(config), "bfloat16"))
        self._model: TrainerModel = TrainerModel(settings, TrainerMesh(), device(), LENGTH)
        self._vocab_size = int(str(config["vocab_size"]))
        self._number = 0

    def become(self, number: int) -> None:
        """Rotate the elements of each shard by one for each number, which keeps their distribution."""
        with torch.no_grad():
            for live in describe_model([self._model.module]):
                content = live.memory[: live.shard.as_storage().logical_numel]
                content.copy_(content.roll(number - self._number))
        self._number = number

    def change(self, share: float, seed: int) -> None:
        """Double or halve some of the elements."""
        with torch.no_grad():
            for live in describe_model([self._model.module]):
                bits = live.memory[: live.shard.as_storage().logical_numel].view(torch.int16)
                generator = torch.Generator(bits.device).manual_seed(seed)
                chosen = torch.rand(bits.shape, generator=generator, device=bits.device) < share
                bits ^= chosen.to(torch.int16) << 7  # the lowest bit of the exponent

    def export(self, path: str, weight_format: WeightFormat) -> None:
        options = ExportOptions(weight_format=weight_format)
        export_checkpoint([self._model.module], path, vocab_size=self._vocab_size, options=options)

    def session(self, url: str, options: Mapping[str, Any]) -> RefitSession:
        """A session that is not prepared yet."""
        return RefitSession(
            [self._model.module],
            [HttpEngine(url, 120.0)],
            vocab_size=self._vocab_size,
            options=RefitOptions(timeout_s=90.0, staging_bytes=64 << 20, **options),
        )

    def kl(self, url: str) -> float:
        """Of what a server writes, engine against trainer, in nats per token."""
        done = complete(url, LONG_PROMPT, 64)
        ours = self._model.log_probs([[*LONG_PROMPT, *done.tokens]], len(LONG_PROMPT))[0]
        ratio = ours - torch.tensor(done.log_probabilities, dtype=torch.float64)
        return float((ratio.exp() - 1 - ratio).mean())


def export(
    rank: int, world_size: int, config: dict[str, Any], weight_format: WeightFormat, models: dict[str, int]
) -> None:
    """Models as checkpoints, each at its path."""
    del rank, world_size
    trainer = Trainer(config)
    for path, number in models.items():
        trainer.become(number)
        trainer.export(path, weight_format)


def push(
    rank: int, world_size: int, config: dict[str, Any], url: str, pushes: Sequence[Push], options: dict[str, Any]
) -> list[After]:
    """Several pushes of one session, which has these options; one item if no session begins."""
    del rank, world_size
    trainer, server, found = Trainer(config), VllmServer(url, Path()), []
    with contextlib.closing(trainer.session(url, options)) as session:
        try:
            session.prepare()
        except RefitError as error:
            return [After(state_of(server), reason=str(error))]
        for version, number, scales in pushes:
            trainer.become(number)
            before = trainer.kl(url)
            session.push(version, kv_scales=scales)
            found.append(After(state_of(server), before, trainer.kl(url)))
    return found


def push_changes(
    rank: int, world_size: int, config: dict[str, Any], url: str, shares: Sequence[float], path: str
) -> tuple[list[int], State]:
    """Pushes a version, and after each change of a share of its elements what has changed; saves the last to ``path``.

    Returns:
        Bytes of each push, and what the server holds and answers at the end.
    """
    del rank, world_size
    trainer, server, sent = Trainer(config), VllmServer(url, Path()), []
    with contextlib.closing(trainer.session(url, {"payload": PayloadKind.DELTA})) as session:
        session.prepare()
        for version, share in enumerate((0.0, *shares), 1):
            trainer.change(share, version)
            sent.append(session.push(version).nbytes)
    trainer.export(path, WeightFormat.TRAINED)
    return sent, state_of(server)


def _memory() -> float:
    """GiB in use, of all processes; 0 without a GPU."""
    if device().type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def push_to_a_sleeper(
    rank: int, world_size: int, config: dict[str, Any], url: str, naps: Sequence[tuple[SleepMode, int, int]]
) -> tuple[list[Woken], str]:
    """Each nap's mode, level and number of the model that is pushed; why a session that refuses sleepers did not begin.

    The server is awake before and after.
    """
    del rank, world_size
    trainer, server, found, reason = Trainer(config), VllmServer(url, Path()), [], ""
    engine = HttpEngine(url, 60.0)
    for version, (mode, level, number) in enumerate(naps, 1):
        trainer.become(number)
        memory = {"awake before": _memory()}
        server.post(f"sleep?level={level}")
        memory["asleep"] = _memory()
        slept = engine.is_sleeping()
        with contextlib.closing(trainer.session(url, {"sleeping": mode})) as session:
            session.prepare()
            memory["joined, weights awake"] = _memory()
            session.push(version)
            memory["after the push"] = _memory()
            sleeps = engine.is_sleeping()
            if sleeps:
                _wake(server)
            memory["awake"] = _memory()
            found.append(Woken(slept, sleeps, state_of(server), memory))
    server.post("sleep?level=2")
    with contextlib.closing(trainer.session(url, {"sleeping": SleepMode.REFUSE})) as session:
        try:
            session.prepare()
        except RefitError as error:
            reason = str(error)
    _wake(server)
    engine.close()
    return found, reason


def _wake(server: VllmServer) -> None:
    for tag in TAGS:
        server.post(f"wake_up?tags={tag}")


def base_model(config: Mapping[str, object]) -> Any:
    """Of Hugging Face, in bfloat16; the same whenever it is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {key: value for key, value in config.items() if key not in {"model_type", "architectures"}}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings)).bfloat16()


def save_base(rank: int, world_size: int, config: dict[str, Any], path: str) -> None:
    """The model that :func:`publish_adapters` adapts, as a checkpoint."""
    del rank, world_size
    base_model(config).save_pretrained(path)


def publish_adapters(
    rank: int, world_size: int, config: dict[str, Any], url: str, paths: dict[int, str], folder: str
) -> tuple[dict[int, State], State]:
    """Random LoRA factors, published by version and saved by PEFT; each version's answers, and then the base's."""
    del rank, world_size
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=6, lora_alpha=13, target_modules=targets, init_lora_weights=False, use_rslora=True)
    model = get_peft_model(base_model(config), lora).to(device())
    server, found = VllmServer(url, Path()), {}
    with AdapterPublisher(model, "math", keep=2, folder=folder, options=RefitOptions(timeout_s=60.0)) as publisher:
        publisher.attach(url)
        for version, path in paths.items():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(parameter, std=0.1 * version)
            model.save_pretrained(path)
            report = publisher.publish(version).result(60.0)
            assert {one.fate for one in report.engines.values()} == {Fate.SERVES}, report
            found[version] = state_of(server, f"math@{version}")
    return found, state_of(server)
