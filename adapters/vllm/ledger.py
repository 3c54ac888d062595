"""The scheduler's books: which requests have a copy on the host, which of them OasisKV attends to, and what the host keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from .messages import Row, Start, StepMessage
from .prefixes import Prefixes


@dataclass
class Entry:
    """A request that is recorded.

    Attributes:
        key: names its sequence on the workers.
        reserved: blocks of the host that are set aside for it.
        sent: blocks that workers were told to copy, counted from the first.
        stored: blocks that all workers have.
        lent: device blocks that OasisKV has for it; empty while vLLM attends.
        attended: whether the workers know that.
        freed: range of its own device blocks that are gone.
        parked: whether it was preempted, and waits.
        processed: tokens whose step is over, when vLLM last asked for blocks for it.
    """

    request: Request
    key: int
    reserved: int
    sent: int = 0
    stored: int = 0
    lent: list[int] = field(default_factory=list)
    attended: bool = False
    freed: tuple[int, int] = (0, 0)
    parked: bool = False
    processed: int = 0


class Ledger:
    """The books of one engine.

    Args:
        handover_tokens: requests with at least this many tokens are recorded, and may be handed over when they decode. A prompt
            that takes more than half of the device blocks may be handed over before.
        block_size: tokens in a device block.
        lent_blocks: device blocks that OasisKV needs for a request.
        most_blocks: device blocks that a request holds at most if it is handed over before its prompt has been read.
        device_blocks: all that there are.
        max_model_len: most tokens of a request.
        kept_first, kept_last: own blocks of a request that are never freed, for the layers of a draft model.
        restores: whether a request may begin with what the host has; not if layers that OasisKV does not know need their
            history too.
        shares: whether the host keeps what a request leaves, for others that begin alike.
        always: whether requests are handed over as soon as they can be, or only when device blocks run short.
        watermark_blocks: that vLLM leaves free when it admits a request.

    Attributes:
        host_blocks: device blocks' worth of tokens that the hosts of all workers may hold; `None` if that is not limited.
    """

    def __init__(
        self,
        *,
        handover_tokens: int,
        block_size: int,
        lent_blocks: int,
        most_blocks: int,
        device_blocks: int,
        max_model_len: int,
        kept_first: int = 0,
        kept_last: int = 0,
        restores: bool = True,
        shares: bool = True,
        always: bool = True,
        watermark_blocks: int = 0,
    ) -> None:
        self.host_blocks: int | None = 0  # until the workers have said
        self.lent_blocks = lent_blocks
        self.most_blocks = most_blocks
        self._device_blocks = device_blocks
        self._long_tokens = max(handover_tokens, device_blocks // 2 * block_size + 1)
        self.kept_first = kept_first
        self.kept_last = kept_last
        self.always = always
        self.watermark_blocks = watermark_blocks
        self.counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._refused: set[str] = set()
        self._handover_tokens = handover_tokens
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._restores = restores
        self._shares = restores and shares
        self._requests: dict[str, Request] = {}
        self._entries: dict[str, Entry] = {}
        self._prefixes = Prefixes()
        self._keys = 0
        self._next = StepMessage()
        self._attended: list[Entry] = []

    # What the connector hears of requests

    def add(self, request: Request) -> None:
        """A request has arrived."""
        self._requests[request.request_id] = request

    def external_tokens(self, request: Request, local_tokens: int) -> int:
        """Tokens beyond `local_tokens` that the host has of a request that begins or comes back. Changes nothing."""
        if not self._restores or request.num_tokens < self._handover_tokens:
            return 0
        entry = self._entries.get(request.request_id)
        blocks = entry.stored if entry is not None else self._found(request)[1]
        if entry is None and blocks and not self._fits(request):
            return 0
        # At least one token must be computed, so that there is something to sample from.
        usable = min(blocks, (request.num_tokens - 1) // self._block_size)
        rest = -(-request.num_tokens // self._block_size) - usable
        if min(rest + self.lent_blocks, self.most_blocks) > self._device_blocks:
            return 0  # beside the lent blocks it would never be admitted
        return max(0, usable * self._block_size - local_tokens)

    def admit(self, request: Request, external_tokens: int) -> None:
        """A request got its blocks, for the first time or once more after it was preempted."""
        entry = self._entries.get(request.request_id)
        if entry is None or not entry.parked:
            if external_tokens:
                self.counts["host_prefix_hit_tokens"] += external_tokens
            return
        entry.parked = False
        entry.sent = entry.stored
        self.counts["host_resumes"] += external_tokens > 0

    def finish(self, request: Request) -> None:
        """A request is over; the host keeps its blocks for others that begin alike."""
        self._requests.pop(request.request_id, None)
        self._refused.discard(request.request_id)
        entry = self._entries.pop(request.request_id, None)
        if entry is None:
            return
        self._reclaim(entry)
        kept = min(entry.stored, len(request.block_hashes)) if self._shares else 0
        if kept:
            self._next.dropped.extend(self._prefixes.keep(entry.key, request.block_hashes[:kept]))
        else:
            self._next.dropped.append(entry.key)

    def forget(self) -> None:
        """Drop everything on the host that no running request needs: the model may have changed."""
        self._next.dropped.extend(self._prefixes.clear())
        for request_id, entry in list(self._entries.items()):
            if entry.parked:
                self._next.dropped.append(entry.key)
                del self._entries[request_id]

    # What the block manager asks and tells

    def streams(self, request_id: str) -> bool:
        """Whether a request may be handed over while its prompt is read: that takes much of the device, and the host has
        room."""
        request = self._requests.get(request_id)
        if request is None or self.most_blocks > self._device_blocks or request.num_tokens < self._long_tokens:
            return False
        return request_id in self._entries or self._fits(request)

    def advance(self, request_id: str, processed_tokens: int) -> None:
        """vLLM asks for blocks for a request; the steps of its first `processed_tokens` are over."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.processed = processed_tokens

    def candidates(self) -> list[str]:
        """The requests that run, are recorded, and were not handed over."""
        return [name for name, entry in self._entries.items() if not (entry.lent or entry.parked)]

    def releasable(self, request_id: str) -> int | None:
        """How many of a request's own blocks, counted from the first, may be freed if it is handed over now: those on the host.
        `None` if it cannot be. It must decode, or be one that `streams`."""
        entry = self._entries.get(request_id)
        if entry is None or entry.request.is_finished():
            return None
        last = min(entry.stored, entry.processed // self._block_size - self.kept_last)
        reads = entry.processed < entry.request.num_prompt_tokens
        ready = not reads or self.streams(request_id)
        return last if last > self.kept_first and ready else None

    def is_stored(self, request_id: str) -> bool:
        """Whether all but the last block of a request is on the host; or it is read, and to wait would take more blocks."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        reads = entry.processed < entry.request.num_prompt_tokens
        return reads or entry.stored >= entry.processed // self._block_size - 1

    def is_attended(self, request_id: str) -> bool:
        """Whether the workers were told that a request is handed over."""
        return self._entries[request_id].attended

    def lend(self, request_id: str, blocks: list[int], freed: tuple[int, int]) -> None:
        """Device blocks were lent for a request, and some of its own freed."""
        entry = self._entries.get(request_id) or self._open(self._requests[request_id])
        entry.lent = blocks
        entry.freed = freed
        self.counts["handovers"] += 1

    def free(self, request_id: str, last: int) -> None:
        """The request's own blocks before `last` were freed."""
        entry = self._entries[request_id]
        entry.freed = (entry.freed[0], max(last, entry.freed[1]))

    def take_back(self, request_id: str) -> None:
        """The blocks of a request are about to be freed: it was preempted, or is over."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._reclaim(entry)
            entry.parked, entry.processed = True, 0

    # What the workers are told, and answer

    def message(self, output: SchedulerOutput, blocks_of: Callable[[str], list[int]]) -> StepMessage:
        """What a step brings. `blocks_of` gives the device blocks of a request."""
        message = self._next
        for entry in self._attended:
            message.lengths.setdefault(entry.key, entry.request.num_computed_tokens)
        self._attended = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            recorded = self._entries.get(request_id) or self._record(request)
            if recorded is not None:
                drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
                message.rows[request_id] = self._row(recorded, tokens, drafts, blocks_of(request_id))
        self._next = StepMessage()
        return message

    def _row(self, entry: Entry, tokens: int, drafts: int, blocks: list[int]) -> Row:
        size, computed = self._block_size, entry.request.num_computed_tokens
        certain = computed + tokens - drafts
        reads = computed < entry.request.num_prompt_tokens or tokens - drafts > 1 or certain < entry.request.num_tokens
        row = Row(entry.key, computed, tokens, drafts, reads, blocks[computed // size :], entry.freed, entry.lent)
        if not entry.attended:
            # Accepted drafts may have filled blocks since the last step, which a request that is handed over takes along.
            full = (computed if entry.lent else row.certain) // size
            if full > entry.sent:
                row.copy_from, row.copy = entry.sent, blocks[entry.sent : full]
                entry.sent = full
        if entry.lent:
            entry.attended = True
            self._attended.append(entry)
        return row

    def acknowledge(self, stored: dict[int, int]) -> None:
        """All workers have so many blocks of sequences that they record."""
        for entry in self._entries.values():
            if entry.key in stored and not entry.lent and not entry.parked:
                entry.stored = max(entry.stored, stored[entry.key])

    # Figures

    def report(self) -> dict[str, float]:
        """What has happened since the last call, and what there is now, by the names of the metrics."""
        grown = self.counts - self._reported
        self._reported = Counter(self.counts)
        held = sum(max(entry.stored, entry.sent) for entry in self._entries.values()) + self._prefixes.blocks
        return {
            **grown,
            "running_requests": sum(bool(entry.lent) for entry in self._entries.values()),
            "host_tokens": held * self._block_size,
        }

    @property
    def host_used(self) -> int:
        """Blocks of the host that are set aside or hold something."""
        return sum(entry.reserved for entry in self._entries.values()) + self._prefixes.blocks

    # Entries

    def _record(self, request: Request) -> Entry | None:
        """Begin to record a request that runs, if it is long enough and the host has room."""
        if request.num_tokens < self._handover_tokens:
            return None
        if self._fits(request):
            return self._open(request)
        if request.request_id not in self._refused:
            self._refused.add(request.request_id)
            self.counts["refused_handovers.host_full"] += 1
        return None

    def _fits(self, request: Request) -> bool:
        """Whether the host has room for all tokens that a request may come to, if it gives up what it merely keeps."""
        return self._has_room(self._need(request) + sum(entry.reserved for entry in self._entries.values()))

    def _has_room(self, blocks: int) -> bool:
        return self.host_blocks is None or blocks <= self.host_blocks

    def _need(self, request: Request) -> int:
        longest = min(request.num_prompt_tokens + request.max_tokens, self._max_model_len)
        return -(-max(longest, request.num_tokens) // self._block_size) + 1

    def _found(self, request: Request) -> tuple[int | None, int]:
        return self._prefixes.find(request.block_hashes) if self._shares else (None, 0)

    def _open(self, request: Request) -> Entry:
        """A new entry, with what the host has of it; makes room by dropping what was not used for longest."""
        source, blocks = self._found(request)
        if source is not None:
            self._prefixes.touch(source)
        entry = Entry(request, self._keys, self._need(request), sent=blocks, stored=blocks)
        self._keys += 1
        self._next.starts.append(Start(entry.key, source, blocks))
        self._entries[request.request_id] = entry
        while len(self._prefixes) and not self._has_room(self.host_used):
            self._next.dropped.append(self._prefixes.evict())
        return entry

    def _reclaim(self, entry: Entry) -> None:
        """OasisKV does not attend to a request any more: what is sealed stays on the host."""
        if entry.attended:
            committed = entry.request.num_computed_tokens
            entry.stored = committed // self._block_size
            self._next.lengths[entry.key] = committed
            self._next.reclaimed.append(entry.key)
        entry.lent, entry.attended, entry.freed = [], False, (0, 0)
