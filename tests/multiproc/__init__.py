"""Bodies that run on several processes, on gloo and (in tests/gpu) on NCCL, and the tests that launch them."""
