"""Where tasks run: in processes of this machine, or on Ray.

In: tasks that travel by pickle.  Out: reports of what became of each, as `protocols.Engine` says.
Promise: a process that dies is replaced and its task run again; no process outlives the one that
started it.
Not here: what a task does. Engines know nothing of builds. Ray's (ray_engine.py) is imported where
it is asked for.
"""

from shardmill.building.engines.local import LocalEngine
from shardmill.building.engines.tasks import pack, usage_of_this_process

__all__ = ["LocalEngine", "pack", "usage_of_this_process"]
