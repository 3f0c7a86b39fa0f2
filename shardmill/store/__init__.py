"""The store on disk: manifest, writer, readers, views, overlays and `verify`.

FORMAT.md is the contract: every byte of the format is read and written here. A store that is
damaged is refused when it is opened or read, never read wrongly.
"""

from __future__ import annotations

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
from shardmill.store.manifest import (
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
    read_manifest,
    write_manifest,
    write_placeholder,
)
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
from shardmill.store.store import ChatArrays, Store, open_store
from shardmill.store.verify import VerifyReport, verify
from shardmill.store.writer import OldStore, StoreWriter, open_old

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
