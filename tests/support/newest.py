"""Lists what another megatron-core or vLLM changes of what this package replaces, relies upon or uses.

::

    python -m tests.support.newest megatron-core    # the megatron-core that an import would find
    python -m tests.support.newest vllm             # the installed vLLM, with the newest adapter

It ends with status 1 if anything differs. docs/releases.md says what to do then.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import megatron_patches
from megatron_patches import registry
from megatron_patches.registry import PatchRecord, SourceRecord


def megatron_core() -> tuple[str, list[str]]:
    """The version that an import would find, and a line for each definition that is not as its record says."""
    from megatron_patches.weight_shard_api import WeightShardApi

    relied_upon, patches = megatron_patches.records(WeightShardApi(megatron_patches.MegatronEtpConfig()))
    records: list[PatchRecord | SourceRecord] = [*relied_upon, *patches]
    of_megatron = [record for record in records if record.module.startswith("megatron.")]
    changed = [
        f"{record.target} {difference}: {record.reason}" for record, _, difference in registry.differences(of_megatron)
    ]
    return registry.megatron_core_version(), changed


def vllm() -> tuple[str, list[str]]:
    """The installed version, and a line for each name that the newest adapter uses and this release lacks."""
    from vllm.version import __version__ as version

    from megatron_patches.refit.vllm import releases

    newest = list(releases.ADAPTERS.values())[-1]
    try:
        adapter = importlib.import_module(f"{releases.__name__}.{newest}").ADAPTER
    except ImportError as error:
        return version, [f"{newest}: {error}"]
    return version, [f"{newest}: it has no {name}" for name in adapter.missing_names()]


KINDS: dict[str, Callable[[], tuple[str, list[str]]]] = {"megatron-core": megatron_core, "vllm": vllm}


def main(kind: str) -> int:
    """Print what differs; returns 1 if anything does."""
    version, changed = KINDS[kind]()
    sys.stdout.write(f"{kind} {version}: {len(changed)} of what is used differs\n")
    sys.stdout.write("".join(f"- {line}\n" for line in changed))
    return 1 if changed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in KINDS:
        raise SystemExit(f"usage: python -m tests.support.newest {{{','.join(KINDS)}}}")
    sys.exit(main(sys.argv[1]))
