"""The contracts that plug-ins implement. Core calls nothing of a plug-in that is not written here."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from .config import OasisConfig
from .types import ModelShape


@dataclass(frozen=True)
class KeySample:
    """Keys of one layer to fit a summary on: `(kv_heads, num_tokens, head_dim)` in float32, after rotary embedding, and their
    positions `(num_tokens,)`."""

    layer: int
    keys: torch.Tensor
    positions: torch.Tensor


class KeySummary(ABC):
    """A digest of a block's keys that is ranked instead of the keys, and always stays on the device.

    One object serves all layers and sequences of a manager. Rows are addressed by *page*: page `p` is the digest of one
    sealed block, in every layer and for all kv heads. Pages are written once, when a block seals, and shared by forks; a
    page that a crop frees is written anew before it is read again, so there is nothing to truncate.

    Note for implementers: no method may synchronise with the host on CUDA; all of them enqueue on the current stream.
    """

    def __init__(self, shape: ModelShape, config: OasisConfig) -> None:
        self.shape = shape
        self.config = config

    @property
    @abstractmethod
    def bytes_per_token(self) -> float:
        """Device bytes per token and kv head, on average over layers and heads, without constant overheads."""

    @property
    def fitted(self) -> bool:
        """Whether `write` and `score` may be called. Summaries without parameters are born fitted."""
        return True

    @property
    def serves(self) -> float:
        """A fit serves texts up to this many times as long as its sample; longer ones fit anew."""
        return math.inf

    def observe(self, layer: int, queries: torch.Tensor, positions: torch.Tensor) -> None:  # noqa: B027 - optional hook
        """See the queries `(num_tokens, query_heads, head_dim)` of a prompt, or of a dense sequence before the first fit."""

    def fit(self, samples: Iterable[KeySample]) -> None:  # noqa: B027 - optional hook
        """Set the parameters from the keys of all layers, which come one at a time so that one layer is staged at most.

        May be called again, for texts that are much longer than before; all pages are written anew afterwards. An exception
        must leave the parameters as they were. Keys are finite.
        """

    @abstractmethod
    def reserve(self, num_pages: int) -> None:
        """Make pages `0 .. num_pages - 1` writable, keeping what is written. Called by the foreground only."""

    @abstractmethod
    def write(self, layer: int, pages: torch.Tensor, keys: torch.Tensor) -> None:
        """Digest sealed blocks: `keys` is `(num_blocks, kv_heads, block_size, head_dim)`, `pages` is `(num_blocks,)`."""

    @abstractmethod
    def score(self, layer: int, queries: torch.Tensor, pages: torch.Tensor, scale: float) -> torch.Tensor:
        """Estimate, per block, the log of the sum over its tokens of `exp(scale * q.k)`.

        Args:
            queries: `(num_sequences, num_rows, query_heads, head_dim)`, after rotary embedding.
            pages: `(num_sequences, num_blocks)`; entries below 0 are padding, whose scores are ignored.
            scale: of the logits, usually `head_dim ** -0.5`.

        Returns:
            Block logits in float32, `(num_sequences, num_rows, query_heads, num_blocks)`.
        """

    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes of every tensor that the summary holds on the device, counted from the allocations."""


class BlockIndex(Protocol):
    """What a predictor may ask about one layer of the sequences in a step.

    A mass is the share of attention that a query row puts on a sealed block, summed over the query heads of a group (so the
    blocks of a kv head sum to the group size): `(num_sequences, num_rows, query_heads, head_dim)` queries give
    `(num_sequences, num_rows, kv_heads, num_blocks)`.
    """

    def summary_mass(self, queries: torch.Tensor) -> torch.Tensor:
        """Masses as the summary estimates them."""

    def exact_mass(self, queries: torch.Tensor) -> torch.Tensor:
        """Masses by the keys themselves, read from the arena: slow, the yardstick of all summaries."""


class QueryProjection(Protocol):
    """How a host's model makes queries from its residual stream."""

    def project(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """`(..., hidden_size)` as it enters `layer` to `(..., query_heads, head_dim)` before rotary embedding."""


class Predictor(ABC):
    """Turns the queries of a step into one score per block: the attention mass that the next step is expected to put on it.

    Note for implementers: a predictor does not know about slots, and keeps nothing of a step but what it learns per sequence.
    """

    foreground: bool = False
    """True: the step's own queries choose its working set before it attends, without a cap (a yardstick, not a mode)."""

    def __init__(self, shape: ModelShape, config: OasisConfig) -> None:
        self.shape = shape
        self.config = config

    @abstractmethod
    def score(self, layer: int, queries: torch.Tensor, index: BlockIndex) -> torch.Tensor:
        """Mass per row; shapes as in `BlockIndex`."""

    @abstractmethod
    def aggregate(self, layer: int, mass: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """One score per block from the masses of the step's rows, `(num_sequences, num_rows, kv_heads, num_blocks)` to
        `(num_sequences, kv_heads, num_blocks)`.

        Args:
            weights: `(num_sequences, num_rows)`, how likely each row is to stay part of the text: 1 or 0 once that is known,
                a probability before; 0 for padding. The first row of a sequence always weighs 1.
            rows: `(num_sequences,)`, which row of the predictor's own tables belongs to each sequence.
        """

    def begin(self, layer: int, mass: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Scores for the first working set of one sequence, from the masses of the prompt's last rows, oldest first: shapes as
        in `aggregate`. By default all rows count alike."""
        return mass.mean(1)

    prompt_rows: int = 4
    """How many of the prompt's last rows `begin` wants to see; a shorter prompt gives fewer."""

    uses_hints: bool = False
    """True: `guess` is called for layers whose residual stream is hinted, and chooses their working sets for the same step."""

    def bind(self, projection: QueryProjection | None) -> None:  # noqa: B027 - optional hook
        """Learn how the host's model makes queries; `None` takes that back: no hints will come."""

    def guess(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Queries that `layer` is expected to have in this step, after rotary embedding. Called on a background lane.

        Args:
            hidden: a residual stream close to the one that will enter the layer, `(num_sequences, num_rows, hidden_size)`.
            positions: `(num_sequences, num_rows)`.
            rows: `(num_sequences,)`, which row of the predictor's own tables belongs to each sequence.

        Returns:
            `(num_sequences, num_rows, query_heads, head_dim)`.
        """
        raise NotImplementedError(f"{type(self).__name__} sets uses_hints and has no guess")

    def learn(  # noqa: B027 - optional hook
        self, layer: int, queries: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """See the queries that a guessed layer really had; shapes as in `guess`. Called in the foreground."""

    def reserve_rows(self, count: int) -> None:  # noqa: B027 - optional hook
        """Make room for what is kept per sequence, in rows `0 .. count - 1`."""

    def clear_row(self, row: int) -> None:  # noqa: B027 - optional hook
        """Forget what is kept for a sequence."""

    def copy_row(self, source: int, target: int) -> None:  # noqa: B027 - optional hook
        """A sequence was forked."""

    def device_bytes(self) -> int:
        """Bytes of what is kept on the device."""
        return 0


class LayerWork(Protocol):
    """The background work of one layer after its attention, in stages; each enqueues on the current stream."""

    layer: int

    def predict(self) -> None:
        """Score the step's queries against the summaries."""

    def select(self) -> None:
        """Choose what to load and what to evict."""

    def mark(self) -> None:
        """Take the places that will be overwritten out of the table. Quick: a late foreground is kept out meanwhile."""

    def transfer(self) -> None:
        """Copy and publish. Nothing before `mark` touches what the foreground reads."""

    def end(self) -> None:
        """Release what the work holds. Called last, whatever became of the stages: done, failed or cancelled. Idempotent."""
        return

    def pending_blocks(self) -> int:
        """How many blocks the selection so far wants to load."""


class Ticket(ABC):
    """A claim on submitted work."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the work is done. Raises `WorkerError` from the work's exception."""

    @abstractmethod
    def skip(self) -> LayerWork | None:
        """Do not wait: `None` when the work is done, else the late work. Late work that has not begun its transfer is
        cancelled; work inside its transfer goes on, and its places stay marked as filling. Raises like `wait`."""


class TransferScheduler(ABC):
    """Runs `LayerWork` beside the foreground. Work of one layer runs in the order of submission. An error ends its work where
    it stands (what `mark` took out of the table stays out) and is kept for the holder of its ticket, or of the layer's next
    one if nobody has asked."""

    @abstractmethod
    def submit(self, work: LayerWork) -> Ticket:
        """Queue work; never blocks on it. Raises `StateError` after `close`."""

    def fence(self) -> None:  # noqa: B027 (nothing to do is the common case)
        """The caller is about to replace memory that `predict` of submitted work may still read, such as a summary that grows.
        Nothing to do where that runs on the host, which holds what it reads; a device has to be waited for by the caller's
        stream."""

    @abstractmethod
    def drain(self) -> None:
        """Block until all work is done, also failed work (whose errors stay with the tickets)."""

    @abstractmethod
    def close(self) -> None:
        """Drain and stop. Idempotent."""
