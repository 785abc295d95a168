"""What a test runs is tiny: compiling it takes most of its time, and less without optimisations that don't pay there.

Of XLA's it is those of its middle, and the newer emitter of fused loops for CPUs, which takes three times as long. A
program in parts, for threads to generate side by side, takes a sixth longer where each core has a test of its own.
"""

import os

import jax
from jaxlib import xla_client

# XLA ends a process that gives it a flag it does not know, as jaxlib 0.11 does this one.
_PLAIN_FUSIONS = ["--xla_cpu_use_fusion_emitters=false"] if jax.__version_info__ < (0, 11) else []

# For processes of their own; with programs kept that took less than JAX's one second.
ENVIRONMENT = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": " ".join([*_PLAIN_FUSIONS, "--xla_cpu_parallel_codegen_split_count=1"]),
}


def in_this_process():
    """Before anything is compiled: XLA reads its flags once."""
    os.environ["XLA_FLAGS"] = ENVIRONMENT["XLA_FLAGS"]
    xla_client.CompileOptions()
    del os.environ["XLA_FLAGS"]
