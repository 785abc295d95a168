"""Compiles MaxText's step for absent TPUs: `PYTHON scripts/evidence/maxtext_program.py CASE FILE [--without-flags]`.

PYTHON is from an environment with MaxText 0.2.4 and MinText's versions of JAX and libtpu (docs/performance.md shows how
to create one). It writes the program's text to FILE, for program_stats.py, and prints the compiler's memory figures.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # set before importing JAX: only the compiler is needed, not a TPU

import maxtext
from maxtext.trainers.pre_train import train_compile

KEYS = "dataset_type=synthetic enable_checkpointing=false jax_cache_dir= base_output_directory=/tmp run_name=none "
KEYS += "attention=flash"
# From MaxText's own scripts (configs/tpu): v5e/16b.sh, v5p/llama2_7b.sh, v6e/llama2_7b_4096.sh and v6e/gemma3_27b.sh.
GATHERS = (
    "xla_enable_async_all_gather xla_tpu_overlap_compute_collective_tc xla_tpu_enable_async_collective_fusion "
    "xla_tpu_enable_async_collective_fusion_multiple_steps xla_tpu_enable_async_collective_fusion_fuse_all_gather "
)
SUMS = "xla_tpu_enable_data_parallel_all_reduce_opt xla_tpu_data_parallel_opt_different_sized_ops "
FLAGS = {
    "v5e": GATHERS + SUMS,
    "v5p": GATHERS + SUMS + "xla_tpu_megacore_fusion_allow_ags=false xla_enable_async_collective_permute "
    "xla_tpu_enable_ag_backward_pipelining",
    "v6e": GATHERS + "xla_tpu_scoped_vmem_limit_kib=98304",
    "gemma3-12b": "xla_tpu_scoped_vmem_limit_kib=122880 xla_tpu_use_minor_sharding_for_major_trivial_input "
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 xla_tpu_assign_all_reduce_scatter_layout "
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather xla_tpu_enable_async_collective_fusion_multiple_steps "
    "xla_tpu_overlap_compute_collective_tc xla_enable_async_all_gather",
}
_16B = "global_parameter_scale=16 per_device_batch_size=4 max_target_length=2048 remat_policy=full use_iota_embed=true"
_8B = "model_name=llama3.1-8b per_device_batch_size=2 max_target_length=8192 remat_policy=full"
_8B_V5P = "model_name=llama3.1-8b per_device_batch_size=4 max_target_length=8192 remat_policy=save_qkv_proj"
_70B = "model_name=llama3.1-70b per_device_batch_size=2 max_target_length=8192 remat_policy=full"
_DEEPSEEK = "model_name=deepseek2-16b max_target_length=4096 remat_policy=full"
CASES = {  # slices, their topology, and the keys
    "16b": (1, "v5e-256", _16B),
    "16b-2-slices": (2, "v5e-256", _16B),
    "70b": (1, "v5p-256", _70B),
    "7b": (
        *(1, "v5p-128"),
        "model_name=llama2-7b per_device_batch_size=4 max_target_length=4096 remat_policy=minimal use_iota_embed=true",
    ),
    "8b": (1, "v6e-256", _8B),
    "8b-v5p": (1, "v5p-64", _8B_V5P),
    "deepseek2-16b": (1, "v5p-64", f"{_DEEPSEEK} per_device_batch_size=2"),
    "deepseek2-16b-expert": (1, "v6e-64", f"{_DEEPSEEK} per_device_batch_size=1 ici_expert_parallelism=8"),
    "gemma2-9b": (
        1,
        "v5e-256",
        "model_name=gemma2-9b per_device_batch_size=1 max_target_length=4096 remat_policy=full",
    ),
    "gemma3-12b": (
        1,
        "v6e-64",
        "model_name=gemma3-12b per_device_batch_size=1 max_target_length=8192 remat_policy=full",
    ),
    "llama4-scout": (
        *(1, "v5p-128"),
        "model_name=llama4-17b-16e per_device_batch_size=1 max_target_length=8192 remat_policy=full",
    ),
    "mixtral": (
        *(1, "v5p-128"),
        "model_name=mixtral-8x7b per_device_batch_size=4 max_target_length=4096 remat_policy=full "
        "sparse_matmul=true megablox=true",
    ),
    "qwen3-30b-a3b": (
        *(1, "v5p-128"),
        "model_name=qwen3-30b-a3b per_device_batch_size=2 max_target_length=4096 remat_policy=full",
    ),
    "qwen3-8b": (1, "v5e-64", "model_name=qwen3-8b per_device_batch_size=2 max_target_length=4096 remat_policy=full"),
}
# Block sizes of attention's kernels, from the same scripts.
BLOCKS = {
    "v6e": "sa_block_q=1024 sa_block_q_dkv=2048 sa_block_q_dq=2048",
    "gemma3-12b": "sa_block_q=2048 sa_block_q_dkv=2048 sa_block_q_dq=2048",
}


def main() -> None:
    """Runs MaxText's own train_compile, and saves the compiled program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--without-flags", action="store_true", help="the compiler's defaults, and MaxText's blocks")
    options = parser.parse_args()
    slices, topology, keys = CASES[options.case]
    words = [*KEYS.split(), f"compile_topology={topology}", f"compile_topology_num_slices={slices}", *keys.split()]
    if not options.without_flags:
        script = options.case if options.case in FLAGS else topology.partition("-")[0]
        flags = (flag if "=" in flag else f"{flag}=true" for flag in FLAGS[script].split())
        words += [f"compile_xla_flags={' '.join(f'--{flag}' for flag in flags)}", *BLOCKS.get(script, "").split()]
    compile_step = train_compile.jit_and_compile

    def compile_and_write(*arguments: Any) -> Any:
        compiled = compile_step(*arguments)
        options.file.write_text(compiled.as_text())
        stated = compiled.memory_analysis()
        sizes = {"arguments": stated.argument_size_in_bytes, "temporaries": stated.temp_size_in_bytes}
        sizes["at once"] = stated.peak_memory_in_bytes  # arguments included
        print("  ".join(f"{name} {size / 1e9:.3f} GB" for name, size in sizes.items()))
        return compiled

    train_compile.jit_and_compile = compile_and_write
    train_compile.main(["train_compile", str(Path(maxtext.__path__[0]) / "configs" / "base.yml"), *words])


if __name__ == "__main__":
    main()
