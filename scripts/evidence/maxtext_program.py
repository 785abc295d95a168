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
# From MaxText's own scripts (configs/tpu): v5e/16b.sh, v5p/llama2_7b.sh and v6e/llama2_7b_4096.sh.
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
}
_16B = "global_parameter_scale=16 per_device_batch_size=4 max_target_length=2048 remat_policy=full use_iota_embed=true"
_8B = "model_name=llama3.1-8b per_device_batch_size=2 max_target_length=8192 remat_policy=full"
_70B = "model_name=llama3.1-70b per_device_batch_size=2 max_target_length=8192 remat_policy=full"
CASES = {  # slices, their topology, and the keys
    "16b": (1, "v5e-256", _16B),
    "16b-2-slices": (2, "v5e-256", _16B),
    "70b": (1, "v5p-256", _70B),
    "7b": (
        *(1, "v5p-128"),
        "model_name=llama2-7b per_device_batch_size=4 max_target_length=4096 remat_policy=minimal use_iota_embed=true",
    ),
    "8b": (1, "v6e-256", _8B),
    "mixtral": (
        *(1, "v5p-128"),
        "model_name=mixtral-8x7b per_device_batch_size=4 max_target_length=4096 remat_policy=full "
        "sparse_matmul=true megablox=true",
    ),
}
# Block sizes of attention's kernels, also from v6e/llama2_7b_4096.sh.
BLOCKS = {"v6e": "sa_block_q=1024 sa_block_q_dkv=2048 sa_block_q_dq=2048"}


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
        hardware = topology.partition("-")[0]
        flags = (flag if "=" in flag else f"{flag}=true" for flag in FLAGS[hardware].split())
        words += [f"compile_xla_flags={' '.join(f'--{flag}' for flag in flags)}", *BLOCKS.get(hardware, "").split()]
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
