"""Writes the Python standard library's sources as a byte-level data set in Megatron's indexed format.

Every file is a document, every byte a token, and byte 255, which UTF-8 never uses, ends a document. So the vocabulary
has 256 tokens and Megatron's ``NullTokenizer`` with ``--vocab-size 256`` fits: its end-of-document token is the last.

::

    python examples/prepare_bytes.py --output data/stdlib       # writes data/stdlib.bin and data/stdlib.idx
    ... examples/pretrain_gpt.py --data-path data/stdlib --tokenizer-type NullTokenizer --vocab-size 256
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

END_OF_DOCUMENT = 255
_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def documents(root: Path, max_bytes: int, seed: int) -> Iterator[bytes]:
    """Contents of Python files under ``root``, in an order that depends only on their names and ``seed``.

    Ends before the file that would bring the total above ``max_bytes``.
    """
    paths = sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))
    random.Random(seed).shuffle(paths)  # noqa: S311
    total = 0
    for path in paths:
        content = path.read_bytes()
        total += len(content)
        if total > max_bytes:
            return
        # A file that is not UTF-8 could contain the end-of-document byte.
        if content and END_OF_DOCUMENT not in content:
            yield content


def write(prefix: Path, contents: Iterator[bytes]) -> tuple[int, int]:
    """Write ``prefix``.bin and ``prefix``.idx.

    Returns:
        Number of documents and number of tokens.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's warnings about optional packages
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint8)
    number, tokens = 0, 0
    for content in contents:
        document = torch.frombuffer(bytearray(content) + bytes([END_OF_DOCUMENT]), dtype=torch.uint8)
        builder.add_document(document, [len(document)])
        number += 1
        tokens += len(document)
    builder.finalize(f"{prefix}.idx")
    return number, tokens


def main() -> None:
    """Write the data set specified on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="path of the data set, without .bin and .idx")
    parser.add_argument("--source", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder to read")
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="size of the data set (%(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="order of the files (%(default)s)")
    args = parser.parse_args()
    number, tokens = write(args.output, documents(args.source, args.max_bytes, args.seed))
    if number == 0:
        parser.error(f"no Python file under {args.source}")
    sys.stdout.write(f"{args.output}.bin: {number} documents, {tokens} tokens\n")


if __name__ == "__main__":
    main()
