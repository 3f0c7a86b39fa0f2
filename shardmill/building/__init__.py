"""The offline half: sources, tokenizers and chat templates to a store.

plan -> workers -> finish. `plan` cuts sources into units; a `worker` reads, encodes and writes one
unit as segments with receipts to the `journal`; the `scheduler` brings units in order from workers
to the `assembly` of the store; `run` publishes it. `api` has the functions for everyday use.
"""

from shardmill.building.api import build, pack
from shardmill.building.chats import build_chats
from shardmill.building.packs import build_plan, plan_name
from shardmill.building.plan import BuildSpec, Feed
from shardmill.building.resources import BuildPlan, plan_store
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
