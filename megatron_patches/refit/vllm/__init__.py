"""Runs inside vLLM's processes: receives the trainer's shards and makes vLLM serve them."""
