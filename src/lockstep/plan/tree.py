"""Fold: the one fixed summation tree over lanes, divided by any assignment of lanes to workers. Pure.

A node is a range of lanes. Its value is the sum of its two halves, split at the largest power of two below its length. The tree of
lanes 0 to 5:

            (0,6)
           /     \\
       (0,4)     (4,6)
       /   \\     /   \\
    (0,2) (2,4) 4     5
    0   1 2   3

Floating-point addition is not associative, but it is commutative: if every worker adds only along this tree, the result does not
depend on which worker adds, or when. A worker with lanes [first, last) adds up the maximal subtrees inside them (``cover``). A
``Fold`` says which worker has which of these subtrees, and which additions remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.errors import InvariantError

Node = tuple[int, int]


def halves(node: Node) -> tuple[Node, Node]:
    """Returns the two nodes whose sum is ``node``, which must have more than one lane."""
    first, last = node
    middle = first + (1 << (last - first - 1).bit_length() - 1)
    return (first, middle), (middle, last)


def nodes(lanes: int) -> set[Node]:
    """Returns all 2 x lanes - 1 nodes of the tree."""
    found: set[Node] = set()
    waiting: list[Node] = [(0, lanes)]
    while waiting:
        node = waiting.pop()
        found.add(node)
        if node[1] - node[0] > 1:
            waiting += halves(node)
    return found


def cover(lanes: int, first: int, last: int) -> tuple[Node, ...]:
    """Returns the maximal subtrees inside lanes [first, last), from left to right."""
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
    """Returns how a worker adds lanes [first, last) one after the other on a stack.

    For each lane: the number of additions of the two top values after the lane's value was pushed. At the end the stack holds the
    values of ``cover(lanes, first, last)``.
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
    """Which rank has the values of which nodes, and which additions make the root of them.

    ``held[r]`` are the nodes whose values rank r has; all ranks together have each lane once. Values are numbered rank by rank.
    ``adds`` is a list of (to, from): value[to] += value[from], in this order. Afterwards the total is value[``root``].
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
            raise InvariantError(f"two ranks of {self.held} have the same node")
        adds: list[tuple[int, int]] = []
        object.__setattr__(self, "root", self._add_up((0, self.lanes), at, adds))
        object.__setattr__(self, "adds", tuple(adds))

    def _add_up(self, node: Node, at: dict[Node, int], adds: list[tuple[int, int]]) -> int:
        """Append the additions below ``node`` to ``adds``; return the number of the value that ends up with the sum."""
        if node in at:
            return at[node]
        left, right = (self._add_up(half, at, adds) for half in halves(node))
        adds.append((left, right))
        return left

    @property
    def width(self) -> int:
        """The largest number of values that a rank has."""
        return max(map(len, self.held))

    def lanes_of(self, rank: int) -> tuple[int, int]:
        """Returns the lanes [first, last) of ``rank``."""
        return self.held[rank][0][0], self.held[rank][-1][1]

    def rank_of(self, lane: int) -> int:
        """Returns the rank that has ``lane``."""
        return next(r for r, mine in enumerate(self.held) if any(first <= lane < last for first, last in mine))

    def merged(self, groups: Sequence[Sequence[int]]) -> Fold:
        """Returns the rest of the tree after the ranks of each group have added up what they can: group g becomes rank g."""
        together = [sorted(node for rank in group for node in self.held[rank]) for group in groups]
        return Fold(self.lanes, tuple(_merge(mine, nodes(self.lanes)) for mine in together))

    def among(self, group: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """Returns what one group of ranks adds up: (the additions, the numbers of the values that end up with the sums).

        The values of the group are numbered rank by rank.
        """
        together = [node for rank in group for node in self.held[rank]]
        at = {node: number for number, node in enumerate(together)}
        adds: list[tuple[int, int]] = []
        ends = []
        for node in _merge(sorted(together), nodes(self.lanes)):
            ends.append(self._add_up(node, at, adds))
        return tuple(adds), tuple(ends)


def fold(lanes: int, assignment: Sequence[tuple[int, int]]) -> Fold:
    """Returns the fold if rank r runs lanes [first, last) of ``assignment[r]``."""
    return Fold(lanes, tuple(cover(lanes, first, last) for first, last in assignment))


def _merge(together: Sequence[Node], known: set[Node]) -> tuple[Node, ...]:
    """Replace neighbouring nodes by their parent as long as both halves are there. ``together`` is sorted."""
    stack: list[Node] = []
    for node in together:
        stack.append(node)
        while len(stack) > 1 and _are_halves(stack[-2], stack[-1], known):
            right = stack.pop()
            stack[-1] = (stack[-1][0], right[1])
    return tuple(stack)


def _are_halves(left: Node, right: Node, known: set[Node]) -> bool:
    """Whether the two nodes are the halves of one node."""
    return left[1] == right[0] and (left[0], right[1]) in known
