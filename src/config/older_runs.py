"""Keeps the value of `logical_axis_rules.latent` that an older run began with: its default has changed since."""

import contextlib
import os
from collections.abc import Mapping, Sequence

from src.config import run_configs
from src.config.requirements import Setting
from src.config.schema import defaults
from src.system.errors import UserError


def former_defaults(settings: Sequence[Setting]) -> list[Setting]:
    """Returns `logical_axis_rules.latent=[]`, a former default, if these settings resume a run with it; else []."""
    chosen = {"base_output_directory": defaults()["base_output_directory"], "run_name": ""}
    chosen |= {setting.key: str(setting.value) for setting in settings}
    if not chosen["run_name"]:
        return []
    path = os.path.join(chosen["base_output_directory"], chosen["run_name"])
    # Only latent attention uses the rule: for other models, do not ask a remote store.
    if "://" in path and "mla" not in f"{chosen.get('attention_type')} {chosen.get('decoder_segments')}":
        return []
    with contextlib.suppress(UserError):  # the command reports it when it opens the run
        if run := run_configs.run_folder(path):
            rules = run_configs.run_keys(run).get("logical_axis_rules")
            if isinstance(rules, Mapping) and rules.get("latent") == []:
                return [Setting("logical_axis_rules.latent", [], f"in {path}")]
    return []
