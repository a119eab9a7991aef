"""An engine worker's part in sessions about LoRA adapters: receives versions, and writes or drops them.

Nothing that serves changes, so the engine answers requests all the while. A version that all workers of the engine have
written is added by vLLM itself, when the trainer asks for it; see [Note: adapter versions].

Adapters that an engine would not apply in full are refused before anything of them is sent. vLLM checks the last part
of modules' names and one rank. It leaves out modules of layers that it does not have, and takes factors of a wrong size
in part: it would answer, but not with the adapter that was trained.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear

from megatron_patches.refit.control.adapter_names import FACTOR_A, FACTOR_B, PREFIX, SCALE, session_folder
from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.control.messages import Model, State, StateLog
from megatron_patches.refit.errors import (
    LostWeightsError,
    ModelMismatchError,
    RefitError,
    StaleVersionError,
    TransferError,
    UnsupportedEngineError,
    first_of,
)
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.memory.ports import Memory
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.vllm.adapter_files import AdapterFiles, StagedAdapter, tensors_of_peft
from megatron_patches.refit.vllm.all_or_none import VOTE_S, AllOrNone, ReceivedVersion, report_commit
from megatron_patches.refit.vllm.aside import Aside
from megatron_patches.refit.vllm.refit_call import RefitCall
from megatron_patches.refit.vllm.releases import installed_release
from megatron_patches.refit.vllm.same_model import check_same_model
from megatron_patches.refit.vllm.version_memory import VersionMemory
from megatron_patches.refit.vllm.worker_session import LEAVING_S, ServingModel

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")  # where versions are received, wherever the model is: vLLM loads them from there


class AdapterSession:
    """One session about one adapter. It joins in its own thread.

    Args:
        call: the call to join.
        serving: the model that serves.
        files: the engine's adapters on this worker.
        log: the state of the session.

    Raises:
        RefitError: if the rendezvous cannot be reached.
    """

    def __init__(self, call: RefitCall, serving: ServingModel, files: AdapterFiles, log: StateLog) -> None:
        self._call, self._serving, self._files, self._log = call, serving, files, log
        self._folder = session_folder(call.folder, call.token)
        self._assembly = Assembly(call.invitation, call.sources + serving.worker, serving.name)
        self._party = DestinationParty(self._assembly, call.links(serving.config))
        self._memory: VersionMemory | None = None  # once the parties have agreed on a plan
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the tensors, by name
        self._dtype = torch.bfloat16  # in which vLLM computes with adapters, once that is known
        self._latest = -1
        self._received = ReceivedVersion(log, undo=StagedAdapter.undo)
        self._aside = Aside(_HOST)
        self._aside.start(f"join-{call.adapter}", self._join)

    def receive(self, call: RefitCall) -> None:
        """Starts to receive a version.

        Raises:
            RefitError: if the session has not been joined.
        """
        self.abandon()
        if self._memory is None:
            raise RefitError(f"asked to receive version {call.version}, but {self._received.instead}")
        self._log.enter(State.SENDING, call.version)
        self._aside.start(f"receive-{call.adapter}-{call.version}", lambda: self._take(call))

    def commit(self, version: int) -> None:
        """Puts a received version in its place on all workers or on none, and tells the trainer.

        Raises:
            RefitError: if a worker cannot.
        """
        reason = None
        try:
            self._place(version)
        except Exception as error:
            reason = f"{type(error).__name__}: {describe_error(error)}"
            raise
        finally:
            if self._memory is not None:  # otherwise it has failed to join, and stays so
                self._log.enter(State.READY, version, reason or "")
            report_commit(self._party, version, reason)

    def abandon(self) -> None:
        """Drops what has been received.

        Raises:
            RefitError: if a version that is arriving does not end.
        """
        self._aside.finish(self._call.timeout_s)
        if self._memory is not None:  # otherwise it has failed to join, and says so
            self._received.clear()

    def end(self) -> None:
        """Leaves the session. The versions that it has brought stay.

        Raises:
            RefitError: if a version that is arriving does not end.
        """
        self._party.leave()
        self._aside.finish(LEAVING_S)
        self.abandon()
        self._party.close()
        self._log.enter(State.CLOSED)

    def _join(self) -> None:
        try:
            manifest = self._party.prepare(self._want)
            self._assembly.most_silence_s = self._call.lease_s
            self._memory = VersionMemory(manifest, _HOST)
            self._log.enter(State.READY)
        except Exception as error:
            self._log.enter(State.FAILED, reason=describe_error(error))
            self._received.instead = f"joining failed ({describe_error(error)})"
            self._party.close()
            raise

    def _want(self, model: Model) -> Manifest:
        """All of the adapter, whatever part of the model this worker has: vLLM cuts the factors when it loads them."""
        serving = self._serving
        manager = manager_of(serving.model, serving.config)
        check_same_model(model.config, serving.config.model_config.hf_text_config, type(serving.model).__name__)
        check_adapter(manager, model.tensors)
        self._shapes, self._dtype = {spec.name: spec.shape for spec in model.tensors}, manager.lora_config.lora_dtype
        return Manifest.of_whole(serving.worker, socket.gethostname(), model.tensors)

    def _take(self, call: RefitCall) -> None:
        try:
            made = self._party.receive(call.version, call.step, call.linked, lambda: self._make(call))
            tensors = {name: torch.as_tensor(flat).view(self._shapes[name]) for name, flat in made.items()}
            staged = StagedAdapter(
                self._files, self._folder, call.adapter, call.version, tensors_of_peft(tensors, self._dtype)
            )
            staged.write()
            self._received.put(call.version, staged)
        except Exception as error:
            self._received.lose(call.version, error)
            raise

    def _make(self, call: RefitCall) -> Memory:
        if call.version <= self._latest:
            raise StaleVersionError(f"asked to receive version {call.version} after version {self._latest}")
        self._files.check_new(call.adapter, call.version)
        if self._memory is None:
            raise RefitError("this worker has not joined the session")
        made = self._memory.make(self._call.timeout_s)
        self._party.beside_bytes = self._memory.beside_bytes
        return made

    def _place(self, version: int) -> None:
        workers = AllOrNone(version, self._latest, self._call.timeout_s + VOTE_S)
        staged = self._received.take(version, workers, lambda: self._aside.finish(self._call.timeout_s))
        try:
            workers.exchange(staged)
        except Exception as error:
            staged.undo()
            if isinstance(error, LostWeightsError):  # none are: at worst, files are left of which vLLM is not told
                raise TransferError(str(error)) from error
            raise
        self._latest = version


class Adapters:
    """The adapters of one worker. See [Note: calls]; ``record`` does nothing, because a model's loader takes no part.

    Args:
        serving: the model that serves.
    """

    def __init__(self, serving: ServingModel) -> None:
        self._serving = serving
        self._sessions: dict[str, tuple[str, AdapterSession]] = {}  # with their tokens, by adapter
        self._files = AdapterFiles()

    def carry_out(self, call: RefitCall) -> None:
        """Carries out one call.

        Raises:
            RefitError: if it fails, or is of a session that has ended.
            ValueError: if it is unknown.
        """
        calls: dict[str, Callable[[RefitCall, AdapterSession], None]] = {
            "record": lambda *_: None,
            "receive": lambda call, session: session.receive(call),
            "commit": self._commit,
            "abandon": lambda _, session: session.abandon(),
            "keep": lambda call, _: self._files.keep(call.adapter, call.versions),
        }
        if call.call == "join":
            self._join(call)
        elif call.call in calls:
            token, session = self._sessions.get(call.adapter, ("", None))
            if session is None or token != call.token:
                if call.call == "commit":  # other workers may vote on it
                    AllOrNone(call.version, -1, VOTE_S).decline()
                raise TransferError(
                    f"asked to {call.call} for the adapter {call.adapter} by another session than the one that this "
                    "engine has joined since; let one trainer at a time push an adapter"
                )
            calls[call.call](call, session)
        else:
            raise ValueError(f"call is {call.call!r}; about an adapter it must be join or one of {', '.join(calls)}")

    def close(self) -> None:
        """Leaves all sessions, and removes the files."""
        for _, session in self._sessions.values():
            session.end()
        self._sessions.clear()
        self._files.close()

    def _join(self, call: RefitCall) -> None:
        _, earlier = self._sessions.pop(call.adapter, ("", None))
        if earlier is not None:
            earlier.end()
        who = f"the trainer of adapter {call.adapter} at {call.host}:{call.port}"
        session = AdapterSession(call, self._serving, self._files, StateLog(who, self._serving.level))
        self._sessions[call.adapter] = call.token, session
        logger.log(self._serving.level, "refit: %s pushes into this engine from now on", who)

    def _commit(self, call: RefitCall, session: AdapterSession) -> None:
        session.commit(call.version)
        logger.log(self._serving.level, "refit: version %d of adapter %s is written", call.version, call.adapter)


def manager_of(model: nn.Module, config: VllmConfig) -> Any:
    """The manager of a model's adapters in vLLM.

    Raises:
        UnsupportedEngineError: if the engine has none, or runs in a way in which adapters would not reach all of it.
    """
    manager = getattr(model, "lora_manager", None)
    if config.lora_config is None or manager is None:
        raise UnsupportedEngineError("the engine was started without --enable-lora; start it with it")
    parallel = config.parallel_config
    for option, number in {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size,
        "--data-parallel-size": parallel.data_parallel_size,
        "--api-server-count": parallel._api_process_count,
    }.items():
        if number > 1:
            raise UnsupportedEngineError(
                f"adapters are not pushed to an engine with {option} {number}; start it with 1"
            )
    return manager


def check_adapter(manager: Any, tensors: Sequence[TensorSpec]) -> None:
    """Checks that an engine has each module of an adapter, in the size that the module's factors need.

    Args:
        manager: vLLM's manager of adapters.
        tensors: the adapter's tensors; see [Note: adapter tensors].

    Raises:
        ModelMismatchError: naming modules, and the rank or the sizes.
    """
    shapes = {spec.name: spec.shape for spec in tensors}
    reasons = []
    sizes = _sizes(manager)
    mapper = installed_release().adapter_names(manager.model)
    most = manager.lora_config.max_lora_rank
    for name in (name for name in shapes if name.endswith(SCALE)):
        prefix = name.removesuffix(SCALE)
        module, _ = parse_fine_tuned_lora_name(prefix + FACTOR_A, mapper)
        (rank, inputs), (outputs, _) = shapes[prefix + FACTOR_A], shapes[prefix + FACTOR_B]
        path = prefix.removeprefix(PREFIX)
        if module not in sizes:
            reasons.append(f"the engine has no module {path} to which an adapter can be added")
        elif rank > most:
            reasons.append(f"{path} has rank {rank}, and the engine takes at most {most} (--max-lora-rank)")
        elif sizes[module] != (inputs, outputs):
            wanted = "{} inputs and {} outputs".format(*sizes[module])
            reasons.append(f"{path} has {inputs} inputs and {outputs} outputs in the trainer, {wanted} in the engine")
    if reasons:
        raise ModelMismatchError(first_of(reasons, "; "))


def _sizes(manager: Any) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear module as adapters know it, over all workers, by vLLM's name."""
    found = {}
    for name, wrapper in manager.modules.items():
        layer = getattr(wrapper, "base_layer", None)
        if isinstance(layer, LinearBase):
            parts = manager.packed_modules.get(name)
            sizes = zip(parts, _outputs(layer), strict=False) if parts else [(name, layer.output_size)]
            found.update({part: (int(layer.input_size), int(outputs)) for part, outputs in sizes})
    return found


def _outputs(layer: Any) -> Iterator[int]:
    """Outputs of each part of a layer that stacks several, over all workers."""
    if isinstance(layer, QKVParallelLinear):
        yield layer.total_num_heads * layer.head_size
        yield layer.total_num_kv_heads * layer.head_size
        yield layer.total_num_kv_heads * layer.v_head_size
    elif isinstance(layer, MergedColumnParallelLinear):
        yield from layer.output_sizes
