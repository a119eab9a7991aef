"""The gradient half of a runtime: local sums and reductions in flight.

If one forward pass uses a weight several times (tied weights), the gradients are added locally and reduced once.

[Note: returned gradients] Under ``torch.autograd.grad`` a shard's gradient is returned through autograd. The same holds
in graphed callables: ``torch.cuda.make_graphed_callables`` captures under ``torch.autograd.grad``, Transformer Engine's
version reads ``grad``, and both replay inside an autograd function that returns what was captured. The capture records
the memory that the reduction fills. A replay returns this memory, autograd accumulates it, and then hooks run.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler

from etp.collectives.base import Route
from etp.config import EtpConfig, GradReduction
from etp.errors import EtpStateError
from etp.grad_hooks import Chosen, GradHooks, chosen_shards, returned_by_autograd
from etp.grads import (
    Destinations,
    PendingReduction,
    gradient_dtype,
    gradient_is_absent,
    new_gradients,
    padded_wgrads,
)
from etp.group import WeightGroup
from etp.mode import Mode, Modes
from etp.passes import Passes
from etp.routes import Routes
from etp.shard import Shard
from etp.stack import Stack
from etp.streams import RANGE, InFlight, let_follow
from etp.te import te_is_capturing

logger = logging.getLogger(__name__)


class Reductions:
    """Reduces the gradients of one runtime's weight groups.

    Args:
        config: options of the runtime.
        routes: transports and lanes.
        modes: whether work is being captured into a CUDA graph, and the buffers for full gradients.
        passes: which pass a gradient belongs to.
    """

    def __init__(self, config: EtpConfig, routes: Routes, modes: Modes, passes: Passes) -> None:
        self._modes = modes
        self._passes = passes
        self._config = config
        self._routes = routes
        self._pending: deque[PendingReduction] = deque()
        self._in_flight = 0
        """Bytes of the gradients being reduced."""
        self._finished: dict[Route, InFlight] = {}
        """The last finished reduction of each route."""
        # Each sum, its home stream, which is ordered after it, and for each shard whether the sum is for it.
        self._local_sums: dict[WeightGroup, tuple[Stack, Any, tuple[bool, ...]]] = {}
        self._leased: dict[WeightGroup, tuple[list[torch.Tensor], set[int]]] = {}
        """Buffers that a consumer requests one at a time, and the indices of those handed out."""
        self._destinations: dict[WeightGroup, Destinations] = {}
        """Destinations of each group's latest reduction, for groups with ``main_grad``."""
        self._largest = 0
        self.hooks = GradHooks(config, modes, self._pending, self._local_sums, self._forget_dropped)

    def __len__(self) -> int:
        """Number of reductions in flight."""
        return len(self._pending)

    def require_complete(self, group: WeightGroup) -> None:
        """Raise EtpStateError unless the group's gradients are complete."""
        if group in self._local_sums or any(pending.group is group for pending in self._pending):
            raise EtpStateError(
                f"the gradient of {group.name} is not complete yet: call etp.wait_async_comms(module) after the last "
                "backward pass of the iteration, before the gradients are clipped, scaled or stepped"
            )

    @property
    def idle(self) -> bool:
        """Whether every gradient has been reduced into its shards."""
        return not self._pending and not self._local_sums

    def change_mode(self, mode: Mode) -> None:
        """Forget what was in flight; see :attr:`etp.mode.Modes.parts`.

        Raises:
            EtpStateError: if a capture begins while gradients are on their way.
        """
        if mode.capture is not None and not self.idle:
            raise EtpStateError(
                f"a CUDA graph is being captured while {len(self)} gradients are on their way, or others only added "
                "up; call etp.wait_async_comms(module) before the capture"
            )
        self._pending.clear()
        self._in_flight = 0
        self._finished.clear()
        self._leased.clear()
        self._local_sums.clear()
        self.hooks.forget()

    def begin_pass(self, *, backward: bool) -> None:
        """Mark the reductions in flight as belonging to an earlier pass, because a new one begins."""
        del backward
        for pending in self._pending:
            pending.belated = True
        self.hooks.owed.clear()
        self.hooks.done.clear()

    # One group's gradient ------------------------------------------------------------------------------------

    def buffers(self, group: WeightGroup, dtype: torch.dtype) -> list[torch.Tensor]:
        """A buffer for each full gradient of the group, of the weights' logical shape; arbitrary content."""
        if self._modes.possible:
            self._modes.update()
        layout, route, pool = group.layout, group.route or self._routes.of(group), self._modes.now.pool
        count, stream = len(group.shards), route.reduce.current_stream()
        if self._pending:
            kind = (count * layout.padded_rows * layout.row_numel, dtype, route.device, stream)
            # Rather than allocate a block, wait for an older one; never for the newest.
            older = [] if pool.has_free(*kind) else [pending.block for pending in self._pending][:-1]
            if kind in older:
                for _ in range(older.index(kind) + 1):
                    self._finish_oldest()
        whole = pool.lease(count, layout.padded_shape, dtype, route.device, stream).tensors
        return list(whole) if layout.pad_rows == 0 else [padded[: layout.rows] for padded in whole]

    def buffer(self, group: WeightGroup, index: int, dtype: torch.dtype) -> torch.Tensor:
        """One of the group's buffers, for consumers that request them one at a time, all before they fill any."""
        if len(group.shards) == 1:
            return self.buffers(group, dtype)[0]
        self._modes.update()
        buffers, handed_out = self._leased.get(group, ([], set()))
        if not buffers or index in handed_out or buffers[0].dtype != dtype:
            buffers, handed_out = self._leased[group] = self.buffers(group, dtype), set()
        handed_out.add(index)
        return buffers[index]

    def take(
        self, group: WeightGroup, wgrads: Sequence[torch.Tensor], *, overwrite: bool = False
    ) -> list[torch.Tensor | None]:
        """Accept the full gradients of one use of the group. Collective, unless they are only added locally.

        Args:
            group: the group whose weights were used.
            wgrads: a gradient of each weight, of its logical shape.
            overwrite: whether they take the place of what ``main_grad`` holds, where there is one.

        Returns:
            what to pass to autograd for each shard; None if the sum goes into ``grad`` or ``main_grad``.

        Raises:
            EtpStateError: if a part of the model is captured and its replays would lose gradients or skip hooks.
        """
        if self._modes.possible:
            self._modes.update()
        self._passes.enter_backward()
        self._leased.pop(group, None)
        if self._modes.now.is_part and self._config.reduce_once_per_iteration:
            raise EtpStateError(
                f"{group.name} is captured in a part of the model, with reduce_once_per_iteration: what its graph adds "
                "up is not seen outside. Capture whole iterations, or reduce each microbatch"
            )
        returned = self.returns_gradients(group)
        if not returned and self._modes.now.is_part and not _has_main_grads(group) and not te_is_capturing():
            raise EtpStateError(
                f"a backward pass into .grad of {group.name} is captured without the forward pass of the module that "
                "was sharded: its replays would leave out hooks and replicated parameters. Capture the whole step, or "
                "use make_graphed_callables"
            )
        chosen = None if returned or (returned is False and len(group.shards) == 1) else chosen_shards(group)
        pool = self._modes.now.pool
        if chosen is not None and not any(chosen):
            if pool.kind_of(wgrads[0]) is not None:
                pool.restore(wgrads[0])
            return [None] * len(group.shards)
        route = group.route or self._routes.of(group)
        stream = route.reduce.current_stream()
        padded = padded_wgrads(wgrads, group.layout, pool, stream)
        if returned:
            return self._add_returned(group, route, padded, stream)
        overwrite = overwrite and _has_main_grads(group)
        if self._config.reduce_once_per_iteration or group.used_more_than_once:
            if overwrite:
                self._zero_main_grads(group)
            # A weight with several uses (tied embeddings) is reduced once, at the end of the backward pass.
            self._add_locally(group, padded, stream, chosen)
        else:
            trained = self._start(group, route, padded, stream, chosen=chosen, overwrite=overwrite)
            self.hooks.used_further[group] = trained[0]
        return [None] * len(group.shards)

    def returns_gradients(self, group: WeightGroup) -> bool | None:
        """Whether the gradients of the group's shards go to autograd; see [Note: returned gradients].

        None if the backward pass reaches none of these shards, as far as autograd knows.
        """
        if _has_main_grads(group):
            return False
        for shard in group.shards:
            returned = returned_by_autograd(shard)
            if returned is not None:
                # A graph task either returns all gradients or accumulates all.
                return returned
        return None

    def _add_returned(self, group: WeightGroup, route: Route, padded: Stack, home: Any) -> list[torch.Tensor | None]:
        """Reduce the group's full gradients for autograd; see [Note: returned gradients]. Collective.

        Returns:
            for each shard its gradient, of the shard's shape; inside a capture, the memory that holds it after a
            replay. None for a frozen shard.
        """
        is_trained = group.trained()
        trained = list(itertools.compress(group.shards, is_trained))
        local = trained[0].local_shard()
        returned = new_gradients(len(trained), local, local.dtype)
        self._start(group, route, padded, home, returned=Destinations(returned, accumulate=False))
        if not self._modes.now.is_part or group.used_more_than_once:
            # Autograd reads the gradient right away, except in a capture of a single use, which only passes it on.
            self._finish_pending()
        if self._modes.now.is_part:
            for shard in trained:
                self.hooks.replayed.add(id(shard))
        filled = iter(returned)
        return [next(filled) if one else None for one in is_trained]

    def _start(
        self,
        group: WeightGroup,
        route: Route,
        padded: Stack,
        home: Any,
        *,
        returned: Destinations | None = None,
        chosen: Chosen = None,
        overwrite: bool = False,
    ) -> Sequence[Shard]:
        """Start a reduction; returns the shards that get a gradient."""
        if group.reducing:
            self._finish_pending()
        is_trained = group.trained() if chosen is None else chosen
        trained, wgrads = group.shards, padded
        if not all(is_trained):
            trained = list(itertools.compress(group.shards, is_trained))
            wgrads = Stack(list(itertools.compress(padded, is_trained)))
        into = returned or Destinations.of(trained, self._destinations.get(group))
        if into.lasting:
            # Only for main_grad, which lasts: zero_grad() could not free a ``grad`` that is referenced here.
            self._destinations[group] = into
        divisor = group.size if self._config.grad_reduction is GradReduction.MEAN else 1
        label = group.reduce_label
        accumulate = into.accumulate and not overwrite
        reduce = partial(route.transport.reduce_scatter, wgrads, into.sinks, divisor, label, accumulate=accumulate)
        ready = route.reduce.start(reduce, label=label)
        # Only now: if the start fails, e.g. for lack of memory, the next step can start it again.
        group.reducing = True
        group.reductions += 1
        group.reduced_bytes += len(wgrads.tensors) * wgrads.nbytes
        publish = None if returned else partial(self.hooks.complete, group, trained, into, chosen)
        nbytes, pool = len(padded.tensors) * padded.nbytes, self._modes.now.pool
        block = pool.kind_of(padded.tensors[0])
        self._pending.append(PendingReduction(group, ready, padded, nbytes, pool, block, home, publish))
        self._in_flight += nbytes
        # See [Note: deferred accumulation] in etp/grads.py.
        self._largest = max(self._largest, nbytes)
        while len(self._pending) > 1 and self._in_flight > 2 * self._largest:
            self._finish_oldest()
        return trained

    def release(self, groups: Sequence[WeightGroup]) -> None:
        """Stop watching these groups."""
        self.hooks.release(groups)
        for group in groups:
            self._destinations.pop(group, None)

    def end_backward(self) -> None:
        """End the pass: the graph has no further uses of any weight."""
        # Including weights that autograd never visited, because their consumer hides them from autograd.
        self.hooks.used_further.clear()
        if not self._config.reduce_once_per_iteration:
            self.reduce_local_sums()
        self._run_owed_hooks()

    def _run_owed_hooks(self) -> None:
        """Run the owed hooks, with the current stream ordered after all finished reductions."""
        self.hooks.done.clear()
        for ready in self._finished.values():
            ready.wait()
        if self.hooks.owed:
            self.hooks.run_owed()

    # Local sums ----------------------------------------------------------------------------------------------

    def _add_locally(self, group: WeightGroup, padded: Stack, stream: Any, chosen: Chosen) -> None:
        totals, home, former = self._local_sums.get(group, (None, None, ()))
        expected = group.trained() if chosen is None else chosen
        for index, is_expected in enumerate(expected):
            if not is_expected:
                padded[index].zero_()
        if totals is None or self._was_dropped(group, former):
            self._expect_gradients(group, expected)
            wide = torch.float32 if self._config.fp32_accumulation else padded.dtype
            totals = Stack.allocate(len(padded), padded.shape, torch.promote_types(padded.dtype, wide), padded.device)
            torch._foreach_copy_(totals.tensors, padded.tensors)
            self._local_sums[group] = totals, stream, expected
        else:
            if expected != former:
                self._expect_gradients(group, expected)
                self._local_sums[group] = totals, home, tuple(map(operator.or_, former, expected))
            let_follow(stream, home)
            torch._foreach_add_(totals.tensors, padded.tensors)
            let_follow(home, stream)
        pool = self._modes.now.pool
        if pool.kind_of(padded[0]) is not None:
            pool.restore(padded[0])

    def _expect_gradients(self, group: WeightGroup, expected: Sequence[bool]) -> None:
        """With ``reduce_once_per_iteration``, give the shards zeros as ``grad``, so that ``zero_grad()`` is noticed."""
        if self._config.reduce_once_per_iteration:
            with torch._C.DisableTorchFunctionSubclass():
                for param in itertools.compress(group.shards, expected):
                    if gradient_is_absent(param):
                        param.grad = torch.zeros_like(param.local_shard(), dtype=gradient_dtype(param))

    def _zero_main_grads(self, group: WeightGroup) -> None:
        if group.reducing:
            self._finish_pending()
        for shard in group.shards:
            main_grad: torch.Tensor | None = getattr(shard, "main_grad", None)
            if main_grad is not None:
                main_grad.zero_()

    def _was_dropped(self, group: WeightGroup, expected: Sequence[bool]) -> bool:
        """Whether ``zero_grad()`` was called after the first microbatch, so that the iteration was abandoned."""
        if not self._config.reduce_once_per_iteration:
            return False
        return any(map(gradient_is_absent, itertools.compress(group.shards, expected)))

    def _forget_dropped(self, group: WeightGroup) -> None:
        """Drop the local sums of ``group`` if :meth:`_was_dropped`, before it gets a gradient that would hide this."""
        known = self._local_sums.get(group)
        if known is not None and self._was_dropped(group, known[2]):
            self.forget_sums(group)

    def forget_sums(self, group: WeightGroup) -> None:
        """Drop the local sums of ``group``, because its gradient was set to zero within the iteration."""
        self._local_sums.pop(group, None)

    def reduce_local_sums(self) -> None:
        """Start reducing the local sums. Collective."""
        sums = self._local_sums.copy()
        self._local_sums.clear()
        for group, (totals, home, expected) in sums.items():
            if not self._was_dropped(group, expected):
                route = self._routes.of(group)
                let_follow(route.reduce.current_stream(), home)
                # A shard that was frozen since keeps the gradients that it has, as without sharding.
                self._start(group, route, totals, home, chosen=None if expected == group.trained() else expected)

    # Ends ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Finish all reductions in flight: their gradients are complete and their hooks have run."""
        self._finish_pending()
        self._run_owed_hooks()

    def _finish_pending(self) -> None:
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        pending = self._pending.popleft()
        self._in_flight -= pending.nbytes
        self._finished[pending.group.route or self._routes.of(pending.group)] = pending.ready
        if profiler._is_profiler_enabled:
            with profiler.record_function(RANGE.format(f"publication of {pending.group.name}'s gradient")):
                pending.finish()
        else:
            pending.finish()

    def settle(self) -> None:
        """Order what the caller does next after all that is in flight; its gradients still count as such."""
        for pending in tuple(self._pending):
            pending.ready.wait(pending.home)

    def discard(self) -> None:
        """Drop the gradients of a backward pass that ended in an exception: they are incomplete."""
        logger.info("a backward pass was abandoned; dropping %d reductions under way", len(self))
        while self._pending:
            pending = self._pending.popleft()
            self._in_flight -= pending.nbytes
            pending.finish(publish=False)
        self._modes.now.pool.write_off()
        self._leased.clear()
        self._local_sums.clear()
        self.hooks.forget()


def _has_main_grads(group: WeightGroup) -> bool:
    # A list: a generator would cost a Python call per shard.
    return any([getattr(shard, "main_grad", None) is not None for shard in group.shards])  # noqa: C419
