"""Counts of one rollout: what the sampler drew, and what trajectories did between turns."""

import dataclasses


@dataclasses.dataclass
class TurnCounts:
    """Counts of the trajectories of one rollout, and what ended or failed them."""

    turns: int = 0
    observation_tokens: int = 0
    prefilled_again_tokens: int = 0
    ended_by_turns: int = 0
    ended_by_tokens: int = 0
    cut_observations: int = 0
    failed_steps: int = 0
    late_steps: int = 0
    wait_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Metrics of a step that are counts as they are."""
        values = dataclasses.asdict(self)
        seconds = {"seconds_environment": values.pop("wait_seconds")}
        return {f"environment_{name}": float(count) for name, count in values.items()} | seconds


@dataclasses.dataclass
class SamplerCounts:
    """Counts of one rollout. Occupancy is measured only while prompts were still waiting."""

    prefills: int = 0
    bursts: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0  # that the host waited for bursts
    responses: int = 0
    tokens: int = 0
    abandoned_responses: int = 0
    abandoned_tokens: int = 0
    unfinished_tokens: int = 0  # of responses that the next step goes on with
    put_back_tokens: int = 0
    busy_slot_steps: int = 0
    slot_steps: int = 0
    turns: TurnCounts | None = None  # with an environment

    @property
    def drawn_tokens(self) -> int:
        """Tokens of all responses, also of those that were stopped or drawn again."""
        return self.tokens + self.abandoned_tokens + self.unfinished_tokens + self.put_back_tokens

    @property
    def occupancy(self) -> float:
        """Share of decode-slot steps that drew a token while the queue was not empty."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 1.0

    def metrics(self) -> dict[str, float]:
        """Metrics of a step that are counts as they are."""
        return {
            "abandoned_tokens": float(self.abandoned_tokens),
            "put_back_tokens": float(self.put_back_tokens),
            "decode_steps": float(self.decode_steps),
            "decode_bursts": float(self.bursts),
            "prefills": float(self.prefills),
            "slot_occupancy": self.occupancy,
            "seconds_decode": self.decode_seconds,
        } | (self.turns.metrics() if self.turns else {})
