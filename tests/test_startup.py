"""What every command begins with."""

from pathlib import Path

import jax
import pytest
from tiny import load

from src.startup import configure_jax


@pytest.mark.parametrize(
    ("typed", "place"),
    [("gs://bucket/programs", "gs://bucket/programs"), ("~/programs", str(Path.home() / "programs"))],
)
def test_programs_are_kept_where_the_key_says(typed, place):
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_default_matmul_precision
    try:
        configure_jax(load(jax_cache_dir=typed))
        assert jax.config.jax_compilation_cache_dir == place
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_default_matmul_precision", before[1])
