"""How much faster mask, fit and collate of a batch are than a plain loop over tokens.

    python benchmarks/chat_fit.py [--rounds 15] [--calls 20] [--json]

One batch is 64 chats of 1 to 8 exchanges, 1,000 tokens in the mean, of which about a third is
longer than the row of 1,025 tokens. Ours gets ids, their turns and no mask, as arrays; the loop
gets ids as lists, which is what it would have. Both give x, y and loss_mask as int64 and bool
arrays, and are checked to give the same before the clock runs. Ours with a stored mask is the
reading of a chat store, where the mask is not computed again. All contenders alternate in this
process; a number is the median of the ratios of each round. Exits with 1 below the wanted 20.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from common import Contender, alternate, microseconds, speed_of

from shardmill.chat.fit import Fit, fit_rows
from shardmill.chat.policy import assistant_mask
from shardmill.records import IGNORE_INDEX, ROLES, ChatExamples, Ragged, next_token_pairs

BATCH, SEQ_LEN = 64, 1024
SYS, USR, ASST, EOT = 1, 2, 3, 4
LOOP, OURS, STORED = "loop over tokens", "arrays", "arrays, the mask was stored"
WANTED = 20.0

Parts = tuple[npt.NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The same chats for everyone."""

    lists: list[list[int]]
    examples: ChatExamples  # with their mask


def draw(rng: np.random.Generator) -> Batch:
    chats, starts, roles = [], [], []
    total = 0
    for _ in range(BATCH):
        order = [SYS, *[USR, ASST] * int(rng.integers(1, 9))]
        ids: list[int] = []
        for opening in order:
            starts.append(total + len(ids))
            roles.append(ROLES.index({SYS: "system", USR: "user", ASST: "assistant"}[opening]))
            words = rng.integers(10, 16_000, int(rng.exponential(20 if opening == SYS else 110)))
            ids += [opening, *words.tolist(), EOT]
        chats.append(ids)
        total += len(ids)
    examples = ChatExamples(
        ids=Ragged.from_sequences(chats, np.uint16),
        mask=np.empty(0, np.bool_),
        turn_starts=np.array(starts),
        turn_roles=np.array(roles, np.uint8),
    )
    return Batch(chats, replace(examples, mask=masked(examples)))


def masked(examples: ChatExamples) -> npt.NDArray[np.bool_]:
    """Every turn has its end, so no span reaches into the next conversation."""
    return assistant_mask(examples.ids.values, open_id=ASST, end_id=EOT)


def by_arrays(batch: Batch) -> Parts:
    return from_store(replace(batch, examples=replace(batch.examples, mask=masked(batch.examples))))


def from_store(batch: Batch) -> Parts:
    rows = fit_rows(batch.examples, SEQ_LEN, fit=Fit.DROP_OLDEST_TURNS, pad_id=EOT)
    return *next_token_pairs(rows.ids, rows.mask), rows.mask[:, 1:]


def by_loop(batch: Batch) -> Parts:
    """The rules as one would write them down first."""
    rows = [collated(*packed(ids, mask_of(ids))) for ids in batch.lists]
    x, y, loss_mask = zip(*rows, strict=True)
    return np.array(x, np.int64), np.array(y, np.int64), np.array(loss_mask, np.bool_)


def mask_of(ids: list[int]) -> list[bool]:
    mask, speaks = [], False
    for token in ids:
        if token == ASST:
            mask.append(False)
            speaks = True
        else:
            mask.append(speaks)
            if token == EOT:
                speaks = False
    return mask


def turns_of(ids: list[int]) -> list[tuple[int, int]]:
    turns, start = [], 0
    for place, token in enumerate(ids):
        if token in (SYS, USR, ASST):
            start = place
        elif token == EOT:
            turns.append((start, place + 1))
    return turns


def packed(ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
    size = SEQ_LEN + 1
    system, *turns = turns_of(ids)
    kept = [system, *turns]
    while sum(stop - start for start, stop in kept) > size and len(kept) > 3:
        kept = [system, *kept[3:]]
    while sum(stop - start for start, stop in kept) > size and len(kept) > 1:
        kept = kept[1:]
    places = [place for start, stop in kept for place in range(start, stop)][-size:]
    row, trained = [ids[place] for place in places], [mask[place] for place in places]
    while len(row) < size:
        row.append(EOT)
        trained.append(False)
    return row, trained


def collated(row: list[int], trained: list[bool]) -> tuple[list[int], list[int], list[bool]]:
    x, y, loss_mask = [], [], []
    for place in range(len(row) - 1):
        x.append(row[place])
        said = trained[place + 1]
        y.append(row[place + 1] if said else IGNORE_INDEX)
        loss_mask.append(said)
    return x, y, loss_mask


def settle() -> None:
    """Make the C library keep freed memory, as it does in a process that once freed a large array.

    Before that it hands every batch's memory back to the kernel and pays for it again, page by
    page, which is neither contender's work.
    """
    np.ones(31 * 2**20, np.uint8)


RUN = {LOOP: by_loop, OURS: by_arrays, STORED: from_store}


def fit_rows_section(*, rounds: int, calls: int) -> dict[str, Any]:
    """Check that all agree, then time them."""
    settle()
    rng = np.random.default_rng(0)
    facts = check([draw(rng) for _ in range(8)])
    pool = [draw(rng) for _ in range(calls)]

    def prepare(count: int) -> Iterator[Batch]:
        return (pool[number % len(pool)] for number in range(count))

    contenders = [Contender(name=name, prepare=prepare, run=run) for name, run in RUN.items()]
    alternate(contenders, rounds=1, calls=calls)
    times = alternate(contenders, rounds=rounds, calls=calls)
    rows = [
        {
            "name": name,
            "microseconds": round(microseconds(times, name), 1),
            "times_the_loop": round(speed_of(times, name, limit=LOOP), 2),
        }
        for name in RUN
    ]
    reached = speed_of(times, OURS, limit=LOOP)
    verdict = {"wanted": WANTED, "reached": round(reached, 2), "passed": reached >= WANTED}
    versions = {"numpy": np.__version__, "python": platform.python_version()}
    return {**facts, "rounds": rounds, "calls": calls, **versions, "rows": rows, **verdict}


def check(batches: list[Batch]) -> dict[str, Any]:
    """The same x, y and loss_mask from everyone, or an error; and what the batches are like."""
    for batch in batches:
        wanted = by_loop(batch)
        for name, run in RUN.items():
            for right, found in zip(wanted, run(batch), strict=True):
                if right.dtype != found.dtype or not np.array_equal(right, found):
                    raise SystemExit(f"{name} and {LOOP} differ")
    lengths = np.concatenate([batch.examples.ids.lengths for batch in batches])
    return {
        "batch": BATCH,
        "seq_len": SEQ_LEN,
        "mean_tokens": round(float(lengths.mean())),
        "too_long": round(float((lengths > SEQ_LEN + 1).mean()), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.rounds < 1 or args.calls < 1:
        parser.error("--rounds and --calls from 1 on")
    result = fit_rows_section(rounds=args.rounds, calls=args.calls)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{'contender':30} {'us a batch':>11} {'times the loop':>15}")
        for row in result["rows"]:
            print(f"{row['name']:30} {row['microseconds']:11.1f} {row['times_the_loop']:15.1f}")
        print(f"arrays reached {result['reached']:.1f} times the loop, wanted {WANTED:.0f}")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
