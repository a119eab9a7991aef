"""Bodies that run on several processes, on gloo and (with --device cuda) on NCCL, and the tests that launch them."""
