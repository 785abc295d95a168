#!/usr/bin/env bash
# Reads the config.json that `src.convert to-hf` writes with vLLM's own reader, for a tiny random model of each family, and
# looks up which code vLLM would run it with. Checks the table in docs/serving.md. Runs no model.
#
#   VLLM_PYTHON=.venv-vllm/bin/python bash end_to_end/vllm_config.sh [FOLDER]     two minutes on two cores
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[[ -n "${VLLM_PYTHON:-}" ]] || skip "set VLLM_PYTHON to a Python that has vLLM, which needs other packages (docs/serving.md)"
needs_transformers
out=$(realpath "${1:-$(mktemp -d)}")
mkdir -p "$out"

"$python" -m end_to_end.tiny_model export "$out"

HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR "$VLLM_PYTHON" - "$out" docs/serving.md <<'PYTHON'
import json, re, sys
from importlib.metadata import version
from pathlib import Path

from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.config import get_config

table = dict(re.findall(r"^\| `(\w+)` \|.*\| (own|transformers) \|$", Path(sys.argv[2]).read_text(), re.MULTILINE))
seen = set()
for file in sorted(Path(sys.argv[1]).glob("*/hf/config.json")):
    entries = json.loads(file.read_text())
    config = get_config(str(file.parent), trust_remote_code=False)
    (architecture,) = config.architectures
    read = config.to_dict()
    # transformers' classes have one mapping for positions, or one for each kind of layer.
    rope = read.get("rope_parameters") or {}
    every, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    read = {**every, **read, "torch_dtype": str(read.get("dtype")).removeprefix("torch.")}
    read["rope_local_base_freq"] = local.get("rope_theta")
    for own in (read.get("per_layer_config") or {}).values():  # newer versions: Gemma 4's full layers
        read |= {"global_head_dim": own.get("head_dim"), "num_global_key_value_heads": own.get("num_key_value_heads")}
    wanted = {key: value for key, value in entries.items() if key != "rope_scaling"}
    wanted |= {key: value for key, value in (entries.get("rope_scaling") or {}).items() if key != "type"}
    found = {key: read.get(key, getattr(config, key, None)) for key in wanted}  # some attributes have another name
    other = {key: found[key] for key in wanted if found[key] != wanted[key]}
    assert not other, f"{file}: vLLM reads {other} instead of {wanted}, and positions {rope}"
    module = ModelRegistry.models[architecture].module_name.rpartition(".")[2]
    by = "transformers" if module == "transformers" else "own"
    assert table[architecture] == by, f"docs/serving.md has {table.get(architecture)} for {architecture}: it is {by}"
    seen.add(architecture)
    print(f"{file.parent.parent.name}: {architecture}, {len(entries)} entries, {by} ({module})")
assert seen == table.keys(), seen ^ table.keys()
print(f"vLLM {version('vllm')} with transformers {version('transformers')} reads all {len(table)} architectures")
PYTHON
