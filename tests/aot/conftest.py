"""How programs for accelerators are compiled."""

import jax
import pytest


@pytest.fixture
def little_effort(request):
    """XLA makes of long tests' programs what it makes of a user's, and of others' with the same collectives a third."""
    if not request.node.get_closest_marker("long"):
        jax.config.update("jax_optimization_level", "O0")
    yield
    jax.config.update("jax_optimization_level", "UNKNOWN")
