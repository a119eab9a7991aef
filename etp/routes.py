"""Which transport and lanes serve a weight group: one transport per process group, one lane per direction."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from etp.collectives import select_transport
from etp.collectives.base import Route, Transport
from etp.collectives.order import ORDER_LABEL
from etp.collectives.works import WorkLine, gather_numbers, reported, start_on_cpu
from etp.config import EtpConfig
from etp.group import WeightGroup
from etp.mode import Mode
from etp.optimizer_steps import after_optimizer_steps
from etp.streams import Lane

logger = logging.getLogger(__name__)


class Routes:
    """The transports and lanes of one runtime, made where they are first needed.

    Args:
        config: options of the runtime.
    """

    def __init__(self, config: EtpConfig) -> None:
        self._config = config
        self.transports: dict[dist.ProcessGroup, Transport] = {}
        """Transports by process group; each was made for the device type that its weights were on at the time."""
        self._kinds: dict[dist.ProcessGroup, str] = {}
        self._routes: dict[tuple[dist.ProcessGroup, torch.device], Route] = {}
        self._names: dict[dist.ProcessGroup, str] = {}
        """The name that the ranks of each process group have agreed on for this runtime."""
        self._line = WorkLine()
        after_optimizer_steps(self, lambda routes, _: routes.watch_replays())

    def of(self, group: WeightGroup) -> Route:
        """The route of ``group``. Collective over its process group at the first call for that process group."""
        device = group.spec.device
        if group.route is None or group.route.device != device:
            known = self._routes.get((group.process_group, device))
            group.route = known or self._new_route(group.process_group, self._transport(group, device), device)
        return group.route

    def _new_route(self, process_group: dist.ProcessGroup, transport: Transport, device: torch.device) -> Route:
        gather, reduce = Lane(device, transport.expect), Lane(device, transport.expect)
        route = self._routes[process_group, device] = Route(transport, gather, reduce, device)
        return route

    def _transport(self, group: WeightGroup, device: torch.device) -> Transport:
        process_group = group.process_group
        transport = self.transports.get(process_group)
        # A transport made for weights on a CPU cannot serve them once they have moved to a GPU.
        if transport is None or self._kinds.setdefault(process_group, device.type) != device.type:
            transport = select_transport(self._config, process_group, device)
            logger.info("%s moves the shards of %s and the like", type(transport).__name__, group.name)
            self.transports[process_group], self._kinds[process_group] = transport, device.type
        return transport

    def _routed_transports(self) -> list[Transport]:
        """The transports of all routes, each once: one may serve several devices."""
        return list(dict.fromkeys(route.transport for route in self._routes.values()))

    def take_over(self, former: Routes) -> None:
        """Use the transports of a runtime that no longer needs them, if its options and process groups are the same.

        Their communicators, which live as long as the program, and symmetric memory were created collectively.
        """
        if _transport_options(self._config) != _transport_options(former._config):
            return
        for process_group, transport in former.transports.items():
            if process_group not in self.transports and process_group in former._kinds:
                self.transports[process_group] = transport
                self._kinds[process_group] = former._kinds[process_group]
        former.transports.clear()
        former._routes.clear()

    def change_mode(self, mode: Mode) -> None:
        """Drop events; see :attr:`etp.mode.Modes.parts`."""
        for route in self._routes.values():
            route.gather.change_mode()
            route.reduce.change_mode()
        for transport in self._routed_transports():
            transport.change_mode(capturing=mode.capture is not None)

    def watch_replays(self) -> None:
        """Watch that all graph replays so far in which ranks wait for each other end within the timeout."""
        for transport in self._routed_transports():
            transport.watch_replays()

    def note(self, process_group: dist.ProcessGroup, label: str) -> None:
        """Record a collective over ``process_group`` outside of its transport, for :meth:`compare_orders`."""
        transport = self.transports.get(process_group)
        if transport is not None and transport.order is not None:
            transport.order.record(label)

    def pair(self, process_group: dist.ProcessGroup, device: torch.device, label: str, members: Sequence[str]) -> None:
        """Hold the caller's stream until all ranks reach the same collective outside of the transport, if that can.

        Args:
            process_group: its ranks.
            device: where it runs.
            label: names it in messages.
            members: the names of what it combines, in order.
        """
        transport = self.transports.get(process_group)
        if transport is not None and transport.pairs:
            route = self._routes.get((process_group, device)) or self._new_route(process_group, transport, device)
            # On the lane of reductions, which wait for peers too, so that there is one order.
            route.reduce.start(partial(transport.pair, label, members), label=f"pairing of {label}").wait()

    def wait_for(
        self, collective: Callable[[], dist.Work | None], process_group: dist.ProcessGroup, label: str, on_cpu: bool
    ) -> None:
        """Wait for a collective outside of its transport, and watch that it ends in time.

        Args:
            collective: starts it; returns None if it is enqueued on the calling stream.
            process_group: its ranks.
            label: names it in messages.
            on_cpu: whether its tensors are on the CPU.
        """
        timeout_s = self._config.timeout_s
        with reported(label, process_group):
            if on_cpu and timeout_s is not None:
                work = start_on_cpu(collective, process_group, timeout_s)
            else:
                work = collective()
            if work is not None:
                self._line.wait(work, keep=on_cpu)
        transport = self.transports.get(process_group)
        if transport is not None and transport.watchdog is not None:
            transport.watchdog.expect_stream(label)

    def gather_numbers(self, numbers: torch.Tensor, process_group: dist.ProcessGroup, label: str) -> torch.Tensor:
        """All-gather a few numbers, ``[n]``, into ``[ranks, n]``, and watch that this ends in time. Collective."""
        everyone = gather_numbers(numbers, process_group, self._line, self._config.timeout_s, label)
        transport = self.transports.get(process_group)
        if transport is not None:
            transport.watch(label)
        return everyone

    def agree_on_name(self, process_group: dist.ProcessGroup, module: nn.Module) -> None:
        """Agree on a name, so that ranks that use different modules with equal names are detected. Collective."""
        name = [f"{type(module).__name__} {secrets.token_hex(4)}"]
        with reported("agreement on a name", process_group):
            dist.broadcast_object_list(name, group_src=0, group=process_group)
        self._names[process_group] = name[0]

    def compare_orders(self) -> None:
        """Detect ranks that use other weights than their peers: now or, with streams, at the next call. Collective.

        Raises:
            PeerMismatchError: on every rank of a process group whose ranks differ.
        """
        for (process_group, _), route in self._routes.items():
            order = route.transport.order
            if order is not None and order.names:
                order.verify()
                # After earlier reductions, and concurrent with compute.
                exchange = partial(order.exchange, self._names.get(process_group, ""))
                route.reduce.start(exchange, waits=(), label=ORDER_LABEL)
                if order.is_answered:
                    order.verify()

    def finish_reading(self) -> None:
        """If peers read shards in place, let the caller's stream wait for them, because it may change the shards."""
        for route in self._routes.values():
            if route.transport.reads_in_place:
                route.gather.start(route.transport.finish_reading, label="wait for peers' gathers").wait()


def _transport_options(config: EtpConfig) -> tuple[object, ...]:
    """The options that a transport is made with."""
    return config.transport, config.fp32_accumulation, config.timeout_s
