"""Which sizes and settings of a checkpoint are refused before anything of its model is built, and in which words."""

from __future__ import annotations

import argparse
import re
import sys
from types import SimpleNamespace

import pytest

from megatron_patches.refit.checkpoints.checkpoint_build import _staged, refuse_unbuildable
from megatron_patches.refit.checkpoints.checkpoint_model import _check_rows, add_checkpoint_options
from megatron_patches.refit.checkpoints.checkpoint_sizes import SIZE_FLAGS, ParallelSizes
from megatron_patches.refit.checkpoints.megatron_checkpoint import vocabulary_of
from megatron_patches.refit.errors import ExportError, UnsupportedModelError

DENSE: dict[str, object] = {
    "num_layers": 8,
    "num_attention_heads": 12,
    "group_query_attention": True,
    "num_query_groups": 4,
    "ffn_hidden_size": 96,
    "num_experts": None,
    "hybrid_layer_pattern": None,
    "spec": None,
}
EXPERTS = DENSE | {"num_experts": 6, "moe_ffn_hidden_size": 40, "moe_shared_expert_intermediate_size": 36}
TIED: dict[str, object] = {"untie_embeddings_and_output_weights": False}
NO_PLACE = "--pipeline-model-parallel-size is 2, and Megatron neither saves nor loads tied embeddings beside"
HYBRID = EXPERTS | {"hybrid_layer_pattern": "M*|E-MM", "mamba_num_heads": 12, "mamba_num_groups": 4}


@pytest.mark.parametrize("minutes", ["nan", "inf", "1e300", "-1", "0", "soon"])
def test_a_wait_that_is_none_is_refused(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_checkpoint_options(parser, "exporting")
    assert parser.parse_args(["--load", "here", "--timeout-minutes", "0.5"]).timeout_minutes == 0.5
    with pytest.raises(SystemExit):
        parser.parse_args(["--load", "here", f"--timeout-minutes={minutes}"])
    assert f"argument --timeout-minutes: '{minutes}' is not a positive number of minutes" in capsys.readouterr().err


def test_rows_that_were_not_saved_hold_no_tokens() -> None:
    """Tensor parallelism may pad the embedding further, with rows that no checkpoint fills."""
    _check_rows(argparse.Namespace(padded_vocab_size=251), 251)
    _check_rows(argparse.Namespace(padded_vocab_size=None), 252)
    with pytest.raises(ExportError, match=r"251 rows, padding included, which cannot hold 252 tokens; pass --v"):
        _check_rows(argparse.Namespace(padded_vocab_size=251), 252)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        # SentencePiece, of a pointer that a clone without Git LFS has; tiktoken, of the same; a class of Megatron's.
        (RuntimeError("INTERNAL: could not parse ModelProto"), "INTERNAL: could not parse ModelProto"),
        (AssertionError(), "raise error"),
        (TypeError("missing 'vocab_size'"), "missing 'vocab_size'"),
    ],
)
def test_a_tokenizer_that_cannot_be_opened_is_named(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_tokenizer(_: argparse.Namespace) -> object:
        raise error

    name = "megatron.core.tokenizers.utils.build_tokenizer"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(build_tokenizer=build_tokenizer))
    args = argparse.Namespace(tokenizer_type="SomeTokenizer", vocab_size=None)
    with pytest.raises(ExportError) as caught:
        vocabulary_of(args)
    assert str(caught.value) == (
        f"cannot open the run's tokenizer SomeTokenizer ({reason}); pass --vocab-size with the number of its tokens"
    )


def test_flags_are_read_into_sizes() -> None:
    parser = argparse.ArgumentParser()
    ParallelSizes.add_options(parser, "exporting")
    assert ParallelSizes.from_options(parser.parse_args([])) == ParallelSizes()
    words = [word for number, flag in enumerate(SIZE_FLAGS.values(), 2) for word in (flag, str(number))]
    sizes = ParallelSizes.from_options(parser.parse_args(words))
    assert [getattr(sizes, name) for name in SIZE_FLAGS] == list(range(2, 2 + len(SIZE_FLAGS)))
    assert "%" not in parser.format_help()


def test_experts_are_spread_by_tensor_parallelism_like_the_rest_unless_told() -> None:
    assert ParallelSizes(tensor=4).experts_tensor == 4
    assert ParallelSizes(tensor=4, expert_tensor=1).experts_tensor == 1


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        (ParallelSizes(tensor=0), 1, "--tensor-model-parallel-size is 0; it must be at least 1"),
        (ParallelSizes(expert_etp=-1), 1, "--expert-etp-size is -1; it must be at least 1"),
        (ParallelSizes(tensor=2, etp=2), 6, "6 processes cannot be divided by tensor 2 x pipeline 1 x ETP 2 = 4"),
        (
            ParallelSizes(tensor=2, expert=2, expert_etp=2),
            4,
            "4 processes cannot be divided by expert tensor 2 x expert 2 x expert ETP 2 x pipeline 1 = 8; start a",
        ),
        (ParallelSizes(chunks=2), 2, "--num-virtual-stages-per-pipeline-rank is 2, but there is one pipeline stage"),
        (ParallelSizes(first=2), 2, "--decoder-first-pipeline-num-layers is 2, but there is one pipeline stage; set"),
    ],
)
def test_processes_that_cannot_be_divided_so_are_refused(sizes: ParallelSizes, world: int, message: str) -> None:
    with pytest.raises(ExportError, match=re.escape(message)):
        sizes.check(world)


@pytest.mark.parametrize(
    ("saved", "sizes", "messages"),
    [
        (DENSE, ParallelSizes(tensor=5), ["--num-attention-heads 12 is not divisible by --tensor-model-parallel-size"]),
        (DENSE, ParallelSizes(tensor=6), ["--num-query-groups 4 is not divisible by --tensor-model-parallel-size 6"]),
        (DENSE | {"ffn_hidden_size": 90}, ParallelSizes(tensor=4), ["--ffn-hidden-size 90 is not divisible by"]),
        (DENSE, ParallelSizes(expert=2), ["--expert-model-parallel-size is 2, but it has no experts (--num-experts)"]),
        (DENSE, ParallelSizes(expert_tensor=2), ["--expert-tensor-parallel-size is 2, but it has no experts"]),
        (DENSE, ParallelSizes(expert_etp=2), ["--expert-etp-size is 2, but it has no experts"]),
        (EXPERTS, ParallelSizes(expert=4), ["--num-experts 6 is not divisible by --expert-model-parallel-size 4"]),
        (
            EXPERTS | {"moe_ffn_hidden_size": 42, "moe_shared_expert_intermediate_size": 34},
            ParallelSizes(tensor=4),
            [
                "--moe-ffn-hidden-size 42 is not divisible by --tensor-model-parallel-size 4; choose another size",
                "--moe-shared-expert-intermediate-size 34 is not divisible by --tensor-model-parallel-size 4",
            ],
        ),
        (
            EXPERTS,
            ParallelSizes(tensor=4, expert_tensor=3),
            ["--moe-ffn-hidden-size 40 is not divisible by --expert-tensor-parallel-size 3"],
        ),
        (HYBRID | {"mamba_num_groups": 2}, ParallelSizes(tensor=4), ["--mamba-num-groups 2 is not divisible by"]),
        (
            DENSE,
            ParallelSizes(pipeline=3),
            [
                "pp of 3 does not divide num_layers (8); change --pipeline-model-parallel-size or",
                "--decoder-first-pipeline-",
            ],
        ),
        (
            DENSE,
            ParallelSizes(pipeline=2, first=3, last=4),
            ["3 on the first stage and 4 on the last stage, leave 1 for 0"],
        ),
        (DENSE, ParallelSizes(pipeline=2, chunks=3), ["stages of [4, 4] layers cannot be cut into 3 chunks each"]),
        (HYBRID, ParallelSizes(pipeline=4), ["pp of 4 does not divide num_layers (6)"]),
        (DENSE | TIED | {"mtp_num_layers": 1}, ParallelSizes(pipeline=2), [NO_PLACE]),
        (HYBRID | TIED | {"hybrid_layer_pattern": "M*EM/*E"}, ParallelSizes(pipeline=2), [NO_PLACE]),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused(
    saved: dict[str, object], sizes: ParallelSizes, messages: list[str]
) -> None:
    with pytest.raises(ExportError) as caught:
        sizes.check_model(argparse.Namespace(**saved))
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "sizes"),
    [
        (DENSE, ParallelSizes(tensor=4, expert_tensor=1, pipeline=2, chunks=2, etp=2)),
        (DENSE, ParallelSizes(tensor=12)),  # more ranks than KV groups
        (DENSE, ParallelSizes(tensor=2, expert_tensor=2, pipeline=3, first=1, last=5)),
        (EXPERTS, ParallelSizes(expert=3, expert_tensor=2, expert_etp=2)),
        (HYBRID, ParallelSizes(tensor=4, pipeline=3)),
        (DENSE | TIED | {"mtp_num_layers": 1}, ParallelSizes(tensor=2)),
        (DENSE | TIED, ParallelSizes(pipeline=2)),
    ],
)
def test_what_can_be_divided_passes(saved: dict[str, object], sizes: ParallelSizes) -> None:
    sizes.check_model(argparse.Namespace(**saved))


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        (ParallelSizes(), "M*EM-MEM"),
        (ParallelSizes(pipeline=2), "M*EM|-MEM"),
        (ParallelSizes(pipeline=2, chunks=2), "M*|EM|-M|EM"),
        (ParallelSizes(pipeline=3, first=1, last=3), "M|*EM-|MEM"),
        (ParallelSizes(pipeline=2, chunks=2, first=2, last=6), "M|*EM|-|MEM"),
    ],
)
def test_a_hybrid_is_cut_into_stages_and_chunks(sizes: ParallelSizes, layers: str) -> None:
    assert _staged("M*EM-MEM", sizes) == layers
    assert _staged("M*|EM-M|EM/*E/*E", sizes) == f"{layers}/*E/*E"


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"yaml_cfg": "run.yaml"}, ["--yaml-cfg run.yaml: train with flags"]),
        (
            {"heterogeneous_layers_config_path": "/layers.json", "experimental_attention_variant": "dsa"},
            ["--heterogeneous-layers-config-path /layers.json: train without", "--experimental-attention-variant dsa:"],
        ),
        ({"moe_single_grouped_weight": True}, ["--moe-single-grouped-weight True: train without it: experts are"]),
        ({"spec": ["no_such_module_here", "layers"]}, ["--spec no_such_module_here layers: No module named", "PYTHON"]),
        ({"spec": ["json", "layers"]}, ["--spec json layers: json has no layers; install"]),
        ({"spec": ["local"]}, ["--spec local: train with a module and a name in it"]),
    ],
)
def test_settings_that_cannot_be_built_are_refused_by_flag_and_value(
    changes: dict[str, object], messages: list[str]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_unbuildable(argparse.Namespace(**(DENSE | changes)))
    for message in messages:
        assert message in str(caught.value)


def test_what_needs_packages_that_are_missing_is_refused_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name == "mamba_ssm" else None)
    latent = {"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": None}
    for changes, message in (
        (HYBRID, "--hybrid-layer-pattern M*|E-MM: Megatron builds such layers with transformer_engine and mamba_ssm"),
        (HYBRID, "only, and transformer_engine cannot be imported; install it, or run this where it is"),
        (latent, "--q-lora-rank None: Megatron builds multi-latent attention without a compressed query with"),
    ):
        with pytest.raises(UnsupportedModelError, match=re.escape(message)):
            refuse_unbuildable(argparse.Namespace(**(DENSE | changes)))
    refuse_unbuildable(argparse.Namespace(**(DENSE | latent | {"q_lora_rank": 8})))
    refuse_unbuildable(argparse.Namespace(**(HYBRID | {"spec": ["json", "loads"]})))  # layers of one's own
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for changes in (HYBRID, latent):
        refuse_unbuildable(argparse.Namespace(**(DENSE | changes)))
