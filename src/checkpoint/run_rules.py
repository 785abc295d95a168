"""Finds the version of the data rules that a run keeps, so that an older run continues with its own."""

import os

from src.checkpoint.agreement import of_process_0
from src.checkpoint.run_folder import absolute, steps_in
from src.config.schema import Checkpoint, Run
from src.data.rules import PRESENT_RULES, RULES_FACT, rules_of
from src.system.errors import UserError


def run_rules(run: Run, loading: Checkpoint) -> int:
    """Finds the version of the data rules (src/data/rules.py) that a run keeps; every process calls it.

    The version comes from the run's newest checkpoint, or from `load_full_state_path`; a new run has the present rules,
    and so has one with `data_rules` in `accept_changes`. Raises UserError for a version that only a later MinText
    knows, and as `newest_meta` does.
    """
    own = absolute(os.path.join(run.base_output_directory, run.run_name, "checkpoints"))
    has_own = run.run_name and of_process_0(lambda: steps_in(own))
    if not (path := own if has_own else loading.load_full_state_path) or "data_rules" in run.accept_changes:
        return PRESENT_RULES
    from src.checkpoint.restore import newest_meta

    facts = newest_meta(path)[0].get("data", {RULES_FACT: PRESENT_RULES})  # absent for weights that were converted
    if (version := rules_of(facts)) > PRESENT_RULES:
        raise UserError(f"{path} has data rules of version {version}: use the MinText that wrote it, or a later one")
    return version
