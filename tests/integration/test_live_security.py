"""A live server in development mode obeys trainers who show its secret, and nobody else."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_patches.refit.control.credentials import API_KEY_VARIABLE, Credentials
from megatron_patches.refit.control.secret import SECRET_HEADER
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.trainer.engines import HttpEngine
from megatron_patches.refit.trainer.session import RefitOptions, RefitSession
from tests.integration.live_refit import PROMPTS, STAGING, fill, start
from tests.integration.tiny_models import LLAMA
from tests.support.launch import run_megatron
from tests.support.live_models import Case
from tests.support.vllm_server import VllmServer, vllm_server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(600),
]

CASE = Case(TrainerMesh(), (), LLAMA)
TRAINERS = ["127.0.0.1"]
API_KEY = "key-of-vllm"
JOIN = {
    "call": "join",
    "host": "127.0.0.1",
    "port": 9,
    "token": "0" * 64,
    "sources": 1,
    "timeout_s": 30.0,
}


def body(rank: int, world_size: int, url: str, secret_file: str | None, host: str, api_key: str) -> str:
    """Pushes a model; what the trainer is told, or how many bytes were sent."""
    del world_size
    os.environ[API_KEY_VARIABLE] = api_key
    chunks = start(CASE)
    fill(CASE, chunks, 1)
    credentials = Credentials(Path(secret_file) if secret_file else None)
    options = RefitOptions(staging_bytes=STAGING, timeout_s=20.0, host=host)
    engines = [HttpEngine(url, 60.0, credentials=credentials)]
    with contextlib.closing(RefitSession(chunks, engines, vocab_size=37, options=options)) as session:
        try:
            session.prepare()
            return f"{session.push(1).nbytes} bytes"
        except RefitError as error:
            return str(error)


def push(url: str, secret_file: Path | None = None, host: str = "127.0.0.1", api_key: str = API_KEY) -> str:
    args = (url, None if secret_file is None else str(secret_file), host, api_key)
    found: str = run_megatron(body, 1, args=args, timeout_s=120)[0]
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("server")
    allowed = json.dumps({"etp": {"trainers": TRAINERS}})
    with vllm_server(LLAMA, folder, "--additional-config", allowed, api_key=API_KEY) as server:
        yield server


def answer(url: str, body: bytes | None, headers: dict[str, str], method: str = "POST") -> int:
    request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310 - of this machine
    try:
        with urllib.request.urlopen(request, timeout=30.0) as found:  # noqa: S310 - as above
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("headers", [{}, {SECRET_HEADER: "of somebody else."}, {"Authorization": f"Bearer {API_KEY}"}])
def test_whoever_does_not_show_the_secret_changes_nothing(
    server: VllmServer, headers: dict[str, str], tmp_path: Path
) -> None:
    """Of what a stranger asks, not even the content is read: it announces more than it sends."""
    json_ = {"Content-Type": "application/json", "Content-Length": "1000000", **headers}
    saved = tmp_path / "weights"
    asked = {"method": "save_sharded_state", "kwargs": {"path": str(saved)}}
    for route, content in [
        ("collective_rpc", asked),
        ("init_weight_transfer_engine", {"init_info": JOIN}),
        ("sleep?level=2", None),
        ("pause?mode=abort", None),
        ("reset_prefix_cache", None),
        ("update_weights", {"update_info": {}}),
    ]:
        assert answer(f"{server.url}/{route}", json.dumps(content).encode(), json_) == 401
    for route in ("server_info", "is_sleeping", "get_world_size"):
        assert answer(f"{server.url}/{route}", None, headers, "GET") == 401
    assert answer(f"{server.url}/health", None, {}, "GET") == 200
    assert not saved.exists()


def test_another_site_cannot_make_a_browser_stop_the_server(server: VllmServer) -> None:
    """Even one that knows the secret: only scripts of the server's own site can send JSON unasked."""
    shown = {**Credentials().headers(), "Origin": "http://evil.example", "Content-Type": "text/plain"}
    content = json.dumps({"init_info": JOIN}).encode()
    assert answer(f"{server.url}/init_weight_transfer_engine", content, shown) == 415


def test_a_trainer_with_the_secret_pushes_and_others_are_told_why_not(server: VllmServer, tmp_path: Path) -> None:
    before = server.log_probabilities(PROMPTS)
    (tmp_path / "secret").write_text("of-another-server\n")
    refusal = push(server.url, tmp_path / "secret")
    assert "get_world_size answered 401" in refusal
    assert f"this process shows the secret of {tmp_path}/secret; the server's log says where its secret is" in refusal
    assert "1 of the workers of http://127.0.0.1:" in push(server.url, host="localhost")
    assert "asked to connect to a trainer at localhost, which is not among those" in server.log()
    refusal = push(server.url, api_key="another-key")
    assert "/refit/lease answered 401: " in refusal
    assert "show this server's API key; a trainer sends that in VLLM_API_KEY" in refusal
    assert server.log_probabilities(PROMPTS) == before
    assert push(server.url).endswith(" bytes")
    assert server.log_probabilities(PROMPTS) != before
    assert "refit: version 1 of the trainer at 127.0.0.1:" in server.log()
    assert "weights can be replaced by whoever shows the secret of the variable ETP_REFIT_SECRET" in server.log()
    assert "another-key" not in server.log() + refusal
    assert API_KEY not in server.log()
