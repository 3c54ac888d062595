"""What the scheduler's side of the connector and the workers tell each other, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class Start:
    """A sequence begins: with the first blocks of another one, or empty.

    Attributes:
        key: names the sequence from now on.
        source: the sequence whose first `blocks` host blocks it shares; `None` begins empty.
        blocks: device blocks' worth of tokens.
    """

    key: int
    source: int | None = None
    blocks: int = 0


@dataclass
class Row:
    """One scheduled request that is recorded or attended to, in one step.

    Attributes:
        key: of its sequence.
        computed: tokens before this step, all of them accepted.
        tokens: rows in this step, drafts included.
        drafts: how many of them, the last ones, may be rejected.
        prompt: whether they are read, not decoded: a prompt's, or computed once more.
        tail: device blocks from the one of the first row to the last one that the request holds; no other request has them.
        freed: device blocks `freed[0] <= number < freed[1]` of the request are not there any more.
        lent: device blocks that OasisKV may use for the request until it is told otherwise; empty while vLLM attends.
        copy_from: number of the first block of `copy`.
        copy: device blocks that are full after this step, to be copied to the host.
    """

    key: int
    computed: int
    tokens: int
    drafts: int
    prompt: bool
    tail: list[int]
    freed: tuple[int, int] = (0, 0)
    lent: list[int] = field(default_factory=list)
    copy_from: int = 0
    copy: list[int] = field(default_factory=list)

    @property
    def certain(self) -> int:
        """Tokens that the request has after this step whatever becomes of the drafts."""
        return self.computed + self.tokens - self.drafts


@dataclass
class StepMessage(KVConnectorMetadata):
    """From the scheduler to every worker, before a step. To be obeyed in the order of the fields.

    Attributes:
        lengths: accepted tokens of the sequences that took part in the step before, by key.
        reclaimed: sequences whose lent blocks belong to others now; what is on the host stays.
        dropped: sequences that are to be forgotten.
        starts: sequences that begin.
        rows: by request id.
    """

    lengths: dict[int, int] = field(default_factory=dict)
    reclaimed: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)


@dataclass
class Capacity(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, before the first step.

    Attributes:
        host_blocks: device blocks' worth of tokens that its host can hold; `None` if that is not limited.
    """

    host_blocks: int | None


@dataclass
class Acknowledgement(KVConnectorWorkerMetadata):
    """From a worker to the scheduler, after a step.

    Attributes:
        stored: device blocks' worth of tokens that are on the host, by key; of the sequences where that has changed.
    """

    stored: dict[int, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Acknowledgement:
        """What all of several workers have. A sequence that one of them does not mention has not changed there yet."""
        assert isinstance(other, Acknowledgement)
        common = self.stored.keys() & other.stored.keys()
        return Acknowledgement({key: min(self.stored[key], other.stored[key]) for key in common})
