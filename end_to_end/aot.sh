#!/usr/bin/env bash
# Compiles published runs ahead of time, for absent TPU slices and GPU hosts, and checks whether each fits. Prints a
# table: verdict, memory per device, and the compiler's time and memory on this machine.
#
#   bash end_to_end/aot.sh [NAME ...]     about half an hour on two cores and 4 GiB; NAMEs choose cases
#
# LARGEST=1 adds MaxText's largest published runs, on 6,144 and 50,944 chips.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
needs_compilers
out=$(mktemp -d)
chosen=" $* "
failed=0

# compiles NAME CODE KEYS: checks that train_compile with these keys exits with this code: 0 if it fits, 3 if not.
compiles() {
  local name=$1 expected=$2 code=0
  shift 2
  if [[ "$chosen" != "  " && "$chosen" != *" $name "* ]]; then return; fi
  "$python" -m src.train_compile configs/base.yml compile_report="$out/$name.json" "$@" >"$out/$name.log" 2>&1 || code=$?
  if [[ $code -ne $expected ]]; then
    echo "$name: exit code $code, expected $expected: $(tail -n 1 "$out/$name.log")  (all of it: $out/$name.log)"
    failed=1
  else
    "$python" - "$name" "$out/$name.json" <<'PYTHON'
import json, sys

name, report = sys.argv[1], json.load(open(sys.argv[2]))
memory, gib = report["memory"], 2**30
needed, capacity = memory["needed"] / gib, memory["capacity"] / gib
print(
    f"| {name} | {report['slices']} x {report['topology']} | {'fits' if memory['fits'] else 'does not fit'} "
    f"| {memory['arguments'] / gib:.2f} | {memory['temporaries'] / gib:.2f} | {needed:.2f} of {capacity:.2f} "
    f"| {sum(report['seconds'].values()):.0f} | {report['host_peak_bytes'] / gib:.2f} |",
    flush=True,
)
PYTHON
  fi
}

echo "| case | devices | verdict | arguments, GiB | temporaries, GiB | needed of what there is, GiB | seconds | host GiB |"
echo "|---|---|---|---|---|---|---|---|"
# MaxText's default model at several scales.
compiles 16b 0 compile_topology=v5e-256 compile_topology_num_slices=2 global_parameter_scale=16 per_device_batch_size=4
compiles 16b-batch-16 3 compile_topology=v5e-256 compile_topology_num_slices=2 global_parameter_scale=16 \
  per_device_batch_size=16
compiles llama3.1-8b 0 compile_topology=v5p-128 model_name=llama3.1-8b per_device_batch_size=4 max_target_length=8192
compiles llama3.1-70b 0 compile_topology=v5p-512 model_name=llama3.1-70b per_device_batch_size=2 max_target_length=8192
compiles llama3.1-405b 0 compile_topology=v5p-1024 model_name=llama3.1-405b per_device_batch_size=1 \
  max_target_length=8192
# Pax's 22B: weights sharded within a slice of v4-128, replicated over two slices.
compiles pax-22b 0 compile_topology=v4-128 compile_topology_num_slices=2 base_emb_dim=6144 base_mlp_dim=24576 \
  base_num_decoder_layers=48 base_num_query_heads=24 base_num_kv_heads=24 head_dim=256 vocab_size=32768 \
  "mlp_activations=[gelu]" final_logits_soft_cap=30 max_target_length=1024 per_device_batch_size=16
compiles llama2-7b-1-host 0 compile_topology=a3 model_name=llama2-7b per_device_batch_size=2 max_target_length=4096
compiles llama2-7b-4-hosts 0 compile_topology=a3 compile_topology_num_slices=4 model_name=llama2-7b \
  per_device_batch_size=2 max_target_length=4096
# MaxText's GPU example.
compiles 16b-gpu 0 compile_topology=a3 compile_topology_num_slices=4 attention=dot_product \
  global_parameter_scale=16 per_device_batch_size=4
if [[ "${LARGEST:-}" == 1 ]]; then
  compiles 1160b 0 compile_topology=v5p-12288 global_parameter_scale=512 base_emb_dim=6144 ici_tensor_parallelism=16 \
    "logical_axis_rules.activation_embed=[tensor]" per_device_batch_size=2
  compiles 199-slices 0 compile_topology=v5e-256 compile_topology_num_slices=199 global_parameter_scale=32 \
    per_device_batch_size=4
fi
exit $failed
