"""The maximal update parametrisation: initial values and learning rates by width (Yang et al. 2022).

With m = base_emb_dim / mup_base_emb_dim, initial values and adamw's learning rates scale with the width as in table 3
of that paper, so that the best learning rate for the base is the best for all widths. The paper's other tables also
scale the output: for adamw, this is equivalent to the output projection's values and rate here (lemma J.1), and the
model has no factor that an exported folder would need.
"""

import math

from src.config.schema import Step
from src.model.params import Tree, by_path, dotted, field, nested
from src.model.selection import Path, multiplied
from src.model.spec import ModelSpec
from src.system.errors import UserError

# Weights that map the width to a number of outputs independent of it, by the last component of their names.
READOUTS = ("output", "router", "shared_gate")
WIDTHS = {"embed", "expert_embed", "heads", "kv_heads", "mlp"}  # logical axes of dims that scale with the width


def learning_rate_scales(keys: Step, spec: ModelSpec, declarations: Tree) -> dict[Path, float]:
    """Factors on the updates of weights used in matmuls: 1/m.

    Weight decay, which adamw adds to the update, is not scaled: it removes the same fraction of a weight at every
    width. Raises UserError for a matrix whose scaling with the width is not known.
    """
    m = spec.emb_dim / keys.mup_base_emb_dim
    axes, fan_ins = (by_path(field(declarations, name)) for name in ("out_sharding", "fan_in"))
    for path in multiplied(declarations):
        written = {axis for dim, axis in enumerate(axes[path]) if dim not in fan_ins[path]}
        if path[-1] not in READOUTS and not written & WIDTHS:
            raise UserError(
                f"mup_base_emb_dim: {dotted(path)} writes to dims that do not scale with the model's width, and "
                "no learning rate by width is known for it: leave mup_base_emb_dim out"
            )
    return dict.fromkeys(multiplied(declarations), 1 / m)


def scaled_initial(keys: Step, spec: ModelSpec, tree: Tree) -> Tree:
    """Scales initial weights by width.

    They are declared with a variance of 1/fan_in, which is right for hidden matrices. Readouts need 1/fan_in**2, times
    a factor that makes both equal at the base; learned positions, like every table, have values independent of the
    width.
    """
    m = spec.emb_dim / keys.mup_base_emb_dim
    if m == 1:
        return tree
    factor = dict.fromkeys(READOUTS, 1 / math.sqrt(m)) | {"position_embedding": math.sqrt(m)}
    return nested({path: value * factor.get(path[-1], 1.0) for path, value in by_path(tree).items()})
