"""What tests that compile for accelerators share: whether their compilers are there, and a model small enough."""

from importlib.util import find_spec

import pytest

# conftest.py has put the folder of `setup.sh aot` on the path.
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="bash setup.sh aot brings libtpu")
needs_cuda = pytest.mark.skipif(
    find_spec("jax_cuda12_plugin") is None, reason="bash setup.sh aot brings JAX's CUDA plugin"
)
# For tests that look at other things than XLA's own kernels of products. Without a GPU to time them on it compiles each
# that it would try, half of its work.
NO_AUTOTUNING = {"xla_gpu_autotune_level": "0"}
SMALL = (
    *("base_emb_dim=256", "base_mlp_dim=512", "base_num_decoder_layers=2", "base_num_query_heads=2"),
    *("base_num_kv_heads=2", "vocab_size=1024", "max_target_length=256"),
)
