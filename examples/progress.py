"""Progress bars of the examples that run for minutes."""

from __future__ import annotations

import time
from typing import Any

from rich.progress import Progress, TaskID

_EVERY_S = 30.0


class Bars(Progress):
    """Bars on a terminal. In a log, where bars appear only at the end, also lines.

    One when a task begins, and one for every half a minute in which it is updated.
    """

    _said = 0.0

    def add_task(self, description: str, *args: Any, **fields: Any) -> TaskID:
        """Add a task, which begins now."""
        task = super().add_task(description, *args, **fields)
        self._say(task)
        return task

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task."""
        super().update(task_id, **changes)
        if time.monotonic() - self._said >= _EVERY_S:
            self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        if self.disable or self.console.is_terminal:
            return
        self._said = time.monotonic()
        (task,) = [task for task in self.tasks if task.id == task_id]
        steps = f" {task.completed:.0f}/{task.total:.0f}" if task.completed and task.total else ""
        self.console.print(f"{task.description}{steps} {task.fields.get('note', '')}".rstrip(), highlight=False)
