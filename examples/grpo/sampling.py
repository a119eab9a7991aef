"""Gets each step's samples from the engines and scores them; runs only on the trainer's first rank."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from examples.grpo.engines import Answer, Engine, EngineError, GrpoError

Reward = Callable[[str, str], float]
_AT_ONCE = 32  # concurrent requests per engine


@dataclass(frozen=True)
class Problem:
    """A prompt as sent to the model, and the correct answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Sample:
    """A scored answer.

    Attributes:
        problem: the prompt and its correct answer.
        answer: the engine's answer.
        reward: its score.
        reference: log-probabilities of the answer's tokens under the reference model; None without one.
    """

    problem: Problem
    answer: Answer
    reward: float
    reference: list[float] | None = None


def read_problems(path: Path) -> list[Problem]:
    """Read the problems of a file, in which each line is a JSON object with ``prompt`` and ``answer``.

    Raises:
        GrpoError: if there are none, or a line has a different format.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise GrpoError(f"cannot read the prompts of {path}: {error}") from error
    problems = []
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            problems.append(Problem(str(found["prompt"]), str(found["answer"])))
        except (ValueError, KeyError, TypeError) as error:
            raise GrpoError(f"{path}, line {number}: want a JSON object with 'prompt' and 'answer'") from error
    if not problems:
        raise GrpoError(f"{path} holds no prompts")
    return problems


class Sampler:
    """Samples from several engines.

    Args:
        engines: at least one. An engine that fails or has old weights is skipped for the rest of a step.
        reward: computes the reward from an answer's text and the correct answer.
        most_tokens: maximum answer length, in tokens.
        seed: seed of the choice of prompts and of the samples.
        reference: engine with the reference model; None for none.
    """

    def __init__(
        self, engines: Sequence[Engine], reward: Reward, most_tokens: int, seed: int, reference: Engine | None = None
    ) -> None:
        self._engines, self._reward, self._reference = engines, reward, reference
        self._most_tokens, self._seed = most_tokens, seed

    def step(self, problems: Sequence[Problem], prompts: int, size: int, step: int, oldest: int) -> list[list[Sample]]:
        """Scored samples of one step; the same step always uses the same prompts.

        Args:
            problems: problems to choose from.
            prompts: number of prompts to choose.
            size: samples per prompt.
            step: number of the step.
            oldest: answers from older versions are discarded.

        Returns:
            The samples of each prompt.

        Raises:
            GrpoError: if no engine answers, or the reward fails.
        """
        draw = random.Random(f"{self._seed} {step}")  # noqa: S311
        chosen = draw.sample(problems, prompts) if prompts <= len(problems) else draw.choices(problems, k=prompts)
        return self._ask_all(chosen, size, draw.randrange(2**31), oldest)

    def accuracy(self, problems: Sequence[Problem], oldest: int) -> float:
        """Mean reward with greedy decoding; arguments and errors as for :meth:`step`."""
        found = self._ask_all(problems, 1, 0, oldest, greedy=True)
        return sum(sample.reward for (sample,) in found) / len(problems)

    def _ask_all(
        self, problems: Sequence[Problem], size: int, seed: int, oldest: int, *, greedy: bool = False
    ) -> list[list[Sample]]:
        left_out: dict[str, str] = {}  # URL and reason of engines that failed

        def ask(number: int) -> list[Sample]:
            problem = problems[number]
            start = number % len(self._engines)
            for engine in [*self._engines[start:], *self._engines[:start]]:
                if engine.url in left_out:
                    continue
                try:
                    # vLLM gives the samples of a request the seeds from this one on; no two prompts share any.
                    answers = engine.sample(
                        problem.prompt, size, self._most_tokens, seed=seed + number * size, greedy=greedy
                    )
                    if answers[0].versions[0] < oldest:
                        raise EngineError(f"{engine.url} serves version {answers[0].versions[0]}, older than {oldest}")
                    return [self._score(problem, answer, wants_reference=not greedy) for answer in answers]
                except EngineError as error:
                    left_out[engine.url] = str(error)
            raise GrpoError(f"no engine gives samples: {'; '.join(left_out.values())}")

        with ThreadPoolExecutor(min(len(problems), _AT_ONCE * len(self._engines)), "grpo-ask") as pool:
            return list(pool.map(ask, range(len(problems))))

    def _score(self, problem: Problem, answer: Answer, *, wants_reference: bool) -> Sample:
        try:
            reward = float(self._reward(answer.text, problem.answer))
        except Exception as error:
            raise GrpoError(
                f"the reward raised {type(error).__name__}: {error}; for answer {answer.text!r} to {problem.prompt!r}"
            ) from error
        if not math.isfinite(reward):
            raise GrpoError(f"the reward is {reward} for answer {answer.text!r} to {problem.prompt!r}")
        reference = None
        if self._reference is not None and wants_reference:
            tokens = answer.prompt_ids + answer.token_ids
            try:
                reference = self._reference.log_probabilities(tokens)[len(answer.prompt_ids) - 1 :]
            except EngineError as error:
                raise GrpoError(f"the reference: {error}") from error
        return Sample(problem, answer, reward, reference)
