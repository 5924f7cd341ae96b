"""Flags of a plan, in addition to the config that it plans."""

import dataclasses
from typing import Annotated

from dapo_jax.config.experiment import Config
from dapo_jax.extras.plan.chips import Chip
from dapo_jax.extras.plan.workload import AssumedWorkload, beta_from_kept
from dapo_jax.runtime.rules import Count, CountOr0, Positive, PositiveOr0, Range, Share
from dapo_jax.runtime.settings import ConfigError, check_types, check_values, section, setting

MEDIAN_FRACTION = 0.145  # of the limit: with a spread of 0.9, 1.6 % of responses reach it


@section
class PlanSettings:
    """Flags of `dapo-jax plan`."""

    topology: str = setting("", "KIND:SHAPE, as in v5p:4x4x4, v5e:2x4 or v6e:16x16.")
    slices: Count = setting(1, "Number of slices of that topology; mesh.data is a multiple of it.")
    model: str = setting("", "Folder with a config.json or a published name; empty: the config's.")
    json: bool = setting(False, "Print one JSON object instead of tables.")
    cache: str = setting("auto", "Folder of earlier results; 'none': compile everything again.")
    price: PositiveOr0 = setting(0.0, "Dollars per chip-hour; 0: show no dollars.")
    samplers: CountOr0 = setting(0, "Number of `dapo-jax sampler` processes; 0: none.")
    sampler_topology: str = setting("", "Topology of each, one host, as in v6e:2x4.")
    sampler_tensor: CountOr0 = setting(0, "Its mesh.tensor; 0: all its chips.")
    sampler_slots: CountOr0 = setting(0, "Its --slots; 0: as the trainer.")
    sampler_pages: CountOr0 = setting(0, "Its --pages; 0: as the trainer.")
    sampler_price: PositiveOr0 = setting(0.0, "Dollars per chip-hour of samplers.")
    preemptions: PositiveOr0 = setting(0.0, "Preemptions of a sampler in an hour.")
    restart_seconds: PositiveOr0 = setting(300.0, "Assumed time from one to the next start.")
    storage: Positive = setting(2.0, "Assumed 10^9 bytes/s between a host and the run's folder.")
    flops: Share = setting(0.75, "Assumed fraction of peak FLOP/s; MFU is it x useful / executed.")
    hbm: Share = setting(0.8, "Assumed fraction of peak memory bandwidth.")
    ici: Share = setting(0.7, "Assumed fraction of peak bandwidth between chips and slices.")
    median_tokens: PositiveOr0 = setting(
        0.0, f"Assumed median length of a response; 0: {MEDIAN_FRACTION} of the limit."
    )
    spread: Positive = setting(0.9, "Assumed standard deviation of the logarithm of the length.")
    accuracy: Annotated[float, Range(above=0, below=1)] = setting(
        0.4, "Assumed fraction of correct responses."
    )
    kept: Positive = setting(0.5, "Assumed fraction of groups neither all correct nor all wrong.")

    def check(self) -> None:
        """Raise `ConfigError` that names a flag of a wrong type or out of range."""
        try:
            check_types(self)
            check_values(self)
        except ConfigError as error:
            raise ConfigError(f"--{str(error).removeprefix('config.')}") from None

    def reached(self, chip: Chip) -> Chip:
        """Return the chip at the speed that programs are assumed to reach."""
        return dataclasses.replace(
            chip,
            flops_per_second=chip.flops_per_second * self.flops,
            hbm_bytes_per_second=chip.hbm_bytes_per_second * self.hbm,
            ici_bytes_per_second=chip.ici_bytes_per_second * self.ici,
            dcn_bytes_per_second=chip.dcn_bytes_per_second * self.ici,
        )

    def make_workload(self, config: Config) -> AssumedWorkload:
        """Return the workload that the flags describe. Raises `ConfigError`."""
        limit = config.sampler.max_response_tokens
        return AssumedWorkload(
            median_tokens=self.median_tokens or MEDIAN_FRACTION * limit,
            spread=self.spread,
            max_response_tokens=limit,
            max_prompt_tokens=config.data.max_prompt_tokens,
            prompt_median_tokens=min(150.0, config.data.max_prompt_tokens / 2),
            beta=beta_from_kept(self.accuracy, self.kept, config.rollout.samples_per_prompt),
            seed=config.seed,
        )
