"""The sequences of one cache, and how they change together: completely, not at all, or not to be used until a reset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from oasiskv import KVManager, Sequence
from oasiskv.errors import PoolExhausted, StateError, WorkerError
from oasiskv.host_memory import physical_bytes
from oasiskv.sequence import Phase


class Batch:
    """Sequences in the order of the batch, and what is wrong with them.

    Attributes:
        sequences: a row of the batch each; none before the first forward.
        torn: what was cut short, if something was; then only a reset helps.
        recorded: whether autograd recorded rows that the sequences hold.
    """

    def __init__(self, manager: KVManager, hybrid: bool) -> None:
        self.manager = manager
        self.sequences: list[Sequence] = []
        self._hybrid = hybrid
        self.forget()

    def forget(self) -> None:
        """As new."""
        self.sequences = []
        self.torn = ""
        self.recorded = False

    def cut_short(self) -> None:
        """A forward has ended in the middle. The sequences are without its rows; the stock layers of a hybrid model may have
        them."""
        if self._hybrid:
            self.torn = "a forward of this hybrid model ended in the middle, and its stock layers cannot be rolled back"

    @property
    def most(self) -> int:
        """Sequences that the memory of this machine could ever hold: each takes a block at least."""
        return physical_bytes() // self.manager.rooms.arena.page_bytes

    def create(self, count: int) -> None:
        """Begin with `count` empty sequences."""
        self.sequences = self._all_or_none([self.manager.create] * count)

    def check_whole(self) -> None:
        """Raise `StateError` if a change was cut short."""
        if self.torn:
            raise StateError(f"{self.torn}; call reset() and pass the whole text again")

    @contextmanager
    def changing(self, what: str, undo: Callable[[], None]) -> Iterator[None]:
        """A change of the sequences and of what goes with them. If it fails before any sequence has changed, `undo` puts back
        what goes with them; if it fails later, the batch is torn."""
        before = self._state()
        self.torn = f"{what} of an OasisCache was cut short"
        try:
            yield
        except BaseException:
            if self._state() == before:
                undo()
                self.torn = ""
            raise
        self.torn = ""

    def _state(self) -> list[tuple[int, int, Phase]]:
        return [(id(sequence), sequence.length, sequence.phase) for sequence in self.sequences]

    def crop(self, count: int) -> None:
        """Take the last `count` columns off: tokens, and padding where a sequence has fewer. See `KVManager.crop`."""
        for sequence in self.sequences:
            self.manager.crop(sequence, max(0, sequence.length - count))

    def select(self, order: list[int]) -> None:
        """Make sequence `i` continue sequence `order[i]`. One that is listed again is forked, one that is not listed is freed.

        Raises `PoolExhausted` if the pool has no room for the forks. Nothing has changed then."""
        first = {number: place for place, number in reversed(list(enumerate(order)))}
        again = [place for place, number in enumerate(order) if first[number] != place]
        parents = [self.sequences[order[place]] for place in again]
        going = [sequence for number, sequence in enumerate(self.sequences) if number not in first]
        if self._must_go_first(parents, going):
            discard(self.manager, going)
        result = [self.sequences[number] for number in order]
        for place, fork in zip(again, self.forks(parents), strict=True):
            result[place] = fork
        self.sequences = result
        discard(self.manager, going)

    def forks(self, parents: list[Sequence]) -> list[Sequence]:
        """A fork of each of the sequences, which may be listed more than once; all of them or, after an error, none.

        Raises `PoolExhausted`."""
        self._check_room(parents)
        return self._all_or_none([partial(self.manager.fork, parent) for parent in parents])

    def _all_or_none(self, makes: list[Callable[[], Sequence]]) -> list[Sequence]:
        """New sequences; after an error, the interrupt of a user included, those that were made are freed."""
        before = set(self.manager.sequences)
        try:
            return [make() for make in makes]
        except BaseException:
            discard(self.manager, (sequence for sequence in self.manager.sequences if sequence not in before))
            raise

    def _must_go_first(self, parents: list[Sequence], going: list[Sequence]) -> bool:
        """Whether the strips of sequences that go are what forks need. A pool that is full but for them, as of a beam search,
        would run short, or grow, with both in it at once."""
        free, needed = self.manager.rooms.pool.free_strips, _strips(parents)
        return free < needed <= free + _strips(going)

    def _check_room(self, parents: list[Sequence]) -> None:
        """Raise `PoolExhausted` where forks cannot succeed, even with every dense sequence turned sparse. So nothing is turned
        sparse for a fork that is undone."""
        pool, needed = self.manager.rooms.pool, _strips(parents)
        budget = self.manager.config.budget_blocks
        dense = [sequence for sequence in self.manager.sequences if sequence.phase is Phase.DENSE]
        spare = sum(max(0, len(sequence.strips) - budget) for sequence in dense)
        if not pool.can_allocate(needed - spare):
            pool.allocate(needed)  # raises, and says how much is needed
        needed_bytes = needed * self.manager.rooms.arena.page_bytes
        if pool.slots.device.type == "cpu" and needed_bytes > physical_bytes():
            raise PoolExhausted(
                f"{len(parents)} forks need {needed_bytes} bytes of the pool, more than this machine has; repeat less often"
            )


def discard(manager: KVManager, sequences: Iterable[Sequence]) -> None:
    """Free sequences that are not wanted any more, and that may be freed already."""
    for sequence in sequences:
        failures = 0
        while sequence.phase is not Phase.FREED:
            try:
                manager.free(sequence)
            except WorkerError:  # told once for each layer; what background work should have brought is not wanted any more
                failures += 1
                if failures > manager.shape.num_layers:
                    raise


def _strips(sequences: list[Sequence]) -> int:
    return sum(len(sequence.strips) for sequence in sequences)
