"""Weights travel over the NICs that an option names, between two network namespaces that two cables join."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_patches.refit.transports.base import TransportName
from tests.integration import nixl_write
from tests.integration.refit_nics import content, model
from tests.integration.refit_two_hosts import listening
from tests.support import plain_engine
from tests.support.two_hosts import ADDRESSES, CABLE, Host, two_hosts
from tests.unit.refit.transport_cases import NEEDS

SECOND = "cable2"
"""The other network interface of both hosts."""

SYSFS = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")
"""Begins a command in whose ``/sys`` are the interfaces of its network namespace."""

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(module) for module in NEEDS[TransportName.NIXL]), reason="NIXL is not installed"
)

NBYTES = sum(parameter.nbytes for parameter in model().parameters())


@contextlib.contextmanager
def two_cables() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a second cable."""
    with two_hosts() as (first, second):
        on(first, f"ip link add {SECOND} type veth peer name {SECOND} netns {second.process}")
        for number, host in enumerate((first, second), 1):
            on(host, f"ip addr add 10.177.5.{number}/24 dev {SECOND}")
            on(host, f"ip link set {SECOND} up")
        trial = subprocess.run([*first.inside, *SYSFS, "true"], capture_output=True, text=True, check=False)
        if trial.returncode:
            pytest.skip(f"needs the right to mount /sys: {trial.stderr.strip()}")
        yield first, second


def on(host: Host, command: str) -> None:
    """Runs a command on a host."""
    subprocess.run([*host.inside, *command.split()], check=True)


def pushes(folder: Path, engine: str, *choices: str) -> tuple[dict[str, Any], str]:
    """What a trainer on the first host saw with each of its choices, and what it wrote, if the engine has one."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with two_cables() as (first, second):
        address = str(folder / "engine.sock")
        process = plain_engine.start(address, [*second.inside, *SYSFS], engine)
        command = [sys.executable, "-m", "tests.integration.refit_nics", str(folder), address, *choices]
        try:
            done = subprocess.run(
                [*first.inside, *SYSFS, *command],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
                timeout=150.0,
                check=False,
            )
        finally:
            process.kill()
            process.wait()
    sys.stderr.write(done.stderr)
    assert done.returncode == 0
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen, done.stderr


@needs_nixl
@pytest.mark.parametrize("address", ["127.0.0.1", ADDRESSES[0]])
def test_ucx_listens_on_the_interface_with_the_address_and_nowhere_else(address: str) -> None:
    make = f"agent = NixlAgent(0, 'cpu', '{address}'); agent.metadata; print('made', flush=True); input()"
    script = f"from megatron_patches.refit.transports.nixl_agent import NixlAgent; {make}"
    with two_cables() as (first, _), contextlib.ExitStack() as stack:
        command = [*first.inside, *SYSFS, sys.executable, "-c", script]
        agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.enter_context(agent)
        stack.callback(agent.kill)
        assert agent.stdout is not None
        assert "made\n" in iter(agent.stdout.readline, "")
        assert {at for at, _ in listening(first.process)} == {address}


@pytest.mark.slow
@pytest.mark.timeout(240)
@needs_nixl
@pytest.mark.parametrize("engine", [CABLE, SECOND, "auto"])
def test_weights_travel_over_the_nics_that_are_named(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # both hosts are one, so that UCX would find faster ways
    apart = "NIXL cannot reach another party"  # over NICs that no network joins
    if engine == "auto":  # the cable with the address at which the engine reaches the trainer
        choices = {CABLE: CABLE, SECOND: apart, f"nowhere,{CABLE}": CABLE, f"{CABLE},{SECOND}": CABLE, "nowhere": ""}
    elif engine == CABLE:
        choices = {CABLE: CABLE, "auto": CABLE, f"{CABLE},{SECOND}": CABLE}
    else:
        choices = {SECOND: SECOND, CABLE: apart, "auto": apart, "all": SECOND, f"{CABLE},{SECOND}": SECOND}
    seen, said = pushes(tmp_path, engine, *choices)
    for choice, carrier in choices.items():
        if choice == "nowhere":
            assert "\n" not in seen[choice]["error"]
            assert seen[choice]["error"].endswith(
                "none of the NICs that the option nics names can be used: nowhere is not in this machine. This machine "
                f"has {CABLE}, {SECOND}, lo"
            )
            continue
        if carrier == apart:
            assert apart in seen[choice]["error"]
            assert seen[choice]["error"].endswith("choose others with the option nics")
            continue
        assert seen[choice]["content"] == content()
        sent = seen[choice]["sent"]
        assert sent[carrier] > NBYTES
        assert sent[CABLE] + sent[SECOND] - sent[carrier] < NBYTES / 20
    missing = f"fewer NICs than the option nics names, NIC {CABLE} only: nowhere is not in this machine"
    assert said.count(missing) == (engine == "auto")
    for choice in choices.keys() & {CABLE, SECOND}:
        assert said.count(f"refit: nixl for cpu uses NIC {choice}, which the option nics names") == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@needs_nixl
@pytest.mark.parametrize(
    ("nics", "rails", "shares"),
    [
        (f"{CABLE},{SECOND}", None, (0.5, 0.5)),
        (f"{CABLE},nowhere,{SECOND}", None, (0.5, 0.5)),
        (f"{SECOND},nowhere", None, (0.0, 1.0)),
        (f"{CABLE},{SECOND}", "1", (1.0, 0.0)),
    ],
)
def test_nics_share_what_ucx_stripes(
    nics: str, rails: str | None, shares: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP, those are writes; reads, of which weights are made, it stripes over RDMA only."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    if rails is not None:  # the user's choice
        monkeypatch.setenv("UCX_MAX_RMA_RAILS", rails)
    with two_cables() as hosts, contextlib.ExitStack() as stack:
        sides = []
        for side, host in zip(("first", "second"), hosts, strict=True):
            command = [sys.executable, "-m", "tests.integration.nixl_write", str(tmp_path), side, nics]
            sides.append(stack.enter_context(subprocess.Popen([*host.inside, *SYSFS, *command])))
            stack.callback(sides[-1].kill)
        assert [side.wait(60.0) for side in sides] == [0, 0]
    sent = json.loads((tmp_path / "done").read_text())
    found = [sent[cable] / nixl_write.NBYTES for cable in (CABLE, SECOND)]
    assert found == pytest.approx(shares, abs=0.05)
