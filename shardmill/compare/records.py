"""What a comparison says, as frozen records. The two stores are called a and b."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentPlace:
    """One document of a store."""

    split: str
    document: int  # its number in the split
    token: int  # where it starts in the split


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBreak:
    """The first place where the documents that both stores hold come in another order."""

    a: DocumentPlace
    b: DocumentPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDocuments:
    """The documents of the splits of one name. Equal documents count as often as they are there."""

    split: str
    both: int
    only_a: int
    only_b: int
    other_mask: int  # of those in both: the tokens are equal, and what of them is trained is not
    first_only_a: tuple[int, ...]  # the numbers of the first few
    first_only_b: tuple[int, ...]
    first_other_mask: tuple[int, ...]  # their numbers in a
    order: OrderBreak | None  # None: what is in both comes in the same order


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDiff:
    """All that differs between two stores."""

    a: str  # the folders
    b: str
    identical: bool  # every file that the manifests list, the manifests, and what is excluded
    facts: dict[str, tuple[str, ...]]  # section -> sentences, "before -> now"; none, no section
    documents: tuple[SplitDocuments, ...]  # by split
    moved: int  # documents that are in both stores, but in splits of other names
    trained_share: tuple[float, float] | None  # of all tokens; None: not both hold conversations
