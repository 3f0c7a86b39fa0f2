"""Where tasks run: processes of this machine, or Ray (imported only when it is asked for)."""

from shardmill.building.engines.local import LocalEngine
from shardmill.building.engines.tasks import Engine, Task, TaskReport, pack

__all__ = ["Engine", "LocalEngine", "Task", "TaskReport", "pack"]
