"""Megatron's and NeMo's way: first fit, longest first, every row looked at for every sequence.

Written here after the published description, in plain Python like theirs; quadratic.
"""

from __future__ import annotations

from peers.packers import Numbers, Rows, rows_of_lists


def prepare(lengths: Numbers, _capacity: int) -> list[int]:
    sizes: list[int] = lengths.tolist()
    return sizes


def pack(sizes: list[int], capacity: int) -> list[list[int]]:
    lists: list[list[int]] = []
    rooms: list[int] = []
    for item in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        row = next((row for row, room in enumerate(rooms) if room >= sizes[item]), len(rooms))
        if row == len(rooms):
            rooms.append(capacity)
            lists.append([])
        rooms[row] -= sizes[item]
        lists[row].append(item)
    return lists


def rows(lists: list[list[int]], _lengths: Numbers) -> Rows:
    return rows_of_lists(lists)
