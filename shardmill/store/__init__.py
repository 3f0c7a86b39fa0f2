"""The store on disk: the only room that knows bytes. FORMAT.md is its contract.

In: ragged token ids, rendered conversations.  Out: a folder that proves what it
is, or a clear refusal to open it.
"""

from __future__ import annotations

from shardmill.store.entries import (
    ChatEntry,
    ChatLedger,
    DocumentLedger,
    FileEntry,
    Ledger,
    Manifest,
    ShardEntry,
    SplitEntry,
    StoreFacts,
    TokenLedger,
    empty_ledger,
)
from shardmill.store.exclusions import (
    ExcludedSteps,
    ExcludeEntry,
    Exclusions,
    add_exclusion,
    exclude_documents,
    exclude_spans,
    read_exclusions,
    refuse_excluded,
    remove_exclusion,
    write_exclusions,
)
from shardmill.store.layout import check_shape, check_tokens, fit_tokens
from shardmill.store.manifest import read_manifest, write_manifest, write_placeholder
from shardmill.store.origins import Origins, read_origins, write_origins
from shardmill.store.plans import (
    LeftOut,
    PlanArrays,
    PlanFacts,
    PlanMetrics,
    PlanOptions,
    StoredPlan,
    check_plan,
    find_plan,
    list_plans,
    plan_path,
    plans_of,
    read_plan,
    write_plan,
)
from shardmill.store.publish import check_target, is_finished, publish_folder
from shardmill.store.sinks import OldStore, open_old
from shardmill.store.store import ChatArrays, Store, open_store
from shardmill.store.verify import VerifyReport, verify
from shardmill.store.writer import StoreWriter

__all__ = [
    "ChatArrays",
    "ChatEntry",
    "ChatLedger",
    "DocumentLedger",
    "ExcludeEntry",
    "ExcludedSteps",
    "Exclusions",
    "FileEntry",
    "Ledger",
    "LeftOut",
    "Manifest",
    "OldStore",
    "Origins",
    "PlanArrays",
    "PlanFacts",
    "PlanMetrics",
    "PlanOptions",
    "ShardEntry",
    "SplitEntry",
    "Store",
    "StoreFacts",
    "StoreWriter",
    "StoredPlan",
    "TokenLedger",
    "VerifyReport",
    "add_exclusion",
    "check_plan",
    "check_shape",
    "check_target",
    "check_tokens",
    "empty_ledger",
    "exclude_documents",
    "exclude_spans",
    "find_plan",
    "fit_tokens",
    "is_finished",
    "list_plans",
    "open_old",
    "open_store",
    "plan_path",
    "plans_of",
    "publish_folder",
    "read_exclusions",
    "read_manifest",
    "read_origins",
    "read_plan",
    "refuse_excluded",
    "remove_exclusion",
    "verify",
    "write_exclusions",
    "write_manifest",
    "write_origins",
    "write_placeholder",
    "write_plan",
]
