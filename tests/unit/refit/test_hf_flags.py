"""Megatron's flags of public models, and the plans that can be made for them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_patches.refit.__main__ import main
from megatron_patches.refit.checkpoints.hf_flags import flags_of, model_flags
from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models.config_traits import family_from_config, read_config
from tests.integration import tiny_models
from tests.support.public_models import PUBLIC

PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "nemotron-h-8b": 8_101_000_000,
}
"""As published; that of Nemotron-H is rounded."""
REFUSED = {
    "gpt-oss-20b": "the architecture is GptOssForCausalLM, whose experts are stored transposed and .* row; known are ",
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items(), ids=PARAMETERS)
def test_public_models_have_as_many_parameters_as_is_said(name: str, parameters: int) -> None:
    found = sum(math.prod(shape) for shape in family_from_config(PUBLIC[name]).shapes().values())
    assert found == pytest.approx(parameters, rel=1e-2 if parameters % 1_000_000 == 0 else 0, abs=0)


def test_latent_experts_and_mtp_layers_of_a_public_model_are_counted() -> None:
    shapes = family_from_config(PUBLIC["nemotron-3-super-120b"]).shapes()
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    mtp = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    # As published: without the MTP layers.
    assert sum(sizes.values()) - mtp == pytest.approx(120_600_000_000, rel=1e-3)
    latent, experts = 2 * 4096 * 1024, 512 * 2 * 1024 * 2688
    assert sum(size for name, size in sizes.items() if "latent_proj" in name) == 41 * latent
    assert sum(size for name, size in sizes.items() if ".experts." in name) == 41 * experts


def test_deepseek_v3_has_as_many_parameters_as_is_said_and_another_layer_for_mtp() -> None:
    sizes = {name: math.prod(shape) for name, shape in family_from_config(PUBLIC["deepseek-v3"]).shapes().items()}
    main = sum(size for name, size in sizes.items() if not name.startswith("model.layers.61."))
    assert main == pytest.approx(671e9, rel=1e-3)
    assert sum(sizes.values()) - main == pytest.approx(14e9, rel=0.05)  # with copies of embedding and output layer


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-8b", "nemotron-h-8b"])
def test_public_models_are_planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC[name]))
    command = ["plan", "--model", str(tmp_path), "--from", "tp=2,etp=2", "--to", "tp=2", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["model_bytes"] == pytest.approx(2 * PARAMETERS[name], rel=1e-2)


def test_latent_experts_and_mtp_layers_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The public model's first layers and a few of its experts; the engine leaves out the MTP layers."""
    fewer = {"num_hidden_layers": 9, "hybrid_override_pattern": "MEMEMEM*E", "n_routed_experts": 24}
    config = PUBLIC["nemotron-3-super-120b"] | fewer
    (tmp_path / "config.json").write_text(json.dumps(config))
    meshes = ["--from", "tp=2,etp=2,pp=3,ep=2,dp=1", "--to", "tp=4"]
    assert main(["plan", "--model", str(tmp_path), *meshes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = {name: math.prod(shape) for name, shape in family_from_config(config).shapes().items()}
    assert found["model_bytes"] == 2 * (sum(sizes.values()) + 5 * 24)  # five routers' biases are in fp32
    main_model = sum(size for name, size in sizes.items() if not name.startswith("mtp."))
    projections = sum(size for name, size in sizes.items() if "backbone" in name and "latent_proj" in name)
    assert found["proof"]["verdict"] == "proved"
    assert found["proof"]["elements"] > main_model + 3 * projections  # each of four ranks has them whole


def test_flags_say_all_that_a_model_is() -> None:
    assert " ".join(model_flags(PUBLIC["llama-3.2-1b"])) == (
        "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --max-position-embeddings 131072 "
        "--normalization RMSNorm --norm-epsilon 1e-05 --attention-dropout 0 --hidden-dropout 0 --disable-bias-linear "
        "--num-attention-heads 32 --kv-channels 64 "
        "--group-query-attention --num-query-groups 8 --position-embedding-type rope --rotary-base 500000 --swiglu "
        "--use-rope-scaling --rope-scaling-factor 32.0"
    )
    assert " ".join(model_flags(PUBLIC["nemotron-h-8b"])) == (
        f"--hybrid-layer-pattern {PUBLIC['nemotron-h-8b']['hybrid_override_pattern']} --hidden-size 4096 "
        "--ffn-hidden-size 21504 --max-position-embeddings 8192 --normalization RMSNorm --norm-epsilon 1e-05 "
        "--attention-dropout 0 --hidden-dropout 0 "
        "--untie-embeddings-and-output-weights --disable-bias-linear --num-attention-heads 32 --kv-channels 128 "
        "--group-query-attention --num-query-groups 8 --position-embedding-type none --squared-relu "
        "--mamba-num-heads 128 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-state-dim 128"
    )
    super_120b = PUBLIC["nemotron-3-super-120b"]
    flags = " ".join(model_flags(super_120b))
    assert flags.startswith(f"--hybrid-layer-pattern {super_120b['hybrid_override_pattern']}/*E --hidden-size 4096 ")
    assert flags.endswith(
        "--num-experts 512 --moe-router-topk 22 --moe-ffn-hidden-size 2688 --moe-latent-size 1024 "
        "--moe-shared-expert-intermediate-size 5376 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 5.0"
    )
    assert "--mtp-num-layers" not in flags  # the pattern says it
    assert " ".join(model_flags(PUBLIC["qwen3-30b-a3b"])).endswith(
        "--swiglu --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768"
    )
    assert " ".join(model_flags(PUBLIC["deepseek-v3"])) == (
        "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --max-position-embeddings 163840 "
        "--normalization RMSNorm --norm-epsilon 1e-06 --attention-dropout 0 --hidden-dropout 0 "
        "--untie-embeddings-and-output-weights --disable-bias-linear --mtp-num-layers 1 --num-attention-heads 128 "
        "--multi-latent-attention --qk-layernorm --rope-type yarn --rotary-scaling-factor 40.0 --mscale 1.0 "
        "--mscale-all-dim 1.0 --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --position-embedding-type rope --rotary-base 10000 --swiglu --num-experts 256 "
        "--moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-layer-freq [0]*3+[1]*58 "
        "--moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-num-groups 8 --moe-router-group-topk 4 "
        "--moe-router-topk-scaling-factor 2.5"
    )
    assert " ".join(model_flags(tiny_models.DEEPSEEK_V3_ODD)).endswith(
        "--moe-layer-freq [0]*1+[1]*3 --moe-shared-expert-intermediate-size 64 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1 "
        "--moe-router-topk-scaling-factor 2.5"
    )


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_the_rotary_base_is_read_where_transformers_reads_it(place: str) -> None:
    config = {name: value for name, value in tiny_models.LLAMA.items() if name != "rope_theta"}
    nested: dict[str, object] = {place: {"rope_type": "default", "rope_theta": 500000.0}}
    flags = model_flags({**config, **nested})
    assert flags[flags.index("--rotary-base") + 1] == "500000"
    assert model_flags({**config, **nested, "rope_theta": 5e5}) == flags
    with pytest.raises(UnsupportedModelError, match=r"rope_theta is 10000.0 in the configuration and 500000.0 in its"):
        model_flags({**config, **nested, "rope_theta": 10000.0})


@pytest.mark.parametrize("name", ["LLAMA", "QWEN2", "QWEN3", "QWEN3_MOE", "DEEPSEEK_V3_ODD", "NEMOTRON_H_ODD"])
def test_a_configuration_that_transformers_saves_gives_the_same_flags(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = family_from_config(getattr(tiny_models, name)).config()
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    assert model_flags(read_config(tmp_path)) == model_flags(config)


def test_yarn_is_told_by_flags() -> None:
    """Where flags are Megatron's defaults for latent attention, stock Megatron needs none of them."""
    yarn: dict[str, object] = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    given = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    config = PUBLIC["deepseek-v3"]
    plain = "--rope-type yarn --rotary-scaling-factor 40.0 --mscale 1.0 --mscale-all-dim 1.0"
    assert f"--qk-layernorm {plain} --q-lora-rank" in " ".join(model_flags(config | {"rope_scaling": yarn | given}))
    kimi = given | {"beta_fast": 1.0, "original_max_position_embeddings": 2048}
    more = "--yarn-original-max-position-embeddings 2048 --yarn-beta-fast 1.0"
    assert f"{plain} {more} --q-lora-rank" in " ".join(model_flags(config | {"rope_scaling": yarn | kimi}))
    assert "--yarn-original-max-position-embeddings 163840 --q" in " ".join(
        model_flags(config | {"rope_scaling": yarn})
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention_factor": 1.2},
            r"YaRN with attention_factor 1\.2: no model here has such a setting",
        ),
        ({"truncate": False}, "YaRN with truncate False: "),
        ({"factor": None}, "YaRN without factor"),
        ({"mscale": None}, None),
        (
            {"mscale": 0.7},
            r"YaRN with mscale 0\.7 and mscale_all_dim 0\.0, for which transformers and Megatron compute",
        ),
        ({"mscale": 0, "mscale_all_dim": 1.0}, r"YaRN with mscale 0\.0 and mscale_all_dim 1\.0"),
        ({"factor": 0.5}, r"YaRN shortens sequences \(by a factor of 0\.5\).* \(rope_scaling\)$"),
        (
            {"original_max_position_embeddings": 0},
            "original_max_position_embeddings is 0 in the configuration; it must",
        ),
    ],
)
def test_yarn_that_megatron_has_not_is_refused_by_name(changes: dict[str, object], message: str | None) -> None:
    entry = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 32, **changes}
    config = tiny_models.DEEPSEEK_V3 | {"rope_scaling": entry}
    if message is None:
        assert "--mscale 1.0" in " ".join(model_flags(config))
        return
    with pytest.raises(UnsupportedModelError, match=message):
        model_flags(config)


PLAIN_YARN: dict[str, object] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("name", ["LLAMA", "QWEN2", "QWEN3", "QWEN3_MOE"])
def test_yarn_without_latent_attention_is_told_by_flags(name: str) -> None:
    """Published configurations leave defaults out, and transformers 5 keeps the entry elsewhere."""
    config: dict[str, object] = getattr(tiny_models, name)
    plain = "--position-embedding-type yarn --rotary-scaling-factor 4.0 --yarn-original-max-position-embeddings 32"
    assert f"{plain} --rotary-base" in " ".join(model_flags(config | {"rope_scaling": PLAIN_YARN}))
    flags = " ".join(model_flags(config | {"rope_parameters": PLAIN_YARN | {"beta_fast": 16, "beta_slow": 2}}))
    assert f"{plain} --yarn-beta-fast 16.0 --yarn-beta-slow 2.0 --rotary-base" in flags
    assert "--rope-type" not in flags
    assert "--use-rope-scaling" not in flags


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mscale": 1.0, "mscale_all_dim": 1.0},
            r"mscale 1\.0 and mscale_all_dim 1\.0, which vLLM ignores without latent",
        ),
        ({"attention_factor": 1.2}, r"YaRN with attention_factor 1\.2: no model here has such a setting"),
        ({"truncate": False}, "YaRN with truncate False: no model here has such a setting"),
    ],
)
def test_yarn_on_which_implementations_differ_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_flags(tiny_models.QWEN3 | {"rope_scaling": PLAIN_YARN | changes})


def test_dropout_is_what_the_configuration_says() -> None:
    """Megatron's default is 0.1."""
    flags = model_flags({**tiny_models.NEMOTRON_H, "attention_dropout": 0.25, "hidden_dropout": 0.5})
    assert "--attention-dropout 0.25 --hidden-dropout 0.5" in " ".join(flags)


def test_the_vocabulary_is_that_of_a_tokenizer_if_there_is_one(tmp_path: Path) -> None:
    config = PUBLIC["qwen3-8b"]
    numbers = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "151936", "--make-vocab-size-divisible-by", "1"]
    assert flags_of(config, tmp_path)[-7:] == [*numbers, "--bf16"]
    (tmp_path / "tokenizer.json").write_text("{}")
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    assert flags_of(config, tmp_path)[-7:] == [*words, "--padded-vocab-size", "151936", "--bf16"]
    assert flags_of({**config, "torch_dtype": "float32"}, tmp_path)[-1] == "151936"


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_cannot_build_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        model_flags(PUBLIC[name])


def test_one_expert_with_a_normalized_score_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="its router picks one expert, whose score Megatron does not norm"):
        model_flags({**tiny_models.QWEN3_MOE, "num_experts_per_tok": 1, "norm_topk_prob": True})
    flags = model_flags({**tiny_models.QWEN3_MOE, "num_experts_per_tok": 1, "norm_topk_prob": False})
    assert "--moe-router-pre-softmax" in flags


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 10000.5}, "its rotary base is 10000.5 (rope_theta), and Megatron takes whole numbers"),
        ({"hidden_act": "gelu"}, "its hidden_act is 'gelu', and Megatron's is 'silu'"),
        ({"scoring_func": "softmax"}, "its scoring_func is 'softmax', and Megatron's is 'sigmoid'"),
        ({"norm_topk_prob": False}, "its router has norm_topk_prob False"),
        ({"torch_dtype": "float8_e4m3fn"}, "the weights' type is "),
        ({"partial_rotary_factor": 0.5}, "it rotates a part of each head (partial_rotary_factor 0.5)"),
    ],
)
def test_the_command_refuses_in_one_line(
    tmp_path: Path, changes: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.DEEPSEEK_V3 | changes))
    assert main(["flags", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert message in said.err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_command_prints_one_line_that_a_shell_splits(
    rank: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every host: some launchers set RANK for a script in which a shell replaces the command by its line."""
    monkeypatch.setenv("RANK", rank)
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.QWEN3))
    assert main(["flags", str(tmp_path)]) == 0
    assert capsys.readouterr().out.rstrip("\n").split(" ") == flags_of(tiny_models.QWEN3, tmp_path)
    spaced = tmp_path / "my model"
    spaced.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (spaced / name).write_text(json.dumps(tiny_models.QWEN3))
    assert main(["flags", str(spaced)]) == 1
    assert "a shell would split" in capsys.readouterr().err
