"""Mutants of the learner's pure functions, and the tests that catch them.

    python tests/learner/mutants.py                         # all, minutes
    python tests/learner/mutants.py --only token_log_ratio  # of one function

Each is one textual change in a temporary copy of the package; the work tree stays as it is. The
exit status is 1 where a mutant survives or its text is gone. A change of the code that removes a
text asks for another mutant here.
"""

import argparse
import contextlib
import io
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{tempfile.gettempdir()}/mutants_compiled")
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.dont_write_bytecode = True

import pytest  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOSSES, CORRECTIONS = "learner/losses.py", "learner/corrections.py"
ADVANTAGES, BASELINES = "learner/advantages.py", "learner/baselines.py"
DIVERGENCE = "model/divergence.py"
# What a file's mutants must not pass; without the tests that compile a model.
SUITES = {
    LOSSES: ["learner/test_family.py", "learner/test_losses.py", "learner/test_corrections.py"],
    CORRECTIONS: ["learner/test_corrections.py", "learner/test_family.py"],
    ADVANTAGES: ["learner/test_family_advantages.py", "learner/test_distillation.py"],
    BASELINES: ["learner/test_family_advantages.py"],
    DIVERGENCE: ["model/test_divergence.py"],
}
MUTATED = ("dapo_jax.learner", "dapo_jax.model.divergence")  # modules, imported anew for each
QUICK = "not device_count and not float32 and not value_loss"

# (file, function, text, its replacement); the text stands once in the function.
MUTANTS = [
    (LOSSES, "clamp_log", "-LOG_RATIO_LIMIT, LOG", "-800.0, LOG"),
    (LOSSES, "clamp_log", ", LOG_RATIO_LIMIT)", ", 800.0)"),
    (LOSSES, "clamp_log", "-LOG_RATIO_LIMIT, LOG", "-1.0, LOG"),
    (LOSSES, "sum_over_responses", "jnp.where(trained, values, 0.0)", "values"),
    (LOSSES, "sum_over_responses", "[segments]", "[segments - 1]"),
    (LOSSES, "sum_over_responses", "segment_sum", "segment_max"),
    (LOSSES, "mean_over_responses", "/ jnp.maximum(counts, 1)", "* jnp.minimum(counts, 1)"),
    (LOSSES, "mean_over_responses", "maximum(counts, 1)", "maximum(counts, 2)"),
    (LOSSES, "mean_over_responses", "/ jnp.max", "/ 1.001 / jnp.max"),
    (LOSSES, "token_log_ratio", "return log_ratio", "return -log_ratio"),
    (LOSSES, "token_log_ratio", "return log_ratio", "return 0 * log_ratio"),
    (LOSSES, "token_log_ratio", "return log_ratio", "return 1.001 * log_ratio"),
    (LOSSES, "no_log_ratio", "jnp.zeros_like(log_ratio)", "log_ratio"),
    (LOSSES, "no_log_ratio", "zeros_like", "ones_like"),
    (LOSSES, "no_log_ratio", "jnp.zeros_like(log_ratio)", "-log_ratio"),
    (LOSSES, "ratio_region", "1 - algorithm.clip_low", "1 - algorithm.clip_high"),
    (LOSSES, "ratio_region", "1 + algorithm.clip_high", "1 / (1 - algorithm.clip_high)"),
    (LOSSES, "ratio_region", "ratio < low, ratio > high", "ratio <= low, ratio >= high"),
    (LOSSES, "log_ratio_region", "-algorithm.clip_low", "-algorithm.clip_low * 1.001"),
    (LOSSES, "log_ratio_region", "np.exp(algorithm.clip_high)", "1 + algorithm.clip_high"),
    (LOSSES, "log_ratio_region", "jnp.clip(ratio, low, high)", "ratio"),
    (LOSSES, "tv_region", "< -algorithm.clip_low", "> algorithm.clip_low"),
    (LOSSES, "tv_region", "> algorithm.clip_high", "> 2 * algorithm.clip_high"),
    (LOSSES, "tv_region", "p - old < -alg", "ratio - 1 < -alg"),
    (LOSSES, "kl_region", "rel_entr(old, p)", "rel_entr(p, old)"),
    (LOSSES, "kl_region", " + rel_entr(1 - old, 1 - p)", ""),
    (LOSSES, "kl_region", "(p > old) & ", ""),
    (LOSSES, "everywhere", "zeros_like", "ones_like"),
    (LOSSES, "everywhere", "never, never, ratio", "never, ratio > 2, ratio"),
    (LOSSES, "everywhere", "never, never, ratio", "ratio < 0.5, never, ratio"),
    (LOSSES, "ratio_weight", "return ratio", "return 1 / ratio"),
    (LOSSES, "ratio_weight", "return ratio", "return jnp.ones_like(ratio)"),
    (LOSSES, "ratio_weight", "return ratio", "return jnp.minimum(ratio, 2)"),
    (LOSSES, "sapo_weight", "where(positive, algorithm.decay_positive, algorithm.decay_negative)",
     "where(positive, algorithm.decay_negative, algorithm.decay_positive)"),
    (LOSSES, "sapo_weight", " * ratio\n", "\n"),
    (LOSSES, "sapo_weight", "return 4 *", "return 4 / t *"),
    (LOSSES, "gamma_weight", "(1 - ratio)", "(ratio - 1)"),
    (LOSSES, "gamma_weight", "algorithm.power_positive", "algorithm.power_negative"),
    (LOSSES, "gamma_weight", "d * (1 - ratio)", "-d * ratio"),
    (LOSSES, "topr_weight", "minimum(ratio, 1.0)", "maximum(ratio, 1.0)"),
    (LOSSES, "topr_weight", "where(positive, 1.0, ", "where(~positive, 1.0, "),
    (LOSSES, "topr_weight", "jnp.minimum(ratio, 1.0)", "ratio"),
    (LOSSES, "k1", "logprobs - reference_logprobs", "reference_logprobs - logprobs"),
    (LOSSES, "k1", "return logprobs -", "return logprobs +"),
    (LOSSES, "k1", "return logprobs", "return 2 * logprobs"),
    (LOSSES, "k2", " / 2", ""),
    (LOSSES, "k2", "logprobs - reference", "logprobs + reference"),
    (LOSSES, "k2", "jnp.square", "jnp.abs"),
    (LOSSES, "k3", "reference_logprobs - logprobs", "logprobs - reference_logprobs"),
    (LOSSES, "k3", "(d) - d", "(d) + d"),
    (LOSSES, "k3", "expm1", "exp"),
    (LOSSES, "k3_with_gradient_of_k2", "gradient + jax", "jax"),
    (LOSSES, "k3_with_gradient_of_k2", "value - gradient)", "value)"),
    (LOSSES, "k3_with_gradient_of_k2", "gradient = k2", "gradient = k3"),
    (LOSSES, "policy_loss", "trained = mask > 0", "trained = mask >= 0"),
    (LOSSES, "policy_loss", "fixed - old_logprobs", "old_logprobs - fixed"),
    (LOSSES, "policy_loss", "jax.lax.stop_gradient(logprobs)", "logprobs"),
    (LOSSES, "policy_loss", "jnp.exp(clamp_log(log_ratio))", "jnp.exp(log_ratio)"),
    (LOSSES, "policy_loss", "== \"sign\"", "== \"both\""),
    (LOSSES, "policy_loss", "above & (advantages > 0)", "above & (advantages < 0)"),
    (LOSSES, "policy_loss", "below & (advantages < 0)", "below"),
    (LOSSES, "policy_loss", "where(below | above, held", "where(below & above, held"),
    (LOSSES, "policy_loss", "(advantages < 0) & (bounded", "(bounded"),
    (LOSSES, "policy_loss", "jnp.where(capped, algorithm.dual_clip, bounded)", "bounded"),
    (LOSSES, "policy_loss", "mean_over_responses", "sum_over_responses"),
    (LOSSES, "policy_loss", "jnp.log(bounded)", "jnp.log(ratio)"),
    (LOSSES, "policy_loss", "bounded, algorithm.weight_low", "bounded, 0.5"),
    (LOSSES, "policy_loss", "algorithm.weight_high or None", "None"),
    (LOSSES, "policy_loss", "advantages > 0)\n    inside", "advantages < 0)\n    inside"),
    (LOSSES, "policy_loss", " | above | capped)", " | above)"),
    (LOSSES, "policy_loss", "~(below | above", "~(below & above"),
    (LOSSES, "policy_loss", "weight < WEIGHT_LIMIT", "weight < 1e30"),
    (LOSSES, "policy_loss", "-advantages * weight", "advantages * weight"),
    (CORRECTIONS, "any_in_response", "> 0", "> 1"),
    (CORRECTIONS, "any_in_response", "> 0", ">= 0"),
    (CORRECTIONS, "any_in_response", "segment_ids, trained", "segment_ids, trained & ~found"),
    (CORRECTIONS, "POOLS", "\"product\": sum", "\"product\": mean"),
    (CORRECTIONS, "POOLS", "\"sequence\": mean", "\"sequence\": sum"),
    (CORRECTIONS, "POOLS", "\"token\": lambda log_ratio, segment_ids, trained: log_ratio",
     "\"token\": mean_over_responses"),
    (CORRECTIONS, "importance_weights", "old_logprobs - sampler", "-old_logprobs + sampler"),
    (CORRECTIONS, "importance_weights", "jnp.minimum", "jnp.maximum"),
    (CORRECTIONS, "importance_weights", "[algorithm.importance_ratio]", "[\"token\"]"),
    (CORRECTIONS, "rejections", "jax.lax.stop_gradient(logprobs)", "old_logprobs"),
    (CORRECTIONS, "rejections", "learner - sampler", "-learner + sampler"),
    (CORRECTIONS, "rejections", "< algorithm.rejection_low", "< 0.99 * algorithm.rejection_low"),
    (CORRECTIONS, "rejections", "algorithm.rejection_high or jnp.inf", "algorithm.rejection_high"),
    (CORRECTIONS, "rejections", "== \"worst\"", "== \"none\""),
    (CORRECTIONS, "rejections", "(advantages < 0)", "(advantages > 0)"),
    (CORRECTIONS, "rejections", " & ~below", ""),
    (BASELINES, "centre_by_length", "rewards - weighted", "rewards + weighted"),
    (BASELINES, "centre_by_length", "(lengths * rewards, lengths)", "(rewards, lengths * 0 + 1)"),
    (BASELINES, "centre_by_length", "maximum(length, STD_EPSILON)", "maximum(length, 4)"),
    (BASELINES, "pass_at_k_advantages", "- sets_of_wrong", "+ sets_of_wrong"),
    (BASELINES, "pass_at_k_advantages", "size - 1, k - 1", "size, k - 1"),
    (BASELINES, "pass_at_k_advantages", "np.sqrt(m * (1 - m))", "m * (1 - m)"),
    (BASELINES, "best_minus_second", "order[-2]", "order[0]"),
    (BASELINES, "best_minus_second", "gains[order[-1]]", "gains[order]"),
    (BASELINES, "best_minus_second", "> 1:", "> 2:"),
    (BASELINES, "over_batch_std", "ddof=min(1, len(rewards) - 1)", "ddof=0"),
    (BASELINES, "over_batch_std", "rewards.std", "advantages.std"),
    (BASELINES, "over_batch_std", "advantages / (", "advantages * ("),
    (BASELINES, "over_mean", "mean > STD_EPSILON", "mean != 0"),
    (BASELINES, "over_mean", "1.0), 0.0)", "1.0), advantages)"),
    (BASELINES, "over_mean", "group_means(rewards, groups)[0]", "rewards.mean()"),
    (BASELINES, "over_informative", "advantages * len(members) /", "advantages * len(rewards) /"),
    (BASELINES, "over_informative", "advantages * len(members)", "advantages"),
    (BASELINES, "over_informative", "max(1, ", "max(2, "),
    (ADVANTAGES, "length_weighted_centre", "feedback.lengths", "feedback.tokens"),
    (ADVANTAGES, "length_weighted_centre", "feedback.lengths", "feedback.lengths + 1"),
    (ADVANTAGES, "length_weighted_centre", "groups, feedback", "groups * 0, feedback"),
    (ADVANTAGES, "reward_parts", "np.abs(present(feedback.part_weights, \"part_weights\"))",
     "present(feedback.part_weights, \"part_weights\")"),
    (ADVANTAGES, "reward_parts", "weights[:, None] * ", ""),
    (ADVANTAGES, "reward_parts", "(total - total.mean())", "total * 1.01"),
    (ADVANTAGES, "pass_at_k", "algorithm.pass_k", "2"),
    (ADVANTAGES, "pass_at_k", "feedback.correct,", "~feedback.correct,"),
    (ADVANTAGES, "pass_at_k", "feedback.groups", "feedback.groups * 0"),
    (ADVANTAGES, "estimate", "advantages + np.where", "advantages - np.where"),
    (ADVANTAGES, "estimate", "np.where(feedback.trained, pull, 0.0)", "pull"),
    (ADVANTAGES, "estimate", "algorithm.distillation_coefficient * ", ""),
    (DIVERGENCE, "Divergence", "of_p * jnp.exp(p) *", "of_p * jnp.exp(q) *"),
    (DIVERGENCE, "Divergence", "+ of_q * jnp.exp(q)", "- of_q * jnp.exp(q)"),
    (DIVERGENCE, "Divergence", "self._weights()[1] * jnp", "self._weights()[0] * jnp"),
    (DIVERGENCE, "Divergence", "return -jnp.exp(p)", "return jnp.exp(p)"),
    (DIVERGENCE, "Divergence", "return p if self.beta else q", "return q if self.beta else p"),
    (DIVERGENCE, "Divergence", "math.log(self.beta) + p", "math.log(self.beta) + q"),
    (DIVERGENCE, "_log_softmax", "- jnp.log(", "- 1.001 * jnp.log("),
    (DIVERGENCE, "_log_softmax", "jnp.exp(logits)", "jnp.exp(2 * logits)"),
    (DIVERGENCE, "_log_softmax", "share.add(jnp.sum(jnp.exp(logits), axis=-1))",
     "jnp.sum(jnp.exp(logits), axis=-1)"),
    (DIVERGENCE, "_distributions", "divergence.temperature)", "1.0)"),
    (DIVERGENCE, "_distributions", "likeliest(teacher, div", "likeliest(student, div"),
    (DIVERGENCE, "_distributions", "jnp.where(apart, 0.0, jnp.exp(one))",
     "jnp.where(apart, jnp.exp(one), 0.0)"),
    (DIVERGENCE, "_divergences", " + divergence.terms(*rest)[:, 0]", ""),
    (DIVERGENCE, "_divergences", "jnp.where(compared, divergence.terms(*both), 0.0)",
     "divergence.terms(*both)"),
    (DIVERGENCE, "_divergences", "shard.add(terms)", "terms"),
    (DIVERGENCE, "_divergence_gradients", "both[1] - rest[1]", "both[0] - rest[0]"),
    (DIVERGENCE, "_divergence_gradients", "- jnp.exp(both[1]) * total", ""),
    (DIVERGENCE, "_divergence_gradients", " / divergence.temperature", ""),
    (DIVERGENCE, "_divergence_gradients", " * upstream[:, None]", ""),
]  # fmt: skip


def function_span(text: str, name: str) -> tuple[int, int]:
    """Where a function, or a table, stands at the top level of a file."""
    start = re.search(rf"^(def {name}\(|class {name}\(|{name} = )", text, re.MULTILINE)
    assert start, f"no {name}"
    end = re.compile(r"^[^\s)}#]", re.MULTILINE).search(text, start.end())
    return start.start(), end.start() if end else len(text)


def mutated(text: str, name: str, old: str, new: str) -> str:
    start, end = function_span(text, name)
    body = text[start:end]
    documented = text[start:].startswith("def") and '"""' in body
    code = body.rindex('"""') + 3 if documented else 0  # docstrings stay
    assert body.count(old, code) == 1, f"{name} has {body.count(old, code)} of {old!r}"
    return text[:start] + body[:code] + body[code:].replace(old, new) + text[end:]


class Failures:
    """Plugin of pytest that keeps the names of what failed."""

    def __init__(self):
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.names.append(report.nodeid.removeprefix("tests/"))

    def pytest_collectreport(self, report):
        if report.failed:
            self.names.append(f"the import of {report.nodeid}")


def forget(copy: pathlib.Path) -> None:
    """Forgets the tests and the learner, which are imported anew; programs stay compiled."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(str(copy / "tests")) or name.startswith(MUTATED):
            del sys.modules[name]


def failing(copy: pathlib.Path, tests: list[str], known: Sequence[str] = ()) -> str:
    """The first of the tests that fails, empty where none does."""
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore", "-k", QUICK]
    options += [f"--deselect=tests/{name}" for name in known]
    forget(copy)
    failures, said = Failures(), io.StringIO()
    with contextlib.redirect_stdout(said):
        chosen = [f"tests/{name}" for name in tests]
        status = pytest.main([*options, *chosen], plugins=[failures])
    assert failures.names or status == 0, said.getvalue()[-2000:]
    return failures.names[0] if failures.names else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the function whose mutants to try")
    parser.add_argument("--known", nargs="*", default=[], help="tests that fail anyhow")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.only in ("", mutant[1])]
    assert chosen, f"no mutant of {arguments.only}"
    survived, catching = 0, set()
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder).resolve()
        skip = shutil.ignore_patterns("__pycache__", "*.ipynb")
        for name in ("dapo_jax", "tests/learner", "tests/model", "tests/support"):
            shutil.copytree(ROOT / name, copy / name, ignore=skip)
        for name in ("tests/conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, copy / name)
        os.chdir(copy)
        sys.path[:1] = [folder]
        for file, name, old, new in chosen:
            path = copy / "dapo_jax" / file
            text = path.read_text()
            try:
                path.write_text(mutated(text, name, old, new))
                found = failing(copy, SUITES[file], arguments.known) or "SURVIVED"
            except AssertionError as error:
                found = f"BROKEN: {error}"
            path.write_text(text)
            survived += found.startswith(("SURVIVED", "BROKEN"))
            catching.add(found)
            print(f"| {name} | {old.strip()!r} -> {new.strip()!r} | {found} |", flush=True)
        there = sorted(name for name in catching if "::" in name)
        always = failing(copy, there) if there else ""
        assert not always, f"{always} fails on the code as it is"
    print(f"{len(chosen) - survived} of {len(chosen)} caught")
    return survived > 0


if __name__ == "__main__":
    sys.exit(main())
