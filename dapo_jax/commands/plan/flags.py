"""Flags of a plan, beside the config that it plans."""

from dapo_jax.commands.plan.chips import check_flag
from dapo_jax.commands.plan.roofline import Efficiency
from dapo_jax.commands.plan.workload import (
    AssumedWorkload,
    RecordedWorkload,
    Workload,
    right_from_kept,
)
from dapo_jax.config.experiment import Config
from dapo_jax.runtime.settings import section, setting

MEDIAN_SHARE = 0.145  # of the limit: with a spread of 0.9, 1.6 % of responses reach it


@section
class PlanSettings:
    """Flags of `dapo-jax plan`."""

    topology: str = setting("", "KIND:SHAPE, as in v5p:4x4x4, v5e:2x4, v6e:16x16 or h100:8.")
    slices: int = setting(1, "So many slices of that topology; mesh.data is a multiple of it.")
    model: str = setting("", "A folder with a config.json or a published name; else the config's.")
    search: bool = setting(False, "Find mesh, rows and slots that fit, the cheapest first.")
    simulate: bool = setting(False, "What slots, dynamic sampling and a lag do to a step.")
    json: bool = setting(False, "Print one JSON object in place of tables.")
    cache: str = setting("auto", "Folder of earlier results; 'none': compile everything again.")
    price: float = setting(0.0, "Dollars of a chip for an hour; 0: no dollars are shown.")
    flops: float = setting(0.75, "Assumed share of peak FLOP/s; MFU is it times useful / executed.")
    hbm: float = setting(0.8, "The same of memory bandwidth.")
    ici: float = setting(0.7, "The same of the links between chips, and between slices.")
    law: str = setting("", "A run's folder whose lengths and verdicts are taken; empty: assumed.")
    median_tokens: float = setting(
        0.0, f"Assumed median length of a response; 0: {MEDIAN_SHARE} of the limit."
    )
    spread: float = setting(0.9, "Assumed deviation of the length's logarithm.")
    accuracy: float = setting(0.4, "Assumed share of right responses.")
    kept: float = setting(0.5, "Assumed share of groups that are neither all right nor all wrong.")

    def check(self) -> None:
        """Raises `ConfigError` for flags that are out of range or contradict each other."""
        check_flag(self.topology != "", "topology", self.topology, "KIND:SHAPE, as in v5p:4x4x4")
        check_flag(self.price >= 0, "price", self.price, "at least 0")
        for name in ("flops", "hbm", "ici"):
            check_flag(
                0 < getattr(self, name) <= 1, name, getattr(self, name), "above 0, at most 1"
            )
        check_flag(not (self.search and self.simulate), "search", True, "alone, without --simulate")

    @property
    def efficiency(self) -> Efficiency:
        """Assumed shares of peaks."""
        return Efficiency(self.flops, self.hbm, self.ici)

    def make_workload(self, config: Config) -> Workload:
        """Workload that the flags name. Raises `ConfigError`."""
        if self.law:
            return RecordedWorkload(self.law)
        limit = config.sampler.max_response_tokens
        right = right_from_kept(self.accuracy, self.kept, config.rollout.samples_per_prompt)
        return AssumedWorkload(
            median_tokens=self.median_tokens or MEDIAN_SHARE * limit,
            spread=self.spread,
            max_response_tokens=limit,
            max_prompt_tokens=config.data.max_prompt_tokens,
            prompt_median_tokens=min(150.0, config.data.max_prompt_tokens / 2),
            right=right,
            seed=config.seed,
        )
