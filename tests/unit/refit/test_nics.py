"""Which NICs UCX may use: by name, and by topology, in machines that are made up."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.transports import nics
from megatron_patches.refit.transports.nics import Choice, Gpu, choose_nics, chosen_nics, parse_nics

ROUTED = "0000:0000:0000:0000:0000:ffff:0a00:0001"
LINK_LOCAL = "fe80:0000:0000:0000:0a00:00ff:fe00:0001"
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
ADDRESSES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1", "fd00::1"], "eth2": ["10.0.2.1"], "eth10": ["10.0.10.1"]}
UNSET: Mapping[str, str] = {}


class Machine:
    """A file system like ``/sys``.

    Attributes:
        root: where it begins.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bus/pci/devices").mkdir(parents=True)

    def pci(self, path: str, node: int) -> Path:
        """A device in the PCI tree, by the addresses on the way to it."""
        found = self.root / "devices" / path
        found.mkdir(parents=True)
        (found / "numa_node").write_text(f"{node}\n")
        (self.root / "bus/pci/devices" / found.name).symlink_to(found)
        return found

    def rdma(self, name: str, at: Path, state: str = "4: ACTIVE", gids: Sequence[str] | None = None) -> None:
        """An RDMA NIC with one port. One with ``gids`` is RoCE."""
        device = self.root / "class/infiniband" / name
        port = device / "ports/1"
        (port / "gids").mkdir(parents=True)
        (device / "device").symlink_to(at)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text("InfiniBand\n" if gids is None else "Ethernet\n")
        for number, gid in enumerate(gids or ()):
            (port / "gids" / str(number)).write_text(f"{gid}\n")

    def virtual(self, name: str, card: Path, function: int, state: str = "4: ACTIVE") -> None:
        """A virtual function of a NIC."""
        at = self.pci(f"{card.parent.relative_to(self.root / 'devices')}/{card.name[:-1]}{function}", 0)
        (at / "physfn").symlink_to(card)
        self.rdma(name, at, state)

    def interface(self, name: str, state: str = "up") -> None:
        """An IP interface."""
        (self.root / "class/net" / name).mkdir(parents=True)
        (self.root / "class/net" / name / "operstate").write_text(f"{state}\n")

    def choose(self, option: str, gpu: Gpu | None, environment: Mapping[str, str] = UNSET) -> Choice:
        """Of the machine, which others reach at ``eth0``, and in which ``eth1`` has no address."""
        return choose_nics(option, gpu, "10.0.0.1", environment, self.root, lambda: ADDRESSES)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def gpu(number: int) -> Gpu:
    return Gpu(number, f"0000:{number + 1}b:00.0")


def eight(machine: Machine, down: str = "") -> None:
    """Eight GPUs, each beside a NIC of its own, four on each NUMA node; and two NICs for storage elsewhere."""
    for number in range(8):
        switch = f"pci0000:{number + 1}0/0000:{number + 1}0:01.0/0000:{number + 1}8:00.0"
        machine.pci(f"{switch}/0000:{number + 1}9:00.0/0000:{number + 1}b:00.0", number // 4)
        name = f"mlx5_{number}"
        state = "1: DOWN" if name == down else "4: ACTIVE"
        machine.rdma(name, machine.pci(f"{switch}/0000:{number + 1}9:01.0/0000:{number + 1}c:00.0", number // 4), state)
    for number in (10, 11):
        at = machine.pci(f"pci0000:f{number - 10}/0000:f{number - 10}:01.0/0000:f{number - 8}:00.0", number - 10)
        machine.rdma(f"mlx5_{number}", at)


def rails(count: int) -> dict[str, str]:
    return dict.fromkeys(("UCX_MAX_RMA_RAILS", "UCX_MAX_RNDV_RAILS"), str(count))


@pytest.mark.parametrize("number", range(8))
def test_a_gpu_has_the_nic_behind_its_switch(number: int, machine: Machine) -> None:
    eight(machine)
    others = ",".join(f"mlx5_{other}:1" for other in (*range(8), 10, 11) if other != number)
    found = machine.choose("auto", gpu(number))
    assert found.variables == {"UCX_NET_DEVICES": f"^{others}", **rails(1)}
    assert found.reason == f"NIC mlx5_{number}:1, closest to the GPU at 0000:{number + 1}b:00.0; of IP interfaces eth0"
    assert not found.warning


def test_a_gpu_whose_nic_is_down_has_those_of_its_numa_node(machine: Machine) -> None:
    eight(machine, down="mlx5_5")
    found = machine.choose("auto", gpu(5))
    # mlx5_11 is on that node, too, and as far away.
    assert found.variables == {"UCX_NET_DEVICES": "^mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_10:1", **rails(4)}
    assert found.warning == (
        "NICs mlx5_4:1, mlx5_6:1, mlx5_7:1, mlx5_11:1, farther from the GPU, because mlx5_5:1 is down"
    )
    assert not machine.choose("auto", gpu(4)).warning


def test_two_gpus_share_the_nic_of_their_switch(machine: Machine) -> None:
    for number in range(8):
        machine.pci(f"pci0000:{number // 2}0/0000:{number // 2}0:01.0/0000:{number + 1}b:00.0", number // 4)
    for number in range(4):
        at = machine.pci(f"pci0000:{number}0/0000:{number}0:01.0/0000:{number}f:00.0", number)
        machine.rdma(f"mlx5_{number}", at)
    chosen = [machine.choose("auto", gpu(number)).reason.split(",")[0] for number in range(8)]
    assert chosen == [f"NIC mlx5_{number // 2}:1" for number in range(8)]


def test_without_a_common_switch_all_nics_of_the_numa_node_share_transfers(machine: Machine) -> None:
    for number in range(8):
        machine.pci(f"pci0000:{number}0/0000:{number + 1}b:00.0", number // 4)
    for number in range(4):
        machine.rdma(f"mlx5_{number}", machine.pci(f"pci0000:a{number}/0000:a{number}:00.0", number // 2))
    assert machine.choose("auto", gpu(3)).variables == {"UCX_NET_DEVICES": "^mlx5_2:1,mlx5_3:1", **rails(2)}
    assert machine.choose("auto", gpu(4)).variables == {"UCX_NET_DEVICES": "^mlx5_0:1,mlx5_1:1", **rails(2)}


def test_where_the_topology_is_unknown_all_nics_share_transfers(machine: Machine) -> None:
    """As in a virtual machine without NUMA nodes. Nothing is excluded then."""
    machine.pci("pci0000:00/0000:1b:00.0", -1)
    for number in range(3):
        machine.rdma(f"mlx5_{number}", machine.pci(f"pci0000:00/0000:0{number}:00.0", -1))
    assert machine.choose("auto", gpu(0)).variables == rails(3)


def test_a_roce_nic_needs_an_ip_address(machine: Machine) -> None:
    machine.pci("pci0000:00/0000:1b:00.0", 0)
    for name, gids in (("mlx5_0", [LINK_LOCAL, NO_GID]), ("mlx5_1", [LINK_LOCAL, ROUTED, NO_GID])):
        machine.rdma(name, machine.pci(f"pci0000:00/0000:0{name[-1]}:00.0", 0), gids=gids)
    found = machine.choose("auto", gpu(0))
    assert found.variables == {"UCX_NET_DEVICES": "^mlx5_0:1", **rails(1)}
    assert found.reason.endswith("(mlx5_0:1 has no IP address); of IP interfaces eth0")


@pytest.mark.parametrize(
    ("states", "used"),
    [
        (("4: ACTIVE", "4: ACTIVE", "4: ACTIVE"), "mlx5_0:1"),
        (("1: DOWN", "4: ACTIVE", "4: ACTIVE"), "mlx5_1:1"),
        (("1: DOWN", "1: DOWN", "4: ACTIVE"), "mlx5_2:1"),
    ],
)
def test_of_a_card_and_its_virtual_functions_one_is_used(
    states: tuple[str, str, str], used: str, machine: Machine
) -> None:
    machine.pci("pci0000:00/0000:1b:00.0", 0)
    card = machine.pci("pci0000:00/0000:01:00.0", 0)
    machine.rdma("mlx5_0", card, states[0])
    for function in (1, 2):
        machine.virtual(f"mlx5_{function}", card, function, states[function])
    found = machine.choose("auto", gpu(0))
    assert found.reason.startswith(f"NIC {used}, closest")
    assert found.variables["UCX_MAX_RMA_RAILS"] == "1"


def test_what_the_user_has_set_stays(machine: Machine) -> None:
    eight(machine)
    found = machine.choose("auto", gpu(0), {"UCX_NET_DEVICES": "mlx5_7:1"})
    assert found == Choice({}, "the NICs that UCX chooses, because UCX_NET_DEVICES is set")
    found = machine.choose("mlx5_1,mlx5_2", gpu(0), {"UCX_NET_DEVICES": "mlx5_7:1", "UCX_MAX_RMA_RAILS": "7"})
    assert found.variables == {"UCX_NET_DEVICES": "mlx5_1:1,mlx5_2:1", "UCX_MAX_RNDV_RAILS": "2"}


@pytest.mark.parametrize(
    ("option", "where", "reason"),
    [
        ("all", gpu(0), "the option nics says so"),
        ("auto", None, "the weights are in host memory"),
        ("0=mlx5_0", None, "the weights are in host memory"),
        ("auto", gpu(8), "/bus/pci/devices/0000:9b:00.0, the place of the GPU, does not exist"),
    ],
)
def test_without_a_topology_ucx_chooses(option: str, where: Gpu | None, reason: str, machine: Machine) -> None:
    eight(machine)
    found = machine.choose(option, where)
    assert (found.variables, found.warning) == ({}, "")
    assert found.reason.startswith("the NICs that UCX chooses, because ")
    assert found.reason.removesuffix("; of IP interfaces eth0").endswith(reason)


def test_without_rdma_ucx_chooses(machine: Machine) -> None:
    at = machine.pci("pci0000:00/0000:1b:00.0", 0)
    machine.interface("eth0")
    expected = "the NICs that UCX chooses, because no RDMA NIC can be used"
    assert machine.choose("auto", gpu(0)) == Choice({}, f"{expected} (there is none); of IP interfaces eth0")
    machine.rdma("mlx5_0", at, "1: DOWN")
    assert machine.choose("auto", gpu(0)) == Choice({}, f"{expected} (mlx5_0:1 is down); of IP interfaces eth0")


def test_nics_by_name(machine: Machine) -> None:
    eight(machine, down="mlx5_5")
    for name, state in (("eth0", "up"), ("eth1", "up"), ("eth2", "down"), ("eth10", "up")):
        machine.interface(name, state)
    for option in ("mlx5_6,mlx5_4:1", "0=mlx5_0,5=mlx5_6+mlx5_4", "00000000:6B:00.0=mlx5_6+mlx5_4"):
        found = machine.choose(option, gpu(5))
        assert found.variables == {"UCX_NET_DEVICES": "mlx5_6:1,mlx5_4:1", **rails(2)}
        assert found.reason == "NICs mlx5_6:1, mlx5_4:1, which the option nics names"
    assert machine.choose("0=mlx5_0", gpu(4)).reason.startswith("NIC mlx5_4:1, closest")
    assert machine.choose("eth0,mlx5_0", None).variables == {"UCX_NET_DEVICES": "eth0,mlx5_0:1", **rails(2)}
    assert machine.choose("eth0,eth10", None).reason.endswith("; UCX reads over one IP interface at a time")


def test_of_nics_that_are_named_some_may_be_missing_but_not_all(machine: Machine) -> None:
    eight(machine, down="mlx5_5")
    for name, state in (("eth0", "up"), ("eth1", "up"), ("eth2", "down")):
        machine.interface(name, state)
    found = machine.choose("mlx5_5,mlx5_4,mlx5_9,eth1,mlx5_1:2", gpu(5))
    assert found.variables == {"UCX_NET_DEVICES": "mlx5_4:1", **rails(1)}
    assert found.warning == (
        "fewer NICs than the option nics names, NIC mlx5_4:1 only: mlx5_5 is down; mlx5_9 is not in this machine; eth1 "
        "has no IP address; mlx5_1:2 is not in this machine"
    )
    with pytest.raises(RefitError) as raised:
        machine.choose("mlx5,mlx5_5", None)
    assert str(raised.value) == (
        "none of the NICs that the option nics names can be used: mlx5 is not in this machine; mlx5_5 is down. This "
        "machine has mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1, mlx5_4:1, mlx5_5:1 (which is down), mlx5_6:1, mlx5_7:1, "
        "mlx5_10:1, mlx5_11:1, eth0, eth1 (which has no IP address), eth2 (which is down)"
    )


@pytest.mark.parametrize(
    "option", ["", ",", "mlx5_0,", "0=", "=mlx5_0", "x=mlx5_0", "0=mlx5_0,mlx5_1", "mlx5_0+mlx5_1", "mlx5 0", "^mlx5_0"]
)
def test_options_that_make_no_sense(option: str) -> None:
    with pytest.raises(ValueError, match=r"^nics is '.*'; it must be auto, all, NICs such as"):
        parse_nics(option)


def test_addresses_of_this_machine() -> None:
    assert "127.0.0.1" in nics._addresses()["lo"]


@pytest.mark.parametrize("number", [None, 0])
def test_ucx_listens_on_no_ip_interface_but_the_one_with_the_address(number: int | None, machine: Machine) -> None:
    eight(machine)
    for name, state in (("lo", "unknown"), ("eth0", "up"), ("eth1", "up"), ("eth2", "down"), ("eth10", "up")):
        machine.interface(name, state)
    found = machine.choose("auto", None if number is None else gpu(number))
    excluded = found.variables["UCX_NET_DEVICES"].removeprefix("^").split(",")
    assert {name for name in excluded if not name.startswith("mlx5")} == {"lo", "eth10"}
    assert len(excluded) == (2 if number is None else 11)
    assert found.reason.endswith("; of IP interfaces eth0")
    assert machine.choose("all", None).variables == {}


def test_ucx_sees_the_choice_only_when_it_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nics._log_once.cache_clear()
    monkeypatch.setenv("UCX_NET_DEVICES", "before")
    monkeypatch.delenv("UCX_MAX_RMA_RAILS", raising=False)
    with caplog.at_level(logging.INFO, logger=nics.__name__):
        for _ in range(2):
            with chosen_nics("lo,none", "cpu", "127.0.0.1"):
                assert (os.environ["UCX_NET_DEVICES"], os.environ["UCX_MAX_RMA_RAILS"]) == ("lo", "1")
            assert os.environ["UCX_NET_DEVICES"] == "before"
            assert "UCX_MAX_RMA_RAILS" not in os.environ
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "refit: nixl for cpu uses NIC lo, which the option nics names"),
        (
            "WARNING",
            "refit: nixl for cpu: fewer NICs than the option nics names, NIC lo only: none is not in this machine",
        ),
    ]
