"""The store on disk: manifest, writer, readers, views, overlays and `verify`.

FORMAT.md is the contract: every byte of the format is read and written here. A store that is
damaged is refused when it is opened or read, never read wrongly.
"""

from __future__ import annotations

from shardmill.store.exclusions import (
    ExcludeEntry,
    Exclusions,
    exclude_documents,
    exclude_spans,
    read_exclusions,
    refuse_excluded,
    remove_exclusion,
)
from shardmill.store.manifest import (
    ChatLedger,
    DocumentLedger,
    Ledger,
    Manifest,
    StoreFacts,
    TokenLedger,
    WrittenShard,
    given_facts,
    kept_ledger,
    read_manifest,
    write_placeholder,
)
from shardmill.store.plans import (
    Origins,
    PlanFacts,
    PlanMetrics,
    PlanOptions,
    StoredPlan,
    find_plan,
    list_plans,
    plans_of,
    read_origins,
    read_plan,
)
from shardmill.store.store import Store, check_target, is_finished, open_store, publish_folder
from shardmill.store.verify import VerifyReport, verify
from shardmill.store.writer import AdoptedTurns, StoreWriter

__all__ = [
    "AdoptedTurns",
    "ExcludeEntry",
    "remove_exclusion",
    "PlanFacts",
    "PlanMetrics",
    "VerifyReport",
    "ChatLedger",
    "DocumentLedger",
    "Exclusions",
    "Ledger",
    "Manifest",
    "Origins",
    "PlanOptions",
    "Store",
    "StoreFacts",
    "StoreWriter",
    "StoredPlan",
    "TokenLedger",
    "WrittenShard",
    "check_target",
    "given_facts",
    "kept_ledger",
    "exclude_documents",
    "exclude_spans",
    "find_plan",
    "is_finished",
    "list_plans",
    "open_store",
    "plans_of",
    "publish_folder",
    "read_exclusions",
    "read_manifest",
    "read_origins",
    "read_plan",
    "refuse_excluded",
    "verify",
    "write_placeholder",
]
