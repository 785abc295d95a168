"""Every test runs on 8 virtual CPU devices."""

import os

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# XLA has a thread a core, or a device if they are more. A device that may begin either of two collectives takes one of
# them up with its thread and waits there; if others took up the other, all wait, and after 40 s XLA aborts the process.
# It was seen on a busy machine of two cores. With threads to spare both are taken up.
os.environ["PJRT_NPROC"] = "32"
