"""Mamba-2's recurrence written out, where its kernels for GPUs are not installed."""

from __future__ import annotations

import torch
from torch.nn.functional import conv1d, pad, silu, softplus


def scan(
    x: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, token after token, in float32.

    Args:
        x: inputs [tokens, heads, rows of a head].
        step: time steps after softplus [tokens, heads].
        decay: A, negative [heads].
        keys: B [tokens, groups, states].
        queries: C, likewise.
        skip: D [heads].
        state: before the first token [heads, rows of a head, states]; zeros if None.

    Returns:
        Outputs like ``x`` in float32, and the state after the last token.
    """
    heads = x.shape[1]
    values, times = x.float(), step.float()
    key, query = (part.float().repeat_interleave(heads // part.shape[1], 1) for part in (keys, queries))
    current = x.new_zeros(heads, x.shape[2], key.shape[2], dtype=torch.float32) if state is None else state.float()
    outputs = []
    for token in range(x.shape[0]):
        kept = torch.exp(times[token] * decay.float())[:, None, None] * current
        current = kept + (times[token, :, None] * values[token])[:, :, None] * key[token, :, None, :]
        outputs.append((current * query[token, :, None, :]).sum(-1) + skip.float()[:, None] * values[token])
    return torch.stack(outputs), current


def split_conv1d_scan(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    step_bias: torch.Tensor,
    decay: torch.Tensor,
    D: torch.Tensor,  # noqa: N803 - callers name it
    *,
    headdim: int,
    ngroups: int,
    **others: object,
) -> torch.Tensor:
    """What ``mamba_split_conv1d_scan_combined`` computes: a mixer between its two projections.

    Args:
        mixed: gate, inputs, keys, queries and time steps, side by side [batch, tokens, columns].
        weight: of the convolution [channels, taps].
        bias: its bias.
        step_bias: added to time steps before softplus [heads].
        decay: A [heads].
        D: the skip's weight [heads].
        headdim: rows of a head.
        ngroups: groups that share keys and queries.
        others: how the kernel is to go about it; ignored.

    Returns:
        [batch, tokens, heads x rows of a head].
    """
    heads = decay.shape[0]
    inner, grouped = heads * headdim, (weight.shape[0] - heads * headdim) // 2
    gate, channels, step = mixed.split([inner, weight.shape[0], heads], -1)
    taps = weight.shape[1]
    padded = pad(channels.transpose(1, 2), (taps - 1, 0))
    channels = silu(conv1d(padded, weight[:, None], bias, groups=weight.shape[0])).transpose(1, 2)
    x, keys, queries = channels.split([inner, grouped, grouped], -1)
    times = softplus(step.float() + step_bias.float())
    outputs = [
        scan(
            x[row].unflatten(-1, (heads, headdim)),
            times[row],
            decay,
            keys[row].unflatten(-1, (ngroups, -1)),
            queries[row].unflatten(-1, (ngroups, -1)),
            D,
        )[0]
        for row in range(mixed.shape[0])
    ]
    return torch.stack(outputs).flatten(2).to(mixed.dtype) * silu(gate)
