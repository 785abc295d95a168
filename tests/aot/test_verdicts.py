"""Ten steps that fit a TPU and ten that don't: `src.train_compile` says of each what the compiler says.

.venv/bin/python -m pytest -m long tests/aot/test_verdicts.py     about eight minutes on two cores
"""

import jax
import pytest

from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
from src.extras.aot.train_compile import main
from src.run import resolve_config
from src.step.trace import trace_train_step
from tests.compilers import SMALL, needs_libtpu
from tests.runs import BASE

pytestmark = [pytest.mark.long, needs_libtpu]
MANY = "per_device_batch_size=16384"
FIT = [
    ("per_device_batch_size=1",),
    ("per_device_batch_size=8",),
    ("per_device_batch_size=4", "remat_policy=none"),
    ("per_device_batch_size=4", "remat_policy=minimal"),
    ("per_device_batch_size=4", "num_vocab_tiling=4"),
    ("per_device_batch_size=4", "ici_tensor_parallelism=2"),
    ("per_device_batch_size=4", "ici_data_parallelism=2"),
    ("per_device_batch_size=4", "gradient_accumulation_steps=2"),
    ("per_device_batch_size=4", "packing=false"),
    ("per_device_batch_size=4", "base_num_decoder_layers=4", "mu_dtype=bfloat16"),
]
DO_NOT = [
    (MANY,),
    (MANY, "remat_policy=none"),
    (MANY, "remat_policy=minimal"),
    (MANY, "ici_tensor_parallelism=2"),
    (MANY, "ici_data_parallelism=2"),
    (MANY, "packing=false"),
    (MANY, "base_num_decoder_layers=4"),
    ("per_device_batch_size=32768", "num_vocab_tiling=2"),
    ("per_device_batch_size=2048", "max_target_length=2048"),
    ("per_device_batch_size=4", "global_parameter_scale=262144"),
]


def compilers_own(keys):
    """Whether the step compiles; the compiler refuses what it finds no place for in a device's 15.75 GiB."""
    config = resolve_config.load([str(BASE), *SMALL, *keys])
    step = trace_train_step(config, abstract_devices(parse_topology("v5e-4", 1)))
    try:
        step.jax_traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize("keys", [*FIT, *DO_NOT], ids=" ".join)
def test_the_verdict_is_the_compilers(keys):
    assert compilers_own(keys) == (keys in FIT), "the case is one of its list"
    report = main([str(BASE), *SMALL, "compile_topology=v5e-4", *keys])
    assert report["memory"]["fits"] == (keys in FIT)
