"""GPU time by kind of work, from small traces that are drawn by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.trace_kinds import OWN_COPIES, PEER_COPIES, SUMS, kind_of, main, times_by_kind
from tests.unit.test_benchmark_trace import GEMM, LOCAL, PEER, work

SUM = "_accumulate_parts"
TRACE = [
    work(GEMM, 7, 10, 14),
    work(PEER, 8, 11, 17),
    work(SUM, 9, 14, 16),
    work(GEMM, 20, 16, 20),
    work(LOCAL, 21, 20, 21),
    work("void at::native::softmax", 7, 21, 22),
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1e6},
]


def test_kinds_are_told_by_names_whatever_the_stream() -> None:
    times, gaps = times_by_kind(TRACE, 2)
    assert times == {"GEMMs": 4.0, PEER_COPIES: 3.0, SUMS: 1.0, OWN_COPIES: 0.5, "other": 0.5}
    assert next(iter(times)) == "GEMMs"
    assert gaps == pytest.approx((2 + 1) / 2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "GEMMs"),
        ("void cudnn::fusion::fmha_reduce_head<true>", "attention"),
        ("triton_poi_fused_add_cat_mul_rsub_sigmoid_silu_split_0", "activations"),
        ("memcpy128", OWN_COPIES),
        ("ncclDevKernel_AllGather_RING_LL", PEER_COPIES),
        ("Memset (Device)", "other"),
    ],
)
def test_names_of_real_kernels_have_a_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_trace_without_compute_is_refused() -> None:
    with pytest.raises(ValueError, match="0 compute kernels"):
        times_by_kind([work(PEER, 8, 0, 1)], 1)
    with pytest.raises(ValueError, match="0 passes"):
        times_by_kind(TRACE, 0)


def test_traces_are_read_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, packed = tmp_path / "a.json", tmp_path / "b.json.gz"
    plain.write_text(json.dumps({"traceEvents": TRACE}))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    main([str(plain), str(packed), "--passes", "1"])
    first, second = capsys.readouterr().out.split("b.json.gz")
    assert "     8.00  GEMMs" in first
    assert first.splitlines()[1:] == second.splitlines()[1:]
