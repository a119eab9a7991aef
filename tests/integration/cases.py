"""The trainings that are compared, sharded against stock: 20 steps of real Megatron each, on 2 to 8 ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.integration.megatron_run import PRETRAIN_FROZEN, PRETRAIN_GPT, PRETRAIN_HYBRID
from tests.support.launch import on_gpus

# Sums of gradients are taken in another order with shards than without, one ulp (1e-7) apart. 20 steps of Adam carry
# that to a few 1e-6 in the loss, and to ten times as much in the norm of the gradient, which is no mean. In bf16 one
# ulp is 4e-3, and a weight near a rounding boundary takes the other side; the loss is a mean over 256 tokens in fp32,
# where most of that cancels.
FP32_TOLERANCE = 1e-5
BF16_TOLERANCE = 4e-3
NORM_FACTOR = 10.0
# Biases of experts that go up or down by the sign of how many tokens came: one token that is routed otherwise, by a
# rounding, changes all that follows. In bf16 stock Megatron differs from itself by up to 6e-3 in 20 steps, all-reducing
# gradients or reduce-scattering them, among three seeds. In fp32 the tolerance is that of all cases.
SIGNS_BF16_TOLERANCE = 2e-2
# The norm is a sum in fp32 over up to three million gradients, of weights that are cut in the one run and whole in the
# other.
EXACT_NORM_TOLERANCE = 5e-6

ONE_MICROBATCH = "--micro-batch-size 4 --clip-grad 0"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

LLAMA = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 250 --make-vocab-size-divisible-by 2 "
    "--attention-dropout 0 --hidden-dropout 0"
)
# Weights of whole blocks of 128 x 128, but for QKV, whose shards are padded; four layers, so that two are between those
# at the ends.
FP8_MODEL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 128 "
    "--group-query-attention --num-query-groups 2 "
    "--max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 250 --make-vocab-size-divisible-by 2 "
    "--attention-dropout 0 --hidden-dropout 0"
)
GPT2 = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 250 --make-vocab-size-divisible-by 2 "
    "--attention-dropout 0 --hidden-dropout 0"
)
SCHEDULE = (
    "--mock-data --no-create-attention-mask-in-dataloader --micro-batch-size 1 --global-batch-size 8 "
    "--lr 3e-3 --lr-decay-style constant --train-iters 20 --log-interval 1000 --eval-iters 2 --eval-interval 1000"
)
# Stock Megatron cannot fuse accumulation without APEX. Unfused attention adds in the same order each time.
GPU = "--bf16 --transformer-impl transformer_engine --attention-backend unfused --num-workers 0"
UNFUSED_ACCUMULATION = "--no-gradient-accumulation-fusion"
COUNT_ZEROS = "--log-num-zeros-in-grad"
LOG_NORM = "--log-params-norm"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
# Experts are whole on a rank, where attention is cut.
EP2_TP2 = (
    "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel"
)
ROUTER_PADDING = "--moe-router-padding-for-quantization"
# What large models of experts have on top.
ROUTING = (
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-shared-expert-intermediate-size 64 --moe-latent-size 40"
)
# As Nemotron 3 Super, in which one MTP layer predicts several tokens, one after another.
HYBRID = (
    "--hybrid-layer-pattern ME*-/*E/*E --mtp-use-repeated-layer --hidden-size 64 --ffn-hidden-size 128 "
    "--num-attention-heads 4 --kv-channels 32 --group-query-attention --num-query-groups 2 --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type none --normalization RMSNorm --squared-relu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 250 --make-vocab-size-divisible-by 2 "
    "--attention-dropout 0 --hidden-dropout 0 --mamba-num-heads 4 --mamba-head-dim 16 --mamba-num-groups 2 "
    "--mamba-state-dim 8 --moe-ffn-hidden-size 64"
)
MUON = "--optimizer muon --lr 1e-3"
# In bf16, its default, iterations make a last bit of a gradient a last bit in bf16 of the update.
MUON_FP32 = f"{MUON} --muon-fp32-matmul-prec high"
LION = "--optimizer lion --lr 1e-3"
LATENT = (
    "--multi-latent-attention --rope-type rope --qk-layernorm --kv-lora-rank 16 --q-lora-rank 24 --qk-head-dim 10 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 6"
)


@dataclass(frozen=True)
class Case:
    """One comparison.

    On GPUs (``pytest --device cuda``) it is made with Transformer Engine's layers and in bf16.

    Attributes:
        name: what it covers.
        ranks: processes of both runs.
        sharded: flags of the sharded run, in place of ``stock``.
        model: the model's flags.
        common: further flags of both runs.
        freeze: parameters whose names match are frozen, by the training script; none if empty.
        falls_to: the last step's loss is below this part of the first's.
        tolerance: relative, on each step's loss and gradient norm and each evaluation; 0.0 asks for equal bits of the
            losses, and of the norm only up to ``EXACT_NORM_TOLERANCE``.
        bf16_tolerance: the same on GPUs, where all cases are in bf16, unless equal bits are asked for.
        exact_in_bf16: whether 0.0 holds in bf16 too.
        fused_accumulation: on GPUs, whether the sharded run fuses gradient accumulation into its GEMMs.
        grouped_experts: on GPUs, whether experts are one grouped GEMM.
        cpu_only: why the case is not for GPUs; empty if it is.
        gpu_only: why the case is not for CPUs; empty if it is.
        on_gpus: further flags of both runs on GPUs.
        needs: a package without which Megatron cannot run the case; empty for none.
        quick: whether `make test` runs it.
        variant: whether continuous integration leaves it out: other cases cover most of it.
    """

    name: str
    ranks: int
    sharded: str
    model: str = LLAMA
    common: str = ""
    freeze: str = ""
    falls_to: float = 0.8
    tolerance: float = FP32_TOLERANCE
    bf16_tolerance: float = BF16_TOLERANCE
    exact_in_bf16: bool = True
    fused_accumulation: bool = False
    grouped_experts: bool = True
    cpu_only: str = ""
    gpu_only: str = ""
    on_gpus: str = ""
    needs: str = ""
    quick: bool = False
    variant: bool = False

    @property
    def loss_tolerance(self) -> float:
        """Relative tolerance of the losses on the session's devices."""
        if not on_gpus():
            return self.tolerance
        return 0.0 if self.tolerance == 0.0 and self.exact_in_bf16 else self.bf16_tolerance

    @property
    def norm_tolerance(self) -> float:
        """Relative tolerance of the gradient norms."""
        return NORM_FACTOR * self.loss_tolerance or EXACT_NORM_TOLERANCE

    @property
    def script(self) -> Path:
        """The training script."""
        if "--hybrid-layer-pattern" in self.model:
            return PRETRAIN_HYBRID
        return PRETRAIN_FROZEN if self.freeze else PRETRAIN_GPT

    @property
    def _shared(self) -> tuple[str, ...]:
        freeze = ("--freeze", self.freeze) if self.freeze else ()
        grouped = "--moe-grouped-gemm" if MOE in self.common and self.grouped_experts else ""
        devices = f"{GPU} {grouped} {self.on_gpus}" if on_gpus() else ""
        return (*f"{self.model} {SCHEDULE} {self.common} {devices}".split(), *freeze)

    @property
    def stock_arguments(self) -> tuple[str, ...]:
        """Command line of the run without shards."""
        return (*self._shared, *([UNFUSED_ACCUMULATION] if on_gpus() else []))

    def sharded_arguments(self, transport: str) -> tuple[str, ...]:
        """Command line of the run with shards."""
        accumulation = [UNFUSED_ACCUMULATION] if on_gpus() and not self.fused_accumulation else []
        return (*self._shared, *accumulation, *self.sharded.split(), "--etp-transport", transport)


CASES = (
    # Two ranks, one microbatch: (a + b) / 2 has one order, so all bits are equal but those of the norm, hence no
    # clipping. With more microbatches the stock run adds them up before it averages over ranks, as "reduce once" does.
    Case("etp2_exact", 2, "--etp-size 2", common=ONE_MICROBATCH, tolerance=0.0, quick=True),
    Case("etp2_dropout_exact", 2, "--etp-size 2", common=f"{ONE_MICROBATCH} --hidden-dropout 0.1", tolerance=0.0),
    # In bf16 autograd rounds the sum of the two gradients of the shared weight, and sharding does not.
    Case(
        "etp2_tied_exact",
        2,
        "--etp-size 2",
        model=GPT2,
        common=ONE_MICROBATCH,
        tolerance=0.0,
        exact_in_bf16=False,
    ),
    Case(
        "etp2_full_recompute_exact",
        2,
        "--etp-size 2",
        common=f"{ONE_MICROBATCH} {FULL_RECOMPUTE}",
        tolerance=0.0,
    ),
    Case(
        "etp2_selective_recompute_exact",
        2,
        "--etp-size 2",
        common=f"{ONE_MICROBATCH} --recompute-granularity selective --recompute-modules core_attn mlp",
        tolerance=0.0,
    ),
    # The bias of a recomputed MLP is added outside of it.
    Case(
        "etp2_selective_recompute_biases_exact",
        2,
        "--etp-size 2",
        model=GPT2,
        common=f"{ONE_MICROBATCH} --recompute-granularity selective --recompute-modules mlp",
        tolerance=0.0,
        exact_in_bf16=False,
    ),
    Case("etp2_no_prefetch_exact", 2, "--etp-size 2 --etp-prefetch-depth 0", common=ONE_MICROBATCH, tolerance=0.0),
    Case("etp2_resident_exact", 2, "--etp-size 2 --etp-resident-bytes 1000000", common=ONE_MICROBATCH, tolerance=0.0),
    # Equal rows divide by 2 without padding, except those of the vocabulary's 250.
    Case("etp2_unpadded_exact", 2, "--etp-size 2 --etp-pad-for-alignment 0", common=ONE_MICROBATCH, tolerance=0.0),
    Case(
        "etp2_reduce_once_exact",
        2,
        "--etp-size 2 --etp-reduce-once-per-iteration",
        common="--micro-batch-size 1 --clip-grad 0",
        tolerance=0.0,
    ),
    Case("etp2_four_microbatches", 2, "--etp-size 2"),
    Case(
        "etp2_grouped_query_clipped",
        2,
        "--etp-size 2",
        common="--group-query-attention --num-query-groups 2 --qk-layernorm --clip-grad 0.1",
    ),
    Case("etp2_per_token_loss", 2, "--etp-size 2", common="--calculate-per-token-loss"),
    Case("etp2_bf16", 2, "--etp-size 2", common=f"--bf16 {COUNT_ZEROS}", tolerance=BF16_TOLERANCE, quick=True),
    Case(
        "dp2_etp2_fp16",
        4,
        "--etp-size 2",
        # The first steps overflow, and are skipped.
        common="--fp16 --initial-loss-scale 3e7 --hysteresis 1 --accumulate-allreduce-grads-in-fp32 "
        "--use-distributed-optimizer --overlap-grad-reduce",
        tolerance=BF16_TOLERANCE,
        cpu_only="on GPUs all cases are in bf16",
        variant=True,
    ),
    Case("etp4", 4, "--etp-size 4", variant=True),
    Case("etp4_backend_sums", 4, "--etp-size 4 --no-etp-fp32-accumulation", variant=True),
    Case(
        "etp4_padding",
        4,
        "--etp-size 4",
        model=LLAMA.replace("--hidden-size 64 --ffn-hidden-size 128", "--hidden-size 72 --ffn-hidden-size 100"),
        common=COUNT_ZEROS,
    ),
    Case("tp2_etp2", 4, "--etp-size 2", common="--tensor-model-parallel-size 2", variant=True),
    Case("tp2_etp2_sequence", 4, "--etp-size 2", common="--tensor-model-parallel-size 2 --sequence-parallel"),
    Case(
        "tp2_etp2_latent_attention",
        4,
        "--etp-size 2",
        common=f"{LATENT} --tensor-model-parallel-size 2 --sequence-parallel",
        on_gpus="--no-rope-fusion",
        variant=True,
    ),
    Case("tp2_etp2_biases", 4, "--etp-size 2", model=GPT2, common="--tensor-model-parallel-size 2", variant=True),
    # Stages but the first start the reduction over replicas from outside; the others count gradients.
    Case(
        "pp2_etp2",
        4,
        "--etp-size 2",
        common="--pipeline-model-parallel-size 2 --overlap-grad-reduce --mtp-num-layers 1 --decoupled-lr 2e-3",
    ),
    # The MTP layer has a stage of its own, with a copy of the first stage's embedding.
    Case(
        "pp3_etp2_mtp_stage",
        6,
        "--etp-size 2",
        common="--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ett|m|L --mtp-num-layers 1",
        variant=True,
    ),
    # The MTP layer shares the embedding and the output layer with the model, so each is visited twice in a pass.
    Case("etp2_mtp", 2, "--etp-size 2", common="--mtp-num-layers 1"),
    Case(
        "dp2_etp2_mtp_overlapped",
        4,
        "--etp-size 2",
        common=f"--mtp-num-layers 1 {OVERLAPPED} --ddp-bucket-size 9000",
        variant=True,
    ),
    Case("pp2_etp2_tied", 4, "--etp-size 2", model=GPT2, common="--pipeline-model-parallel-size 2", variant=True),
    Case(
        "pp2_etp2_interleaved",
        4,
        "--etp-size 2",
        model=LLAMA.replace("--num-layers 2", "--num-layers 4"),
        common="--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce",
        variant=True,
    ),
    # With two replicas: what comes too late for their reduction would differ on each.
    Case(
        "pp2_dp2_etp2_interleaved",
        8,
        "--etp-size 2",
        model=LLAMA.replace("--num-layers 2", "--num-layers 4"),
        common="--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    Case("dp2_etp2", 4, "--etp-size 2", common="--overlap-grad-reduce"),
    Case(
        "dp2_etp2_tied_overlap",
        4,
        "--etp-size 2",
        model=GPT2,
        common="--overlap-grad-reduce --ddp-bucket-size 9000",
        variant=True,
    ),
    Case(
        "dp2_etp2_distributed_optimizer",
        4,
        "--etp-size 2",
        common=f"{COUNT_ZEROS} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 9000",
        quick=True,
    ),
    Case(
        "dp2_etp2_distributed_optimizer_bf16",
        4,
        "--etp-size 2",
        common="--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        tolerance=BF16_TOLERANCE,
        variant=True,
    ),
    Case(
        "moe_ep2_expert_etp2",
        4,
        "--etp-size 2 --expert-etp-size 2",
        common=f"{MOE} {ROUTING} --expert-model-parallel-size 2",
        bf16_tolerance=SIGNS_BF16_TOLERANCE,
    ),
    Case(
        "hybrid_mtp",
        2,
        "--etp-size 2 --expert-etp-size 2",
        model=HYBRID,
        common=f"{MOE} {ROUTING} --spec tests.support.hybrid_on_cpu STACK",
        falls_to=0.9,
        cpu_only="the layers are those of a machine without Mamba's kernels and Transformer Engine",
        variant=True,
    ),
    # Experts are cut as attention is, and tensor-parallel ranks have different numbers of tokens for them.
    Case(
        "moe_ep2_tp2_etp2_capacity",
        4,
        "--etp-size 2",
        common=f"{MOE} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--moe-expert-capacity-factor 1",
        cpu_only="NCCL gathers parts of any size",
    ),
    # Dense and expert weights with different numbers of shards: the scales of their gradients differ.
    Case(
        "moe_etp4_expert_etp2",
        4,
        "--etp-size 4 --expert-etp-size 2",
        common=f"{MOE} --expert-model-parallel-size 2",
        variant=True,
    ),
    Case(
        "moe_expert_etp4",
        4,
        "--expert-etp-size 4",
        common=f"{MOE} {COUNT_ZEROS} --moe-ffn-hidden-size 50",
        variant=True,
    ),
    # Experts' biases are replicated over the ranks that share an expert's weights.
    Case(
        "moe_biases",
        4,
        "--etp-size 4 --expert-etp-size 2",
        model=GPT2,
        common=f"{MOE.replace('--moe-router-topk 2', '--moe-router-topk 1')} --moe-router-pre-softmax {LOG_NORM} "
        "--expert-model-parallel-size 2",
        cpu_only="the norm is computed by the same code on a GPU",
        variant=True,
    ),
    Case(
        "moe_per_token_loss",
        4,
        "--etp-size 4 --expert-etp-size 2",
        common=f"{MOE} --expert-model-parallel-size 2 --calculate-per-token-loss",
        variant=True,
    ),
    # Frozen: nothing is reduced for them, and below the first trained layer there is no backward pass at all.
    Case(
        "frozen_first_layer_exact",
        2,
        "--etp-size 2",
        common=ONE_MICROBATCH,
        freeze=r"^embedding\.|layers\.0\.",
        tolerance=0.0,
    ),
    # In between, backward passes through frozen weights to trained ones.
    Case("frozen_last_layer", 4, "--etp-size 2", model=GPT2, common="--overlap-grad-reduce", freeze=r"layers\.1\."),
    Case("frozen_tied_embedding", 4, "--etp-size 2", model=GPT2, freeze=r"word_embeddings", falls_to=0.95),
    Case(
        "frozen_layers_distributed_optimizer",
        4,
        "--etp-size 2",
        common="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000",
        freeze=r"^embedding\.|layers\.0\.|layers\.1\.mlp\.linear_fc1",
        variant=True,
    ),
    Case(
        "frozen_layer_recomputed",
        4,
        "--etp-size 4",
        common=FULL_RECOMPUTE,
        freeze=r"layers\.1\.",
        variant=True,
    ),
    Case(
        "frozen_expert",
        4,
        "--etp-size 2 --expert-etp-size 2",
        common=f"{MOE} --expert-model-parallel-size 2",
        freeze=r"layers\.1\..*local_experts\.0\.",
        grouped_experts=False,
        variant=True,
    ),
    Case(
        "frozen_expert_distributed_optimizer",
        4,
        "--etp-size 4 --expert-etp-size 2",
        common=f"{MOE} --expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce",
        freeze=r"^embedding\.|layers\.0\..*local_experts\.1\.",
        grouped_experts=False,
        variant=True,
    ),
    # The stock run computes shared experts on the stream of all others: two streams share slots and gradient buffers.
    Case(
        "moe_shared_expert_overlap",
        2,
        "--etp-size 2 --expert-etp-size 2 --moe-shared-expert-overlap",
        common=f"{MOE} --moe-shared-expert-intermediate-size 64",
        variant=True,
    ),
    # All of Megatron's overlaps that experts on two replicas may have at once.
    Case(
        "moe_dp2_overlapped",
        4,
        "--etp-size 2 --expert-etp-size 2 --moe-shared-expert-overlap",
        common=f"{MOE} --moe-shared-expert-intermediate-size 64 {OVERLAPPED} --ddp-bucket-size 9000",
        variant=True,
    ),
    # Experts on two ranks, each whole on both without shards.
    Case("moe_expert_etp2", 2, "--expert-etp-size 2", common=MOE, variant=True),
    # Without expert parallelism, a layer adds the bias of an expert in place. Where attention is cut, experts are not.
    Case(
        "moe_tp2_etp2_expert_etp2_biases",
        4,
        "--etp-size 2 --expert-etp-size 2",
        model=GPT2,
        common=f"{MOE} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel",
        cpu_only="Megatron's own layers add it in place",
        variant=True,
    ),
    Case(
        "moe_etp2_expert_etp2_biases",
        2,
        "--etp-size 2 --expert-etp-size 2",
        model=GPT2,
        common=MOE,
        cpu_only="Megatron's own layers add it in place",
    ),
    Case(
        "moe_etp2_expert_etp2_recomputed",
        2,
        "--etp-size 2 --expert-etp-size 2",
        common=f"{MOE} {FULL_RECOMPUTE}",
        quick=True,
    ),
    Case(
        "etp2_muon_exact",
        2,
        "--etp-size 2",
        common=f"{ONE_MICROBATCH} {MUON} --bf16 --group-query-attention --num-query-groups 2",
        tolerance=0.0,
        needs="emerging_optimizers",
    ),
    # Padding of dense and expert weights; query, key and value of a shard that are no whole query groups.
    Case(
        "moe_ep2_expert_etp2_muon_padding",
        4,
        "--etp-size 4 --expert-etp-size 2",
        model=LLAMA.replace("--hidden-size 64 --ffn-hidden-size 128", "--hidden-size 72 --ffn-hidden-size 100"),
        common=f"{MOE} {MUON_FP32} --expert-model-parallel-size 2 --clip-grad 0.1",
        needs="emerging_optimizers",
        variant=True,
    ),
    Case(
        "tp2_etp2_muon",
        4,
        "--etp-size 2",
        common=f"{MUON_FP32} --tensor-model-parallel-size 2 --muon-tp-mode duplicated",
        needs="emerging_optimizers",
        variant=True,
    ),
    # Steps are signs of averages of gradients, of which a rounding changes some.
    Case(
        "etp2_lion_exact",
        2,
        "--etp-size 2",
        common=f"{ONE_MICROBATCH} {LION}",
        tolerance=0.0,
        needs="emerging_optimizers",
        variant=True,
    ),
    Case(
        "moe_ep2_expert_etp2_lion_padding",
        4,
        "--etp-size 4 --expert-etp-size 2",
        model=LLAMA.replace("--hidden-size 64 --ffn-hidden-size 128", "--hidden-size 72 --ffn-hidden-size 100"),
        common=f"{MOE} {LION} --expert-model-parallel-size 2 --clip-grad 0.1",
        needs="emerging_optimizers",
        variant=True,
    ),
    Case(
        "etp2_fused_accumulation",
        2,
        "--etp-size 2",
        fused_accumulation=True,
        gpu_only="Transformer Engine's GEMMs add to the gradient, and it needs a GPU",
    ),
    Case(
        "etp2_tied_fused_accumulation",
        2,
        "--etp-size 2",
        model=GPT2,
        fused_accumulation=True,
        gpu_only="Transformer Engine's GEMMs add to the gradient, and it needs a GPU",
    ),
    *(
        Case(
            f"fp8_{recipe}_{name}",
            ranks,
            sharded,
            model=FP8_MODEL,
            # Exact, or nothing: one ulp of a bf16 gradient moves a weight to the next number of E4M3, 6e-2 away.
            common=f"--fp8-format {form} --fp8-recipe {recipe} {ONE_MICROBATCH} {common}",
            # Of norms and routers all four ranks have gradients then, and add them in another order with shards.
            freeze="router|norm" if "--sequence-parallel" in common else "",
            falls_to=0.9 if "--sequence-parallel" in common else 0.8,
            tolerance=0.0,
            gpu_only="FP8 needs Transformer Engine's kernels",
        )
        for recipe, form in (("blockwise", "e4m3"), ("tensorwise", "hybrid"))
        for name, ranks, sharded, common in (
            ("dense", 2, "--etp-size 2", ""),
            ("overlapped", 2, "--etp-size 2", "--use-distributed-optimizer --overlap-grad-reduce"),
            ("ends_in_bf16", 2, "--etp-size 2", "--first-last-layers-bf16"),
            ("recomputed", 2, "--etp-size 2", FULL_RECOMPUTE),
            ("experts", 2, "--etp-size 2 --expert-etp-size 2", MOE),
            # Experts are whole; only tokens cross ranks.
            ("experts_ep2_whole", 2, "--etp-size 2", f"{MOE} --expert-model-parallel-size 2"),
            # Of four ranks, each two exchange tokens, and each two others share experts.
            ("experts_ep2", 4, "--etp-size 2 --expert-etp-size 2", f"{MOE} {EP2_TP2}"),
            # The router sends experts as many tokens as a GEMM reads at once, and nothing is padded before it.
            ("experts_routed_padded", 4, "--etp-size 2 --expert-etp-size 2", f"{MOE} {EP2_TP2} {ROUTER_PADDING}"),
            ("tp2", 4, "--etp-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"),
            ("stages", 4, "--etp-size 2", "--pipeline-model-parallel-size 2"),
            # Four microbatches: sums of them have the same order if the ranks' sums are added at the end.
            ("accumulated", 2, "--etp-size 2 --etp-reduce-once-per-iteration", "--micro-batch-size 1"),
            (
                "vpp",
                4,
                "--etp-size 2 --etp-reduce-once-per-iteration",
                "--micro-batch-size 1 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            ),
        )
    ),
    Case(
        "moe_exchange_overlapped",
        4,
        "--etp-size 2 --expert-etp-size 2",
        common=f"{MOE} --bf16 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm",
        tolerance=BF16_TOLERANCE,
        variant=True,
    ),
    # Overlapped reductions beside it are for interleaved stages alone.
    Case(
        "moe_pp2_dp2_all_overlapped",
        8,
        "--etp-size 2",
        model=LLAMA.replace("--num-layers 2", "--num-layers 4"),
        common=f"{MOE} --bf16 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm {OVERLAPPED} "
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        tolerance=BF16_TOLERANCE,
        variant=True,
    ),
    Case(
        "cp2_etp2",
        4,
        "--etp-size 2",
        common="--context-parallel-size 2",
        gpu_only="Transformer Engine's attention has context parallelism, and it needs a GPU",
        on_gpus="--attention-backend fused",
    ),
    Case(
        "etp2_precision_aware_exact",
        2,
        "--etp-size 2",
        common=f"{ONE_MICROBATCH} --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 "
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        tolerance=0.0,
        gpu_only="Transformer Engine's Adam, and it needs a GPU",
    ),
    Case(
        "dp2_etp2_fused_accumulation",
        4,
        "--etp-size 2",
        common="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        fused_accumulation=True,
        gpu_only="Transformer Engine's GEMMs add to the gradient, and it needs a GPU",
    ),
)
