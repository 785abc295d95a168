"""What a test runs is tiny: compiling it takes most of its time, and less without optimisations that don't pay there.

Of XLA's it is those of its middle, and the newer emitter of fused loops for CPUs, which takes three times as long. A
program in parts, for threads to generate side by side, takes a sixth longer where each core has a test of its own.
"""

import os

from jaxlib import xla_client

# An option, which a later XLA without it passes over: that takes twice the time. XLA ends a process for a flag that it
# does not know, as jaxlib 0.11 does for the one that 0.10 has for this.
_PLAIN_FUSIONS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"

# For processes of their own; with programs kept that took less than JAX's one second, and without ten frames of Python
# beside the name of each operation, which take a twentieth of tracing and compiling.
ENVIRONMENT = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": f"{_PLAIN_FUSIONS} --xla_cpu_parallel_codegen_split_count=1",
}


def in_this_process():
    """Before anything is compiled: XLA reads its flags once."""
    os.environ["XLA_FLAGS"] = ENVIRONMENT["XLA_FLAGS"]
    xla_client.CompileOptions()
    del os.environ["XLA_FLAGS"]
