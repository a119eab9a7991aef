"""Which network interfaces (NICs) UCX may use for the memory of one GPU, by option or by topology.

NICs have UCX's names: ``mlx5_0:1`` is port 1 of an RDMA NIC, ``eth0`` an IP interface. ``/sys`` shows which NICs
there are, which of them are up, and where they are in the PCI tree.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import re
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron_patches.refit.errors import RefitError

logger = logging.getLogger(__name__)

AUTO_NICS = "auto"
"""Option value for the RDMA NICs that are closest to the GPU."""
ALL = "all"
"""Option value that leaves the choice to UCX."""
_DEVICES = "UCX_NET_DEVICES"
_RAILS = ("UCX_MAX_RMA_RAILS", "UCX_MAX_RNDV_RAILS")  # over how many NICs UCX stripes one transfer
_NAME = re.compile(r"[A-Za-z0-9_.-]+(:[0-9]+)?")
_NUMBER = re.compile(r"[0-9]+")
_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
_DOWN = "is down"
_GET_ADDRESSES = 0x8912  # SIOCGIFCONF
_ADDRESSES = struct.Struct("16s 4x 4s 16x")  # struct ifreq: name of the interface, sockaddr_in
_MOST_ADDRESSES = 4096
_LINK_LOCAL = "fe80"
_STARTING = threading.Lock()


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        number: CUDA's number of it in this process.
        address: its PCI address, such as ``0000:1b:00.0``.
    """

    number: int
    address: str


class Choice(NamedTuple):
    """What UCX is told.

    Attributes:
        variables: environment variables that UCX reads when it starts; empty to leave the choice to it.
        reason: which NICs it uses and why, for the log.
        warning: what the user would not expect of the choice; empty if nothing.
    """

    variables: Mapping[str, str]
    reason: str
    warning: str = ""


class _Nic(NamedTuple):
    """A NIC of this machine.

    Attributes:
        name: UCX's name.
        rdma: whether it is an RDMA NIC, not an IP interface.
        trouble: why it cannot be used, as a predicate; empty if it can.
        at: its place in the PCI tree.
        card: place of the card that it is a virtual function of; if it is none, its own.
    """

    name: str
    rdma: bool
    trouble: str
    at: Path
    card: Path


def parse_nics(text: str) -> Mapping[str, Sequence[str]]:
    """Reads the option.

    Args:
        text: ``auto``, ``all``, the NICs of all GPUs (``mlx5_0,mlx5_1``), or those of each GPU
            (``0=mlx5_0+mlx5_1,1=mlx5_2``). A GPU is named by CUDA's number in the process, or by its PCI address.

    Returns:
        NICs by GPU, with the key ``""`` for all GPUs. Empty for ``auto`` and ``all``.

    Raises:
        ValueError: if it is none of these.
    """
    if text in (AUTO_NICS, ALL):
        return {}
    found: dict[str | None, list[str]] = {}
    for item in text.split(","):
        gpu, per_gpu, names = item.rpartition("=")
        found.setdefault(_key(gpu) if per_gpu else "", []).extend(names.split("+") if per_gpu else [names])
    named = [name for names in found.values() for name in names]
    if None in found or ("" in found and len(found) > 1) or not all(map(_NAME.fullmatch, named)):
        raise ValueError(
            f"nics is {text!r}; it must be {AUTO_NICS}, {ALL}, NICs such as mlx5_0,mlx5_1, or NICs of each GPU such as "
            "0=mlx5_0+mlx5_1,1=mlx5_2"
        )
    return {gpu: names for gpu, names in found.items() if gpu is not None}


def _addresses() -> Mapping[str, Collection[str]]:
    """IP addresses of each interface that has any, but IPv6 addresses that are link-local."""
    found: dict[str, set[str]] = {}
    entries = array("B", bytes(_ADDRESSES.size * _MOST_ADDRESSES))
    start, nbytes = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        used, _ = struct.unpack("iP", fcntl.ioctl(asking, _GET_ADDRESSES, struct.pack("iP", nbytes, start)))
    for label, address in _ADDRESSES.iter_unpack(memoryview(entries)[:used]):
        interface = label.partition(b"\0")[0].decode().partition(":")[0]  # a second address may be that of eth0:1
        found.setdefault(interface, set()).add(socket.inet_ntoa(address))
    for line in _read(Path("/proc/net/if_inet6")).splitlines():
        address, *_, interface = line.split()
        if not address.startswith(_LINK_LOCAL):
            found.setdefault(interface, set()).add(str(ipaddress.IPv6Address(bytes.fromhex(address))))
    return found


def choose_nics(
    option: str,
    gpu: Gpu | None,
    host: str,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/sys"),
    addresses: Callable[[], Mapping[str, Collection[str]]] = _addresses,
) -> Choice:
    """Chooses the NICs for the memory of one GPU, or of the host.

    Args:
        option: see :func:`parse_nics`.
        gpu: the GPU; None for host memory.
        host: address at which other parties reach this one. Unless the option or the user names NICs, or leaves the
            choice to UCX, UCX listens on no other IP interface than the one that has this address.
        environment: variables that the user may have set for UCX.
        root: where ``sysfs`` is mounted.
        addresses: returns the IP addresses of each interface that other hosts can use.

    Raises:
        RefitError: if none of the NICs that the option names can be used.
        ValueError: if the option is invalid.
    """
    by_gpu = parse_nics(option)
    names = by_gpu.get("", ())
    if gpu is not None and not names:
        names = by_gpu.get(gpu.address) or by_gpu.get(str(gpu.number), ())
    if names:
        return _by_name(names, _rdma_nics(root) + _ip_nics(root, addresses()), environment)
    if option == ALL:
        return Choice({}, "the NICs that UCX chooses, because the option nics says so")
    if _DEVICES in environment:
        return Choice({}, f"the NICs that UCX chooses, because {_DEVICES} is set")
    interfaces = addresses()
    own = [interface for interface, found in interfaces.items() if host in found]
    # UCX warns of an excluded NIC that it does not know, such as one that is down.
    others = [nic.name for nic in _ip_nics(root, interfaces) if own and nic.name not in own and not nic.trouble]
    and_ip = f"; of IP interfaces {', '.join(own) or f'all, because none has the address {host}'}"
    nics = _rdma_nics(root)
    why_not = _why_topology_says_nothing(gpu, nics, root)
    if gpu is None or why_not:
        return Choice(_excluding(others), f"the NICs that UCX chooses, because {why_not}{and_ip}")
    found = _by_topology(_place(root, gpu).resolve(), nics, others, environment)
    return found._replace(reason=found.reason + and_ip)


@contextmanager
def chosen_nics(option: str, device: str, host: str) -> Iterator[None]:
    """Chooses NICs, logs the choice once, and sets the environment in which UCX must start to use them.

    UCX reads its variables only when it starts. They are removed afterwards, because another NIXL agent in this process
    or its children may need other NICs.

    Args:
        option: see :func:`parse_nics`.
        device: device of the memory: ``cpu``, or torch's name of a GPU.
        host: see :func:`choose_nics`.

    Raises:
        RefitError: as :func:`choose_nics`.
    """
    gpu = None if option == ALL else _gpu_of(device)
    with _STARTING:  # several sessions link at once; each must see only what the user has set
        choice = choose_nics(option, gpu, host)
        _log_once(logging.INFO, f"refit: nixl for {device} uses {choice.reason}")
        if choice.warning:
            _log_once(logging.WARNING, f"refit: nixl for {device}: {choice.warning}")
        before = {name: os.environ.get(name) for name in choice.variables}
        os.environ.update(choice.variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _why_topology_says_nothing(gpu: Gpu | None, nics: Sequence[_Nic], root: Path) -> str:
    """Why the choice of RDMA NICs is left to UCX; empty if it is not."""
    if gpu is None:
        return "the weights are in host memory"
    if all(nic.trouble for nic in nics):
        return f"no RDMA NIC can be used ({'; '.join(f'{nic.name} {nic.trouble}' for nic in nics) or 'there is none'})"
    place = _place(root, gpu)
    return "" if place.exists() else f"{place}, the place of the GPU, does not exist"


def _by_name(names: Sequence[str], nics: Sequence[_Nic], environment: Mapping[str, str]) -> Choice:
    used: dict[str, _Nic] = {}
    missing = []
    for name in names:
        meant = [nic for nic in nics if nic.name == name or (nic.rdma and nic.name.startswith(f"{name}:"))]
        usable = {nic.name: nic for nic in meant if not nic.trouble}
        used |= usable
        if not usable:
            missing.append(f"{name} {meant[0].trouble if meant else 'is not in this machine'}")
    if not used:
        there = ", ".join(nic.name + (f" (which {nic.trouble})" if nic.trouble else "") for nic in nics)
        raise RefitError(
            f"none of the NICs that the option nics names can be used: {'; '.join(missing)}. This machine has "
            f"{there or 'no NICs'}"
        )
    reason = f"{_listed(used)}, which the option nics names"
    if sum(not nic.rdma for nic in used.values()) > 1:
        reason += "; UCX reads over one IP interface at a time"
    warning = f"fewer NICs than the option nics names, {_listed(used)} only: {'; '.join(missing)}" if missing else ""
    return Choice({_DEVICES: ",".join(used), **_rails(len(used), environment)}, reason, warning)


def _by_topology(gpu: Path, nics: Sequence[_Nic], interfaces: Sequence[str], environment: Mapping[str, str]) -> Choice:
    """The closest RDMA NICs that can be used. The others are excluded, and the given IP interfaces."""
    nearness = {nic: _nearness(gpu, nic.at) for nic in nics}
    best = max(near for nic, near in nearness.items() if not nic.trouble)
    closest: dict[tuple[Path, str], _Nic] = {}
    for nic, near in nearness.items():
        port = nic.card, nic.name.partition(":")[2]
        # Virtual functions share the port of their card, so one is enough, and none if the card itself can be used.
        if near == best and not nic.trouble and (port not in closest or nic.at == nic.card):
            closest[port] = nic
    used = [nic.name for nic in closest.values()]
    unusable = {nic: near for nic, near in nearness.items() if nic.trouble and nic.at == nic.card and near >= best}
    closer = [f"{nic.name} {nic.trouble}" for nic, near in unusable.items() if near > best]
    beside = [f"{nic.name} {nic.trouble}" for nic, near in unusable.items() if near == best]
    others = [nic.name for nic in nics if nic.name not in used and nic.trouble != _DOWN]
    variables = {**_rails(len(used), environment), **_excluding([*others, *interfaces])}
    note = f" ({'; '.join(beside)})" if beside else ""
    warning = f"{_listed(used)}, farther from the GPU, because {'; '.join(closer)}" if closer else ""
    return Choice(variables, f"{_listed(used)}, closest to the GPU at {gpu.name}{note}", warning)


def _place(root: Path, gpu: Gpu) -> Path:
    return root / "bus/pci/devices" / gpu.address


def _nearness(gpu: Path, nic: Path) -> tuple[int, bool]:
    """How much of their paths in the PCI tree they share, and whether they are on one NUMA node."""
    node = _read(gpu / "numa_node")
    return len(Path(os.path.commonpath((gpu, nic))).parts), node not in ("", "-1") and node == _read(nic / "numa_node")


def _rdma_nics(root: Path) -> list[_Nic]:
    found = []
    for device in _folders(root / "class/infiniband"):
        at = (device / "device").resolve()
        card = (at / "physfn").resolve() if (at / "physfn").exists() else at
        for port in _folders(device / "ports"):
            trouble = "" if _read(port / "state").endswith("ACTIVE") else _DOWN
            if not trouble and _read(port / "link_layer") == "Ethernet" and not _is_routed(port / "gids"):
                trouble = "has no IP address"
            found.append(_Nic(f"{device.name}:{port.name}", True, trouble, at, card))
    return found


def _ip_nics(root: Path, addresses: Mapping[str, Collection[str]]) -> list[_Nic]:
    found = []
    for interface in _folders(root / "class/net"):
        trouble = "" if _read(interface / "operstate") in ("up", "unknown") else _DOWN
        if not trouble and not addresses.get(interface.name):
            trouble = "has no IP address"
        found.append(_Nic(interface.name, False, trouble, interface, interface))
    return found


def _is_routed(gids: Path) -> bool:
    """Whether a RoCE port has an identifier that is neither empty nor link-local; it has one for each IP address."""
    identifiers = (_read(entry) for entry in gids.glob("*"))
    return any(found.strip("0:") and not found.startswith(_LINK_LOCAL) for found in identifiers)


def _gpu_of(device: str) -> Gpu | None:
    if device == "cpu":
        return None
    import torch

    number = int(device.partition(":")[2] or 0)
    found: Any = torch.cuda.get_device_properties(number)  # torch's types lack the address
    return Gpu(number, f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")


def _key(gpu: str) -> str | None:
    """The number of a GPU, or its PCI address in the form of ``/sys``; None if the text is neither."""
    address = _ADDRESS.fullmatch(gpu.lower())
    if address is not None:
        return f"{int(address[1] or '0', 16):04x}:{address[2]}"
    return str(int(gpu)) if _NUMBER.fullmatch(gpu) else None


def _rails(count: int, environment: Mapping[str, str]) -> dict[str, str]:
    return {name: str(count) for name in _RAILS if name not in environment}


def _excluding(names: Sequence[str]) -> dict[str, str]:
    return {_DEVICES: f"^{','.join(names)}"} if names else {}


def _listed(names: Sequence[str] | Mapping[str, object]) -> str:
    return f"NIC{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _folders(parent: Path) -> list[Path]:
    """In the order of the numbers in their names."""
    found = [entry for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    return sorted(found, key=lambda entry: _NUMBER.sub(lambda number: number[0].zfill(9), entry.name))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:  # absent, or the kernel has nothing to say
        return ""


@cache
def _log_once(level: int, message: str) -> None:
    logger.log(level, "%s", message)
