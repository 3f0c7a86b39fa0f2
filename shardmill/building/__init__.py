"""The offline half: sources, tokenizers and chat templates to a store.

plan -> workers -> finish. `units` cuts sources into units; a `worker` reads, encodes and writes one
unit as segments with receipts; the `scheduler` brings units in order from the `pool` of workers to
the `assembly` of the store; `run` publishes it. `api` has the functions for everyday use.
"""

from shardmill.building.api import build, pack
from shardmill.building.chats import ExampleBatch, build_chats, build_examples
from shardmill.building.documents import BuildPlan, build_store, plan_store
from shardmill.building.packs import build_plan, plan_name
from shardmill.building.spec import BuildCost, BuildReport, BuildSpec, Feed, Progress
from shardmill.building.workplace import has_unfinished_build

__all__ = [
    "BuildCost",
    "BuildPlan",
    "BuildReport",
    "BuildSpec",
    "ExampleBatch",
    "Feed",
    "Progress",
    "build",
    "build_chats",
    "build_examples",
    "build_plan",
    "build_store",
    "has_unfinished_build",
    "pack",
    "plan_name",
    "plan_store",
]
