"""Limits of the scheduler, and what fits into them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxkv.core.config import SchedulingPolicy
from jaxkv.core.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits, all at least 1.

    num_blocks: blocks of the pool that sequences may use (no trash page among them). block_size: tokens of a block.
    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens of a step; at least max_num_seqs, so that
    every running sequence can advance in every step. max_model_len: prompt and output tokens of a sequence.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy is {self.policy!r}: it must be fcfs or priority")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "each running sequence needs a token per step, so raise the first or lower the second"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def room_for_output(self, prompt_len: int) -> int:
        """The largest max_tokens that fits after a prompt of prompt_len tokens; 0 or less when none does."""
        in_pool = self.num_blocks * self.block_size + 1 - prompt_len  # the last output token is never stored
        return min(self.max_model_len - prompt_len, in_pool)

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raises RequestError when a sequence can never run: empty, or too long for the model or for the pool."""
        if prompt_len < 1:
            raise RequestError("the prompt is empty: it needs at least 1 token", param="prompt")
        if max_tokens < 0:
            raise RequestError(f"max_tokens is {max_tokens}: it must be at least 0", param="max_tokens")
        if prompt_len + max_tokens > self.max_model_len:
            self._refuse(prompt_len, max_tokens, f"the model's context is {self.max_model_len} tokens")
        if self.blocks_for(prompt_len + max(max_tokens - 1, 0)) > self.num_blocks:
            pool = f"{self.num_blocks} blocks of {self.block_size} tokens = {self.num_blocks * self.block_size} tokens"
            self._refuse(prompt_len, max_tokens, f"the KV pool holds {pool}")

    def _refuse(self, prompt_len: int, max_tokens: int, limit: str) -> None:
        room = self.room_for_output(prompt_len)
        advice = f"ask for at most {room} output tokens" if room >= 1 else "shorten the prompt"
        raise RequestError(
            f"{prompt_len} prompt tokens and {max_tokens} output tokens (max_tokens) are {prompt_len + max_tokens} "
            f"tokens, but {limit}: {advice}",
            param="max_tokens" if room >= 1 else "prompt",
            code="context_length_exceeded",
        )
