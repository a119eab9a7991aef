"""How Megatron numbers the ranks of a training run: from sizes of the parallel axes to each rank's coordinates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """Coordinates of one rank.

    Attributes:
        tp: rank in its tensor-parallel group.
        etp: rank in its extended-tensor-parallel group.
        pp: its pipeline stage.
        ep: rank in its expert-parallel group.
        expert_tp: rank in its expert tensor-parallel group.
        expert_etp: rank in the group over which the rows of expert weights are cut.
    """

    tp: int
    etp: int
    pp: int
    ep: int
    expert_tp: int
    expert_etp: int


@dataclass(frozen=True, kw_only=True)
class TrainerMesh:
    """Sizes of the axes, in Megatron's default rank order (``tp-cp-ep-dp-pp``).

    The world size is ``tp * etp * dp * pp``. Expert layers divide the ranks of a stage along other axes: ``expert_tp``,
    ``ep``, ``expert_etp``, and as many replicas as remain.

    Attributes:
        tp: tensor parallelism.
        etp: extended tensor parallelism.
        pp: pipeline stages.
        vpp: model chunks on each stage.
        ep: expert parallelism.
        expert_tp: tensor parallelism of experts.
        expert_etp: extended tensor parallelism of experts.
        dp: replicas, context parallelism included: peers that hold the same bytes.
        first: layers on the first pipeline stage (``--decoder-first-pipeline-num-layers``); 0 for as many as on the
            others.
        last: layers on the last pipeline stage (``--decoder-last-pipeline-num-layers``); 0 for as many as on the
            others.

    Raises:
        ValueError: if a size is not positive, there are several chunks but one stage, or the expert axes do not divide
            the ranks of a stage.
    """

    tp: int = 1
    etp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    expert_tp: int = 1
    expert_etp: int = 1
    dp: int = 1
    first: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "etp", "pp", "vpp", "ep", "expert_tp", "expert_etp", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if (self.first or self.last) and self.pp == 1:
            raise ValueError(f"first is {self.first} and last {self.last}, but there is one pipeline stage")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp is {self.vpp}, but several model chunks on a rank need pp of at least 2")
        axes = self.expert_tp * self.ep * self.expert_etp
        if self.stage_size % axes:
            raise ValueError(
                f"expert_tp {self.expert_tp} x ep {self.ep} x expert_etp {self.expert_etp} = {axes} does not divide "
                f"the {self.stage_size} ranks of a pipeline stage (tp {self.tp} x etp {self.etp} x dp {self.dp})"
            )

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tp * self.etp * self.dp

    @property
    def size(self) -> int:
        """Number of ranks of the run."""
        return self.stage_size * self.pp

    def stage_layers(self, num_layers: int) -> list[int]:
        """Number of layers on each pipeline stage, all its chunks together.

        Raises:
            ValueError: if the layers cannot be spread evenly over the stages without an explicit number.
        """
        even = self.pp - bool(self.first) - bool(self.last)
        rest = num_layers - self.first - self.last
        if rest < even or (rest % even if even else rest):
            named = [
                f"{count} on the {name} stage" for name, count in (("first", self.first), ("last", self.last)) if count
            ]
            raise ValueError(
                f"{num_layers} layers, {' and '.join(named)}, leave {rest} for {even} further stages of pp {self.pp}; "
                "each needs as many, and at least one"
                if named
                else f"pp of {self.pp} does not divide num_layers ({num_layers})"
            )
        middle = [rest // even] * even if even else []
        return [self.first] * bool(self.first) + middle + [self.last] * bool(self.last)

    def coordinates(self, rank: int) -> TrainerRank:
        """The coordinates of ``rank``.

        Raises:
            ValueError: if the rank does not exist.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank} among {self.size}")
        pp, inner = divmod(rank, self.stage_size)
        return TrainerRank(
            tp=inner % self.tp,
            etp=inner // self.tp % self.etp,
            pp=pp,
            expert_tp=inner % self.expert_tp,
            ep=inner // self.expert_tp % self.ep,
            expert_etp=inner // (self.expert_tp * self.ep) % self.expert_etp,
        )
