"""Publishes weights from a framework that has its engines in Ray actors: what verl and NeMo-RL have in common.

Such a framework makes an object of this package in each of its trainer's ranks, and tells it when to send. It stops
requests before an update and continues them after it. Ray itself is needed only by a program that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.ray_engine import answer_of
from megatron_patches.refit.trainer.engine_client import PassedEngine
from megatron_patches.refit.trainer.publisher import WeightPublisher
from megatron_patches.refit.trainer.push_options import PushReport, RefitOptions

if TYPE_CHECKING:
    from torch import nn

    from megatron_patches.refit.trainer.engine_client import EngineClient


class FrameworkEngine(PassedEngine):
    """A framework's Ray actor, which stops and continues requests itself.

    Subclasses say which of the actor's methods pass a call on to the workers of vLLM, and empty their caches.

    Args:
        name: of the actor.
        world_size: number of its workers.
        timeout_s: seconds for one call.

    Attributes:
        absent: what to say if there is no such actor.

    Raises:
        RefitError: if there is no such actor.
    """

    absent: str

    def __init__(self, name: str, world_size: int, timeout_s: float) -> None:
        import ray

        super().__init__(name, world_size)
        try:
            self._actor = ray.get_actor(name)
        except ValueError as error:
            raise RefitError(f"there is no Ray actor {name}; {self.absent}") from error
        self._timeout_s = timeout_s

    def _call(self, method: str, *args: Any, **named: Any) -> Any:
        return answer_of(self.name, method, getattr(self._actor, method).remote(*args, **named), self._timeout_s)


class VersionSender:
    """Sends versions of a module to engines, all of which must serve each. Every rank of the trainer makes one.

    Args:
        options: of :class:`megatron_patches.refit.trainer.push_options.RefitOptions`, without ``host``.

    Attributes:
        version: number of the last version that was sent; -1 before.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.version = -1
        self._given = dict(options)
        self._host = ""
        self._engines: Sequence[EngineClient] = ()
        self._module: nn.Module | None = None
        self._publisher: WeightPublisher | None = None

    def connect(self, host: str, engines: Sequence[EngineClient]) -> None:
        """Notes who is to receive the next version; all of them join with it.

        Args:
            host: address of the trainer's first machine.
            engines: all engines, on the first rank; empty on the others.
        """
        self.close()
        self._host, self._engines = host, engines

    def send(self, module: nn.Module, version: int = 0) -> PushReport:
        """Sends a version, and waits until the engines serve it. On all ranks.

        Args:
            module: whose weights to send.
            version: its number, unless that is not more than the last one; then the next number.

        Raises:
            PartyFailedError: if an engine does not serve the version, with its reason.
        """
        if module is not self._module:
            self.close()
        if self._publisher is None:
            self._publisher = WeightPublisher(module, options=RefitOptions(**{"host": self._host, **self._given}))
            self._module = module
            for engine in self._engines:
                self._publisher.attach(engine)
        self.version = max(self.version + 1, version)
        report = self._publisher.publish(self.version).result()
        report.check_served()
        return report

    def close(self) -> None:
        """Disconnects. The next version connects again."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()


def checked_options(
    where: str, bucket_size: int, options: Mapping[str, Any], refused: Mapping[str, str]
) -> dict[str, Any]:
    """Options of a push, from a framework's settings.

    Args:
        where: what the framework calls the place of the settings, for messages.
        bucket_size: bytes for packets in one process.
        options: of :class:`megatron_patches.refit.trainer.push_options.RefitOptions`.
        refused: for each option that the framework determines, why it may not be set.

    Raises:
        ValueError: if an option is unknown, refused, or has a value that cannot be.
    """
    for name, why in refused.items():
        if name in options:
            raise ValueError(f"{where}.{name} is {options[name]!r}, but {why}; leave it out")
    taken = {"staging_bytes": bucket_size, **options}
    try:
        RefitOptions(**taken)
    except TypeError as error:
        raise ValueError(f"{where}: {error}; it takes the options of RefitOptions") from error
    return taken
