"""The main job as the command runs it: read a long prompt, write on, and report memory, speed and fidelity."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import TextStreamer

from oasiskv import OasisConfig, Stats, Trace
from oasiskv.errors import InputError

from .cache import OasisCache
from .fidelity import Pair


class Reporter(Protocol):
    """Whoever shows progress."""

    def start(self, what: str, total: int) -> None:
        """Begin a bar of `total` tokens."""

    def advance(self, amount: int) -> None:
        """Move the bar."""

    def finish(self) -> None:
        """End the bar."""

    def text(self, piece: str) -> None:
        """Show a piece of the generated text."""


@dataclass(frozen=True)
class Fidelity:
    """How far the working set's next-token distributions are from full attention's, over the written tokens."""

    mean_kl: float
    worst_kl: float
    agreement: float
    dense_tokens_per_s: float
    dense_device_bytes: int


@dataclass(frozen=True)
class Report:
    """What a run did. Times are wall-clock seconds on this machine."""

    prompt_tokens: int
    new_tokens: int
    budget_tokens: int
    prefill_s: float
    decode_s: float
    threads: int
    text: str
    stats: Stats
    fidelity: Fidelity | None = None
    versions: dict[str, str] = field(
        default_factory=lambda: {"torch": torch.__version__, "transformers": transformers.__version__}
    )

    @property
    def tokens_per_s(self) -> float:
        """Written tokens per second of decoding."""
        return self.new_tokens / self.decode_s if self.decode_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        own = {key: value for key, value in vars(self).items() if key not in ("stats", "fidelity")}
        fidelity = vars(self.fidelity) if self.fidelity else None
        return {**own, "tokens_per_s": self.tokens_per_s, "stats": self.stats.as_dict(), "fidelity": fidelity}

    def rows(self) -> list[tuple[str, ...]]:
        """A table for people, head first."""
        stats, dense = self.stats, self.fidelity
        full = dense.dense_device_bytes if dense else stats.full_kv_bytes
        mib = 1 / (1 << 20)
        rows: list[tuple[str, ...]] = [
            ("", "working set", "full attention"),
            ("tokens in context", str(stats.tokens), str(stats.tokens)),
            ("KV on the device", f"{stats.device_bytes * mib:.1f} MiB", f"{full * mib:.1f} MiB"),
            ("  pool", f"{stats.pool_bytes * mib:.1f} MiB", ""),
            ("  key summaries", f"{stats.summary_bytes * mib:.1f} MiB", ""),
            ("  tables", f"{stats.table_bytes * mib:.1f} MiB", ""),
            ("share of full KV", f"{stats.device_bytes / full:.1%}", "100%"),
            ("KV in host memory", f"{stats.arena_bytes * mib:.1f} MiB", ""),
            *([("KV in the tier store", f"{stats.tier_bytes * mib:.1f} MiB", "")] if stats.tier_bytes else []),
            ("wanted blocks resident", f"{stats.hit_rate:.1%}", ""),
            ("moved per token", f"{stats.moved_bytes_per_token / 1024:.0f} KiB", ""),
            ("late blocks", str(stats.late_blocks), ""),
            ("prefill", f"{self.prefill_s:.1f} s", ""),
            (
                f"decoding, {self.threads} threads",
                f"{self.tokens_per_s:.1f} tokens/s",
                f"{dense.dense_tokens_per_s:.1f} tokens/s" if dense else "",
            ),
        ]
        if dense:
            rows += [
                ("same next token", f"{dense.agreement:.1%}", ""),
                ("KL to full attention", f"{dense.mean_kl:.4f} mean, {dense.worst_kl:.3f} worst", ""),
            ]
        return rows


class _Streamer(TextStreamer):
    """Hands finished words to a reporter, without the prompt."""

    def __init__(self, tokenizer: Any, reporter: Reporter) -> None:  # noqa: ANN401 - tokenizers share no typed base
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._reporter = reporter

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers for each finished piece."""
        self._reporter.text(text + ("\n" if stream_end else ""))


class Session:
    """A loaded model with its tokenizer, and a draft model if there is one."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,  # noqa: ANN401 - tokenizers share no typed base
        speculation: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._speculation = speculation or {}

    @classmethod
    def load(cls, name: str, dtype: str, device: str, draft: str | None, draft_tokens: int) -> Session:
        """Load by directory or hub name; `smollm2` is the model of `oasiskv.testing.models`.

        `draft` is `None`, "prompt-lookup", or the name of a small model with the same tokenizer.
        """
        transformers.utils.logging.disable_progress_bar()
        model = _load_model(name, dtype, device)
        tokenizer = AutoTokenizer.from_pretrained(_locate(name))
        speculation: dict[str, Any] = {}
        if draft == "prompt-lookup":
            speculation = {"prompt_lookup_num_tokens": draft_tokens}
        elif draft is not None:
            assistant = _load_model(draft, dtype, device)
            assistant.generation_config.num_assistant_tokens = draft_tokens
            speculation = {"assistant_model": assistant}
        return cls(model, tokenizer, speculation)

    def encode(self, text: str, question: str | None, limit: int | None) -> torch.Tensor:
        """Token ids of the prompt, `(1, num_tokens)`."""
        ids = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :limit]
        if question is not None:
            content = f"{self.tokenizer.decode(ids[0])}\n\n{question}"
            chat = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            ids = self.tokenizer(chat, return_tensors="pt", verbose=False, add_special_tokens=False).input_ids
        longest = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if longest is not None and ids.shape[1] >= longest:
            raise InputError(
                f"the prompt has {ids.shape[1]} tokens and the model reads {longest}; shorten it with --max-prompt-tokens"
            )
        return ids.to(self.model.device)

    def generate(
        self,
        prompt: torch.Tensor,
        config: OasisConfig,
        max_new_tokens: int,
        chunk: int,
        reporter: Reporter,
        trace: Trace | None = None,
    ) -> Report:
        """Greedy generation through `model.generate`, drafts included."""
        with torch.no_grad(), OasisCache.for_model(self.model, config, trace) as cache:
            prefill_s = self._prefill(cache, prompt[:, :-1], chunk, reporter)
            start = time.perf_counter()
            ids = self.model.generate(
                prompt,
                **{cache.keyword: cache},
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                streamer=_Streamer(self.tokenizer, reporter),
                pad_token_id=self._pad_token(),
                **self._speculation,
            )
            decode_s = time.perf_counter() - start
            return self._report(prompt, ids[0, prompt.shape[1] :], config, prefill_s, decode_s, cache.stats())

    def compare(
        self,
        prompt: torch.Tensor,
        config: OasisConfig,
        max_new_tokens: int,
        chunk: int,
        reporter: Reporter,
        trace: Trace | None = None,
    ) -> Report:
        """Greedy generation over the working set, with full attention beside it on the same tokens, step by step."""
        with torch.no_grad(), Pair(self.model, config, trace) as pair:
            reporter.start("reading the prompt twice", 2 * prompt.shape[1] - 2)
            prefill_s = pair.prefill(prompt[:, :-1], chunk, reporter.advance)
            reporter.finish()
            streamer = _Streamer(self.tokenizer, reporter)
            streamer.put(prompt)
            token, ids = prompt[:, -1:], []
            for _ in range(max_new_tokens):
                token = pair.step(token).argmax().view(1, 1)
                ids.append(int(token))
                streamer.put(token[0].cpu())
                if int(token) in self._end_tokens():
                    break
            streamer.end()
            divergence = pair.divergence
            fidelity = Fidelity(
                mean_kl=divergence.mean_kl,
                worst_kl=max(divergence.kl),
                agreement=divergence.agreement,
                dense_tokens_per_s=len(ids) / divergence.dense_seconds,
                dense_device_bytes=pair.dense_bytes(),
            )
            return self._report(prompt, torch.tensor(ids), config, prefill_s, divergence.seconds, pair.cache.stats(), fidelity)

    def _prefill(self, cache: OasisCache, prompt: torch.Tensor, chunk: int, reporter: Reporter) -> float:
        start = time.perf_counter()
        reporter.start("reading the prompt", prompt.shape[1])
        for piece in prompt.split(cache.manager.prompt_piece(chunk), dim=1):
            self.model(piece, **{cache.keyword: cache}, logits_to_keep=1)
            reporter.advance(piece.shape[1])
        reporter.finish()
        return time.perf_counter() - start

    def _report(
        self,
        prompt: torch.Tensor,
        ids: torch.Tensor,
        config: OasisConfig,
        prefill_s: float,
        decode_s: float,
        stats: Stats,
        fidelity: Fidelity | None = None,
    ) -> Report:
        return Report(
            prompt_tokens=prompt.shape[1],
            new_tokens=len(ids),
            budget_tokens=config.budget_tokens,
            prefill_s=prefill_s,
            decode_s=decode_s,
            threads=torch.get_num_threads(),
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            stats=stats,
            fidelity=fidelity,
        )

    def _end_tokens(self) -> set[int]:
        end = self.model.generation_config.eos_token_id
        return set(end) if isinstance(end, list) else {end}

    def _pad_token(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else next(iter(self._end_tokens())))


def _locate(name: str) -> str:
    if name != "smollm2":
        if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
            raise InputError(f"the model directory {name} does not exist; give a directory, a hub name, or 'smollm2'")
        return str(Path(name).expanduser()) if name.startswith("~") else name
    from oasiskv.testing.models import smollm2_directory

    return str(smollm2_directory())


def _load_model(name: str, dtype: str, device: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(_locate(name), dtype=getattr(torch, dtype))
    return model.to(device).eval()
