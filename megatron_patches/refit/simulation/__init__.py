"""A refit between clusters that need not exist: its own planning code, run for some workers of each kind."""
