"""Tests that need CUDA devices; each says how many."""
