"""A plain PyTorch checkpoint holds whole tensors, whatever the number of shards that saved it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiproc import bodies_checkpoint as bodies
from tests.support.launch import on_gpus, run_distributed

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("optimizer", list(bodies.OPTIMIZERS))
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path, optimizer: str) -> None:
    saved = run_distributed(bodies.train_save_and_go_on, 2, args=(str(tmp_path / "a"), optimizer))
    loaded = run_distributed(bodies.load_and_go_on, 2, args=(str(tmp_path / "a"), optimizer, str(tmp_path / "b")))
    for (losses, full), (again, held, _) in zip(saved, loaded, strict=True):
        assert held == full
        assert again == losses


@pytest.mark.parametrize(("size", "other"), [(2, 3), (4, 1), (1, 4)])
def test_any_number_of_ranks_loads_it_and_so_does_the_unsharded_model(tmp_path: Path, size: int, other: int) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    full = run_distributed(bodies.train_save_and_go_on, size, args=(first, "adamw"))[0][1]
    (whole,) = run_distributed(_whole, 1, args=(first,))
    assert full.items() <= whole.items()
    assert any(name.endswith("exp_avg_sq") for name in whole)
    for _, held, saved_again in run_distributed(bodies.load_and_go_on, other, args=(first, "adamw", second)):
        assert held == full
        assert saved_again == whole


def _whole(rank: int, world_size: int, folder: str) -> dict[str, bytes]:
    return bodies.whole_from(folder, "adamw")


@pytest.mark.parametrize("size", [2, 4])
def test_an_unsharded_model_s_checkpoint_is_loaded_into_shards(tmp_path: Path, size: int) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    (whole,) = run_distributed(bodies.save_whole, 1, args=(first, "adamw"))
    for _, held, saved_again in run_distributed(bodies.load_and_go_on, size, args=(first, "adamw", second)):
        assert held.items() <= whole.items()
        assert saved_again == whole


def test_an_asynchronous_save_holds_what_there_was_when_it_began(tmp_path: Path) -> None:
    if on_gpus():
        pytest.skip("PyTorch wants a group with gloo, too")
    folder = str(tmp_path / "a")
    (full, _) = run_distributed(bodies.save_while_training_goes_on, 2, args=(folder,))
    (whole,) = run_distributed(_whole, 1, args=(folder,))
    assert full.items() <= whole.items()


def test_a_checkpoint_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    assert all(run_distributed(bodies.fresh_optimizer_is_left_alone, 2, args=(str(tmp_path),)))


def test_a_checkpoint_of_no_step_is_one_of_no_step_for_every_optimizer(tmp_path: Path) -> None:
    for losses in run_distributed(bodies.losses_around_a_checkpoint_of_no_step, 2, args=(str(tmp_path),)):
        for name, (without, *others) in losses.items():
            assert others == [without] * 3, name


def test_parameters_without_state_are_saved_and_loaded_as_others(tmp_path: Path) -> None:
    for losses in run_distributed(bodies.parameters_without_state, 2, args=(str(tmp_path),)):
        assert losses[0] == losses[1]
        assert losses[2] == losses[3]


def test_what_would_lose_shards_is_refused(tmp_path: Path) -> None:
    for answers in run_distributed(bodies.refusals, 2, args=(str(tmp_path / "a"),)):
        for name in (
            ("plain save", "parameters") if on_gpus() else ("plain save", "plain asynchronous save", "parameters")
        ):
            assert "pass it etp.ShardedCheckpoint(module, optimizer)" in answers[name]
        assert "embedding.weight: a hook" in answers["hook"]
        assert "Size mismatch" in answers["plain load"]
        assert "shape (3,) that is not the module's" in answers["stranger"]
        assert "the optimizer's row_var has shape" in answers["factored"]
        assert "build the optimizer with the groups" in answers["groups"]
        assert "build the optimizer with the options" in answers["options"]
        assert "LBFGS" in answers["lbfgs"]
        assert "etp.full_state_dict" in answers["arithmetic"]


def test_state_dicts_are_saved_as_plain_tensors() -> None:
    assert all(run_distributed(bodies.states_are_saved_as_plain_tensors, 2))


def test_the_lines_of_the_documentation_save_and_load(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert example.count('"runs/a"') == 2
    example = example.replace("runs/a", str(tmp_path / "a"))
    assert run_distributed(bodies.run_the_documentation, 2, args=(example,)) == [True, True]


def test_experts_that_would_be_lost_are_not_saved(tmp_path: Path) -> None:
    answers = run_distributed(bodies.experts_of_pairs, 4, args=(str(tmp_path),))
    pairs = {"weights": "(2 than on rank 0|3 than on rank 1)", "biases": "2 than on rank 0"}
    for answer in answers:
        assert answer.pop("replicas") == "saved"
        if not on_gpus():
            assert answer.pop("later") == answer["weights"]
        for case, name in (("weights", "weight1"), ("biases", "bias0")):
            told = answer.pop(case)
            assert re.search(rf"experts\.{name} has other values on rank {pairs[case]}, and a", told), told
            assert "give these names of their own" in told
        assert not answer


def test_experts_with_names_of_their_own_are_saved_and_loaded_with_their_optimizer(tmp_path: Path) -> None:
    for going_on, loaded in run_distributed(bodies.experts_of_own_names, 4, args=(str(tmp_path),)):
        assert loaded == going_on


def test_replicas_that_differ_are_saved_one_at_a_time(tmp_path: Path) -> None:
    for told, own, whole in run_distributed(bodies.one_of_unequal_replicas, 4, args=(str(tmp_path),)):
        assert "has other values on rank" in told
        assert "pass its ranks as process_group" in told
        assert own == whole


def test_replicas_of_shards_save_one_checkpoint(tmp_path: Path) -> None:
    for full, whole in run_distributed(bodies.replicas_save_one, 4, args=(str(tmp_path / "a"),)):
        assert full.items() <= whole.items()
