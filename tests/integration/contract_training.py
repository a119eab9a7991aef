"""A trainer written against vLLM's own weight transfer contract; run in vLLM's environment.

::

    python -m tests.integration.contract_training URL WORKERS MODEL ANOTHER

It prints what the server holds and how it labels that, as JSON: after a trainer that dies while its weights travel, and
after three versions of which the workers vote the second one down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import ModuleSource, ParamMeta, WeightSource, WeightTransferTrainerFactory

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.trainer.engine_client import SleepMode
from megatron_patches.refit.trainer.push_options import RefitOptions
from megatron_patches.refit.vllm_trainer import EtpTrainerInitInfo, GuardedSyncClient
from tests.support.vllm_server import VllmServer


def trainer_engine(url: str, workers: int, model: torch.nn.Module) -> Any:
    """As vLLM documents it."""
    return WeightTransferTrainerFactory.trainer_init(
        EtpTrainerInitInfo(workers, rank=0), client=GuardedSyncClient(url), source=ModuleSource(model)
    )


def die_while_sending(url: str, workers: int, model: torch.nn.Module) -> None:
    """Ends this process when the first bytes are to leave."""
    from megatron_patches.refit.transports.sending import SendingEnd

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    end_class: Any = SendingEnd
    end_class.send = die
    trainer_engine(url, workers, model).send_weights()


class Whole(WeightSource):
    """Yields whole tensors alone, and counts them.

    Args:
        model: the model.
        is_part: whether the first rank is said to have one of its tensors alone.
    """

    def __init__(self, model: torch.nn.Module, *, is_part: bool = False) -> None:
        self._model, self._is_part = model, is_part
        self.tensors = 0

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Since vLLM 0.33 a property."""
        owners = [(1,) if self._is_part and number else None for number, _ in enumerate(self._model.parameters())]
        return [
            ParamMeta(name, one.dtype, one.shape, **({} if owned is None else {"owners": owned}))
            for owned, (name, one) in zip(owners, self._model.named_parameters(), strict=True)
        ]

    def held_names(self) -> list[str] | None:
        """For vLLM 0.32."""
        return ["lm_head.weight"] if self._is_part else None

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Since vLLM 0.33."""
        for pair in self._model.named_parameters():
            self.tensors += 1
            yield pair

    __iter__ = iter_full
    """For vLLM 0.32."""


def refusals(model: torch.nn.Module) -> list[str]:
    """What trainers are told without a server."""
    client = GuardedSyncClient("http://127.0.0.1:9")
    factory, own = WeightTransferTrainerFactory, EtpTrainerInitInfo
    attempts: list[Callable[[], Any]] = [
        lambda: own(0, rank=0),
        lambda: own(1, rank=0, options=RefitOptions(memory=MemoryMode.IN_PLACE)),
        lambda: own(1, rank=0, options=RefitOptions(sleeping=SleepMode.WAKE)),
        lambda: factory.trainer_init(own(1, rank=0), client=client),
        lambda: factory.trainer_init(own(1, rank=0), client=client, source=Whole(model, is_part=True)),
        lambda: factory.trainer_init(own(1, rank=0), client=client, source=ModuleSource(model)).send_weights(),
    ]
    said = []
    for attempt in attempts:
        try:
            attempt()
        except (ValueError, RefitError) as error:
            said.append(str(error))
    source = Whole(model)
    factory.trainer_init(own(1, rank=1), client=client, source=source).send_weights()
    assert source.tensors == len(list(model.parameters()))  # and the client was not called
    return said


def main() -> None:
    """See the module's docstring."""
    url, workers, *folders = sys.argv[1:]
    server, found, reason = VllmServer(url, Path()), [], ""
    model, second = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in folders)

    def note() -> None:
        found.append((server.get("weight_info"), server.parameters()))

    note()
    if (child := os.fork()) == 0:
        die_while_sending(url, int(workers), second)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    note()
    engine = trainer_engine(url, int(workers), model)
    engine.send_weights()
    note()
    model.load_state_dict(second.state_dict())
    server.rpc("sabotage")
    try:
        engine.send_weights()
    except RefitError as error:
        reason = str(error)
    note()
    engine.send_weights()
    note()
    engine.shutdown()
    json.dump({"reason": reason, "states": found, "refusals": refusals(model)}, sys.stdout)


if __name__ == "__main__":
    main()
