"""A refit between clusters that need not exist: runs refit's own planning code for some workers of each kind."""
