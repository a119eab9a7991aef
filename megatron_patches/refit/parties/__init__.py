"""Trainer ranks and engine workers, each a party in its own process: they agree on a plan, connect and move versions.

Sources have the first numbers, destinations the next ones. All take the same steps of one
:class:`~megatron_patches.refit.control.assembly.Assembly`, so a failure of one party fails the step for all, with its
reason.
"""
