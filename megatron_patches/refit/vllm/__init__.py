"""Runs inside vLLM's processes: receives the trainer's shards and lets them serve."""
