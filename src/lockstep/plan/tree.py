"""The one fixed summation tree over lanes, cut along any assignment of lanes to workers. Pure.

A node is a range of lanes; its value is the sum of its two halves, split at the largest power of
two below its length. Lanes 0 to 5:

            (0,6)
           /     \\
       (0,4)     (4,6)
       /   \\     /   \\
    (0,2) (2,4) 4     5
    0   1 2   3

Floating-point addition is not associative, but it is commutative: if every worker adds only along
this tree, then who adds, and when, cannot be seen in the result. A worker that was my_lanes lanes
[first, last) adds what it can, the maximal subtrees inside (``cover``); a ``Fold`` says who holds
which of those and which additions are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.errors import InvariantError

Node = tuple[int, int]


def halves(node: Node) -> tuple[Node, Node]:
    """The two nodes whose sum this one is. Not for single lanes."""
    first, last = node
    middle = first + (1 << (last - first - 1).bit_length() - 1)
    return (first, middle), (middle, last)


def nodes(lanes: int) -> set[Node]:
    """All nodes of the tree: 2 x lanes - 1."""
    found: set[Node] = set()
    waiting: list[Node] = [(0, lanes)]
    while waiting:
        node = waiting.pop()
        found.add(node)
        if node[1] - node[0] > 1:
            waiting += halves(node)
    return found


def cover(lanes: int, first: int, last: int) -> tuple[Node, ...]:
    """The maximal subtrees inside lanes [first, last), from left to right."""
    if first == last:
        return ()
    found: list[Node] = []
    waiting: list[Node] = [(0, lanes)]
    while waiting:
        node = waiting.pop()
        if first <= node[0] and node[1] <= last:
            found.append(node)
        elif node[0] < last and first < node[1]:
            waiting += halves(node)[::-1]
    return tuple(found)


def carries(lanes: int, first: int, last: int) -> tuple[int, ...]:
    """How a worker folds lanes [first, last) as they come, on a stack.

    For each lane: after its value is pushed, so many times the two values on top become one. What
    is left in the end are the values of ``cover(lanes, first, last)``.
    """
    known = nodes(lanes)
    stack: list[Node] = []
    counts = []
    for lane in range(first, last):
        stack.append((lane, lane + 1))
        count = 0
        while len(stack) > 1 and _are_halves(stack[-2], stack[-1], known):
            right = stack.pop()
            stack[-1] = (stack[-1][0], right[1])
            count += 1
        counts.append(count)
    return tuple(counts)


@dataclass(frozen=True)
class Fold:
    """Who holds which nodes, and which additions make the root of them.

    ``held[r]`` are the nodes whose values holder r brings; together they are all lanes, once. Values
    are numbered holder by holder; ``adds`` is a list of (to, from): value[to] += value[from], in
    this order; afterwards the total is value[``root``].
    """

    lanes: int
    held: tuple[tuple[Node, ...], ...]
    adds: tuple[tuple[int, int], ...] = field(init=False)
    root: int = field(init=False)

    def __post_init__(self) -> None:
        at = {node: number for number, node in enumerate(node for mine in self.held for node in mine)}
        covered = sorted(at)
        ends = [0, *(last for _, last in covered)]
        if [first for first, _ in covered] != ends[:-1] or ends[-1] != self.lanes or not set(at) <= nodes(self.lanes):
            raise InvariantError(f"nodes {self.held} do not make up {self.lanes} lanes")
        if sum(map(len, self.held)) != len(at):
            raise InvariantError(f"a node of {self.held} is held twice")
        adds: list[tuple[int, int]] = []
        object.__setattr__(self, "root", self._finish((0, self.lanes), at, adds))
        object.__setattr__(self, "adds", tuple(adds))

    def _finish(self, node: Node, at: dict[Node, int], adds: list[tuple[int, int]]) -> int:
        """Emit the additions below ``node``; the number of the value it ends in."""
        if node in at:
            return at[node]
        left, right = (self._finish(half, at, adds) for half in halves(node))
        adds.append((left, right))
        return left

    @property
    def width(self) -> int:
        """The most values any holder brings."""
        return max(map(len, self.held))

    def merged(self, holders: Sequence[Sequence[int]]) -> Fold:
        """The same tree when each group of holders first adds among itself what it can: group g becomes holder g."""
        groups = []
        for group in holders:
            together = sorted(node for holder in group for node in self.held[holder])
            groups.append(_merge(together, nodes(self.lanes)))
        return Fold(self.lanes, tuple(groups))

    def among(self, group: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """Within one group of holders, its values numbered holder by holder: (additions, where the merged values end)."""
        together = [node for holder in group for node in self.held[holder]]
        at = {node: number for number, node in enumerate(together)}
        adds: list[tuple[int, int]] = []
        ends = []
        for node in _merge(sorted(together), nodes(self.lanes)):
            ends.append(self._finish(node, at, adds))
        return tuple(adds), tuple(ends)


def fold(lanes: int, assignment: Sequence[tuple[int, int]]) -> Fold:
    """The fold of a assignment: worker r ran lanes [first, last) of ``assignment[r]``."""
    return Fold(lanes, tuple(cover(lanes, first, last) for first, last in assignment))


def _merge(together: Sequence[Node], known: set[Node]) -> tuple[Node, ...]:
    """Neighbouring nodes (sorted) become their parents as long as both halves are there."""
    stack: list[Node] = []
    for node in together:
        stack.append(node)
        while len(stack) > 1 and _are_halves(stack[-2], stack[-1], known):
            right = stack.pop()
            stack[-1] = (stack[-1][0], right[1])
    return tuple(stack)


def _are_halves(left: Node, right: Node, known: set[Node]) -> bool:
    """Whether the two are all of one node."""
    return left[1] == right[0] and (left[0], right[1]) in known
