# A vLLM server that obeys trainers which show its secret.
#
#   docker build --file docker/server.Dockerfile --tag etp-server .
#   docker run --gpus all --ipc host --network host --volume "$HOME/.config/megatron-etp:/root/.config/megatron-etp" \
#       etp-server --model MODEL
#
# The volume shares the secret with a trainer of the same user: docs/live_refit.md, "Who may push".
#
# Every step has been built with buildah on Debian 12 with Python 3.12 in place of BASE; with vLLM's image, nothing has
# run. tests/packaging/test_docker.py compares files and the command with the repository's.
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}

WORKDIR /opt/etp
COPY setup.py pyproject.toml README.md LICENSE ./
COPY etp etp
COPY megatron_patches megatron_patches
RUN python3 -m pip install --no-cache-dir . && rm -rf /opt/etp/*

ENV VLLM_SERVER_DEV_MODE=1
WORKDIR /
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server", \
    "--weight-transfer-config", "{\"backend\": \"etp\"}", \
    "--middleware", "megatron_patches.refit.vllm.guard.RefitGuard"]
