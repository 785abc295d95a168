"""What scripts/evidence/program_memory.py reads from the dump of a program whose temporaries are known."""

import jax
import jax.numpy as jnp
import pytest

from scripts.evidence.program_memory import main
from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
from src.system.errors import UserError
from tests.compilers import needs_libtpu


@needs_libtpu
def test_what_a_loop_keeps_is_there_once_and_named(tmp_path, capsys):
    def step(x, weights):
        def loss(weights):
            block = jax.checkpoint(lambda x, kernel: (jnp.tanh(x @ kernel), None))
            return jnp.sum(jax.lax.scan(block, x, weights)[0].astype(jnp.float32))

        with jax.named_scope("model"):
            return jax.grad(loss)(weights)

    sharding = jax.sharding.SingleDeviceSharding(abstract_devices(parse_topology("v5e-1", 1))[0])
    shapes = (4096, 4096), (8, 4096, 4096)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    compiled = jax.jit(step).lower(*given).compile({"xla_dump_to": str(tmp_path)})
    main([str(tmp_path), "--module", "jit_step"])
    first, *listed = capsys.readouterr().out.splitlines()
    kept = 8 * 4096 * 4096 * 2
    at_once = float(first.split()[0]) * 1e9
    # The inputs of eight rounds once, and what a round of the loop makes; the compiler may state more.
    assert kept <= at_once < 1.5 * kept
    assert at_once <= compiled.memory_analysis().temp_size_in_bytes + 1e6
    assert listed[0].split()[:2] == [f"{kept / 1e9:.3f}", "bf16[8,4096,4096]"]
    assert "/model/" in listed[0]


def test_a_folder_without_a_dump_is_an_error(tmp_path):
    with pytest.raises(UserError, match="xla_dump_to"):
        main([str(tmp_path)])
