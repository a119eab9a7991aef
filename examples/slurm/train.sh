#!/usr/bin/env bash
# Trains on several hosts with Slurm: one launcher on each host, GPUS processes under each.
#
#   sbatch --nodes 2 --gpus-per-node 8 examples/slurm/train.sh SCRIPT.py ... --etp-size 8
#
# Submit it from the root of the repository, or of your own project. PYTHON names the interpreter, GPUS the processes on
# each host (default: those that Slurm gave, or 8).
#SBATCH --job-name etp
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive
set -euo pipefail

gpus=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}

# A failure on one host ends the job on all of them; srun passes on the launcher's status.
srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$gpus" \
    --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID" \
    -m megatron_patches "$@"
