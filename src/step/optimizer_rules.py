"""The optimizer, learning rate and weight decay of each weight, from `optimizer_rules`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import optax

from src.config.schema import Step
from src.model.params import Tree, by_path, matches, nested
from src.model.selection import Path, require_matches
from src.system.errors import UserError, counted

HParams = dict[str, Any]  # values that may change without recompiling the step


@dataclass(frozen=True)
class Rule:
    """How a weight is updated."""

    opt_type: str
    learning_rate_scale: float = 1.0
    weight_decay: float | None = None  # None: adam_weight_decay if the weight decays
    match: str = ""  # the rule's pattern; empty: no rule matches the weight
    by_width: float = field(default=1.0, compare=False)  # the weight's own factor on its update, but not on its decay


class OptimizerInputs(NamedTuple):
    """What optimizers may use: trees with an entry for each weight, and values that may be traced arrays."""

    matrices: Any  # of src/step/matrices.py MatrixDims
    shardings: Any  # of updates
    hparams: HParams
    mu_dtype: str
    only_adamw: bool  # adamw updates every weight


def assign_rules(keys: Step, trained: Tree, by_width: Mapping[Path, float] = {}) -> Tree:
    """Assigns a `Rule` to each trained weight: the first of `optimizer_rules` whose pattern matches it.

    `by_width` has factors on weights' updates (`mup.learning_rate_scales`), 1 by default. Raises UserError for a rule
    that applies to no weight.
    """
    rules = {path: Rule(keys.opt_type) for path in by_path(trained)}
    for rule in _rules(keys)[:-1]:
        require_matches("optimizer_rules", [rule.match], rules, "that is trained:")
        taken = [path for path in rules if not rules[path].match and matches(path, [rule.match])]
        if not taken:
            raise UserError(
                f"optimizer_rules: earlier rules take every weight that {rule.match} matches, because the first rule "
                "that matches a weight applies: move this rule before them, or remove it"
            )
        rules |= dict.fromkeys(taken, rule)
    return nested({path: replace(rule, by_width=by_width.get(path, 1.0)) for path, rule in rules.items()})


def where(rules: Tree, field: str, value: Any) -> Tree:
    """Mask tree: True for weights whose rule has `field == value`."""
    return jax.tree.map(lambda rule: getattr(rule, field) == value, rules)


def decayed(rules: Tree, decays: Tree, rate: jax.Array) -> list[optax.GradientTransformation]:
    """Adds weight decay to updates: at the rate of a weight's rule, or without one at `rate` if the weight `decays`."""
    default = jax.tree.map(lambda rule, decays: rule.weight_decay is None and decays, rules, decays)
    rates = sorted({rule.weight_decay for rule in jax.tree.leaves(rules) if rule.weight_decay})
    by_rule = [optax.add_decayed_weights(it, where(rules, "weight_decay", it)) for it in rates]
    return [optax.add_decayed_weights(rate, default), *by_rule]


def scaled(rules: Tree, field: str) -> list[optax.GradientTransformation]:
    """Multiplies each weight's update by this field of its rule."""
    scales = sorted({getattr(rule, field) for rule in jax.tree.leaves(rules)} - {1.0})
    return [optax.masked(optax.scale(it), where(rules, field, it)) for it in scales]


def _rules(keys: Step) -> list[Rule]:
    return [replace(Rule(keys.opt_type), **settings) for settings in (*keys.optimizer_rules, {})]


def describe_rules(keys: Step, rules: Tree, trained: Tree) -> str:
    """Describes each rule in a line: the weights it applies to and how they are updated; empty without rules."""
    sizes, rule_of, lines = by_path(trained), by_path(rules), []
    for rule in _rules(keys) if keys.optimizer_rules else ():
        taken = [sizes[path].size for path in rule_of if rule_of[path] == rule]
        decay = "" if rule.weight_decay is None else f", weight decay {rule.weight_decay:g}"
        rate = f"{rule.opt_type}, learning rate x {rule.learning_rate_scale:g}{decay}"
        lines.append(f"{rule.match or 'the rest'}: {counted(len(taken), 'weight')}, {sum(taken):,} parameters: {rate}")
    return "\n".join(lines)
