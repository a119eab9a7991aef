# A trainer with Megatron and Transformer Engine, for NVIDIA GPUs.
#
#   docker build --file docker/trainer.Dockerfile --tag etp-trainer .
#   docker run --gpus all --ipc host --network host etp-trainer \
#       torchrun --nproc-per-node 2 -m megatron_patches examples/pretrain_gpt.py ... --etp-size 2
#
# Transformer Engine is compiled, which takes about half an hour, with the CUDA 13 of the image.
#
# Every step has been built with buildah on Debian 12 in place of BASE, without the extra "te": compiling Transformer
# Engine has not been tried here, and the image has not run on a GPU. tests/packaging/test_docker.py compares files and
# extras with the repository's.
ARG BASE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/etp
ENV PATH=/opt/etp/bin:$PATH PIP_NO_CACHE_DIR=1

WORKDIR /workspace
COPY requirements/ci.lock requirements/
RUN pip install --constraint requirements/ci.lock ninja numpy packaging setuptools torch wheel

COPY setup.py pyproject.toml README.md LICENSE ./
COPY etp etp
COPY megatron_patches megatron_patches
RUN pip install --no-build-isolation --constraint requirements/ci.lock '.[megatron,te,nixl,metrics]'

COPY examples examples
CMD ["bash"]
