"""Trainer ranks and engine workers, each a party in a process of its own: how they agree, link up and move versions.

Parties are numbered sources first. All take the same steps of one
:class:`~megatron_patches.refit.assembly.Assembly`, so a failure anywhere is everybody's, with its reason; see there.
"""
