"""The offline half: sources, tokenizer, chat and shards put together."""

from shardmill.build.chats import build_chats
from shardmill.build.dry import BuildPlan, plan_store
from shardmill.build.examples import build_examples
from shardmill.build.packs import build_plan, plan_name
from shardmill.build.spec import BuildCost, BuildReport, BuildSpec, ExampleBatch, Feed, Progress
from shardmill.build.store import build_store
from shardmill.build.workplace import has_unfinished_build

__all__ = [
    "BuildCost",
    "BuildPlan",
    "BuildReport",
    "BuildSpec",
    "ExampleBatch",
    "Feed",
    "Progress",
    "build_chats",
    "build_examples",
    "build_plan",
    "build_store",
    "has_unfinished_build",
    "plan_name",
    "plan_store",
]
