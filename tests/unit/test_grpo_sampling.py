"""What engines are asked by GRPO, what becomes of their answers, and of engines that fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from examples.grpo.engines import Engine, GrpoError
from examples.grpo.reward import exact_number
from examples.grpo.sampling import Problem, Sampler, read_problems
from megatron_patches.refit.control.credentials import Credentials

PROBLEMS = [Problem(f"{number}=", str(number)) for number in range(20)]


class Fake(ThreadingHTTPServer):
    """A server that answers each prompt with itself: ``7=`` with ``7``; notes what it is asked."""

    daemon_threads = True
    request_queue_size = 128  # as many as ask at a time: of more, the kernel resets some

    def __init__(self, version: str | None = "3", status: int = 200) -> None:
        self.version, self.status, self.asked = version, status, list[dict[str, Any]]()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        tokens = list(str(body["prompt"]).encode())
        choice = {
            "prompt_token_ids": tokens,
            "token_ids": [*tokens[:-1], 10],
            "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
            "text": str(body["prompt"])[:-1],
            "prompt_logprobs": [None, *({str(token): {"logprob": -float(token)}} for token in body["prompt"][1:])]
            if isinstance(body["prompt"], list)
            else None,
        }
        self._answer(self.server.status, {"choices": [choice] * body.get("n", 1), "error": "no such thing"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        if self.server.version is not None:
            self.send_header("x-weights-version", self.server.version)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(*servers: Fake) -> Iterator[list[Engine]]:
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield [Engine(server.url, 10.0, Credentials()) for server in servers]
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


def test_samples_are_scored_and_carry_the_version_that_wrote_them() -> None:
    fake = Fake("3, 4")
    with served(fake) as engines:
        groups = Sampler(engines, exact_number, 5, seed=0).step(PROBLEMS, 4, 8, step=1, oldest=3)
    assert [len(group) for group in groups] == [8] * 4
    assert {sample.answer.versions for group in groups for sample in group} == {(3, 4)}
    assert {sample.reward for group in groups for sample in group} == {1.0}
    assert len({group[0].problem for group in groups}) == 4
    # From the model's own distribution, whatever the server's defaults are.
    asked = fake.asked[0]
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert (asked["n"], asked["max_tokens"], asked["repetition_penalty"]) == (8, 5, 1)
    # vLLM counts up from the request's seed, one for each of its samples.
    assert len({asked["seed"] + sample for asked in fake.asked for sample in range(8)}) == 4 * 8


def test_a_step_asks_the_same_whenever_it_is_taken_and_another_step_something_else() -> None:
    asked = []
    for step in (1, 1, 2):
        fake = Fake()
        with served(fake) as engines:
            Sampler(engines, exact_number, 5, seed=0).step(PROBLEMS, 4, 2, step, oldest=0)
        asked.append(sorted((body["prompt"], body["seed"]) for body in fake.asked))
    assert asked[0] == asked[1] != asked[2]


def test_engines_share_the_prompts_and_one_that_fails_or_is_behind_is_left_out() -> None:
    for other in (Fake(status=503), Fake("2")):
        good, bad = Fake(), other
        with served(bad, good) as engines:
            sampler = Sampler(engines, exact_number, 5, seed=0)
            assert sampler.accuracy(PROBLEMS, oldest=3) == 1.0
        assert len(good.asked) == len(PROBLEMS)
    first, second = Fake(), Fake()
    with served(first, second) as engines:
        Sampler(engines, exact_number, 5, seed=0).accuracy(PROBLEMS, oldest=3)
    assert len(first.asked) == len(second.asked) == len(PROBLEMS) // 2


def test_where_no_engine_is_left_each_says_why() -> None:
    gone = Fake()
    gone.server_close()
    with served(Fake("2")) as engines:
        sampler = Sampler([Engine(gone.url, 10.0, Credentials()), *engines], exact_number, 5, seed=0)
        with pytest.raises(GrpoError, match="no engine gives samples: ") as raised:
            sampler.step(PROBLEMS, 4, 2, step=1, oldest=3)
    assert f"{gone.url} does not answer: " in str(raised.value)
    assert f"{engines[0].url} serves version 2, older than 3" in str(raised.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"status": 400}, r"refused a request with 400: .*no such thing"),
        ({"version": None}, "does not say which version of the weights has answered; start it with --middleware"),
    ],
)
def test_what_every_engine_would_refuse_ends_the_run(how: dict[str, Any], message: str) -> None:
    with served(Fake(**how)) as engines, pytest.raises(GrpoError, match=message):
        Sampler(engines, exact_number, 5, seed=0).step(PROBLEMS, 4, 2, step=1, oldest=0)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda *_: 1 / 0, "the reward raised ZeroDivisionError: division by zero; for answer '0' to '0='"),
        (lambda *_: float("nan"), "the reward is nan for answer '0' to '0='"),
        (lambda *_: None, "the reward raised TypeError: "),
    ],
)
def test_a_reward_that_fails_is_told_with_the_answer(reward: Any, message: str) -> None:
    with served(Fake()) as engines, pytest.raises(GrpoError, match=message):
        Sampler(engines, reward, 5, seed=0).step(PROBLEMS[:1], 1, 2, step=1, oldest=0)


def test_log_probabilities_of_the_reference_are_those_of_the_answer() -> None:
    fake = Fake()
    with served(fake) as engines:
        sampler = Sampler(engines, exact_number, 5, seed=0, reference=engines[0])
        ((sample,),) = sampler.step([Problem("12=", "12")], 1, 1, step=1, oldest=0)
    assert sample.answer.token_ids == [ord("1"), ord("2"), 10]
    assert sample.reference == [-49.0, -50.0, -10.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "1="}', "line 1: want a JSON object with 'prompt' and 'answer'"),
        ('{"prompt": "1=", "answer": 1}\n[]', "line 2: want"),
        (None, "cannot read the prompts of"),
    ],
)
def test_files_without_problems_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "problems.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(GrpoError, match=message):
        read_problems(file)
