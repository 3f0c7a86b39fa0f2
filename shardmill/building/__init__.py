"""The offline half: sources, tokenizer, chat and shards put together."""

from shardmill.building.api import build, pack
from shardmill.building.chats import build_chats, build_examples
from shardmill.building.documents import BuildPlan, build_store, plan_store
from shardmill.building.packs import build_plan, plan_name
from shardmill.building.spec import BuildCost, BuildReport, BuildSpec, ExampleBatch, Feed, Progress
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
