"""One forward over a batch of sequences: attend layer by layer, then commit."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from .change import Change
from .decode import DecodeRows
from .errors import ArenaExhausted, InputError, StateError, TierError, WorkerError
from .ops.softcap import require_softcap
from .prefill import PrefillRows
from .room import make_room
from .sequence import Phase, Sequence
from .settling import cut
from .types import MAX_STEP_ROWS
from .uncopied import Uncopied

if TYPE_CHECKING:
    from .manager import KVManager


class Step(Uncopied):
    """Made by `KVManager.begin_step`. Rows of all sequences are packed one after another, in the order of the sequences.

    A sequence decodes over its working set when it has a history and brings one row, or up to `MAX_STEP_ROWS` rows with drafts
    among them, unless the caller says that they are prompt. Any other prefills: its rows are prompt, and attend exactly to the
    whole history, one layer at a time.
    """

    def __init__(
        self, manager: KVManager, sequences: list[Sequence], num_tokens: list[int], num_drafts: list[int], prompt: list[bool]
    ) -> None:
        self.manager = manager
        self.sequences = sequences
        self.num_tokens = num_tokens
        self.certain = not any(num_drafts)
        self._min_accepted = [tokens - drafts for tokens, drafts in zip(num_tokens, num_drafts, strict=True)]
        self._next_layer = 0
        self._total = sum(num_tokens)
        decoding = [
            sequence.length > 0 and not reads and tokens <= MAX_STEP_ROWS and (tokens == 1 or drafts > 0)
            for sequence, tokens, drafts, reads in zip(sequences, num_tokens, num_drafts, prompt, strict=True)
        ]
        offsets = [0]
        for tokens in num_tokens:
            offsets.append(offsets[-1] + tokens)
        self._decode: DecodeRows | None = None
        self._prefills: list[PrefillRows] = []
        members = [number for number, flag in enumerate(decoding) if flag]
        manager.open_step = self  # from here on what it takes counts as taken, see `repair`
        try:
            dense = make_room(manager, sequences, num_tokens, num_drafts, decoding)
            for number, flag in enumerate(decoding):
                if not flag:
                    rows = PrefillRows(manager, sequences[number], offsets[number], num_tokens[number], dense[number])
                    self._prefills.append(rows)
            if members:
                self._decode = DecodeRows(
                    manager,
                    [sequences[number] for number in members],
                    [num_tokens[number] for number in members],
                    [num_drafts[number] for number in members],
                    [offsets[number] for number in members],
                    self.certain,
                )
        except BaseException:
            self.abort()
            raise

    @property
    def pages(self) -> list[int]:
        """That were taken for blocks which seal with the step, and belong to no sequence yet."""
        pages = [page for prefill in self._prefills for page in prefill.pages]
        return pages + (self._decode.pages if self._decode is not None else [])

    @property
    def next_layer(self) -> int:
        """The layer that must attend next; the number of layers when all have."""
        return self._next_layer

    @property
    def complete(self) -> bool:
        """Whether all layers have attended."""
        return self._next_layer == self.manager.shape.num_layers

    def hint(self, layer: int, hidden: torch.Tensor) -> None:
        """Let the predictor choose the working set of `layer` ahead of its attention, from a residual stream.

        Args:
            layer: one that has not attended yet.
            hidden: the residual stream of one of the layers before it, `(num_rows, hidden_size)`; the closer the better, and
                the later. A layer or two ahead is what a transfer needs.
        """
        self._check_live()
        if not self._next_layer <= layer < self.manager.shape.num_layers:
            raise StateError(f"a hint for layer {layer} comes too late or too far: layer {self._next_layer} attends next")
        if hidden.ndim != 2 or hidden.shape[0] != self._total:
            raise InputError(f"hidden has shape {tuple(hidden.shape)}; this step needs ({self._total}, hidden_size)")
        if self._decode is not None:
            self._decode.hint(layer, hidden if not self._prefills else hidden[self._decode.packed])

    @torch.no_grad()
    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Append the rows' keys and values, and attend. No gradient flows through it.

        Args:
            layer: every layer once, in order.
            queries: `(num_rows, query_heads, head_dim)` after rotary embedding.
            keys, values: `(num_rows, kv_heads, head_dim)`, keys after rotary embedding.
            scale: of the logits; `head_dim ** -0.5` if `None`.
            softcap: a logit `x` becomes `softcap * tanh(x / softcap)`; `None` leaves it as it is.

        Returns:
            The attention output, in the shape and dtype of `queries`.

        Raises:
            InputError: a shape, dtype or device that is not the model's, or a softcap that is no finite number above 0.
            StateError: a layer out of order.
            WorkerError: the background work of this layer failed in the last step. The step must be aborted.
        """
        self._check_live()
        if layer != self._next_layer:
            raise StateError(f"layer {layer} attends, but layer {self._next_layer} is next; layers attend once each, in order")
        shape = self.manager.shape
        self._check("queries", queries, (self._total, shape.query_heads, shape.head_dim))
        self._check("keys", keys, (self._total, shape.kv_heads, shape.head_dim))
        self._check("values", values, (self._total, shape.kv_heads, shape.head_dim))
        require_softcap(softcap)
        scale = shape.head_dim**-0.5 if scale is None else scale
        sets = self.manager.rooms.sets
        sets.scales[layer], sets.softcaps[layer] = scale, softcap
        if self._decode is not None and not self._prefills:
            output = self._decode.attend(layer, queries, keys, values, scale, softcap)
        else:
            output = torch.empty_like(queries)
            if self._decode is not None:
                rows = self._decode.packed
                output[rows] = self._decode.attend(layer, queries[rows], keys[rows], values[rows], scale, softcap)
            for prefill in self._prefills:
                own = prefill.packed
                output[own] = prefill.attend(layer, queries[own], keys[own], values[own], scale, softcap)
        self._next_layer += 1
        return output

    def _check(self, name: str, tensor: torch.Tensor, size: tuple[int, ...]) -> None:
        shape = self.manager.shape
        if tensor.shape != size:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}; this step needs {size}: rows, heads, head_dim")
        if tensor.dtype != shape.dtype or tensor.device.type != shape.device.type:
            raise InputError(
                f"{name} is {tensor.dtype} on {tensor.device}; the manager was made for {shape.dtype} on {shape.device}"
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def commit(self, accepted: Sequences[int] | None = None) -> None:
        """Keep the first `accepted[i]` rows of each sequence (all, if `None`) and forget the others.

        Raises:
            InputError: fewer than the rows that are no drafts, or more than there were.
            StateError: some layer has not attended.
            ArenaExhausted: no room for a block that seals; with drafts only, since a certain step has taken it at its begin.
            WorkerError: background work failed.

        After one of these errors the step is still open: mend and commit again, or abort. Any other exception, an interrupt
        for example, may come when some sequences have changed: those of the step then refuse to be used until they are freed.
        """
        self._check_live()
        if not self.complete:
            raise StateError(
                f"{self._next_layer} of {self.manager.shape.num_layers} layers have attended; commit comes after the last"
            )
        kept = list(accepted) if accepted is not None else self.num_tokens
        if len(kept) != len(self.sequences):
            raise InputError(f"accepted has {len(kept)} entries for {len(self.sequences)} sequences")
        for count, least, most in zip(kept, self._min_accepted, self.num_tokens, strict=True):
            if not least <= count <= most:
                raise InputError(f"accepted is {count}; this step has {most} rows, of which {most - least} are drafts")
        by_sequence = {id(sequence): count for sequence, count in zip(self.sequences, kept, strict=True)}
        if self._prefills:
            self.manager.drain()
        with Change(self.manager, "commit") as change:
            if self._decode is not None:
                try:
                    self._decode.prepare_commit([by_sequence[id(s)] for s in self._decode.sequences])
                except ArenaExhausted:
                    change.restored()
                    raise
            with Change(self.manager, "commit", self.sequences):
                self._commit(by_sequence)

    def _commit(self, kept: dict[int, int]) -> None:
        self.manager.open_step = None
        counters = self.manager.rooms.counters
        counters.add(steps=1)
        for prefill in self._prefills:
            prefill.commit()
            counters.add(prefilled_tokens=prefill.num_tokens)
            dropped = prefill.num_tokens - kept[id(prefill.sequence)]
            if dropped:
                # Cropped it is in any case. If it could not be laid out, the step that uses it next says so.
                with suppress(TierError, WorkerError):
                    cut(self.manager, prefill.sequence, prefill.sequence.length - dropped)
        if self._decode is not None:  # last, since it starts background work
            counters.add(decoded_tokens=sum(kept[id(s)] for s in self._decode.sequences))
            self._decode.commit()

    def abort(self) -> None:
        """Forget the step: the sequences are as they were before it. Idempotent, also after `commit`."""
        if self._done:
            return
        with Change(self.manager, "abort", self.sequences):
            self.manager.open_step = None
            if self._decode is not None:
                self._decode.abort()
            for prefill in self._prefills:
                prefill.abort()
        self.manager.open_changes += 1  # an interrupt in `attend` may have left slots leased: `repair` finds them

    @property
    def _done(self) -> bool:
        return self.manager.open_step is not self

    def _check_live(self) -> None:
        if self._done:
            raise StateError("the step was committed or aborted; begin a new one")

    @property
    def sparse(self) -> bool:
        """Whether any sequence of the step decodes over a bounded working set."""
        return self._decode is not None and any(s.phase is Phase.SPARSE for s in self._decode.sequences)
