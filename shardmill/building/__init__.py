"""The offline half: sources, tokenizers and chat templates to a store.

plan -> workers -> finish. `plan` cuts sources into units; a `worker` reads and encodes a unit and
writes its shards and a receipt; the `scheduler` hands out units; `finish` turns receipts into
indexes and the manifest; `run` publishes the store. `api` has the functions for everyday use.
"""

from shardmill.building.api import build, pack
from shardmill.building.chats import build_chats
from shardmill.building.estimate import BuildPlan, plan_store
from shardmill.building.packs import build_plan, plan_name
from shardmill.building.plan import BuildSpec, Feed
from shardmill.building.run import BuildReport, build_store
from shardmill.building.scheduler import BuildCost, Progress
from shardmill.building.workplace import has_unfinished_build

__all__ = [
    "BuildCost",
    "BuildPlan",
    "BuildReport",
    "BuildSpec",
    "Feed",
    "Progress",
    "build",
    "build_chats",
    "build_plan",
    "build_store",
    "has_unfinished_build",
    "pack",
    "plan_name",
    "plan_store",
]
