"""Prints what a registry record expects of a definition in the installed Megatron.

Run it when a patch is written for a new version::

    python tests/support/source_hashes.py megatron.training.training:evaluate
"""

from __future__ import annotations

import sys

from megatron_patches.registry import InstalledPackage


def main(targets: list[str]) -> None:
    """Print signature and hash of each target, as the fields of a record."""
    for target in targets:
        module, _, name = target.partition(":")
        found = InstalledPackage(".".join(module.split(".")[:2])).definition(module, name)
        if found is None:
            raise SystemExit(f"{target} is not in the installed Megatron")
        sys.stdout.write(f'target="{target}",\n')
        if found.signature is not None:
            sys.stdout.write(f"    signature={found.signature!r},\n")
        sys.stdout.write(f'    sha256="{found.sha256}",\n')


if __name__ == "__main__":
    main(sys.argv[1:])
